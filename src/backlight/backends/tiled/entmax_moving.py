"""How the weights of alpha-entmax move along tangents, which both derivatives of the tiled backend share (eq. 108-112).

r of eq. 108 takes the place that ts has in a softmax, slopes w that of the weights. Only tiles in which something weighs are
visited.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile
from backlight.backends.tiled.entmax import Entmax
from backlight.backends.tiled.forward import base2
from backlight.backends.tiled.moving import Moving
from backlight.backends.tiled.primitives import Block, Scores, heads_of
from backlight.call import Call


@dataclass(slots=True)
class Visit:
    """A tile in which something weighs: u, P and w of eq. 80, and r of eq. 108, None where nothing moves."""

    tile: Tile
    part: slice
    u: Tensor
    p: Tensor
    w: Tensor
    r: Tensor | None


@dataclass(slots=True)
class AtSink:
    """u, w and r of the sink, [N, rows, 1]."""

    u: Tensor
    w: Tensor
    r: Tensor


class MovingEntmax:
    """Thresholds, weights and their tangents of a slab's rows, a started block at a time."""

    def __init__(self, call: Call, slab: Slab, scores: Scores, moving: Moving, tangents: Mapping[str, Tensor]):
        self.scores, self.moving = scores, moving
        self.entmax = Entmax(call, slab)
        self.entmax.skip_by_norms(scores)

        def per_head(name: str) -> Tensor | None:
            return heads_of(tangents[name], slab, call.group, call.accumulator_dtype) if name in tangents else None

        self._tsink, self._talpha = per_head("sink"), per_head("entmax")

    @property
    def moves(self) -> bool:
        """Whether any weight does."""
        return self.moving.moves or self._tsink is not None or self._talpha is not None

    def start(self, block: Block) -> None:
        """After `scores` and `moving`."""
        self.entmax.start(block)
        self.e, self.rate = self.entmax.e, self.entmax.rate
        self.tsink = None if self._tsink is None else block.repeat_positions(self._tsink)
        self.talpha = None if self._talpha is None else block.repeat_positions(self._talpha)

    def visits(self, lse: Tensor, tiles: list[Tile]) -> Iterator[Visit]:
        """At the lse [N, rows, 1] of the started block. What the next tile overwrites: u and r."""
        lse2 = base2(lse)
        for tile in self.entmax.left(tiles, lse):
            part = self.scores.block.part(tile)
            u = self.entmax.above(self.scores.tile(tile), lse2, part)
            # elsewhere the question would wait for a device
            if u.device.type == "cpu" and not bool(u.any()):
                continue
            p, w = self.entmax.weights(u, part)
            yield Visit(tile, part, u, p, w, self._driven(u, self.moving.tile(tile, tuple(u.shape)), part))

    def _driven(self, u: Tensor, ts: Tensor | None, part: slice) -> Tensor | None:
        """r of eq. 108, in the place of ts."""
        if self.talpha is None:
            return torch.zeros_like(u) if ts is None and self.moves else ts
        moved = self.by_alpha(u, part).mul_(self.talpha[:, part])
        return moved if ts is None else ts.add_(moved)

    def by_alpha(self, u: Tensor, part: slice) -> Tensor:
        """phi of eq. 108."""
        return (u - 1).sub_(torch.xlogy(u, u)).mul_(self.e[:, part] ** 2)

    def sink(self, lse: Tensor) -> AtSink | None:
        """An infinite one is all there is, or nothing."""
        kappa, whole = self.entmax.kappa, slice(None)
        if kappa is None:
            return None
        w = self.entmax.sink_weights(lse)[1]
        u = (1 + self.rate * (kappa - lse)).clamp_(min=0).masked_fill_(lse == kappa, 1).masked_fill_(lse == -math.inf, 0)
        r = torch.zeros_like(u) if self.tsink is None else self.tsink
        return AtSink(u, w, r if self.talpha is None else r + self.talpha * self.by_alpha(u, whole))

    def bend(self, u: Tensor, centred: Tensor, part: slice) -> Tensor:
        """rho of eq. 111: the tangent of w, divided by w; centred: r less the tangent of lse."""
        safe = u.masked_fill(u <= 0, 1)
        found = centred * (1 - self.rate[:, part]) / safe
        if self.talpha is not None:
            found.sub_(safe.log_().mul_(self.e[:, part]).mul_(self.talpha[:, part]))
        return found

    def by_alpha_moved(self, u: Tensor, centred: Tensor, part: slice) -> Tensor:
        """The tangent of phi, eq. 113."""
        e = self.e[:, part]
        log_p = u.masked_fill(u <= 0, 1).log_().mul_(e)
        found = -log_p * centred
        if self.talpha is not None:
            found.sub_((2 * self.by_alpha(u, part) + u * log_p**2).mul_(self.talpha[:, part] * e))
        return found
