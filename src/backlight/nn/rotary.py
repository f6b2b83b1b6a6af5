"""Rotary position embedding, in halves: column c turns with column c + D/2 (the convention of Llama and its kin).

Angles are formed from integer positions in fp32 at every call. No table is stored, so no cast of the module can round it and no
length is too long for it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def angles(positions: Tensor, head_dim: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) [..., S, 1, D/2] of integer positions [..., S]; the middle axis broadcasts over heads."""
    columns = torch.arange(0, head_dim, 2, device=positions.device, dtype=dtype)
    turns = positions.to(dtype)[..., None, None] * base ** (-columns / head_dim)
    return turns.cos(), turns.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., S, H, D] turned by its positions, in the dtype of x; the arithmetic is that of `cos`."""
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """Position of each packed row inside its own sequence: int64 [total]."""
    rows = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True)
    return (rows - cu_seqlens[sequence]).long()
