"""The forward of e4m3 tensors in plain PyTorch, rounding where the kernel of Hopper GPUs rounds (eq. 96-98)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backlight.quantising import BLOCK, Quantised, in_order
from backlight.spec import LOG2E, AttentionSpec

# 2^8 times the weights: e4m3 reaches 448
HEADROOM = 8.0
ROWS = 4 * BLOCK


def forward(given: Quantised, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(y, lse); memory linear in Sq and Sk."""
    sq, heads, keys = given.q.shape[2], given.q.shape[1], given.keys
    y = torch.empty(*given.q.shape[:3], keys.v.shape[2], dtype=given.dtype, device=given.q.device)
    lse = torch.empty(given.q.shape[:3], dtype=torch.float32, device=given.q.device)
    group = heads // keys.k.shape[1]
    k, v, k_scale, v_scale = (
        x.repeat_interleave(group, 1) for x in (keys.k.float(), in_order(keys.v.float()), keys.k_scale, keys.v_scale)
    )
    for begin in range(0, sq, ROWS):
        end = min(begin + ROWS, sq)
        o, top, total = _rows(given, spec, (begin, end), k, v, k_scale)
        y[:, :, begin:end] = (o / total * v_scale[:, :, None]).masked_fill(total == 0, 0.0).to(y.dtype)
        found = (top + torch.log2(total) - HEADROOM)[..., 0] * math.log(2.0) + given.offset[:, :, begin:end]
        lse[:, :, begin:end] = found.masked_fill(total[..., 0] == 0, -torch.inf)
    return y, lse


def _rows(
    given: Quantised, spec: AttentionSpec, rows: tuple[int, int], k: Tensor, v: Tensor, k_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of p v, maximum, sum of p) of some rows, key blocks from right to left."""
    begin, end = rows
    sk = k.shape[2]
    q = given.q[:, :, begin:end].float()
    blocks = torch.arange(begin, end, device=q.device) // BLOCK
    factor = given.q_scale[:, :, blocks, None] * (given.scale * LOG2E)
    o = q.new_zeros(*q.shape[:3], v.shape[2])
    top = q.new_full((*q.shape[:3], 1), -torch.inf)
    total = torch.zeros_like(top)
    position = torch.arange(begin, end, device=q.device)[:, None] + (sk - given.q.shape[2])
    for block in reversed(range(-(-sk // BLOCK))):
        keys = slice(block * BLOCK, min((block + 1) * BLOCK, sk))
        s = (q @ k[:, :, keys].mT) * (factor * k_scale[:, :, block, None, None])
        s = s.masked_fill(~_seen(spec, position, torch.arange(keys.start, keys.stop, device=q.device)), -torch.inf)
        highest = torch.maximum(top, s.amax(-1, keepdim=True).ceil())
        from_here = highest.clamp(min=-1e30)
        p = torch.exp2(s - from_here + HEADROOM).to(torch.float8_e4m3fn).float()
        rescale = torch.exp2(top - from_here)
        o = o * rescale + p @ v[:, :, :, keys].mT
        total = total * rescale + p.sum(-1, keepdim=True)
        top = highest
    return o, top, total


def _seen(spec: AttentionSpec, position: Tensor, keys: Tensor) -> Tensor:
    """Visible keys (eq. 2) of rows at `position` [rows, 1]."""
    seen = torch.ones(position.shape[0], keys.shape[0], dtype=torch.bool, device=keys.device)
    if spec.right is not None:
        seen &= keys <= position + spec.right
    if spec.left is not None:
        seen &= keys >= position - spec.left
    return seen
