"""FlashAttention's call over a cache, versions 2 and 3, against dense PyTorch in float64 on a cache written by hand."""

from __future__ import annotations

import pytest
import torch
from flash_dense import dense, same
from torch import Tensor

from backlight import compat
from backlight.compat import flash_attn_interface as fa3

BATCH, ROOM, HQ, HKV, D, DV = 3, 19, 4, 2, 16, 10
LENGTHS = [0, 11, 5]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def caches(lengths: list[int], entries: list[int] | None = None, of: int = BATCH) -> tuple[Tensor, Tensor]:
    """NaN behind what they hold."""
    k, v = torch.full((of, ROOM, HKV, D), torch.nan).double(), torch.full((of, ROOM, HKV, DV), torch.nan).double()
    for entry, length in zip(range(of) if entries is None else entries, lengths, strict=False):
        k[entry, :length], v[entry, :length] = randn(length, HKV, D), randn(length, HKV, DV)
    return k, v


def turned(x: Tensor, positions: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """x [S, H, D] as complex numbers, multiplied."""
    n = angles.shape[1]
    a, b = (x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]) if interleaved else (x[..., :n], x[..., n : 2 * n])
    z = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[positions][:, None]
    out = x.clone()
    if interleaved:
        out[..., 0 : 2 * n : 2], out[..., 1 : 2 * n : 2] = z.real, z.imag
    else:
        out[..., :n], out[..., n : 2 * n] = z.real, z.imag
    return out


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window, softcap": {"window_size": (3, 1), "softcap": 1.5, "softmax_scale": 0.3},
    "causal window": {"causal": True, "window_size": (4, -1)},
}


@pytest.mark.parametrize("rotary", [None, True, False], ids=["as it is", "interleaved", "halves"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("sq", "new"), [(1, 1), (4, 4), (3, 7)])
def test_append_and_attend(sq: int, new: int, name: str, rotary: bool | None) -> None:
    options = OPTIONS[name]
    q, k, v, (k_cache, v_cache) = (
        randn(BATCH, sq, HQ, D),
        randn(BATCH, new, HKV, D),
        randn(BATCH, new, HKV, DV),
        caches(LENGTHS),
    )
    held_k, held_v = k_cache.clone(), v_cache.clone()
    angles, tables = randn(ROOM + 2, 3), {}
    if rotary is not None:
        tables = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": rotary}
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    y, lse = compat.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=lengths, num_splits=3, return_softmax_lse=True, **tables, **options
    )
    for b, length in enumerate(LENGTHS):
        rows, keys = q[b], k[b]
        if rotary is not None:
            step = 1 if options.get("causal") or "window_size" in options else 0
            rows = turned(rows, length + step * torch.arange(sq), angles, rotary)
            keys = turned(keys, length + torch.arange(new), angles, rotary)
        held_k[b, length : length + new], held_v[b, length : length + new] = keys, v[b]
        same((y[b], lse[b]), dense(rows, held_k[b, : length + new], held_v[b, : length + new], **options))
    torch.testing.assert_close(k_cache, held_k, equal_nan=True)
    torch.testing.assert_close(v_cache, held_v, equal_nan=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("slopes", [None, "heads", "entries and heads"])
def test_entries_left_padding_and_slopes(name: str, slopes: str | None) -> None:
    options, entries, padding, new = OPTIONS[name], [4, 0, 2], [0, 6, 8], 3
    k_cache, v_cache = caches(LENGTHS, entries, of=5)
    q, k, v = randn(BATCH, 3, HQ, D), randn(BATCH, new, HKV, D), randn(BATCH, new, HKV, DV)
    slope = None if slopes is None else torch.rand(HQ).double() if slopes == "heads" else torch.rand(BATCH, HQ).double()
    before = k_cache.clone()
    y, lse = compat.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=torch.tensor(LENGTHS),
        cache_batch_idx=torch.tensor(entries),
        cache_leftpad=torch.tensor(padding),
        alibi_slopes=slope,
        return_softmax_lse=True,
        **options,
    )
    torch.testing.assert_close(k_cache[[1, 3]], before[[1, 3]], equal_nan=True)
    for b, (entry, length, left) in enumerate(zip(entries, LENGTHS, padding, strict=True)):
        own = slope if slope is None or slope.dim() == 1 else slope[b]
        held = k_cache[entry, left : length + new], v_cache[entry, left : length + new]
        assert torch.equal(k_cache[entry, length : length + new], k[b])
        same((y[b], lse[b]), dense(q[b], *held, slopes=own, **options))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("length", [None, 0, 7])
