"""FlashAttention 3's functions: order, returns, seqused and chunks against dense PyTorch in float64, gradients included."""

from __future__ import annotations

import inspect

import pytest
import torch
from flash_dense import dense, pieces, same
from torch import Tensor

from backlight.compat import flash_attn_interface as fa3

SIGNATURES = {
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap"
    " num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv softmax_scale causal q_descale k_descale v_descale window_size attention_chunk softcap"
    " deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale"
    " causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic sm_margin"
    " return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad"
    " page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale softmax_scale causal"
    " window_size attention_chunk softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin"
    " return_softmax_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa3, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(13, 13), (5, 17), (17, 5)])
@pytest.mark.parametrize("chunk", [0, 1, 4, 64])
def test_batched_with_chunks(chunk: int, sq: int, sk: int, causal: bool) -> None:
    q, k, v = randn(2, sq, 4, 8), randn(2, sk, 2, 8), randn(2, sk, 2, 6)
    options = {"causal": causal, "window_size": (6, -1), "softcap": 2.0}
    y, lse = fa3.flash_attn_func(q, k, v, None, attention_chunk=chunk, return_attn_probs=True, **options)
    each = [dense(*one, chunk=chunk, **options) for one in zip(q, k, v, strict=True)]
    want = torch.stack([out for out, _ in each])
    same((y, lse), (want, torch.stack([row for _, row in each])))
    do, leaves = torch.randn_like(y), (q, k, v)
    same(torch.autograd.grad(y, leaves, do), torch.autograd.grad(want, leaves, do))


@pytest.mark.parametrize("chunk", [2**31 - 3, 2**31 - 1, 2**31, 2**32, 2**40])
def test_chunks_longer_than_any_sequence(chunk: int) -> None:
    """Ends of such a chunk left int32 and hid its keys. Rows before the first key are in an earlier one and see nothing."""
    q, k = randn(1, 9, 4, 8), randn(1, 5, 2, 8)
    want, _ = dense(q[0], k[0], k[0], chunk=chunk)
    assert not want[:4].any()
    same((fa3.flash_attn_func(q, k, k, attention_chunk=chunk)[0],), (want,))
    # behind another sequence, where rows and keys have larger numbers
    both, cu_q, cu_k = torch.cat([q[0], q[0]]), torch.tensor([0, 9, 18]), torch.tensor([0, 5, 10])
    keys = torch.cat([k[0], k[0]])
    same((fa3.flash_attn_varlen_func(both, keys, keys, cu_q, cu_k, 9, 5, attention_chunk=chunk),), (torch.cat([want, want]),))


LENGTHS_Q, LENGTHS_K = [3, 11, 0, 4, 6], [9, 4, 2, 5, 6]
USED = {
    "rows": ([2, 7, 0, 0, 6], LENGTHS_K),
    "keys": (LENGTHS_Q, [1, 4, 0, 0, 5]),
    "both": ([3, 10, 0, 2, 1], [9, 3, 1, 0, 6]),
    "all": (LENGTHS_Q, LENGTHS_K),
}


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", USED)
def test_what_is_used_of_packed_sequences(name: str, causal: bool, chunk: int) -> None:
    """What lies behind, NaN here, is not read; its rows and its gradients are 0."""
    used_q, used_k = USED[name]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (LENGTHS_Q, LENGTHS_K))
    q, k, v = (torch.randn(n, h, 8, dtype=torch.float64) for n, h in ((24, 4), (26, 2), (26, 2)))
    unused = [
        torch.cat([torch.arange(n) >= m for n, m in zip(lengths, used, strict=True)])
        for lengths, used in ((LENGTHS_Q, used_q), (LENGTHS_K, used_k))
    ]
    for x, rows in ((q, unused[0]), (k, unused[1]), (v, unused[1])):
        x[rows] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    seqused = {f"seqused_{side}": torch.tensor(used, dtype=torch.int32) for side, used in (("q", used_q), ("k", used_k))}
    y, lse = fa3.flash_attn_varlen_func(
        *leaves, cu_q, cu_k, 11, 9, **seqused, causal=causal, attention_chunk=chunk, return_attn_probs=True
    )
    parts = zip(pieces(q, LENGTHS_Q, used_q), pieces(k, LENGTHS_K, used_k), pieces(v, LENGTHS_K, used_k), strict=True)
    each = [dense(*one, causal=causal, chunk=chunk) for one in parts]
    assert (y[unused[0]] == 0).all()
    assert (lse[:, unused[0]] == -torch.inf).all()
    want = torch.cat([out for out, _ in each])
    same((y[~unused[0]], lse[:, ~unused[0]]), (want, torch.cat([row for _, row in each], dim=1)))
    do = torch.randn_like(y)
    same(torch.autograd.grad(y, leaves, do), torch.autograd.grad(want, leaves, do[~unused[0]]))


def test_heads_packed_side_by_side() -> None:
    qkv = randn(2, 7, 4 + 2 + 2, 8)
    y = fa3.flash_attn_qkvpacked_func(qkv, None, True, num_heads_q=4)
    want = torch.stack([dense(*one.split([4, 2, 2], dim=1), causal=True)[0] for one in qkv])
    do = torch.randn_like(y)
    same((y, *torch.autograd.grad(y, qkv, do)), (want, *torch.autograd.grad(want, qkv, do)))
    with pytest.raises(ValueError, match=r"qkv must be .* num_heads_q, 5, got shape \(2, 7, 8, 8\)"):
        fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=5)


def test_how_work_is_shared_out_changes_nothing() -> None:
    q = torch.randn(1, 5, 2, 8)
    want = fa3.flash_attn_func(q, q, q)
    assert torch.equal(fa3.flash_attn_func(q, q, q, num_splits=4, pack_gqa=True, sm_margin=8), want)
    for wrong in ({"num_splits": -1}, {"pack_gqa": 1}, {"sm_margin": 0.5}, {"attention_chunk": -2}):
        with pytest.raises((TypeError, ValueError), match=f"{next(iter(wrong))} must be"):
            fa3.flash_attn_func(q, q, q, **wrong)


@pytest.mark.parametrize("name", ["qv", "q_descale", "k_descale", "v_descale"])
def test_what_is_missing_is_refused_by_name(name: str) -> None:
    q, cu = torch.randn(1, 5, 2, 8), torch.tensor([0, 5])
    calls = (
        lambda **given: fa3.flash_attn_func(q, q, q, **given),
        lambda **given: fa3.flash_attn_varlen_func(q[0], q[0], q[0], cu, cu, 5, 5, **given),
        lambda **given: fa3.flash_attn_with_kvcache(q, q, q, **given),
    )
    for call in calls:
        with pytest.raises(NotImplementedError, match=rf"{name} must be None, got a tensor of shape \(3,\): backlight"):
            call(**{name: torch.ones(3)})


def test_compiles_whole() -> None:
    """Lengths that differ are tensors all the way."""
    cu, used = torch.tensor([0, 5, 12]), torch.tensor([3, 6])
    q = torch.randn(12, 2, 8)
    call = torch.compile(
        lambda q, used: fa3.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, seqused_k=used, causal=True, attention_chunk=4),
        fullgraph=True,
        backend="aot_eager",
    )
    torch.testing.assert_close(
        call(q, used), fa3.flash_attn_varlen_func(q, q, q, cu, cu, 7, 7, seqused_k=used, causal=True, attention_chunk=4)
    )
