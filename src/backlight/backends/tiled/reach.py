"""Which tiles scores cannot carry above a threshold, by norms alone (eq. 85): they are left out before q.k.

A score is at most |scale| times the norms of its row and its key, plus its bias. That says something where a bias falls with
distance; tiles of calls without one are all reached.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backlight.backends.tiled.config import Tile
from backlight.backends.tiled.primitives import Block, Scores
from backlight.call import Call
from backlight.spec import LOG2E

# what rounding may add to a bound
MARGIN = 2.0**-12


def limits(call: Call) -> bool:
    """Whether norms are asked."""
    return call.entmax is not None and call.bias is not None and call.pair_bias is None


class Reach:
    """Upper bounds of base-2 logits of a slab's tiles."""

    def __init__(self, scores: Scores):
        self.scores = scores
        call, cap = scores.call, scores.spec.softcap
        # |tanh x| <= |x|
        self.factor = (1 if scores.folded else abs(scores.factor)) * (1 if cap is None else cap * LOG2E)
        self.keys = torch.linalg.vector_norm(scores.k, dim=-1, dtype=call.accumulator_dtype)

    def start(self, block: Block) -> None:
        self.block = block
        self.rows = torch.linalg.vector_norm(self.scores.q, dim=-1, keepdim=True, dtype=self.keys.dtype) * self.factor

    def most(self, tile: Tile) -> Tensor:
        """[N, rows, 1]."""
        assert self.scores.bias is not None
        product = self.rows[:, self.block.part(tile)] * self.keys[:, tile.j0 : tile.j1].amax(dim=-1)[:, None, None]
        top = self.scores.bias.largest(tile).repeat(1, tile.i1 - tile.i0)[..., None]
        return product + top + MARGIN * (product + top.abs())

    def weighs(self, tile: Tile, lse: Tensor, gain: Tensor) -> Tensor:
        """[N, rows, 1]: rows of a tile that may have a weight in it, by the lse of a block's rows; where that is -inf they see
        nothing."""
        part = self.block.part(tile)
        floor = (lse[:, part] * LOG2E - 1 / gain[:, part]).masked_fill(lse[:, part] == -math.inf, math.inf)
        return self.most(tile) > floor
