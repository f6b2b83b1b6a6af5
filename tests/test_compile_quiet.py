"""How often the compiler begins anew: never more often than for SDPA, and counted beside it where both have the argument."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.functional import scaled_dot_product_attention

import backlight
import backlight.nn

# compilers look into the allocators that the other tests poison
pytestmark = pytest.mark.clean_memory

LENGTHS = (9, 17, 33, 64, 5)
NUMBERS = (0.5, 0.75, 2.0, 0.3)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs(function: Callable[..., Tensor], calls: Iterable[tuple[Any, ...]]) -> int:
    """Graphs that were made for the calls, each of which runs in one."""
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    return counter.frame_count


def qkv(batch: int, sq: int, sk: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(batch, 4, sq, 16), torch.randn(batch, 2, sk, 16), torch.randn(batch, 2, sk, 16)


SHAPES = {
    "rows and keys": [qkv(2, s, s) for s in LENGTHS],
    "keys": [qkv(2, 9, s) for s in LENGTHS],
    "batch": [qkv(b, 9, 9) for b in (2, 3, 5, 8)],
}


@pytest.mark.parametrize("what", SHAPES)
def test_shapes(what: str) -> None:
    ours = graphs(lambda q, k, v: backlight.attention(q, k, v), SHAPES[what])
    sdpa = graphs(lambda q, k, v: scaled_dot_product_attention(q, k, v, enable_gqa=True), SHAPES[what])
    assert ours == sdpa == 2


def test_borders() -> None:
    def attend(q: Tensor, cu_seqlens: Tensor) -> Tensor:
        return backlight.attention_varlen(q, q, q, cu_seqlens, causal=True)

    packed = ([3, 9, 4], [5, 6, 17, 2], [30, 1, 8, 8, 2], [4, 4])
    assert graphs(attend, [(torch.randn(sum(n), 2, 8), torch.tensor([0, *n]).cumsum(0)) for n in packed]) == 2


def test_scales() -> None:
    """A float that reaches an operator is a constant of the graph: one for each value, SDPA's own included."""
    q = torch.randn(2, 4, 9, 16)
    calls = [(q, number) for number in NUMBERS]
    ours = graphs(lambda q, scale: backlight.attention(q, q, q, scale=scale), calls)
    sdpa = graphs(lambda q, scale: scaled_dot_product_attention(q, q, q, scale=scale), calls)
    assert ours <= sdpa
    assert graphs(lambda q, softcap: backlight.attention(q, q, q, softcap=softcap), calls) <= sdpa


@pytest.mark.parametrize("what", ["scale", "softcap"])
def test_numbers_beside_borders(what: str) -> None:
    """Packed sequences need no more graphs for a float than the plain call."""
    q, cu = torch.randn(9, 2, 16), torch.tensor([0, 4, 9])

    def packed(q: Tensor, cu: Tensor, number: float) -> Tensor:
        return backlight.attention_varlen(q, q, q, cu, **{what: number})

    def plain(q: Tensor, number: float) -> Tensor:
        return backlight.attention(q, q, q, **{what: number})

    x = torch.randn(2, 4, 9, 16)
    assert graphs(packed, [(q, cu, number) for number in NUMBERS]) <= graphs(plain, [(x, number) for number in NUMBERS])


def test_windows_beside_borders() -> None:
    def attend(q: Tensor, cu: Tensor, reach: int) -> Tensor:
        return backlight.attention_varlen(q, q, q, cu, causal=True, window=(reach, 0))

    q, cu = torch.randn(19, 2, 16), torch.tensor([0, 8, 19])
    assert graphs(attend, [(q, cu, reach) for reach in (2, 3, 5, 7)]) == 2


LAYERS: dict[str, Callable[[], backlight.nn.Attention | backlight.nn.LazyAttention]] = {
    "plain": lambda: backlight.nn.Attention(32, 4, kv_heads=2, qk_norm=True),
    "window": lambda: backlight.nn.Attention(32, 4, window=(5, 0), sink=True, gate=True),
    "lazy": lambda: backlight.nn.LazyAttention(32, 4, distances=8),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    """Other lengths, other batches, other borders: two graphs each, the second for every size."""
    layer = LAYERS[name]()
    assert graphs(layer, [(torch.randn(2, s, 32),) for s in LENGTHS]) == 2
    assert graphs(layer, [(torch.randn(b, 9, 32),) for b in (2, 3, 5, 8)]) == 2

    def packed(x: Tensor, cu_seqlens: Tensor) -> Tensor:
        return layer(x, cu_seqlens=cu_seqlens)

    lengths = ([3, 9, 4], [5, 6, 17, 2], [30, 1, 8, 8, 2], [4, 4])
    assert graphs(packed, [(torch.randn(sum(n), 32), torch.tensor([0, *n]).cumsum(0)) for n in lengths]) == 2


@pytest.mark.parametrize("causal", [False, True])
def test_windows(causal: bool) -> None:
    def attend(q: Tensor, reach: int) -> Tensor:
        return backlight.attention(q, q, q, causal=causal, window=(reach, None if causal else reach))

    q = torch.randn(2, 4, 9, 16)
    assert graphs(attend, [(q, reach) for reach in (2, 3, 5, 7)]) == 2
