"""What the weights of a call are, counted head by head from its lse: the tiles of the forward, kept as counts only.

Weights are formed for a few rows of one key head at a time, so that a long sequence costs time and not memory. Parity contract:
tests/nn/test_statistics.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from backlight.backends.tiled.config import Slab, Tile
from backlight.backends.tiled.entmax import Entmax
from backlight.backends.tiled.forward import base2
from backlight.backends.tiled.primitives import Block, Elastic, Scores, Workspace
from backlight.call import Call

# weights held at a time
WEIGHTS = 2**22


def count(call: Call, lse: Tensor, tile: tuple[int, int]) -> Tensor:
    """[9, Hq]: weights above zero, visible pairs, the sum of weights, rows without a weight, live tiles, rows that see a key,
    tiles with a visible pair, tiles in which all pairs are visible, tiles with a visible pair whose scores must be formed.

    A live tile has a weight above zero; tiles of `tile` (rows, keys) start at the first row and key of a sequence. Scores need
    not be formed where norms keep them below the thresholds of entmax (eq. 85).
    """
    sums = torch.zeros(9, call.q.shape[1], dtype=torch.float64, device=call.q.device)
    for z in call.segments():
        for kv_head in range(call.k.shape[1]):
            heads = slice(kv_head * call.group, (kv_head + 1) * call.group)
            sums[:, heads] += _count_slab(call, Slab(z.batch, z.batch + 1, kv_head, kv_head + 1, z), lse, tile)
    return sums


def _count_slab(call: Call, slab: Slab, lse: Tensor, tile: tuple[int, int]) -> Tensor:
    """[9, r] of the query heads of one key head."""
    z = slab.segment
    step = max(1, WEIGHTS // max(1, call.group * z.sk * tile[0])) * tile[0]
    workspace = Workspace(call.group * min(step, z.sq) * z.sk, call.q, call.accumulator_dtype)
    scores = Scores(call, slab, workspace)
    elastic = Elastic(call, slab, workspace) if call.tau is not None else None
    entmax = Entmax(call, slab) if call.entmax is not None else None
    if entmax is not None:
        entmax.skip_by_norms(scores)
    sums = torch.zeros(9, call.group, dtype=torch.float64, device=call.q.device)
    for i0 in range(0, z.sq, step):
        i1 = min(i0 + step, z.sq)
        here = Tile(i0, i1, *call.spec.key_range(i0, i1, z.sq, z.sk))
        if here.j0 >= here.j1:
            continue
        block = Block(slab, call.group, i0, i1)
        scores.start(block)
        s2 = scores.tile(here)
        # a pair bias hides too
        m = workspace.take("m", *s2.shape).copy_(s2 > -math.inf) if scores.pair_bias is not None else None
        lse2 = base2(block.rows_of(lse[..., None]))
        if entmax is None:
            p = s2.sub_(lse2).exp2_()
        else:
            entmax.start(block)
            p, _ = entmax.weights(entmax.above(s2, lse2, slice(None)), slice(None))
        if m is None:
            m = scores.mask_(workspace.take("m", *p.shape).fill_(1), here).clamp_(min=0)
        a = p
        seen = m.sum(dim=-1, keepdim=True)
        tiles = _tiles(m, here, call.group, tile)
        some, whole = tiles.any_of(), tiles.all_of(z.sk)
        if elastic is not None:
            elastic.start(block)
            a, m = elastic.weights(elastic.exact_single_(p, here), here, scores)
        if entmax is not None:
            m = (p > 0).to(p.dtype)
        n, survivors = seen, m.sum(dim=-1, keepdim=True)
        counts = (survivors, n, a.sum(dim=-1, keepdim=True), (survivors == 0) & (n > 0), n > 0)
        found = [block.sum_positions(each.double())[0] for each in counts]
        formed = some
        if entmax is not None and entmax.reach is not None:
            formed = _formed(entmax, block.rows_of(lse[..., None]), tiles, here)
        sums += torch.stack([*found[:4], _tiles(m, here, call.group, tile).any_of(), found[4], some, whole, formed])
    return sums


def _formed(entmax: Entmax, lse: Tensor, tiles: _Tiled, here: Tile) -> Tensor:
    """[r]: tiles with a visible pair whose scores norms do not keep below the thresholds."""
    assert entmax.reach is not None
    visible = tiles.cells.any(dim=4).any(dim=2)
    (_, _, rows, _, keys), found = tiles.cells.shape, torch.zeros(len(visible), dtype=torch.float64, device=lse.device)
    for a, b in visible.any(dim=0).nonzero().tolist():
        i0, j0 = here.i0 + a * rows, tiles.first_key + b * keys
        tile = Tile(i0, min(i0 + rows, here.i1), max(j0, here.j0), min(j0 + keys, here.j1))
        weighs = entmax.reach.weighs(tile, lse, entmax.gain).squeeze(-1).unflatten(1, (-1, len(visible))).any(dim=1)
        found += (weighs[0] & visible[:, a, b]).double()
    return found


@dataclass(frozen=True, slots=True)
class _Tiled:
    """Cells of some rows, which start on a tile, cut into tiles: [r, row tiles, rows, key tiles, keys]."""

    cells: Tensor
    rows: int
    first_key: int

    def any_of(self) -> Tensor:
        """[r]: tiles in which anything is."""
        return self.cells.any(dim=4).any(dim=2).sum(dim=(1, 2)).double()

    def all_of(self, sk: int) -> Tensor:
        """[r]: tiles in which everything is, of sk keys."""
        _, m, bm, n, bn = self.cells.shape
        rows = (self.rows - torch.arange(m) * bm).clamp(max=bm)
        keys = (sk - self.first_key - torch.arange(n) * bn).clamp(max=bn)
        cells = (rows[:, None] * keys).to(self.cells.device)
        return (self.cells.sum(dim=(2, 4)) == cells).sum(dim=(1, 2)).double()


def _tiles(cells: Tensor, here: Tile, group: int, tile: tuple[int, int]) -> _Tiled:
    """Cells above zero of [1, rows, keys from here.j0], by tiles of the sequence."""
    above = cells[0].unflatten(0, (-1, group)).transpose(0, 1) > 0
    rows, keys = above.shape[1:]
    before = here.j0 % tile[1]
    padded = pad(above, (before, -(keys + before) % tile[1], 0, -rows % tile[0]))
    return _Tiled(padded.unflatten(2, (-1, tile[1])).unflatten(1, (-1, tile[0])), rows, here.j0 - before)
