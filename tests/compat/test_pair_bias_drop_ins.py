"""Drop-ins for calls with a pair bias, against what their documentation says in plain PyTorch, gradients included."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from backlight.compat import (
    DS4Sci_EvoformerAttention,
    attention_pair_bias,
    scaled_dot_product_attention,
    triangle_attention,
)

B, N, H, S, D = 2, 3, 2, 7, 8
sdpa = torch.nn.functional.scaled_dot_product_attention


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def check(found: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(found, wanted)
    pairs = zip(*(torch.autograd.grad(x.square().sum(), inputs) for x in (found, wanted)), strict=True)
    for got, want in pairs:
        torch.testing.assert_close(got, want)


# --- cuEquivariance ----------------------------------------------------------------------------------------------------------


def by_hand(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    s = q @ k.mT * scale + bias
    if mask is not None:
        s = s.masked_fill(~mask, -1e9)
    return s.softmax(-1) @ v


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_triangle_attention(scale: float | None, masked: bool) -> None:
    torch.manual_seed(0)
    q, k, v, bias = drawn(B, N, H, S, D), drawn(B, N, H, S + 2, D), drawn(B, N, H, S + 2, D), drawn(B, 1, H, S, S + 2)
    mask = torch.rand(B, N, 1, 1, S + 2) < 0.7
    mask[..., 0] = True
    given = mask if masked else None
    found = triangle_attention(q, k, v, bias, given, scale)
    check(found, by_hand(q, k, v, bias, given, scale or D**-0.5), (q, k, v, bias))


def test_triangle_attention_without_a_batch() -> None:
    q, bias, mask = torch.randn(N, H, S, D), torch.randn(1, H, S, S), torch.rand(N, 1, 1, S) < 0.8
    whole = triangle_attention(q[None], q[None], q[None], bias[None], mask[None])
    assert torch.equal(triangle_attention(q, q, q, bias, mask), whole[0])
    assert torch.equal(triangle_attention(q, q, q, bias, mask.float()), whole[0])


def test_triangle_attention_of_hidden_rows_is_zero() -> None:
    q, bias = torch.randn(B, N, H, S, D), torch.randn(B, 1, H, S, S)
    mask = torch.ones(B, N, 1, 1, S, dtype=torch.bool)
    mask[1, 2] = False
    y = triangle_attention(q, q, q, bias, mask)
    assert not bool(y[1, 2].any())
    assert bool(y[1, 1].any())


def test_what_triangle_attention_refuses() -> None:
    q, bias = torch.randn(B, N, H, S, D), torch.randn(B, 1, H, S, S)
    with pytest.raises(
        ValueError, match=re.escape("mask must be [2, 3, 1, 1, 7] (B, N, 1, 1, keys), got shape (2, 3, 1, 7, 7)")
    ):
        triangle_attention(q, q, q, bias, torch.ones(B, N, 1, S, S))
    with pytest.raises(ValueError, match="bias must have 5 dimensions, or 4 without the batch, as q has"):
        triangle_attention(q, q, q, bias[:, 0])
    with pytest.raises(NotImplementedError, match="return_aux must be False"):
        triangle_attention(q, q, q, bias, return_aux=True)


@pytest.mark.parametrize("cached", [False, True])
def test_attention_pair_bias(cached: bool) -> None:
    torch.manual_seed(0)
    m, ds, dz = 3, 10, 5
    s, (q, k, v) = drawn(B * m, S, ds), (drawn(B * m, H, S, D) for _ in range(3))
    z = drawn(B, H, S, S) if cached else drawn(B, S, S, dz)
    wz, wg, wo, ln = drawn(H, dz), drawn(H * D, ds), drawn(ds, H * D), drawn(dz)
    mask = torch.rand(B, S) < 0.7
    mask[:, 0] = True
    found, bias = attention_pair_bias(s, q, k, v, z, mask, H, wz, wg, wo, w_ln_z=ln, is_cached_z_proj=cached)
    wanted = z if cached else (torch.nn.functional.layer_norm(z, (dz,), ln) @ wz.mT).permute(0, 3, 1, 2)
    torch.testing.assert_close(bias, wanted)
    hidden = mask.repeat_interleave(m, 0)[:, None, None]
    o = by_hand(q, k, v, wanted.repeat_interleave(m, 0), hidden, D**-0.5)
    out = (o.transpose(1, 2).flatten(2) * torch.sigmoid(s @ wg.mT)) @ wo.mT
    check(found, out, (s, q, k, v, z, wg, wo))
    assert attention_pair_bias(s, q, k, v, z, None, H, wz, wg, wo, return_z_proj=False, is_cached_z_proj=cached)[1] is None


# --- DeepSpeed4Science -------------------------------------------------------------------------------------------------------


def evoformer(q: Tensor, k: Tensor, v: Tensor, *biases: Tensor | None) -> Tensor:
    q, k, v = (x.transpose(2, 3) for x in (q, k, v))
    s = q @ k.mT * D**-0.5
    for bias in biases:
        s = s if bias is None else s + bias
    return (s.softmax(-1) @ v).transpose(2, 3)


@pytest.mark.parametrize("kind", ["learned", "mask", "neither", "none"])
def test_evoformer(kind: str) -> None:
    """Gradients of both biases; a first bias that is a mask, one that is more than that, none."""
    torch.manual_seed(0)
    q, k, v, bias2 = drawn(B, N, S, H, D), drawn(B, N, S + 1, H, D), drawn(B, N, S + 1, H, D), drawn(B, 1, H, S, S + 1)
    bias1 = {"learned": drawn(B, N, 1, 1, S + 1), "neither": torch.randn(B, N, 1, 1, S + 1, dtype=torch.float64)}.get(kind)
    if kind == "mask":
        bias1 = 1e9 * ((torch.rand(B, N, 1, 1, S + 1, dtype=torch.float64) < 0.7).double() - 1)
        bias1[..., 0] = 0
    inputs = (q, k, v, bias2) + ((bias1,) if kind == "learned" else ())
    check(DS4Sci_EvoformerAttention(q, k, v, [bias1, bias2]), evoformer(q, k, v, bias1, bias2), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_by_key_keeps_its_digits(dtype: torch.dtype) -> None:
    """Two columns: the error is far below that of one rounding of the bias; a mask in fp16 overflows nowhere."""
    torch.manual_seed(0)
    q = torch.randn(1, 1, S, H, D, dtype=dtype)
    bias1 = torch.randn(1, 1, 1, 1, S, requires_grad=True)
    wide = evoformer(q.double(), q.double(), q.double(), bias1.detach().double())
    found = DS4Sci_EvoformerAttention(q, q, q, [bias1])
    assert float((found.detach() - wide).abs().max()) < 2 * torch.finfo(dtype).eps
    hiding = torch.zeros(1, 1, 1, 1, S, requires_grad=True)
    with torch.no_grad():
        hiding[..., 1:] = -1e9
    y = DS4Sci_EvoformerAttention(q, q, q, [hiding])
    torch.testing.assert_close(y, q[:, :, :1].expand_as(y))


def test_a_changed_mask_is_read_again() -> None:
    q, bias1 = torch.randn(1, 1, S, H, D), torch.zeros(1, 1, 1, 1, S)
    before = DS4Sci_EvoformerAttention(q, q, q, [bias1])
    bias1[..., 1:] = -1e9
    after = DS4Sci_EvoformerAttention(q, q, q, [bias1])
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, q[:, :, :1].expand_as(after))


def test_a_mask_that_changed_behind_its_version_is_read_again() -> None:
    """numpy and `.data` write without a trace; what was hidden before was hidden still."""
    q, values = torch.randn(1, 1, S, H, D), np.zeros((1, 1, 1, 1, S), dtype=np.float32)
    bias1 = torch.from_numpy(values)
    before = DS4Sci_EvoformerAttention(q, q, q, [bias1])
    values[..., 1:] = -1e9
    after = DS4Sci_EvoformerAttention(q, q, q, [bias1])
    torch.testing.assert_close(after, q[:, :, :1].expand_as(after))
    bias1.data.zero_()
    torch.testing.assert_close(DS4Sci_EvoformerAttention(q, q, q, [bias1]), before)


def test_what_evoformer_refuses() -> None:
    q = torch.randn(B, N, S, H, D)
    with pytest.raises(ValueError, match=re.escape("bias1 must be [2, 3, 1, 1, 7], got shape (2, 3, 7)")):
        DS4Sci_EvoformerAttention(q, q, q, [torch.zeros(B, N, S)])
    with pytest.raises(ValueError, match="biases must be a list of at most two"):
        DS4Sci_EvoformerAttention(q, q, q, [None] * 3)


# --- PyTorch -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(S, S + 2), (B, 1, 1, S + 2), (1, H, S, S + 2), (B, H, S, S + 2), (1, 1, S, 1)], ids=str)
def test_sdpa_with_a_float_mask(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, k, v, mask = drawn(B, H, S, D), drawn(B, H, S + 2, D), drawn(B, H, S + 2, D), drawn(*shape)
    check(scaled_dot_product_attention(q, k, v, mask), sdpa(q, k, v, mask), (q, k, v, mask))


def test_sdpa_with_other_masks() -> None:
    torch.manual_seed(0)
    q, k = drawn(B, H, S, D), drawn(B, H, S + 2, D)
    mask = torch.rand(S, S + 2) < 0.6
    mask[:, 0] = True
    check(scaled_dot_product_attention(q, k, k, mask), sdpa(q, k, k, mask), (q, k))
    for causal in (q, k):
        check(
            scaled_dot_product_attention(causal, k, k, is_causal=True, scale=0.3),
            sdpa(causal, k, k, is_causal=True, scale=0.3),
            (causal, k),
        )
    check(scaled_dot_product_attention(q[0], k[0], k[0], mask), sdpa(q[0], k[0], k[0], mask), (q, k))
    grouped = drawn(B, 1, S + 2, D)
    check(
        scaled_dot_product_attention(q, grouped, grouped, enable_gqa=True),
        sdpa(q, grouped, grouped, enable_gqa=True),
        (q, grouped),
    )


@pytest.mark.parametrize("shape", [(B, 1, H, S, S), (1, N, 1, S, S), (B, N, 1, 1, S), (S, S)], ids=str)
def test_sdpa_of_five_axes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    q, mask = drawn(B, N, H, S, D), drawn(*shape)
    check(scaled_dot_product_attention(q, q, q, mask), sdpa(q, q, q, mask), (q, mask))


def test_what_sdpa_refuses() -> None:
    q = torch.randn(B, H, S, D)
    for options, sentence in (
        ({"dropout_p": 0.1}, "backlight has no attention dropout"),
        ({"is_causal": True, "attn_mask": torch.zeros(S, S)}, "attn_mask must be None with is_causal"),
        ({"attn_mask": torch.zeros(S, S - 1)}, re.escape("attn_mask must broadcast to [2, 2, 7, 7], got shape (7, 6)")),
        ({"attn_mask": torch.zeros(S, S, dtype=torch.int64)}, "attn_mask must be bool, float32 or have the dtype of query"),
        ({"scale": math.inf}, "scale must be a finite number"),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=sentence):
            scaled_dot_product_attention(q, q, q, **options)


def test_a_bias_by_key_that_looks_like_a_mask_has_its_tangent() -> None:
    """At 0 it was read as a mask of keys, which has no derivative: the tangent was 0 without a word."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, N, S, H, D, dtype=torch.float64) for _ in range(3))
    bias = torch.zeros(B, N, 1, 1, S, dtype=torch.float64)

    def ours(x: Tensor) -> Tensor:
        return DS4Sci_EvoformerAttention(q, k, v, [x, None])

    along, step = torch.randn_like(bias), 1e-6
    wanted = (ours(bias + step * along) - ours(bias - step * along)) / (2 * step)
    torch.testing.assert_close(torch.func.jvp(ours, (bias,), (along,))[1], wanted, rtol=1e-6, atol=1e-8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(bias, along)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(ours(dual)).tangent, wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(torch.func.vmap(ours)(torch.stack([bias, bias + 1]))[0], ours(bias))
