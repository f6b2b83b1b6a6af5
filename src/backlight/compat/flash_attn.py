"""FlashAttention 2's functions: its names, argument order, layout and conventions.

Layout is [B, S, H, D] (packed: [T, H, D]); -1 in `window_size` is an open side; softcap 0 is no cap; causal rows align to the
bottom right, as here. ALiBi slopes become a bias by distance, so they get a gradient, which FlashAttention does not give.
Dropout, paged keys and slopes per batch entry are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import backlight
from backlight.arguments import check_borders, shown
from backlight.compat.flash_arguments import bias_of, check_flags, check_longest, check_tensors, longest_of, options_of, unbound

Output = Tensor | tuple[Tensor, Tensor, None]
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
        alibi_slopes: [Hq]: -slope * |i + Sk - Sq - j| is added to the scores.
        return_attn_probs: return (out, lse [B, Hq, Sq], None); the probabilities themselves are never formed.

    Returns:
        out [B, Sq, Hq, Dv].
    """
    check_tensors(q, k, v, "[B, S, H, D]")
    check_flags(causal, deterministic, return_attn_probs)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        options |= bias_of(alibi_slopes, q, causal, q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse = backlight.attention(q, k, v, return_lse=True, deterministic=deterministic or None, **options)
    y = y.transpose(1, 2)
    return (y, lse, None) if return_attn_probs else y


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
        The rest: as in `flash_attn_func`.

    Returns:
        out [Tq, Hq, Dv]; with return_attn_probs (out, lse [Hq, Tq], None).
    """
    check_tensors(q, k, v, "[T, H, D]")
    for name, borders in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_borders(name, borders, q.device)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        check_longest(name, longest)
    if block_table is not None:
        raise NotImplementedError(f"block_table must be None, got {shown(block_table)}: backlight does not read paged keys")
    check_flags(causal, deterministic, return_attn_probs)
    options = options_of(dropout_p, softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        lengths = longest_of(cu_seqlens_q, q.shape[0]), longest_of(cu_seqlens_k, k.shape[0])
        options |= bias_of(alibi_slopes, q, causal, *lengths)
    y, lse = backlight.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, deterministic=deterministic or None, **options
    )
    return (y, lse, None) if return_attn_probs else y


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
