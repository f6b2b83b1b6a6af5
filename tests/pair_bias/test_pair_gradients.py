"""Eq. 67, 68: every broadcast form against finite differences and plain PyTorch, -inf entries, what it costs in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import gradcheck

import backlight
from backlight.api import call_of
from backlight.mask import from_dense
from backlight.reference import GRADIENTS, oracle

B, HQ, HKV, SQ, SK, D = 4, 2, 1, 2, 3, 2
FORMS = [(b, h, r) for b, h, r in itertools.product((1, 2, 4), (1, HQ), (1, SQ))]
FP64 = torch.float64


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=FP64, requires_grad=True)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return drawn(B, HQ, SQ, D), drawn(B, HKV, SK, D), drawn(B, HKV, SK, D)


class OfOracle(torch.autograd.Function):
    """The oracle's forward with its own backward."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call = call_of(*(x.detach() for x in tensors[:3]), pair_bias=tensors[3].detach(), softcap=1.5, causal=True)
        trace = oracle(ctx.call)
        return trace.y, trace.lse

    @staticmethod
    def backward(ctx, dy: Tensor, dlse: Tensor):
        trace = oracle(ctx.call, dy, dlse, keep=GRADIENTS)
        return None, None, None, trace.dpair_bias


def tiled(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor) -> tuple[Tensor, Tensor]:
    return backlight.attention(
        q, k, v, pair_bias=pair_bias, softcap=1.5, causal=True, return_lse=True, backend="tiled", deterministic=True
    )


@pytest.mark.parametrize("attend", [OfOracle.apply, tiled], ids=["oracle", "tiled"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_gradcheck(form: tuple[int, int, int], attend: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Of the bias; q, k and v are compared with plain PyTorch below."""
    torch.manual_seed(0)
    assert gradcheck(attend, (*(x.detach() for x in qkv()), drawn(*form, SK)), nondet_tol=0.0)


def plainly(q: Tensor, k: Tensor, v: Tensor, pair_bias: Tensor, visible: Tensor | None = None) -> Tensor:
    """Plain PyTorch; rows that see nothing are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5 + pair_bias.repeat_interleave(q.shape[0] // pair_bias.shape[0], dim=0)
    if visible is not None:
        s = s.masked_fill(~visible, -torch.inf)
    p = torch.where((s > -torch.inf).any(-1, keepdim=True), s, 0).softmax(-1).masked_fill(s == -torch.inf, 0)
    return p @ v


def gradients_of(y: Tensor, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return torch.autograd.grad(y, tensors, dy)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_it_is_plain_pytorch(form: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    tensors = (*qkv(), drawn(*form, SK))
    y, wanted = backlight.attention(*tensors[:3], pair_bias=tensors[3]), plainly(*tensors)
    torch.testing.assert_close(y, wanted)
    for got, want in zip(gradients_of(y, tensors), gradients_of(wanted, tensors), strict=True):
        torch.testing.assert_close(got, want)


def test_hidden_pairs_beside_a_mask() -> None:
    """-inf hides; a row of nothing else is empty; what a mask hides stays hidden under any bias."""
    torch.manual_seed(0)
    q, k, v = qkv()
    given = torch.randn(2, HQ, SQ, SK, dtype=FP64).masked_fill(torch.rand(2, HQ, SQ, SK) < 0.3, -torch.inf)
    given[:, :, 0] = -torch.inf
    given[:, :, 1, 2] = 1e4
    pair_bias = given.requires_grad_()
    visible = torch.ones(SQ, SK, dtype=torch.bool)
    visible[:, 2] = False
    tensors = (q, k, v, pair_bias)
    y, lse = backlight.attention(q, k, v, pair_bias=pair_bias, mask=from_dense(visible), return_lse=True)
    wanted = plainly(*tensors, visible)
    torch.testing.assert_close(y, wanted)
    assert bool((lse[:, :, 0] == -torch.inf).all())
    found = gradients_of(y, tensors)
    for got, want in zip(found, gradients_of(wanted, tensors), strict=True):
        torch.testing.assert_close(got, want)
    assert not bool(found[3][given == -torch.inf].any())
    assert not bool(found[3][..., 2].any())


def views(b: Tensor) -> dict[str, Tensor]:
    return {
        "transposed": b.mT.contiguous().mT,
        "sliced": torch.cat([b, b], dim=-1)[..., : b.shape[-1]],
        "every second": torch.stack([b, b], dim=-1)[..., 0],
        "heads last": b.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    }


@pytest.mark.parametrize("view", ["transposed", "sliced", "every second", "heads last"])
def test_strides_do_not_matter(view: str) -> None:
    torch.manual_seed(0)
    q, k, v = qkv()
    b = torch.randn(2, HQ, SQ, SK, dtype=FP64)
    own = views(b)[view].requires_grad_()
    y, (found,) = (y := tiled(q, k, v, own)[0]), gradients_of(y, (own,))
    plain = b.clone().requires_grad_()
    want = tiled(q, k, v, plain)[0]
    assert torch.equal(y, want)
    assert torch.equal(found, gradients_of(want, (plain,))[0])


def test_an_expanded_bias_is_summed_by_autograd() -> None:
    torch.manual_seed(0)
    q, k, v = qkv()
    b = drawn(1, 1, SQ, SK)
    (found,) = gradients_of(tiled(q, k, v, b.expand(B, HQ, SQ, SK))[0], (b,))
    torch.testing.assert_close(found, gradients_of(tiled(q, k, v, b)[0], (b,))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_has_the_dtype_of_the_bias(dtype: torch.dtype) -> None:
    q = torch.randn(2, 2, 8, 16, dtype=torch.bfloat16)
    b = torch.randn(1, 2, 8, 8, dtype=dtype, requires_grad=True)
    backlight.attention(q, q, q, pair_bias=b).sum().backward()
    assert (b.grad.dtype, b.grad.shape) == (dtype, b.shape)


def test_rows_of_the_gradient_sum_to_nothing() -> None:
    """(I17), plain."""
    torch.manual_seed(0)
    tensors = (*qkv(), drawn(2, HQ, SQ, SK))
    *_, db = gradients_of(backlight.attention(*tensors[:3], pair_bias=tensors[3]), tensors)
    torch.testing.assert_close(db.sum(-1), torch.zeros(2, HQ, SQ, dtype=FP64))
