"""Tangents of a slab's scores, which the tangent and the second derivative of the tiled backend share (eq. 47).

Masked pairs keep a finite tangent: their weight is 0, and so is every product with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile
from backlight.backends.tiled.pair_bias import PairBias
from backlight.backends.tiled.primitives import Bias, Block, Scores, columns, heads_of, keys_of, product
from backlight.call import Call


class Moving:
    """`tile` gives ts of the tile whose scores came last. `tx` is that tangent before the cap, `slope` the cap's derivative."""

    def __init__(self, call: Call, slab: Slab, scores: Scores, tangents: Mapping[str, Tensor]):
        self.scores, self.workspace = scores, scores.workspace
        self.given_q = tangents.get("q")
        self.tk = keys_of(tangents["k"], slab).to(scores.operand) if "k" in tangents else None
        self.bias = BiasTangent(call, slab, tangents["bias"]) if "bias" in tangents else None
        pairs = tangents.get("pair_bias")
        self.pair_bias = None if pairs is None else PairBias(replace(call, pair_bias=pairs), slab)
        sides = [scores.k_columns] if self.given_q is not None else []
        sides += [columns(self.tk)] if self.tk is not None else []
        self._right = torch.cat(sides, dim=1) if len(sides) == 2 else sides[0] if sides else None
        self.tq: Tensor | None = None
        self.tx: Tensor | None = None
        self.slope: Tensor | None = None

    @property
    def moves(self) -> bool:
        return not (self._right is None and self.bias is None and self.pair_bias is None)

    def start(self, block: Block) -> None:
        """tq comes with the factor of `scores.q`."""
        scores = self.scores
        if self.given_q is not None:
            self.tq = block.rows_of(self.given_q).to(scores.operand)
            if scores.folded:
                self.tq = self.tq * scores.factor
        sides = [x for x in (self.tq, scores.q if self.tk is not None else None) if x is not None]
        # tq.k + q.tk is one product over both
        self._left = torch.cat(sides, dim=-1) if len(sides) == 2 else sides[0] if sides else None

    def tile(self, tile: Tile, shape: tuple[int, ...]) -> Tensor | None:
        """ts in natural units, [N, rows, keys]; None where no score moves."""
        scores, tanh = self.scores, self.scores.tanh
        self.slope = None
        if tanh is not None:
            self.slope = torch.mul(tanh, tanh, out=self.workspace.take("slope", *shape)).neg_().add_(1)
        if not self.moves:
            return None
        ts = self.workspace.take("ts", *shape)
        self.tx = None
        if self._left is None or self._right is None:
            ts.zero_()
        else:
            part = self._left[:, scores.block.part(tile)]
            product(part, self._right[:, :, tile.j0 : tile.j1], ts).mul_(scores.dk_factor)
            if self.slope is not None:
                self.tx = self.workspace.take("tx", *shape).copy_(ts)
                ts.mul_(self.slope)
        if self.bias is not None:
            self.bias.add_(ts, tile)
        if self.pair_bias is not None:
            self.pair_bias.add_(ts, tile, unit=1.0)
        return ts


class BiasTangent(Bias):
    """The tangent of a distance table, in natural units."""

    def __init__(self, call: Call, slab: Slab, table: Tensor):
        super().__init__(replace(call, bias=table), slab)
        self.mirrored = heads_of(table, slab, call.group, call.accumulator_dtype).flip(-1)
