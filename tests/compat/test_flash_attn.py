"""FlashAttention's functions: signatures, layout, conventions; numbers against the float64 oracle."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor

from backlight import compat
from backlight.call import Call
from backlight.reference import oracle
from backlight.spec import AttentionSpec

SIGNATURES = {
    "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal"
    " window_size softcap alibi_slopes deterministic return_attn_probs block_table",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
    " block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    "lazy_attention": "q k v bias tau window_size varlen",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    """Positional order is the contract: existing code passes by position."""
    parameters = inspect.signature(getattr(compat, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def tensors(sq: int = 9, sk: int = 9, hq: int = 4, hkv: int = 2, d: int = 8) -> list[Tensor]:
    """q, k, v [2, S, H, D] and the incoming gradient, float64."""
    shapes = ((2, sq, hq, d), (2, sk, hkv, d), (2, sk, hkv, d), (2, sq, hq, d))
    return [torch.randn(*shape, dtype=torch.float64) for shape in shapes]


OPTIONS = {
    "plain": ({}, AttentionSpec()),
    "causal": ({"causal": True}, AttentionSpec(causal=True)),
    "window": ({"window_size": (3, 1)}, AttentionSpec(window=(3, 1))),
    "window as a tensor": ({"window_size": torch.tensor([3, 1])}, AttentionSpec(window=(3, 1))),
    "open left": ({"causal": True, "window_size": (-1, 0)}, AttentionSpec(causal=True)),
    "causal window": ({"causal": True, "window_size": (2, -1)}, AttentionSpec(causal=True, window=(2, None))),
    "scale, softcap": ({"softmax_scale": 0.7, "softcap": 2.0}, AttentionSpec(scale=0.7, softcap=2.0)),
}


@pytest.mark.parametrize(("sq", "sk"), [(9, 9), (5, 9), (9, 5)])
@pytest.mark.parametrize("name", OPTIONS)
def test_against_the_oracle(name: str, sq: int, sk: int) -> None:
    options, spec = OPTIONS[name]
    *inputs, do = tensors(sq, sk)
    leaves = [x.requires_grad_() for x in inputs]
    y, lse, probabilities = compat.flash_attn_func(*leaves, return_attn_probs=True, **options)
    assert probabilities.shape == (0,), "FlashAttention returns an empty tensor where there is no dropout"
    grads = torch.autograd.grad(y, leaves, do)
    trace = oracle(Call(spec, *(x.detach().transpose(1, 2) for x in inputs)), do.transpose(1, 2))
    torch.testing.assert_close(y, trace.y.transpose(1, 2))
    torch.testing.assert_close(lse, trace.lse)
    for grad, want in zip(grads, (trace.dq, trace.dk, trace.dv), strict=True):
        torch.testing.assert_close(grad, want.transpose(1, 2))
    torch.testing.assert_close(compat.flash_attn_func(*leaves, **options), y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(7, 7), (4, 9), (9, 4)])
def test_alibi(sq: int, sk: int, causal: bool) -> None:
    """-slope * |i + Sk - Sq - j|, and a gradient for the slopes."""
    q, k, v, do = tensors(sq, sk)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64, requires_grad=True)
    y = compat.flash_attn_func(q, k, v, causal=causal, alibi_slopes=slopes)
    distance = torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)
    seeing = (distance >= 0).any(dim=1) if causal else torch.ones(sq, dtype=torch.bool)
    k, v = (x.repeat_interleave(2, dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 - slopes[:, None, None] * distance.abs()
    s = (s.masked_fill(distance < 0, -torch.inf) if causal else s)[:, :, seeing]
    want = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)
    assert (y[:, ~seeing] == 0).all()
    torch.testing.assert_close(y[:, seeing], want)
    (got,), (expected,) = torch.autograd.grad(y, slopes, do), torch.autograd.grad(want, slopes, do[:, seeing])
    torch.testing.assert_close(got, expected)


def test_packed_layouts_are_views_of_the_same() -> None:
    qkv = torch.randn(2, 6, 3, 4, 8)
    want = compat.flash_attn_func(*qkv.unbind(2), causal=True)
    assert torch.equal(compat.flash_attn_qkvpacked_func(qkv, causal=True), want)
    assert torch.equal(compat.flash_attn_qkvpacked_func(qkv, 0.0, None, True), want)
    assert torch.equal(compat.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True), want)
    with pytest.raises(ValueError, match=r"qkv must be \[B, S, 3, H, D\], .* got shape \(2, 6, 2, 4, 8\)"):
        compat.flash_attn_qkvpacked_func(qkv[:, :, 1:])


def test_varlen_gives_what_each_gives_alone() -> None:
    lengths = [3, 0, 7]
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    qkv = torch.randn(10, 3, 4, 8, requires_grad=True)
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0])
    options = {"causal": True, "window_size": (4, 0), "alibi_slopes": slopes}
    packed, lse, _ = compat.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 7, 7, return_attn_probs=True, **options)
    assert (packed.shape, lse.shape) == ((10, 4, 8), (4, 10))
    alone = [compat.flash_attn_qkvpacked_func(part[None], **options)[0] for part in qkv.split(lengths) if len(part)]
    torch.testing.assert_close(packed, torch.cat(alone))
    assert torch.equal(compat.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, **options), packed)
    assert torch.equal(compat.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], cu, cu, 7, 7, **options), packed)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("named", [1, 3, 7, 70])
def test_alibi_of_packed_sequences_reaches_as_far_as_they_do(named: int, causal: bool) -> None:
    """max_seqlen used to set the length of the table: keys beyond one that was too small lost their bias."""
    lengths_q, lengths_k = [3, 7, 0, 2], [9, 4, 2, 2]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((12, 4), (17, 2), (17, 2)))
    packed = compat.flash_attn_varlen_func(q, k, v, cu_q, cu_k, named, named, causal=causal, alibi_slopes=slopes)
    alone = [
        compat.flash_attn_func(*(x[None] for x in parts), causal=causal, alibi_slopes=slopes)[0]
        for parts in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    ]
    torch.testing.assert_close(packed, torch.cat(alone))
    dy = torch.randn_like(packed)
    got, want = (torch.autograd.grad(y, slopes, dy)[0] for y in (packed, torch.cat(alone)))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_alibi_slopes_of_low_precision_keep_every_distance(dtype: torch.dtype) -> None:
    """256 and 257 are one number in bf16; slopes that bf16 holds exactly must give what the same slopes give in fp32."""
    q, k, v, _ = (x.float() for x in tensors(2, 2600))
    slopes = torch.tensor([0.5, 0.25, 2**-6, 2**-9])
    want = compat.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    assert torch.equal(compat.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes.to(dtype)), want)


def test_deterministic_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    import backlight

    seen = []
    honest = backlight.attention
    monkeypatch.setattr(backlight, "attention", lambda *a, **o: (seen.append(o["deterministic"]), honest(*a, **o))[1])
    q = torch.randn(1, 3, 2, 8)
    compat.flash_attn_func(q, q, q, deterministic=True)
    compat.flash_attn_func(q, q, q)
    assert seen == [True, None]


def test_what_is_missing_is_refused() -> None:
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=r"dropout_p must be 0, got 0.1"):
        compat.flash_attn_func(q, q, q, 0.1)
    with pytest.raises(ValueError, match=r"alibi_slopes must be \[2\], one per query head, or \[1, 2\], got shape \(2, 2\)"):
        compat.flash_attn_func(q, q, q, alibi_slopes=torch.ones(2, 2))
    cu = torch.tensor([0, 3])
    with pytest.raises(NotImplementedError, match="block_table"):
        compat.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 3, 3, block_table=torch.zeros(1, 1))
