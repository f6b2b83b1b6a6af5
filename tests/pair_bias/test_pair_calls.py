"""A pair bias around the call: five axes, what is refused and how, vmap, compilers, shards, statistics."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import backlight
from backlight.api import call_of
from backlight.distributed import simulated_attention
from backlight.distributed.context import ContextParallel
from backlight.distributed.simulation import Simulated, simulate
from backlight.peers import eager, flex, sdpa

B, N, H, S, D = 2, 3, 4, 9, 8


def grid() -> Tensor:
    return torch.randn(B, N, H, S, D, requires_grad=True)


@pytest.mark.parametrize("form", [(B, 1, H, S, S), (1, 1, H, S, S), (B, N, 1, S, S), (B, 1, H, 1, S), (B, H, S, S)], ids=str)
def test_five_axes(form: tuple[int, ...]) -> None:
    """N consecutive entries share what stands at their b."""
    torch.manual_seed(0)
    q, k, v = grid(), grid(), grid()
    gate, b = torch.randn(B, N, H, S, D), torch.randn(form, requires_grad=True)
    y, lse = backlight.attention(q, k, v, pair_bias=b, gate=gate, return_lse=True)
    five = b if b.dim() == 5 else b[:, None]
    mask = five.expand(B, N, H, S, S).flatten(0, 1)
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), attn_mask=mask)
    wanted = plain.unflatten(0, (B, N)) * gate.sigmoid()
    torch.testing.assert_close(y, wanted)
    assert lse.shape == (B, N, H, S)
    found, want = (torch.autograd.grad(x.square().sum(), (q, k, v, b)) for x in (y, wanted))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


def test_five_axes_without_a_bias() -> None:
    q = grid()
    torch.testing.assert_close(backlight.attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert backlight.explain(q, q, q).chosen is not None
    assert backlight.statistics(q, q, q).density.shape == (H,)


def test_nothing_of_the_size_of_all_pairs_is_made() -> None:
    """Neither direction holds [N, H, S, S]: 64 entries share one bias of 512 x 512."""
    n, s = 64, 512
    q = torch.randn(1, n, 1, s, 8, requires_grad=True)
    b = torch.randn(1, 1, 1, s, s, requires_grad=True)
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest[0] = max(largest[0], out.untyped_storage().nbytes())
            return out

    with Watch():
        backlight.attention(q, q, q, pair_bias=b).sum().backward()
    # the backend's own tiles are bounded (`tiled.config.CPU_TILE_ELEMENTS`); all pairs would be 64 MiB
    assert largest[0] <= 2**25 + 2**12


Q4, B4 = torch.randn(4, 2, 5, 8), torch.randn(4, 2, 5, 5)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pair_bias": torch.randn(3, 2, 5, 5)}, "pair_bias must be [a divisor of 4, 1 or 2, 1 or 5, 5] (batch, query heads, rows"),
    ({"pair_bias": torch.randn(2, 5, 5)}, "got shape (2, 5, 5)"),
    ({"pair_bias": torch.randn(1, 2, 5, 1)}, "got shape (1, 2, 5, 1)"),
    ({"pair_bias": torch.randn(1, 3, 5, 5)}, "got shape (1, 3, 5, 5)"),
    ({"pair_bias": torch.randn(1, 2, 4, 5)}, "got shape (1, 2, 4, 5)"),
    ({"pair_bias": B4.double()}, "pair_bias must have the dtype of q, torch.float32, or float32, got torch.float64"),
    ({"pair_bias": B4.long()}, "pair_bias must have a floating-point dtype, got torch.int64"),
    ({"pair_bias": B4 > 0}, "pair_bias must have a floating-point dtype, got torch.bool"),
    ({"pair_bias": 1.0}, "pair_bias must be a torch.Tensor, got float"),
    ({"pair_bias": B4, "tau": torch.zeros(2)}, "tau counts visible keys, of which pair_bias may hide any with -inf"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=[sentence[:40] for _, sentence in WRONG])
def test_what_is_wrong_is_said(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(sentence)):
        backlight.attention(Q4, Q4, Q4, **options)


def test_five_axes_that_do_not_fit() -> None:
    q = torch.randn(2, 3, 2, 5, 8)
    with pytest.raises(ValueError, match=re.escape("k must have 5 dimensions [B, N, H, S, D], as q has, got shape")):
        backlight.attention(q, q.flatten(0, 1), q)
    with pytest.raises(ValueError, match=re.escape("v must have the first two axes of q, (2, 3), got (3, 2)")):
        backlight.attention(q, q, q.transpose(0, 1))
    with pytest.raises(
        ValueError, match=re.escape("the first two axes of pair_bias must be (2, 1), (1, 1) or (2, 3), got (1, 3)")
    ):
        backlight.attention(q, q, q, pair_bias=torch.zeros(1, 3, 2, 5, 5))


@pytest.mark.parametrize("heads", [1, 4])
def test_vmap_over_examples(heads: int) -> None:
    """Examples differ in q; the bias is shared, and has a gradient for each example."""
    q, b = torch.randn(3, 2, 4, 5, 8), torch.randn(2, heads, 5, 5)

    def loss(q: Tensor, b: Tensor) -> Tensor:
        return backlight.attention(q, q, q, pair_bias=b).square().sum()

    found = vmap(grad(loss, argnums=1), in_dims=(0, None))(q, b)
    own = vmap(grad(loss, argnums=1))(q, torch.stack([b, 2 * b, 3 * b]))
    for i in range(3):
        torch.testing.assert_close(found[i], grad(loss, argnums=1)(q[i], b))
        torch.testing.assert_close(own[i], grad(loss, argnums=1)(q[i], (i + 1) * b))


@pytest.mark.parametrize("form", [(2, 4, 12, 12), (1, 1, 12, 12), (1, 4, 1, 12)], ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_context_parallel_trades_heads(form: tuple[int, ...], world: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 12, 8, requires_grad=True) for _ in range(3))
    b = torch.randn(form, requires_grad=True)
    inputs = (q, k, v, b)
    y = simulated_attention(q, k, v, pair_bias=b, causal=True, world=world, strategy="all_to_all")
    wanted = backlight.attention(q, k, v, pair_bias=b, causal=True)
    torch.testing.assert_close(y, wanted)
    found, want = (torch.autograd.grad(x.square().sum(), inputs) for x in (y, wanted))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


def test_a_ring_refuses_it() -> None:
    q, b = torch.randn(1, 2, 8, 4), torch.randn(1, 2, 8, 8)
    for strategy in ("ring", "auto"):
        with pytest.raises(NotImplementedError, match="strategy must be all_to_all for a call with pair_bias"):
            simulated_attention(q, q, q, pair_bias=b, strategy=strategy)


def test_statistics_do_not_count_what_is_hidden() -> None:
    q, b = torch.randn(1, 1, 4, 8), torch.zeros(1, 1, 4, 4)
    b[..., 2:] = -torch.inf
    found = backlight.statistics(q, q, q, pair_bias=b, tile=(2, 2))
    assert (float(found.density), float(found.mass)) == (1.0, pytest.approx(1.0))
    assert (float(found.empty_tiles), float(found.full_tiles)) == (0.5, 0.5)


def test_compiled() -> None:
    q, b = torch.randn(2, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 5, 5, requires_grad=True)

    def attend(q: Tensor, b: Tensor) -> Tensor:
        return backlight.attention(q, q, q, pair_bias=b)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found, want = (torch.autograd.grad(f(q, b).square().sum(), (q, b)) for f in (compiled, attend))
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("heads", [1, 2])
def test_shares_of_ranks_add_up(heads: int) -> None:
    """sum_learned=False leaves each rank its share of the gradient."""
    q, b = torch.randn(1, 2, 8, 4), torch.randn(1, heads, 8, 8)

    def gradient(sum_learned: bool, rank: Simulated) -> Tensor:
        context = ContextParallel(rank, strategy="all_to_all", sum_learned=sum_learned)
        own, pairs = context.shard(q, 2), b.clone().requires_grad_()
        y = backlight.attention(own, own, own, pair_bias=pairs, context=context)
        return torch.autograd.grad(y.square().sum(), pairs)[0]

    summed, shares = (simulate(2, partial(gradient, whole)) for whole in (True, False))
    torch.testing.assert_close(summed[0], shares[0] + shares[1])
    torch.testing.assert_close(summed[0], summed[1])


def test_ranks_are_told_about_a_pair_bias_that_does_not_fit() -> None:
    def attend(rank: Simulated) -> str:
        context = ContextParallel(rank, strategy="all_to_all")
        own = context.shard(torch.randn(1, 2, 8, 4), 2)
        with pytest.raises(ValueError, match=re.escape("1 or 8, 8] (batch, query heads, rows, keys), got shape (1, 2, 4, 4)")):
            backlight.attention(own, own, own, pair_bias=torch.zeros(1, 2, 4, 4), context=context)
        return "told"

    assert simulate(2, attend) == ["told", "told"]


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("form", [(1, 2, 6, 6), (2, 1, 6, 6), (4, 2, 1, 6)], ids=str)
def test_peers_read_it_alike(form: tuple[int, ...]) -> None:
    """Adapters of other people's attention, for the doctor and the bench."""
    torch.manual_seed(0)
    q, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 2, 6, 8), form))
    wanted = backlight.attention(q, q, q, pair_bias=b, causal=True)
    found = {
        "sdpa": sdpa.attention(q, q, q, pair_bias=b, causal=True),
        # which has no backward on CPUs
        "flex": flex.attention(*[q.detach()] * 3, pair_bias=b.detach(), causal=True)[0],
        "eager": eager.attention(call_of(q, q, q, pair_bias=b, causal=True))(q, q, q, pair_bias=b),
    }
    want = torch.autograd.grad(wanted.square().sum(), (q, b))
    for name, y in found.items():
        torch.testing.assert_close(y, wanted, msg=lambda text, name=name: f"{name}: {text}")
        if name != "flex":
            for one, other in zip(torch.autograd.grad(y.square().sum(), (q, b)), want, strict=True):
                torch.testing.assert_close(one, other, msg=lambda text, name=name: f"{name}: {text}")
