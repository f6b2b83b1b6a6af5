"""alpha-entmax of the tiled backend: thresholds in a few sweeps over the keys, then o and u in a last one (eq. 80-92).

The first sweep keeps a lower bound of each row's threshold (eq. 84), the next step to it (eq. 83, above alpha 1.5 eq. 81), the
last multiplies v and makes one more step on the way (eq. 86). Scores come in base 2: z = gain * s2. In both directions weights
follow from lse: u = 1 + gain * (s2 - lse2).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile
from backlight.backends.tiled.primitives import Block, Scores, add_product_, heads_of
from backlight.backends.tiled.reach import Reach, limits
from backlight.call import Call
from backlight.spec import LN2
from backlight.thresholds import Bound, Sums, power

MOST_SWEEPS = 40
# a step this small, in eps of the threshold, is rounding
CLOSE = 8.0


class Entmax:
    """Thresholds and weights of a block's rows."""

    def __init__(self, call: Call, slab: Slab):
        assert call.entmax is not None
        dtype = call.accumulator_dtype
        self.alphas = heads_of(call.entmax, slab, call.group, dtype)
        self.sinks = None if call.sink is None else heads_of(call.sink, slab, call.group, dtype)
        self.reach: Reach | None = None

    def skip_by_norms(self, scores: Scores) -> None:
        """Where that may leave tiles out."""
        self.reach = Reach(scores) if limits(scores.call) else None

    def start(self, block: Block) -> None:
        if self.reach is not None:
            self.reach.start(block)
        alpha = block.repeat_positions(self.alphas)
        self.rate, self.gain, self.e = alpha - 1, (alpha - 1) * LN2, 1 / (alpha - 1)
        self.kappa = None if self.sinks is None else block.repeat_positions(self.sinks)

    @property
    def sink(self) -> Tensor | None:
        """z of the sink, -inf where it takes no part in a threshold: an infinite one is all there is."""
        return None if self.kappa is None else (self.rate * self.kappa).masked_fill(self.kappa == math.inf, -math.inf)

    # --- forward -------------------------------------------------------------------------------------------------------------

    def forward(self, scores: Scores, v: Tensor, tiles: list[Tile]) -> tuple[Tensor, Tensor, Tensor]:
        """(lse [N, rows, 1], o, u [N, rows, Dv]) of the started block."""
        theta, largest, tiles = self._bound(scores, tiles)
        for _ in range(MOST_SWEEPS):
            sums = self._sums(scores, theta, tiles)
            room = torch.where(theta > -math.inf, largest - theta, 0)
            step = sums.step(self.e, room)
            theta = theta + step
            limit = CLOSE * torch.finfo(theta.dtype).eps * torch.nan_to_num(theta.abs(), posinf=0).clamp(min=1)
            if bool((step.abs() <= limit).all()):
                break
        return self._last(scores, v, theta, tiles)

    def _bound(self, scores: Scores, tiles: list[Tile]) -> tuple[Tensor, Tensor, list[Tile]]:
        """Eq. 84: a lower bound of thresholds, the largest z of each row, and the tiles that reach above the bound (eq. 85).

        Under norms from the last tile to the first: near keys, whose bias is high, raise the bound before far ones are asked.
        """
        theta = scores.q.new_full((*scores.q.shape[:2], 1), -math.inf, dtype=scores.dtype)
        line, slope = torch.zeros_like(theta), torch.zeros_like(theta)
        largest = theta.clone()
        if self.sink is not None:
            # the first group of keys is the sink alone
            largest.copy_(self.sink)
            theta.copy_(self.sink - 1)
            line = (theta > -math.inf).to(theta.dtype)
            slope = line.clone()
        tops: list[tuple[Tile, Tensor]] = []
        for tile in tiles if self.reach is None else reversed(tiles):
            part = scores.block.part(tile)
            if self.reach is not None and bool((self.reach.most(tile) * self.gain[:, part] <= theta[:, part]).all()):
                continue
            e, z = self.e[:, part], scores.tile(tile).mul_(self.gain[:, part])
            top = z.amax(dim=-1, keepdim=True)
            tops.append((tile, top))
            largest[:, part] = torch.maximum(largest[:, part], top)
            bound = Bound(theta[:, part], line[:, part], slope[:, part])
            new = torch.maximum(bound.theta, top - 1)
            u = z.sub_(bound.moved(new)[0]).clamp_(min=0)
            f, w = (power(u, exponent).sum(dim=-1, keepdim=True) for exponent in (e, e - 1))
            theta[:, part], line[:, part], slope[:, part] = bound.joined(new, f, w, e)
        if self.reach is not None:
            tops.reverse()
        return theta, largest, [tile for tile, top in tops if bool((top > theta[:, scores.block.part(tile)]).any())]

    def _sums(self, scores: Scores, theta: Tensor, tiles: list[Tile]) -> Sums:
        sums = Sums(*(torch.zeros_like(theta) for _ in range(3)))
        base = torch.where(theta > -math.inf, theta, 0)
        for tile in tiles:
            part = scores.block.part(tile)
            sums.add_(part, scores.tile(tile).mul_(self.gain[:, part]).sub_(base[:, part]).clamp_(min=0), self.e[:, part])
        if self.sink is not None:
            sums.add_(slice(None), (self.sink - base).clamp(min=0), self.e)
        return sums

    def _last(self, scores: Scores, v: Tensor, theta: Tensor, tiles: list[Tile]) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 86."""
        o = v.new_zeros(*scores.q.shape[:2], v.shape[-1], dtype=scores.dtype)
        u = torch.zeros_like(o)
        sums = Sums(*(torch.zeros_like(theta) for _ in range(3)))
        base = torch.where(theta > -math.inf, theta, 0)
        for tile in tiles:
            part, keys = scores.block.part(tile), v[:, tile.j0 : tile.j1]
            above = scores.tile(tile).mul_(self.gain[:, part]).sub_(base[:, part]).clamp_(min=0)
            e = self.e[:, part]
            p, w = power(above, e), power(above, e - 1)
            sums.f[:, part] += p.sum(dim=-1, keepdim=True)
            sums.w[:, part] += w.sum(dim=-1, keepdim=True)
            add_product_(o[:, part], p.to(v.dtype), keys)
            add_product_(u[:, part], w.to(v.dtype), keys)
        if self.sink is not None:
            sums.add_(slice(None), (self.sink - base).clamp(min=0), self.e)
        u.div_(sums.w.masked_fill(sums.w == 0, 1))
        o.sub_(u * torch.where(sums.w > 0, sums.f - 1, 0))
        lse = (theta + sums.newton(self.e) + 1) * self.e
        # what is not a number, or endless, lies above no threshold, and would weigh nothing
        o, u = (x.masked_fill_(~(lse < math.inf), math.nan) for x in (o, u))
        if self.kappa is not None:
            endless = self.kappa == math.inf
            lse.masked_fill_(endless, math.inf)
            o.masked_fill_(endless, 0)
            u.masked_fill_(endless, 0)
        return lse, o, u

    def left(self, tiles: list[Tile], lse: Tensor) -> list[Tile]:
        """Without the tiles that norms keep below thresholds."""
        if self.reach is None:
            return tiles
        return [tile for tile in tiles if bool(self.reach.weighs(tile, lse, self.gain).any())]

    # --- both directions -----------------------------------------------------------------------------------------------------

    def above(self, s2: Tensor, lse2: Tensor, part: slice) -> Tensor:
        """u of eq. 80 from base-2 scores, in their place."""
        return s2.sub_(lse2[:, part]).mul_(self.gain[:, part]).add_(1).clamp_(min=0)

    def weights(self, u: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """(p, w)."""
        return power(u, self.e[:, part]), power(u, self.e[:, part] - 1)

    # --- parts of a row's keys, at the lse of the whole row (eq. 94) ----------------------------------------------------------

    def summands(self, scores: Scores, v: Tensor, lse2: Tensor, tiles: list[Tile]) -> tuple[Tensor, Tensor]:
        """p v and w v of the started block, [N, rows, Dv]."""
        o = v.new_zeros(*scores.q.shape[:2], v.shape[-1], dtype=scores.dtype)
        u = torch.zeros_like(o)
        for tile in tiles:
            part, keys = scores.block.part(tile), v[:, tile.j0 : tile.j1]
            for total, weights in zip((o, u), self.weights(self.above(scores.tile(tile), lse2, part), part), strict=True):
                add_product_(total[:, part], weights.to(v.dtype), keys)
        return o, u

    def row_sums(self, scores: Scores, lse2: Tensor, tiles: list[Tile]) -> tuple[Tensor, ...]:
        """F, W, W2 and the sum of p ln p, [N, rows, 1] each."""
        sums = Sums(*(torch.zeros_like(lse2) for _ in range(3)))
        entropy = torch.zeros_like(lse2)
        for tile in tiles:
            part = scores.block.part(tile)
            u, e = self.above(scores.tile(tile), lse2, part), self.e[:, part]
            sums.add_(part, u, e)
            entropy[:, part] += (torch.xlogy(power(u, e), u) * e).sum(dim=-1, keepdim=True)
        return sums.f, sums.w, sums.w2, entropy

    # --- backward ------------------------------------------------------------------------------------------------------------

    def sink_weights(self, lse: Tensor) -> tuple[Tensor, Tensor]:
        """(p, w) of the sink; an infinite one is all there is, or nothing."""
        assert self.kappa is not None
        u = (1 + self.rate * (self.kappa - lse)).clamp_(min=0).masked_fill_(lse == self.kappa, 1)
        u.masked_fill_(lse == -math.inf, 0)
        return power(u, self.e), power(u, self.e - 1)

    def slope_sums(self, scores: Scores, lse: Tensor, lse2: Tensor, tiles: list[Tile]) -> Tensor:
        """W of each row, 1 where nothing weighs: a sweep of its own, which only a gradient at lse needs (eq. 87)."""
        total = torch.zeros_like(lse)
        for tile in tiles:
            part = scores.block.part(tile)
            total[:, part] += self.weights(self.above(scores.tile(tile), lse2, part), part)[1].sum(dim=-1, keepdim=True)
        if self.kappa is not None:
            total += self.sink_weights(lse)[1]
        return total.masked_fill_(total == 0, 1)


class ByAlpha:
    """The gradient by alpha of a block's rows (eq. 89), summed in the tile loop: from rounded o and u it would be off by
    percents."""

    def __init__(self, entmax: Entmax):
        self.entmax = entmax
        self.of_keys, self.entropy, self.slopes, self.moved = (torch.zeros_like(entmax.e) for _ in range(4))

    def add_(self, u: Tensor, weights: tuple[Tensor, Tensor], dp: Tensor, part: slice) -> None:
        (p, w), e = weights, self.entmax.e[:, part]
        # p ln p
        own = torch.xlogy(p, u) * e
        self.of_keys[:, part] += ((p * e - own) * dp).sum(dim=-1, keepdim=True)
        self.entropy[:, part] += own.sum(dim=-1, keepdim=True)
        self.slopes[:, part] += w.sum(dim=-1, keepdim=True)
        self.moved[:, part] += (w * dp).sum(dim=-1, keepdim=True)

    def of_part(self, eta: Tensor) -> Tensor:
        """[N, rows, 1] of keys that are a part of a row's, whose eta is known; without what comes from dlse."""
        return self.entmax.e * (self.of_keys - eta * self.moved)

    def rows(self, lse: Tensor, dlse: Tensor | None) -> Tensor:
        """[N, rows, 1]; dlse is 0 where there is no lse."""
        e = self.entmax.e
        entropy, slopes = self.entropy, self.slopes
        if self.entmax.kappa is not None:
            p0, w0 = self.entmax.sink_weights(lse)
            entropy, slopes = entropy + torch.xlogy(p0, p0), slopes + w0
        eta = torch.where(slopes > 0, (e - entropy) / slopes, 0)
        found = self.of_keys - eta * self.moved
        if dlse is not None:
            found = found - torch.where(slopes > 0, dlse * (e - eta), 0)
        return e * found
