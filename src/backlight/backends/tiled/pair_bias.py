"""A bias of pairs in the tiled backend: a tile of it added to the scores, and ds of a tile added to its gradient (eq. 67, 68).

Batch entries that share an entry of the bias read it where it lies, whatever its strides; nothing larger than a tile is formed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile
from backlight.call import Call
from backlight.spec import LOG2E


class PairBias:
    """The pair bias of a slab. Tiles are [N, rows, keys], rows position-major (see `primitives`)."""

    def __init__(self, call: Call, slab: Slab):
        assert call.pair_bias is not None
        self.bias, self.slab, self.group, self.sharing = call.pair_bias, slab, call.group, call.sharing
        self.varlen = call.varlen

    def add_(self, s: Tensor, tile: Tile, unit: float = LOG2E) -> None:
        """s += pair bias in these units, base 2 unless told (eq. 67)."""
        cells = self._cells(s)
        for entries, own in self._runs():
            part = self._of_tile(self.bias, own, tile)
            cells[entries].add_(part.transpose(2, 3), alpha=unit)

    def add_gradient_(self, total: Tensor, ds: Tensor, tile: Tile) -> None:
        """total += ds, summed over what shares an entry of the bias (eq. 68); total is shaped like the bias."""
        cells = self._cells(ds)
        for entries, own in self._runs():
            target = self._of_tile(total, own, tile)
            part = cells[entries].transpose(2, 3)
            summed = [axis for axis in range(4) if target.shape[axis] < part.shape[axis]]
            target += part.sum(dim=summed, keepdim=True) if summed else part

    def _cells(self, tile_values: Tensor) -> Tensor:
        """[N, rows, keys] -> [batches, kv heads, positions, r, keys], a view."""
        batches = self.slab.b1 - self.slab.b0
        return tile_values.unflatten(1, (-1, self.group)).unflatten(0, (batches, -1))

    def _runs(self) -> Iterator[tuple[slice, slice]]:
        """Batch entries of the slab, counted from its first, and the entries of the bias that are theirs: as many, or one."""
        b0, b1 = self.slab.b0, self.slab.b1
        if self.varlen:
            own = self.slab.segment.number // self.sharing
            yield slice(0, 1), slice(own, own + 1)
            return
        if self.sharing == 1:
            yield slice(0, b1 - b0), slice(b0, b1)
            return
        for own in range(b0 // self.sharing, -(-b1 // self.sharing)):
            first, end = max(b0, own * self.sharing), min(b1, (own + 1) * self.sharing)
            yield slice(first - b0, end - b0), slice(own, own + 1)

    def _of_tile(self, tensor: Tensor, own: slice, tile: Tile) -> Tensor:
        """A tile of the bias or its gradient, [entries, kv heads or 1, r or 1, positions or 1, keys], a view."""
        heads = slice(self.slab.g0 * self.group, self.slab.g1 * self.group) if tensor.shape[1] > 1 else slice(0, 1)
        rows = slice(tile.i0, tile.i1) if tensor.shape[2] > 1 else slice(0, 1)
        part = tensor[own, heads, rows, tile.j0 : tile.j1]
        return part.unflatten(1, (-1, self.group if tensor.shape[1] > 1 else 1))


def blank_gradient(call: Call) -> Tensor:
    """Zeros for the sums of `add_gradient_`: in the accumulator dtype, or in that of the bias where each gets one summand."""
    assert call.pair_bias is not None
    own = call.owns_pairs and (call.varlen or call.pair_bias.shape[2] == call.q.shape[2])
    by_key = call.pair_bias.shape[2] == 1
    return torch.zeros_like(call.pair_bias, dtype=call.pair_bias.dtype if own and not by_key else call.accumulator_dtype)
