"""FlashAttention 4's functions: order, returns, sinks, windows and packing against dense PyTorch in float64, with gradients."""

from __future__ import annotations

import inspect

import pytest
import torch
from flash_dense import dense, pieces, same
from torch import Tensor

from backlight.compat import flash_attn_cute as fa4

# what comes by place or by keyword, then what comes by keyword
SIGNATURES = {
    "flash_attn_func": "q k v qv gather_kv_indices softmax_scale causal window_size learnable_sink",
    "flash_attn_varlen_func": "q k v qv cu_seqlens_q cu_seqlens_k",
}
KEYWORDS = {
    "flash_attn_func": "softcap num_splits pack_gqa deterministic score_mod score_mod_bwd mask_mod aux_tensors aux_scalars"
    " block_sparse_tensors block_sparse_tensors_bwd return_lse",
    "flash_attn_varlen_func": "max_seqlen_q max_seqlen_k min_seqlen_k seqused_q seqused_k gather_kv_indices page_table"
    " softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic score_mod score_mod_bwd"
    " mask_mod block_sparse_tensors aux_tensors aux_scalars return_lse scheduler_metadata seqlen_k_per_split"
    " disable_scheduler_metadata",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(fa4, name)).parameters
    assert list(parameters) == [*SIGNATURES[name].split(), "rest"]
    known = (fa4.Rest if name == "flash_attn_func" else fa4.Packed).__annotations__
    assert set(KEYWORDS[name].split()) <= set(known)
    with pytest.raises(TypeError, match="unexpected keyword argument 'dropout_p'"):
        getattr(fa4, name)(*(torch.randn(1, 2, 1, 4),) * 3, dropout_p=0.0)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


WINDOWS = [(None, None), (6, None), (None, 2), (3, 1), (None, -2), (-3, None), (-2, 5), (7, -1)]


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("sq", "sk"), [(9, 9), (4, 11), (11, 4)])
def test_batched(sq: int, sk: int, window: fa4.Window, causal: bool, with_sink: bool) -> None:
    q, k, v = randn(2, sq, 4, 8), randn(2, sk, 2, 8), randn(2, sk, 2, 6)
    sink = randn(4) if with_sink else None
    y, lse = fa4.flash_attn_func(q, k, v, causal=causal, window_size=window, learnable_sink=sink, softcap=2.0)
    sides = (window[0], 0 if causal else window[1])
    each = [dense(*one, window=sides, sink=sink, softcap=2.0) for one in zip(q, k, v, strict=True)]
    want = torch.stack([out for out, _ in each])
    same((y, lse), (want, torch.stack([row for _, row in each])))
    do, leaves = torch.randn_like(y), (q, k, v) if sink is None else (q, k, v, sink)
    same(torch.autograd.grad(y, leaves, do), torch.autograd.grad(want, leaves, do))


@pytest.mark.parametrize("big", [2**30, 2**31 - 12, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_side_beyond_every_key_is_open(side: str, big: int) -> None:
    """Beside a negative side rows are counted in int32, which such a reach left: all keys were hidden."""
    q, cu = randn(9, 4, 8), torch.tensor([0, 3, 9])
    window, wanted = ((big, -1), (None, -1)) if side == "left" else ((-2, big), (-2, None))
    same(fa4.flash_attn_func(*(q[None],) * 3, window_size=window), fa4.flash_attn_func(*(q[None],) * 3, window_size=wanted))
    want = [dense(x, x, x, window=wanted) for x in q.split([3, 6])]
    y, lse = fa4.flash_attn_varlen_func(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, window_size=window)
    same((y, lse), (torch.cat([out for out, _ in want]), torch.cat([row for _, row in want], dim=1)))


LENGTHS_Q, LENGTHS_K = [3, 7, 1, 4, 7], [6, 4, 2, 5, 6]


def padded(parts: list[Tensor], length: int) -> Tensor:
    """Behind what counts stands what must not be read."""
    filler = [torch.full((length - len(x), *x.shape[1:]), 1e6, dtype=x.dtype) for x in parts]
    return torch.stack([torch.cat(pair) for pair in zip(parts, filler, strict=True)])


@pytest.mark.parametrize("packed_k", [False, True])
@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (None, None)), (True, (None, None)), (False, (3, 1)), (False, (None, -1))]
)
def test_rows_and_keys_are_packed_or_padded(causal: bool, window: fa4.Window, packed_q: bool, packed_k: bool) -> None:
    (tq, tk), sink = (sum(LENGTHS_Q), sum(LENGTHS_K)), randn(4)
    q, k, v = randn(tq, 4, 8), randn(tk, 2, 8), randn(tk, 2, 6)
    each = [pieces(x, n, n) for x, n in ((q, LENGTHS_Q), (k, LENGTHS_K), (v, LENGTHS_K))]
    given, options = [], {"causal": causal, "window_size": window, "learnable_sink": sink}
    for x, parts, packed in zip((q, k, v), each, (packed_q, packed_k, packed_k), strict=True):
        given.append(x if packed else padded(parts, 9))
    for side, lengths, packed in (("q", LENGTHS_Q, packed_q), ("k", LENGTHS_K, packed_k)):
        borders = torch.tensor([0, *lengths], dtype=torch.int32)
        options |= {f"cu_seqlens_{side}": borders.cumsum(0).int()} if packed else {f"seqused_{side}": borders[1:]}
    y, lse = fa4.flash_attn_varlen_func(*given, **options)
    sides = (window[0], 0 if causal else window[1])
    wanted = [dense(*one, window=sides, sink=sink) for one in zip(*each, strict=True)]
    want, rows = torch.cat([out for out, _ in wanted]), torch.cat([row for _, row in wanted], dim=1)
    if not packed_q:
        behind = torch.arange(y.shape[1]) >= torch.tensor(LENGTHS_Q)[:, None]
        assert (y[behind] == 0).all()
        y, lse = y[~behind], lse.transpose(1, 2)[~behind].transpose(0, 1)
    same((y, lse), (want, rows))
    do, leaves = torch.randn_like(y), (q, k, v, sink)
    same(torch.autograd.grad(y, leaves, do), torch.autograd.grad(want, leaves, do))


def test_a_batch_without_lengths_is_a_batch() -> None:
    q = randn(2, 5, 2, 8)
    same(fa4.flash_attn_varlen_func(q, q, q, causal=True), fa4.flash_attn_func(q, q, q, causal=True))


@pytest.mark.parametrize("name", ["qv", "gather_kv_indices", "score_mod", "mask_mod", "block_sparse_tensors", "aux_tensors"])
def test_refused(name: str) -> None:
    q = torch.randn(1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match=f"^{name} must be None"):
        fa4.flash_attn_func(q, q, q, **{name: q})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"window_size": 3}, "window_size must be a pair"),
        ({"window_size": (1.5, None)}, "window_size left must be"),
        ({"causal": 1}, "causal must be"),
        ({"softcap": -1.0}, "softcap must be"),
        ({"seqused_k": torch.tensor([2])}, r"seqused_k must be \[2\]"),
        ({"cu_seqlens_k": torch.tensor([0, 4, 6, 8])}, "k must be"),
        ({"max_seqlen_q": "4"}, "max_seqlen_q must be"),
    ],
)
def test_bad_arguments(options: dict[str, object], sentence: str) -> None:
    q = torch.randn(2, 4, 2, 8)
    with pytest.raises((TypeError, ValueError), match=sentence):
        fa4.flash_attn_varlen_func(q, q, q, **options)
