"""The slot taken for real: SDPA, packed sequences and nested tensors on a card, and what goes to torch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import backlight
from backlight.api import call_of
from backlight.slot.counts import Counts
from gate import judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.clean_memory,
    pytest.mark.skipif(torch.version.hip is not None, reason="the slot is for CUDA"),
]


@pytest.fixture
def counts() -> Iterator[Counts]:
    with backlight.activated() as found:
        yield found


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()


def far(got: Any, want: Any) -> float:
    """Sums in another order differ in their last bits."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True))


def with_gradients(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    y = attend(*inputs)
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


CASES = {
    "plain": ((2, 4, 4, 200, 200, 64), {}),
    "causal": ((2, 4, 4, 200, 200, 128), {"is_causal": True}),
    "grouped": ((2, 8, 2, 333, 333, 64), {"is_causal": True, "enable_gqa": True}),
    "other keys": ((1, 4, 4, 70, 300, 128), {"scale": 0.05}),
    "padded columns": ((2, 3, 3, 130, 130, 36), {"is_causal": True}),
    "wide": ((1, 2, 2, 150, 150, 256), {"is_causal": True}),
    "one row": ((2, 4, 4, 1, 257, 128), {}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows_first", [False, True], ids=["heads first", "rows first"])
@pytest.mark.parametrize("case", CASES)
def test_sdpa(counts: Counts, case: str, rows_first: bool, dtype: torch.dtype) -> None:
    """Right by the gate, and on our kernels, though torch would rather ask cuDNN on Hopper."""
    (batch, heads, kv_heads, rows, keys, dim), options = CASES[case]

    def tensor(heads: int, rows: int) -> Tensor:
        if not rows_first:
            return drawn(batch, heads, rows, dim, dtype=dtype)
        return drawn(batch, rows, heads, dim, dtype=dtype).transpose(1, 2).detach().requires_grad_()

    q, k, v = tensor(heads, rows), tensor(kv_heads, keys), tensor(kv_heads, keys)
    dy = torch.randn_like(q)
    names = ("y", "dq", "dk", "dv")
    found = with_gradients(lambda *x: scaled_dot_product_attention(*x, **options), (q, k, v), dy)
    call = call_of(q, k, v, causal=options.get("is_causal", False), scale=options.get("scale"))
    verdict = judge(call, dy, None, dict(zip(names, found, strict=True)), names=names)
    assert verdict.ok, verdict
    assert counts == Counts(1, 1), counts


def test_autocast(counts: Counts) -> None:
    q, k, v = (drawn(2, 4, 128, 64, dtype=torch.float32) for _ in range(3))
    with torch.autocast("cuda", torch.bfloat16):
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert y.dtype == torch.bfloat16
    dy = torch.randn_like(y)
    got = (y, *torch.autograd.grad(y, (q, k, v), dy))
    want = with_gradients(lambda *x: backlight.attention(*[t.bfloat16() for t in x], causal=True), (q, k, v), dy)
    assert far(got, want) < 2e-3
    assert counts == Counts(1, 1), counts


def test_packed_sequences(counts: Counts) -> None:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = drawn(300, 4, 64), drawn(300, 4, 64), drawn(300, 4, 64)
    cu = torch.tensor([0, 70, 70, 300], dtype=torch.int32, device="cuda")
    dy = torch.randn_like(q)
    for window, options in (((-1, -1), {}), ((-1, 0), {"causal": True}), ((20, 0), {"window": (20, 0)})):
        got = with_gradients(lambda *x, w=window: varlen_attn(*x, cu, cu, 230, 230, window_size=w), (q, k, v), dy)
        want = with_gradients(lambda *x, o=options: backlight.attention_varlen(*x, cu, **o), (q, k, v), dy)
        assert far(got, want) < 2e-3
    assert counts == Counts(3, 3), counts


def test_nested_tensors(counts: Counts) -> None:
    parts = [torch.randn(n, 4, 64, device="cuda", dtype=torch.bfloat16) for n in (70, 130)]
    q, k, v = (torch.nested.nested_tensor(parts, layout=torch.jagged).requires_grad_() for _ in range(3))
    y = scaled_dot_product_attention(*[x.transpose(1, 2) for x in (q, k, v)], is_causal=True).transpose(1, 2)
    grads = torch.autograd.grad(y.values().sum(), (q, k, v))
    for i, part in enumerate(parts):
        x, one, two = (part.transpose(0, 1)[None].detach().requires_grad_() for _ in range(3))
        wanted = backlight.attention(x, one, two, causal=True)
        want = torch.autograd.grad(wanted.sum(), (x, one, two))
        pairs = [(y.unbind()[i], wanted), *zip((g.unbind()[i] for g in grads), want, strict=True)]
        assert far([a for a, _ in pairs], [b[0].transpose(0, 1) for _, b in pairs]) < 2e-3
    assert not counts.fallbacks, counts


def test_causal_to_the_bottom_right(counts: Counts) -> None:
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = drawn(1, 4, 70, 64), drawn(1, 4, 200, 64), drawn(1, 4, 200, 64)
    dy = torch.randn_like(q)
    got = with_gradients(lambda *x: scaled_dot_product_attention(*x, attn_mask=causal_lower_right(70, 200)), (q, k, v), dy)
    want = with_gradients(lambda *x: backlight.attention(*x, causal=True), (q, k, v), dy)
    assert far(got, want) < 2e-3
    assert counts == Counts(1, 1), counts


def test_causal_to_the_top_left_is_not_ours_and_right(counts: Counts) -> None:
    q, k, v = drawn(1, 4, 70, 64), drawn(1, 4, 200, 64), drawn(1, 4, 200, 64)
    found = scaled_dot_product_attention(q, k, v, is_causal=True)
    with sdpa_kernel(SDPBackend.MATH):
        wanted = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert far([found], [wanted]) < 1e-2
    assert counts == Counts(), counts


# --- torch's own -------------------------------------------------------------------------------------------------------------


def test_dropout_is_torchs_bit_for_bit() -> None:
    q, k, v = (drawn(2, 4, 128, 64) for _ in range(3))
    dy = torch.randn_like(q)

    def step() -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                return with_gradients(lambda *x: scaled_dot_product_attention(*x, dropout_p=0.3), (q, k, v), dy)
        finally:
            torch.use_deterministic_algorithms(False)

    wanted = step()
    with backlight.activated() as counts:
        found = step()
    assert all(map(torch.equal, found, wanted))
    assert (counts.forward, counts.backward, dict(counts.fallbacks)) == (0, 0, {"dropout_p is not 0": 2})


def test_deactivated_everything_is_as_before() -> None:
    q = drawn(2, 4, 128, 64).detach()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = scaled_dot_product_attention(q, q, q)
    chosen = torch._fused_sdp_choice(q, q, q)
    with backlight.activated() as counts:
        scaled_dot_product_attention(q, q, q)
        assert torch._fused_sdp_choice(q, q, q) == int(SDPBackend.FLASH_ATTENTION.value)
    assert torch._fused_sdp_choice(q, q, q) == chosen
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert torch.equal(scaled_dot_product_attention(q, q, q), wanted)
    assert counts.forward == 1


def test_other_kernels_stay_what_they_are(counts: Counts) -> None:
    """A mask and fp32 are not for the flash slot; whoever names a kernel gets it."""
    q = drawn(2, 4, 128, 64).detach()
    mask = torch.rand(128, 128, device="cuda") < 0.5
    scaled_dot_product_attention(q, q, q, attn_mask=mask)
    scaled_dot_product_attention(q.float(), q.float(), q.float())
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        scaled_dot_product_attention(q, q, q)
    assert counts == Counts(), counts


# --- who looks at calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("rows_first", [False, True], ids=["heads first", "rows first"])
def test_compiled_in_one_graph(counts: Counts, rows_first: bool, mode: str) -> None:
    def attend(x: Tensor) -> Tensor:
        q, k, v = x.chunk(3, dim=-1)
        if rows_first:
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return (y.transpose(1, 2) if rows_first else y) * 2

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, mode=mode)
    for _ in range(4):
        x = drawn(2, 4, 256, 192) if not rows_first else drawn(2, 256, 4, 192)
        dy = torch.randn_like(x[..., :64])
        torch.compiler.cudagraph_mark_step_begin()
        got = [t.clone() for t in with_gradients(compiled, (x,), dy)]
        assert far(got, with_gradients(attend, (x,), dy)) < 2e-3
    assert counts.forward > 4
    assert counts.backward > 4
    assert not counts.fallbacks, counts


def test_compiled_before_and_after() -> None:
    """A graph calls torch's operator, whoever answers it when it runs."""
    torch.compiler.reset()
    compiled = torch.compile(lambda q: scaled_dot_product_attention(q, q, q, is_causal=True), fullgraph=True)
    q = drawn(2, 4, 256, 64).detach()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        wanted = compiled(q)
        with backlight.activated() as counts:
            assert far([compiled(q)], [wanted]) < 1e-2
        assert counts.forward == 1
        assert torch.equal(compiled(q), wanted)
        assert counts.forward == 1


def test_cuda_graph(counts: Counts) -> None:
    leaves = tuple(drawn(2, 4, 200, 64) for _ in range(3))
    dy = torch.randn_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        return with_gradients(lambda *x: scaled_dot_product_attention(*x, is_causal=True), leaves, dy)

    gc.collect()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    assert counts == Counts(4, 4), counts
    with torch.no_grad():
        for x in leaves:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert far(got, step()) < 2e-3


def test_checkpoints_and_vmap(counts: Counts) -> None:
    from torch.utils.checkpoint import checkpoint

    q, k, v = (drawn(2, 4, 200, 64) for _ in range(3))
    dy = torch.randn_like(q)
    attend = lambda *x: scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    want = with_gradients(attend, (q, k, v), dy)
    assert far(with_gradients(lambda *x: checkpoint(attend, *x, use_reentrant=False), (q, k, v), dy), want) < 2e-3
    assert counts == Counts(3, 2), counts
    many = [torch.stack([x.detach()] * 3) for x in (q, k, v)]
    assert far([torch.func.vmap(attend)(*many)[1]], want[:1]) < 2e-3
    assert counts == Counts(4, 2), counts


def test_deterministic(counts: Counts) -> None:
    q, k, v = (drawn(2, 4, 1000, 64) for _ in range(3))
    dy = torch.randn_like(q)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (with_gradients(scaled_dot_product_attention, (q, k, v), dy) for _ in range(4))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    assert counts == Counts(4, 4), counts
