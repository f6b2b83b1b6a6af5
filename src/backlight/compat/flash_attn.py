"""FlashAttention 2's functions: its names, argument order, layout and conventions.

Layout is [B, S, H, D] (packed: [T, H, D]); -1 in `window_size` is an open side; softcap 0 is no cap; causal rows align to the
bottom right, as here. ALiBi slopes become a bias by distance, so they get a gradient, which FlashAttention does not give.
Dropout, paged keys and slopes per batch entry are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight

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
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse = backlight.attention(q, k, v, return_lse=True, deterministic=deterministic or None, **options)
    y = y.transpose(1, 2)
    return (y, lse, None) if return_attn_probs else y


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_qkvpacked_func`: qkv [B, S, 3, H, D], then as `flash_attn_func` after v."""
    q, k, v = _unbind(qkv, 3, "qkv")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_kvpacked_func`: kv [B, Sk, 2, Hkv, D], then as `flash_attn_func` after v."""
    k, v = _unbind(kv, 2, "kv")
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
        max_seqlen_q, max_seqlen_k: used for the length of the ALiBi table only.
        The rest: as in `flash_attn_func`.

    Returns:
        out [Tq, Hq, Dv]; with return_attn_probs (out, lse [Hq, Tq], None).
    """
    if block_table is not None:
        raise NotImplementedError("block_table (paged keys) is not supported by backlight")
    lengths = int(max_seqlen_q), int(max_seqlen_k)
    options = _options(q, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, *lengths)
    y, lse = backlight.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, deterministic=deterministic or None, **options
    )
    return (y, lse, None) if return_attn_probs else y


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_varlen_qkvpacked_func`: qkv [T, 3, H, D]."""
    q, k, v = _unbind(qkv, 3, "qkv")
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
    k, v = _unbind(kv, 2, "kv")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options)


def _unbind(packed: Tensor, parts: int, name: str) -> tuple[Tensor, ...]:
    if packed.dim() < 4 or packed.shape[-3] != parts:
        raise ValueError(f"{name} must have {parts} as its third last dimension, got shape {tuple(packed.shape)}")
    return packed.unbind(dim=-3)


def _options(
    q: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: Tensor | None,
    sq: int,
    sk: int,
) -> dict[str, Any]:
    """Keywords of the public call."""
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0, got {dropout_p}: backlight has no attention dropout")
    left, right = (None if reach < 0 else reach for reach in window_size)
    options: dict[str, Any] = {"causal": causal, "window": (left, right), "scale": softmax_scale, "softcap": softcap or None}
    if alibi_slopes is not None:
        if alibi_slopes.shape != q.shape[-2:-1]:
            raise NotImplementedError(
                f"alibi_slopes must be [{q.shape[-2]}], one per query head, got shape {tuple(alibi_slopes.shape)}"
            )
        # distances i' - j run from -(sk - 1) - max(0, sq - sk) to sk - 1
        behind, ahead = max(sk, 1), 0 if causal else max(sq, sk, 1)
        distance = torch.arange(-ahead, behind, device=q.device, dtype=alibi_slopes.dtype).abs()
        options |= {"bias": -alibi_slopes[:, None] * distance, "bias_origin": ahead}
    return options
