"""Recipes: what q and k are made into after they were drawn, so that rows saturate, lean on one key or underflow."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 32


def _gaussian(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q, k


def _peaky(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q * 3, k


def _dominant(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One key draws most of every row: a shared direction in q, answered by one key."""
    d = q.shape[-1]
    pull = (6 / (_positive(scale) * d)) ** 0.5
    k = k.clone()
    if k.shape[-2]:
        k[..., k.shape[-2] // 3, :] = pull
    return q + pull, k


def _low_lse(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All logits near -120: exp of a natural-log lse below -88 underflows in fp32."""
    shift = (120 / (_positive(scale) * q.shape[-1])) ** 0.5
    return q + shift, k - shift


def _high_lse(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All logits near +120: exp of an lse above 88 overflows in fp32."""
    shift = (120 / (_positive(scale) * q.shape[-1])) ** 0.5
    return q + shift, k + shift


def _jumps(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """All logits of a block of 32 rows near -50, those of the next near +50: lse jumps by 100, more than exp can hold."""
    shift = (50 / (_positive(scale) * q.shape[-1])) ** 0.5
    blocks = torch.arange(q.shape[-2], device=q.device) // BLOCK
    return q + shift * (2.0 * (blocks % 2) - 1)[:, None].to(q.dtype), k + shift


def _rising(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Logits of the first half of the keys near -55, of the second near +55: exp of the difference is no number of fp32."""
    return _halves(q, k, scale, 1.0)


def _falling(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The first half near +55 and the second near -55."""
    return _halves(q, k, scale, -1.0)


def _halves(q: Tensor, k: Tensor, scale: float, sign: float) -> tuple[Tensor, Tensor]:
    shift = (55 / (_positive(scale) * q.shape[-1])) ** 0.5
    later = torch.arange(k.shape[-2], device=k.device) >= k.shape[-2] // 2
    return q + shift, k + shift * sign * (2.0 * later - 1)[:, None].to(k.dtype)


def _outliers(q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One channel of q and k is eight times the others, as in trained models; one key stands out by as much again."""
    q, k = q.clone(), k.clone()
    q[..., 0] *= 8
    k[..., 0] *= 8
    if k.shape[-2]:
        k[..., k.shape[-2] // 2, :] *= 4
    return q, k


def _positive(scale: float) -> float:
    if not scale > 0:
        raise ValueError(f"this recipe aims at scores of a certain size, for which scale must be > 0, got {scale}")
    return scale


RECIPES: dict[str, Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]] = {
    "gaussian": _gaussian,
    "peaky": _peaky,
    "dominant": _dominant,
    "low_lse": _low_lse,
    "high_lse": _high_lse,
    "jumps": _jumps,
    "rising": _rising,
    "falling": _falling,
    "outliers": _outliers,
}
