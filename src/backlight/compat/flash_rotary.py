"""Rotary positions as FlashAttention's cache functions apply them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.arguments import check_device, check_dtype, check_tensor


def check_rotary(cos: Any, sin: Any, q: Tensor, longest: int) -> None:
    """cos, sin: [at least `longest`, R / 2], of which the first R columns of q and k are rotated; both or neither."""
    if cos is None and sin is None:
        return
    for name, other, table in (("rotary_cos", "rotary_sin", cos), ("rotary_sin", "rotary_cos", sin)):
        if table is None:
            raise ValueError(f"{name} must be given with {other}, got None")
        check_tensor(name, table, "[S, R / 2]")
        check_dtype(name, table, (q.dtype, torch.float32))
        check_device(name, table, "q", q.device)
        if table.shape != cos.shape or table.shape[0] < longest or 2 * table.shape[1] > q.shape[-1]:
            wanted = f"[at least {longest}, at most {q.shape[-1] // 2}], both alike"
            raise ValueError(f"{name} must be {wanted}, got shape {tuple(table.shape)}")


def rotated(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, H, D], row t rotated by its position: pairs of columns (0, 1), (2, 3), ..., or (0, R / 2), (1, R / 2 + 1), ..."""
    columns = 2 * cos.shape[1]
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    turned, rest = x[..., :columns].to(wide), x[..., columns:]
    cos, sin = (table[position].to(wide)[:, None] for table in (cos, sin))
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * cos - b * sin, a * sin + b * cos
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)