def test_one_length_for_all(length: int | None, name: str) -> None:
    """A number, or the whole cache; a batch smaller than the cache has its first entries; nothing is written without k."""
    options, held = OPTIONS[name], ROOM if length is None else length
    k_cache, v_cache = caches([held] * 5, of=5)
    q, before = randn(BATCH, 4, HQ, D), k_cache.clone()
    y = compat.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, **options)
    same(y, (dense(q[b], k_cache[b, :held], v_cache[b, :held], **options)[0] for b in range(BATCH)))
    torch.testing.assert_close(k_cache, before, equal_nan=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk", [0, 4])
def test_packed_rows_and_packed_new_keys(name: str, chunk: int) -> None:
    """Version 3: rows and new keys of different numbers for each entry, positions that are not those of the cache."""
    options, rows, new, start = OPTIONS[name], [2, 5, 1], [3, 0, 4], [7, 1, 4]
    (k_cache, v_cache), angles = caches(LENGTHS), randn(ROOM + 2, 4)
    q, k, v = randn(sum(rows), HQ, D), randn(sum(new), HKV, D), randn(sum(new), HKV, DV)
    cu_rows, cu_new = (torch.tensor([0, *counts]).cumsum(0).int() for counts in (rows, new))
    y, lse = fa3.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        rotary_interleaved=False,
        cache_seqlens=torch.tensor(LENGTHS),
        cu_seqlens_q=cu_rows,
        cu_seqlens_k_new=cu_new,
        max_seqlen_q=5,
        rotary_seqlens=torch.tensor(start),
        attention_chunk=chunk,
        return_softmax_lse=True,
        **options,
    )
    step = 1 if options.get("causal") or "window_size" in options or chunk else 0
    parts = zip(q.split(rows), k.split(new), start, LENGTHS, y.split(rows), lse.split(rows, dim=1), strict=True)
    for b, (own, keys, at, length, out, row) in enumerate(parts):
        end = length + len(keys)
        same([k_cache[b, length:end]], [turned(keys, at + torch.arange(len(keys)), angles, False)])
        own = turned(own, at + step * torch.arange(len(own)), angles, False)
        same((out, row), dense(own, k_cache[b, :end], v_cache[b, :end], chunk=chunk, **options))


def test_decoding_is_the_causal_call() -> None:
    """Step by step, with caches of any strides and no gradients, as in FlashAttention."""
    q, k, v = randn(2, 9, HQ, D).requires_grad_(), randn(2, 9, HKV, D), randn(2, 9, HKV, D)
    k_cache, v_cache = torch.zeros(2, 2, 12, HKV, D).double().transpose(2, 3).contiguous().transpose(2, 3).unbind(0)
    steps = []
    for i in range(9):
        one = slice(i, i + 1)
        steps.append(
            compat.flash_attn_with_kvcache(
                q[:, one],
                k_cache,
                v_cache,
                k[:, one],
                v[:, one],
                cache_seqlens=i if i % 2 else torch.tensor([i, i]),
                causal=True,
            )
        )
    assert not any(step.requires_grad for step in steps)
    torch.testing.assert_close(torch.cat(steps, dim=1), compat.flash_attn_func(q, k, v, causal=True).detach())


def test_paged_keys_are_refused() -> None:
    q, table = torch.randn(1, 3, 2, 8), torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match=r"block_table must be None, .*: backlight does not read paged keys"):
        compat.flash_attn_with_kvcache(q, q, q, block_table=table)
    with pytest.raises(NotImplementedError, match=r"page_table must be None, .*: backlight does not read paged keys"):
        fa3.flash_attn_with_kvcache(q, q, q, page_table=table)


def test_a_bad_call_writes_nothing() -> None:
    k_cache, q = torch.zeros(1, 9, 3, 8), torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match=r"heads of q must be a multiple of those of k_cache, 3, got 4"):
        compat.flash_attn_with_kvcache(q, k_cache, k_cache, q[:, :, :3], q[:, :, :3], cache_seqlens=2)
    assert (k_cache == 0).all()
