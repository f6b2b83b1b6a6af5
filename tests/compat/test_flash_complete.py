"""What users of FlashAttention 2 pass beside the plain call, against dense PyTorch in float64, gradients included."""

from __future__ import annotations

import pytest
import torch
from flash_dense import dense, same
from torch import Tensor

from backlight import compat


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


VARIANTS = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window_size": (4, 2), "softcap": 1.5, "softmax_scale": 0.4},
    "causal window": {"causal": True, "window_size": (5, -1)},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("sq", "sk"), [(13, 13), (5, 17), (17, 5)])
def test_slopes_for_each_batch_entry(variant: str, sq: int, sk: int) -> None:
    options = VARIANTS[variant]
    q, k, v, slopes = randn(3, sq, 4, 8), randn(3, sk, 2, 8), randn(3, sk, 2, 6), randn(3, 4)
    y, lse, dmask = compat.flash_attn_func(q, k, v, alibi_slopes=slopes, return_attn_probs=True, **options)
    each = [dense(*one, slopes=slope, **options) for *one, slope in zip(q, k, v, slopes, strict=True)]
    want = torch.stack([out for out, _ in each])
    same((y, lse), (want, torch.stack([row for _, row in each])))
    assert dmask.shape == (0,)
    do = torch.randn_like(y)
    leaves = (q, k, v, slopes)
    same(torch.autograd.grad(y, leaves, do), torch.autograd.grad(want, leaves, do))


@pytest.mark.parametrize("variant", VARIANTS)
def test_slopes_for_each_packed_sequence(variant: str) -> None:
    options = VARIANTS[variant]
    lengths_q, lengths_k = [3, 11, 0, 1, 6], [9, 4, 2, 0, 6]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    q, k, v, slopes = randn(21, 4, 8), randn(21, 2, 8), randn(21, 2, 6), randn(5, 4)
    y, lse, _ = compat.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, 11, 9, alibi_slopes=slopes, return_attn_probs=True, **options
    )
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), slopes, strict=True)
    each = [dense(*one, slopes=slope, **options) for *one, slope in parts]
    want = torch.cat([out for out, _ in each])
    same((y, lse), (want, torch.cat([row for _, row in each], dim=1)))
    do, leaves = torch.randn_like(y), (q, k, v, slopes)
    same(torch.autograd.grad(y, leaves, do), torch.autograd.grad(want, leaves, do))


def test_a_foreign_sequence_may_hold_nan() -> None:
    """Sequences are padded beside one another where each has slopes of its own: nothing of one may reach the next."""
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    for x in (q, k, v):
        x[:4] = torch.nan
    cu = torch.tensor([0, 4, 9])
    y = compat.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, alibi_slopes=torch.rand(2, 2))
    assert y[4:].isfinite().all()
    assert y[:4].isnan().all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_arrive_in_the_packed_tensor(variant: str) -> None:
    options = VARIANTS[variant]
    qkv, do = randn(2, 7, 3, 4, 8), torch.randn(2, 7, 4, 8, dtype=torch.float64)
    want = torch.stack([dense(*one.unbind(1), **options)[0] for one in qkv])
    (expected,) = torch.autograd.grad(want, qkv, do)
    y = compat.flash_attn_qkvpacked_func(qkv, **options)
    same((y, *torch.autograd.grad(y, qkv, do)), (want, expected))
    q, kv = (x.detach().clone().requires_grad_() for x in (qkv[:, :, 0], qkv[:, :, 1:]))
    y = compat.flash_attn_kvpacked_func(q, kv, **options)
    dq, dkv = torch.autograd.grad(y, (q, kv), do)
    same((y, dq, dkv), (want, expected[:, :, 0], expected[:, :, 1:]))
    flat, cu = qkv.detach().flatten(0, 1).requires_grad_(), torch.tensor([0, 7, 14])
    y = compat.flash_attn_varlen_qkvpacked_func(flat, cu, 7, **options)
    same((y, *torch.autograd.grad(y, flat, do.flatten(0, 1))), (want.flatten(0, 1), expected.flatten(0, 1)))
    q, kv = (x.detach().flatten(0, 1).requires_grad_() for x in (qkv[:, :, 0], qkv[:, :, 1:]))
    y = compat.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7, **options)
    dq, dkv = torch.autograd.grad(y, (q, kv), do.flatten(0, 1))
    same((y, dq, dkv), (x.flatten(0, 1) for x in (want, expected[:, :, 0], expected[:, :, 1:])))


def test_borders_of_different_numbers_of_sequences() -> None:
    q = torch.randn(6, 2, 8)
    with pytest.raises(ValueError, match="cu_seqlens_k must have as many sequences as cu_seqlens_q, 2, got 1"):
        compat.flash_attn_varlen_func(q, q, q, torch.tensor([0, 2, 6]), torch.tensor([0, 6]), 4, 6, alibi_slopes=torch.ones(2))
