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
from backlight.arguments import (
    FLOATS,
    INTEGERS,
    check_borders,
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_tensor,
    check_whole,
    shown,
)

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
    _check_tensors(q, k, v, "[B, S, H, D]")
    _check_flags(causal, deterministic, return_attn_probs)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        options |= _alibi(alibi_slopes, q, causal, q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y, lse = backlight.attention(q, k, v, return_lse=True, deterministic=deterministic or None, **options)
    y = y.transpose(1, 2)
    return (y, lse, None) if return_attn_probs else y


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_qkvpacked_func`: qkv [B, S, 3, H, D], then as `flash_attn_func` after v."""
    q, k, v = _unbind("qkv", qkv, "[B, S, 3, H, D]", 3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_kvpacked_func`: kv [B, Sk, 2, Hkv, D], then as `flash_attn_func` after v."""
    k, v = _unbind("kv", kv, "[B, S, 2, H, D]", 2)
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
    _check_tensors(q, k, v, "[T, H, D]")
    for name, borders in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_borders(name, borders, q.device)
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_longest(name, longest)
    if block_table is not None:
        raise NotImplementedError(f"block_table must be None, got {shown(block_table)}: backlight does not read paged keys")
    _check_flags(causal, deterministic, return_attn_probs)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap)
    if alibi_slopes is not None:
        lengths = _longest(cu_seqlens_q, q.shape[0]), _longest(cu_seqlens_k, k.shape[0])
        options |= _alibi(alibi_slopes, q, causal, *lengths)
    y, lse = backlight.attention_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=True, deterministic=deterministic or None, **options
    )
    return (y, lse, None) if return_attn_probs else y


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any) -> Output:
    """`flash_attn.flash_attn_varlen_qkvpacked_func`: qkv [T, 3, H, D]."""
    q, k, v = _unbind("qkv", qkv, "[T, 3, H, D]", 3)
    check_borders("cu_seqlens", cu_seqlens, qkv.device)
    _check_longest("max_seqlen", max_seqlen)
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
    k, v = _unbind("kv", kv, "[T, 2, H, D]", 2)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options)


# --- arguments ---------------------------------------------------------------------------------------------------------------


def _unbind(name: str, packed: Any, layout: str, parts: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed, layout)
    if packed.shape[-3] != parts:
        raise ValueError(f"{name} must be {layout}, with {parts} third from the end, got shape {tuple(packed.shape)}")
    return packed.unbind(dim=-3)


def _check_tensors(q: Any, k: Any, v: Any, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, layout)


def _check_flags(causal: Any, deterministic: Any, return_attn_probs: Any) -> None:
    flags = {"causal": causal, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    for name, flag in flags.items():
        check_flag(name, flag)


def _check_longest(name: str, value: Any) -> None:
    """A length; a tensor of one integer is one too, and is not read."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in INTEGERS:
        return
    check_whole(name, value, least=0)


def _options(dropout_p: Any, softmax_scale: Any, causal: bool, window_size: Any, softcap: Any) -> dict[str, Any]:
    """Keywords of the public call."""
    check_number("dropout_p", dropout_p)
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0, got {dropout_p}: backlight has no attention dropout")
    check_number("softmax_scale", softmax_scale, optional=True)
    check_number("softcap", softcap, least=0)
    return {"causal": causal, "window": _window(window_size), "scale": softmax_scale, "softcap": softcap or None}


def _window(window_size: Any) -> tuple[int | None, int | None]:
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise ValueError(f"window_size must be a pair (left, right), -1 for an open side, got {shown(window_size)}")
    for side, reach in zip(("left", "right"), window_size, strict=True):
        check_whole(f"window_size {side}", reach, least=-1)
    left, right = (None if reach == -1 else reach for reach in window_size)
    return left, right


def _longest(cu_seqlens: Tensor, total: int) -> int:
    """Positions of the longest sequence; where reading it would break a graph, as many as there are."""
    if torch.compiler.is_compiling() or cu_seqlens.device.type == "meta" or cu_seqlens.shape[0] < 2:
        return total
    return min(total, int(cu_seqlens.diff().max()))


def _alibi(alibi_slopes: Any, q: Tensor, causal: bool, sq: int, sk: int) -> dict[str, Any]:
    """The slopes as a bias by distance, for up to `sq` rows and `sk` keys."""
    heads = q.shape[-2]
    check_tensor("alibi_slopes", alibi_slopes)
    if tuple(alibi_slopes.shape) != (heads,):
        shape = tuple(alibi_slopes.shape)
        raise NotImplementedError(f"alibi_slopes must be [{heads}], one per query head, got shape {shape}")
    check_dtype("alibi_slopes", alibi_slopes, FLOATS)
    check_device("alibi_slopes", alibi_slopes, "q", q.device)
    # distances i' - j run from 1 - sq to sk - 1
    behind, ahead = max(sk, 1), 0 if causal else max(sq, 1)
    # bf16 holds no whole number between 256 and 258, fp16 none between 2048 and 2050
    dtype = torch.float64 if alibi_slopes.dtype == torch.float64 else torch.float32
    distance = torch.arange(-ahead, behind, device=q.device).abs().to(dtype)
    return {"bias": -alibi_slopes.to(dtype)[:, None] * distance, "bias_origin": ahead}
