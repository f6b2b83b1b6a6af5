"""Masks by row intervals in the tiled backend: which tiles they leave out, which they leave alone, and -inf in the others.

Intervals are compared as they came, disjoint (eq. 61), beside causal and window, which have their own tile ranges: one test for
rows and for positions. Classes are those of eq. 64, taken over all heads of a slab: their extremes lie on the host.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backlight import intervals
from backlight.backends.tiled.config import Slab, Tile
from backlight.call import Call

EMPTY, PARTIAL, FULL = "empty", "partial", "full"


class Intervals:
    """The intervals of a slab, [N|1, r|1, w, Sk] for first and end, and the positions of its rows, [N|1, Sq]."""

    def __init__(self, call: Call, slab: Slab):
        assert call.rows is not None
        z, group, self.group = slab.segment, call.group, call.group
        rows = intervals.disjoint(call.rows[..., z.k0 : z.k1])
        rows = rows[slab.b0 : slab.b1] if rows.shape[0] > 1 else rows
        if rows.shape[1] > 1:
            rows = rows[:, slab.g0 * group : slab.g1 * group].unflatten(1, (-1, group))
        else:
            rows = rows[:, None]
        kv_heads = slab.g1 - slab.g0
        # one for all pairs of batch and head, or one for each
        if rows.shape[:2] != (1, 1):
            rows = rows.expand(slab.b1 - slab.b0, kv_heads, *rows.shape[2:])
        self.first, self.end = intervals.pairs(rows.flatten(0, 1))
        if call.pos is None:
            positions = torch.arange(z.q0, z.q1, dtype=torch.int32, device=rows.device)[None]
        else:
            pos = call.pos[slab.b0 : slab.b1] if call.pos.shape[0] > 1 else call.pos
            positions = pos[:, z.q0 : z.q1]
        self.positions = positions.repeat_interleave(kv_heads, dim=0) if positions.shape[0] > 1 else positions
        self._kinds: dict[Tile, str] = {}
        extremes = [f(each, dim=(0, 1)) for each in (self.first, self.end) for f in (torch.amin, torch.amax)]
        self._extremes = torch.stack(extremes).cpu()
        self._rows = torch.stack([self.positions.amin(dim=0), self.positions.amax(dim=0)]).cpu()

    def kind(self, tile: Tile) -> str:
        """Eq. 64 over all heads of the slab; of two intervals, empty where both are, full where one is."""
        if tile not in self._kinds:
            self._kinds[tile] = self._find_kind(tile)
        return self._kinds[tile]

    def _find_kind(self, tile: Tile) -> str:
        lowest, highest = (int(f(x[tile.i0 : tile.i1])) for f, x in zip((torch.amin, torch.amax), self._rows, strict=True))
        keys = self._extremes[..., tile.j0 : tile.j1]
        f_min, e_min = keys[0].amin(dim=-1), keys[2].amin(dim=-1)
        f_max, e_max = keys[1].amax(dim=-1), keys[3].amax(dim=-1)
        if bool(((f_min > highest) | (e_max <= lowest)).all()):
            return EMPTY
        return FULL if bool(((f_max <= lowest) & (e_min > highest)).any()) else PARTIAL

    def visited(self, tiles: list[Tile]) -> list[Tile]:
        """Without those in which no row sees a key."""
        return [tile for tile in tiles if self.kind(tile) != EMPTY]

    def mask_(self, tile_values: Tensor, tile: Tile) -> None:
        """-inf where a row is in no interval of a key."""
        if self.kind(tile) == FULL:
            return
        keys = slice(tile.j0, tile.j1)
        # [N|1, rows, r|1, w, keys]
        at = self.positions[:, tile.i0 : tile.i1, None, None, None]
        first, end = self.first[:, None, :, :, keys], self.end[:, None, :, :, keys]
        hidden = ~((first <= at) & (at < end)).any(dim=-2)
        tile_values.unflatten(1, (-1, self.group)).masked_fill_(hidden, -math.inf)
