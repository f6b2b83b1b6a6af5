"""Arguments of FlashAttention 2's functions: checked, and as keywords of the public call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.arguments import (
    FLOATS,
    INTEGERS,
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_tensor,
    check_whole,
    shown,
)


def unbound(name: str, packed: Any, layout: str, parts: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed, layout)
    if packed.shape[-3] != parts:
        raise ValueError(f"{name} must be {layout}, with {parts} third from the end, got shape {tuple(packed.shape)}")
    return packed.unbind(dim=-3)


def check_tensors(q: Any, k: Any, v: Any, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, layout)


def check_flags(causal: Any, deterministic: Any, return_attn_probs: Any) -> None:
    flags = {"causal": causal, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    for name, flag in flags.items():
        check_flag(name, flag)


def check_longest(name: str, value: Any) -> None:
    """A length: a whole number, or a tensor of one integer, whose value is not read."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in INTEGERS:
        return
    check_whole(name, value, least=0)


def options_of(dropout_p: Any, softmax_scale: Any, causal: bool, window_size: Any, softcap: Any) -> dict[str, Any]:
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


def longest_of(cu_seqlens: Tensor, total: int) -> int:
    """Length of the longest sequence; `total` where reading it would break a graph."""
    if torch.compiler.is_compiling() or cu_seqlens.device.type == "meta" or cu_seqlens.shape[0] < 2:
        return total
    return min(total, int(cu_seqlens.diff().max()))


def bias_of(alibi_slopes: Any, q: Tensor, causal: bool, sq: int, sk: int) -> dict[str, Any]:
    """The slopes as a bias by distance, for up to `sq` rows and `sk` keys."""
    heads = q.shape[-2]
    check_tensor("alibi_slopes", alibi_slopes)
    if tuple(alibi_slopes.shape) != (heads,):
        shape = tuple(alibi_slopes.shape)
        raise NotImplementedError(f"alibi_slopes must be [{heads}], one per query head, got shape {shape}")
    check_dtype("alibi_slopes", alibi_slopes, FLOATS)
    check_device("alibi_slopes", alibi_slopes, "q", q.device)
    return backlight.alibi(alibi_slopes, sq, sk, causal=causal)
