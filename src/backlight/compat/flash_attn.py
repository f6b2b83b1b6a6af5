"""FlashAttention 2's functions: its names, argument order, layout and conventions.

Layout is [B, S, H, D] (packed: [T, H, D]); -1 in `window_size` is an open side; softcap 0 is no cap; causal rows align to the
bottom right, as here. ALiBi slopes become a bias by distance, so they get a gradient, which FlashAttention does not give.
Dropout and paged keys are refused. FlashAttention 3's functions, in another order: `backlight.compat.flash_attn_interface`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backlight.arguments import check_borders, check_flag
from backlight.compat.flash_arguments import (
    check_flags,
    check_longest,
    check_packed,
    check_schedule,
    check_slopes,
    check_tensors,
    options_of,
    refuse,
    unbound,
)
from backlight.compat.flash_cache import Cache, Rotary, attend_cache, check_cache_call
from backlight.compat.flash_calls import attend, attend_varlen

Output = Tensor | tuple[Tensor, Tensor, Tensor]
Window = tuple[int, int]
OPEN: Window = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn.flash_attn_func`.

    Args:
        q, k, v: [B, Sq, Hq, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv].
        window_size: (left, right), both included, -1 = open.
        alibi_slopes: [Hq] or [B, Hq]: -slope * |i + Sk - Sq - j| is added to the scores.
        deterministic: bitwise repeatable backward.
        return_attn_probs: return (out, lse [B, Hq, Sq], S_dmask); S_dmask is empty, as FlashAttention's is without dropout.

    Returns:
        out [B, Sq, Hq, Dv].
    """
    check_tensors(q, k, v, "[B, S, H, D]")
    check_flags(causal, deterministic, return_attn_probs)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, q, q.shape[0])
    y, lse = attend(q, k, v, options, alibi_slopes)
    return (y, lse, _no_mask(q)) if return_attn_probs else y


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_qkvpacked_func`: qkv [B, S, 3, H, D], then as `flash_attn_func` after v."""
    q, k, v = unbound("qkv", qkv, "[B, S, 3, H, D]", 3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_kvpacked_func`: kv [B, Sk, 2, Hkv, D], then as `flash_attn_func` after v."""
    k, v = unbound("kv", kv, "[B, S, 2, H, D]", 2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Output:
    """`flash_attn.flash_attn_varlen_func`.

    Args:
        q, k, v: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]: sequences one after another.
        cu_seqlens_q, cu_seqlens_k: [Z + 1], borders of the sequences.
        max_seqlen_q, max_seqlen_k: not needed: lengths are those of the borders.
        alibi_slopes: [Hq] or [Z, Hq]. The rest: as in `flash_attn_func`.

    Returns:
        out [Tq, Hq, Dv]; with return_attn_probs (out, lse [Hq, Tq], S_dmask).
    """
    # first: paged keys have another layout
    refuse(block_table=block_table)
    check_packed((q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    check_flags(causal, deterministic, return_attn_probs)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap, deterministic)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, q, cu_seqlens_q.shape[0] - 1)
    y, lse = attend_varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k), (None, None), options, alibi_slopes)
    return (y, lse, _no_mask(q)) if return_attn_probs else y


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_varlen_qkvpacked_func`: qkv [T, 3, H, D]."""
    q, k, v = unbound("qkv", qkv, "[T, 3, H, D]", 3)
    check_borders("cu_seqlens", cu_seqlens, qkv.device)
    check_longest("max_seqlen", max_seqlen)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Output:
    """`flash_attn.flash_attn_varlen_kvpacked_func`: kv [Tk, 2, Hkv, D]."""
    k, v = unbound("kv", kv, "[T, 2, H, D]", 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = OPEN,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`flash_attn.flash_attn_with_kvcache`: k and v are written into the cache, then q attends to it. No gradients, as there.

    Args:
        q: [B, Sq, Hq, D].
        k_cache, v_cache: [Bc, Sc, Hkv, D], [Bc, Sc, Hkv, Dv], any strides; written in place.
        k, v: [B, Sn, Hkv, D], [B, Sn, Hkv, Dv], written behind the first cache_seqlens keys; None = nothing is written.
        rotary_cos, rotary_sin: [at least Sc, R / 2], in the dtype of q or fp32: the first R columns of k are rotated by
            positions cache_seqlens, cache_seqlens + 1, ..., those of q too if causal or with a window, otherwise all rows of q
            by cache_seqlens.
        cache_seqlens: keys the cache holds before, one number or [B]; None = all.
        cache_batch_idx: [B], which entries of the cache the batch has. They are copied together: the kernels read one tensor.
        cache_leftpad: [B], where the keys of an entry begin.
        rotary_interleaved: columns 0 and 1 are a pair, 2 and 3, ...; otherwise 0 and R / 2, 1 and R / 2 + 1, ...
        num_splits: changes nothing: our kernels choose.

    Returns:
        out [B, Sq, Hq, Dv]; with return_softmax_lse (out, lse [B, Hq, Sq]).
    """
    refuse(block_table=block_table)
    check_schedule(num_splits)
    check_flag("causal", causal)
    check_flag("return_softmax_lse", return_softmax_lse)
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, False)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad)
    rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved)
    batch = check_cache_call(q, cache, k, v, rotary)
    if alibi_slopes is not None:
        check_slopes(alibi_slopes, q, batch)
    y, lse = attend_cache(q, cache, (k, v), rotary, options, alibi_slopes)
    return (y, lse) if return_softmax_lse else y


def _no_mask(q: Tensor) -> Tensor:
    """S_dmask where there is no dropout."""
    return q.detach().new_zeros(0)
