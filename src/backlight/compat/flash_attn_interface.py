"""FlashAttention 3's functions: the names of `backlight.compat.flash_attn` in the order, and with the returns, of version 3.

Version 3 has no dropout and no ALiBi; it has `seqused_q`, `seqused_k` and `attention_chunk`. num_splits, pack_gqa, sm_margin
and scheduler_metadata say how FlashAttention's kernels share out their work; here they change nothing. qv, the scales of
fp8 and paged keys are refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backlight.arguments import check_flag, check_tensor, check_whole
from backlight.compat.flash_arguments import (
    check_flags,
    check_longest,
    check_packed,
    check_per_sequence,
    check_schedule,
    check_tensors,
    options_of,
    refuse,
    unbound,
)
from backlight.compat.flash_attn import OPEN, Window
from backlight.compat.flash_cache import Cache, Rotary, attend_cache, check_cache_call
from backlight.compat.flash_calls import attend, attend_varlen, of_chunk

Output = Tensor | tuple[Tensor, Tensor]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Window = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_interface.flash_attn_func`.

    Args:
        q, k, v: [B, Sq, Hq, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv].
        window_size: (left, right), both included, -1 = open.
        attention_chunk: rows see keys of their own chunk of this many only; 0 = no chunks. It has its gradient here.
        deterministic: bitwise repeatable backward.
        return_attn_probs: return (out, lse [B, Hq, Sq]).

    Returns:
        out [B, Sq, Hq, Dv].
    """
    check_tensors(q, k, v, "[B, S, H, D]")
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_schedule(num_splits, pack_gqa, sm_margin)
    check_flags(causal, deterministic, return_attn_probs)
    check_whole("attention_chunk", attention_chunk, least=0)
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, deterministic)
    y, lse = attend(q, k, v, options, seen=of_chunk(attention_chunk))
    return (y, lse) if return_attn_probs else y


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Window = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_interface.flash_attn_qkvpacked_func`: qkv [B, S, 3, H, D], or [B, S, Hq + 2 Hkv, D] with num_heads_q."""
    check_whole("num_heads_q", num_heads_q, least=1, optional=True)
    if num_heads_q is None:
        q, k, v = unbound("qkv", qkv, "[B, S, 3, H, D]", 3)
    else:
        q, k, v = _split(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Window = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Output:
    """`flash_attn_interface.flash_attn_varlen_func`.

    Args:
        q, k, v: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]: sequences one after another.
        cu_seqlens_q, cu_seqlens_k: [Z + 1], borders of the sequences.
        max_seqlen_q, max_seqlen_k: not needed: lengths are those of the borders.
        seqused_q, seqused_k: [Z], rows and keys of each sequence, from its first, that count; causal and windows align by them.
            Rows behind give 0 (FlashAttention leaves them unwritten), lse -inf, and gradients there are 0.
        The rest: as in `flash_attn_func`.

    Returns:
        out [Tq, Hq, Dv]; with return_attn_probs (out, lse [Hq, Tq]).
    """
    check_packed((q, k, v), (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    for name, used in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        if used is not None:
            check_per_sequence(name, used, cu_seqlens_q.shape[0] - 1, q)
    refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_schedule(num_splits, pack_gqa, sm_margin)
    check_flags(causal, deterministic, return_attn_probs)
    check_whole("attention_chunk", attention_chunk, least=0)
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, deterministic)
    cu_seqlens, counted = (cu_seqlens_q, cu_seqlens_k), (seqused_q, seqused_k)
    y, lse = attend_varlen(q, k, v, cu_seqlens, counted, options, seen=of_chunk(attention_chunk))
    return (y, lse) if return_attn_probs else y


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = OPEN,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Output:
    """`flash_attn_interface.flash_attn_with_kvcache`: as `backlight.compat.flash_attn_with_kvcache`, and

    Args:
        cu_seqlens_q: [B + 1]: q is packed, [Tq, Hq, D]; out and lse are packed then too.
        cu_seqlens_k_new: [B + 1]: k and v are packed, [Tn, Hkv, D].
        max_seqlen_q: not needed.
        rotary_seqlens: [B], the position of the first new key, where it is not cache_seqlens.
        attention_chunk: as in `flash_attn_func`.

    Returns:
        out [B, Sq, Hq, Dv]; with return_softmax_lse (out, lse [B, Hq, Sq]).
    """
    refuse(qv=qv, page_table=page_table, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    check_schedule(num_splits, pack_gqa, sm_margin)
    check_flag("causal", causal)
    check_flag("return_softmax_lse", return_softmax_lse)
    check_whole("attention_chunk", attention_chunk, least=0)
    if max_seqlen_q is not None:
        check_longest("max_seqlen_q", max_seqlen_q)
    options = options_of(0.0, softmax_scale, causal, window_size, softcap, False)
    cache = Cache(k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad)
    rotary = Rotary(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens)
    check_cache_call(q, cache, k, v, rotary, cu_seqlens_q, cu_seqlens_k_new)
    cu_seqlens = (cu_seqlens_q, cu_seqlens_k_new)
    y, lse = attend_cache(q, cache, (k, v), rotary, options, seen=of_chunk(attention_chunk), cu_seqlens=cu_seqlens)
    return (y, lse) if return_softmax_lse else y


def _split(qkv: Any, heads: int) -> tuple[Tensor, ...]:
    check_tensor("qkv", qkv, "[B, S, Hq + 2 Hkv, D]")
    rest = qkv.shape[2] - heads
    if rest <= 0 or rest % 2:
        shape = tuple(qkv.shape)
        raise ValueError(f"qkv must be [B, S, Hq + 2 Hkv, D] with Hq = num_heads_q, {heads}, got shape {shape}")
    return qkv.split([heads, rest // 2, rest // 2], dim=2)
