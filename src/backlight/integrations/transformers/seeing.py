"""Which row sees which key, densely: for what our kernels do not take."""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.integrations.transformers.given import INTERVALS, check_given
from backlight.integrations.transformers.packing import room_of
from backlight.intervals import segment_of
from backlight.mask import Mask
from backlight.spec import AttentionSpec


def of_geometry(spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor | None:
    """[Sq, Sk]; None for everything."""
    everything = spec.left is None and spec.right is None
    return None if everything else spec.allowed(query.shape[2], key.shape[2], query.device)


def of_numbers(mask: Tensor, spec: AttentionSpec, sk: int) -> Tensor:
    """[B, 1, Sq, Sk] of a mask [B, 1, 1, Sk + Sq] of sequence numbers, keys first."""
    keys, rows = mask[:, 0, 0, :sk], mask[:, 0, 0, sk:]
    # a causal row sits at its key, and a cache may have room behind the last one
    start = sk - rows.shape[1] - (room_of(rows, keys) if spec.causal else 0)
    row, key = (torch.arange(n, device=mask.device) for n in (rows.shape[1], sk))
    near = spec.allowed_distance((row + start)[:, None] - key)
    return ((rows[:, :, None] == keys[:, None]) & (keys != 0)[:, None] & near)[:, None]


def of_borders(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, spec: AttentionSpec, query: Tensor, key: Tensor) -> Tensor:
    """[Tq, Tk] of packed sequences, the last row of each beside its last key."""
    (z_q, row), (z_k, column) = _places(query, cu_seqlens_q), _places(key, cu_seqlens_k)
    return (z_q[:, None] == z_k) & spec.allowed_distance(row[:, None] - column)


def _places(x: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """The sequence of each row of [1, H, T, D], and its place before the end of that."""
    place = torch.arange(x.shape[2], device=x.device)
    z = segment_of(place, cu_seqlens)
    return z, place - cu_seqlens[1:][z]


def of_given(mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """What is seen, and what is added, by intervals or a dense mask; the other is None."""
    check_given(mask, query, key)
    if mask.dtype == INTERVALS:
        return Mask(mask).dense(query.shape[2]), None
    return (mask, None) if mask.dtype == torch.bool else (None, mask)
