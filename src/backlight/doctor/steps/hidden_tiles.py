"""Rows that are NaN because the first tile of keys that they meet is hidden from them: -inf minus -inf."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.defects.tails import TILES

MOST_PAIRS = 2**24


def tile_of(wrong: Tensor, call: Call) -> tuple[int, int] | None:
    """(rows, keys) of tiles that explain which rows [B, H, Sq] are not finite; None where no tile does."""
    if call.varlen or call.q.shape[2] * call.k.shape[2] > MOST_PAIRS or not bool(wrong.any()):
        return None
    visible = intervals.visible_whole(call).to(wrong.device).expand(*wrong.shape, call.k.shape[2])
    sees = visible.any(dim=-1)
    for rows, keys in sorted(product(TILES, TILES), key=lambda size: (size[0] != size[1], size)):
        if torch.equal(wrong & sees, _hidden_first(visible, rows, keys) & sees):
            return rows, keys
    return None


def _hidden_first(visible: Tensor, rows: int, keys: int) -> Tensor:
    """Rows that see nothing in the first tile of keys that their tile of rows visits."""
    sq, sk = visible.shape[-2:]
    position = torch.arange(sk, device=visible.device)
    first = torch.where(visible, position, sk).amin(dim=-1)
    padded = torch.nn.functional.pad(first, (0, -sq % rows), value=sk).unflatten(-1, (-1, rows))
    start = padded.amin(dim=-1).div(keys, rounding_mode="floor").mul(keys).repeat_interleave(rows, dim=-1)[..., :sq, None]
    return ~(visible & (position >= start) & (position < start + keys)).any(dim=-1)
