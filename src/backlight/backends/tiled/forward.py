"""Forward of the tiled backend: one sweep over the keys (eq. 31), two for the elastic softmax (eq. 32), a few for entmax.

Per slab and row block: the running maximum `m` and sum `l` in base 2 and an fp32 accumulator, [N, rows, *]. Nothing larger than
a score tile is ever allocated. Parity contract: tests/conformance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.entmax import Entmax
from backlight.backends.tiled.primitives import Block, Elastic, Scores, Workspace, add_product_, heads_of, keys_of
from backlight.call import Call
from backlight.config import Config
from backlight.spec import LN2, LOG2E


@dataclass(frozen=True)
class Results:
    """y, lse, and what else is wanted: u, the low half of y (eq. 103), the largest logits of rows (eq. 72)."""

    y: Tensor
    lse: Tensor
    u: Tensor | None
    low: Tensor | None
    peaks: Tensor | None


def forward(call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    dv = call.v.shape[-1]
    y = torch.empty_like(call.q, dtype=call.output_dtype)
    if dv != call.q.shape[-1]:
        y = y.new_empty(*call.q.shape[:3], dv)
    lse = call.q.new_empty(call.q.shape[:3], dtype=call.accumulator_dtype)
    kept = torch.empty_like(y) if save_u and call.keeps else None
    u, low = (kept, None) if call.spec.keeps_u else (None, kept)
    out = Results(y, lse, u, low, torch.empty_like(lse).fill_(-math.inf) if call.max_logit else None)
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        _forward_slab(call, slab, config, workspace, out)
    return y, lse, kept, out.peaks


def _forward_slab(call: Call, slab: Slab, config: Config, workspace: Workspace, out: Results) -> None:
    z = slab.segment
    scores = Scores(call, slab, workspace)
    v = keys_of(call.v, slab).to(scores.operand)
    known_lse = None if call.part is None else call.part.lse
    elastic = Elastic(call, slab, workspace) if call.tau is not None else None
    entmax = Entmax(call, slab) if call.entmax is not None else None
    if entmax is not None:
        entmax.skip_by_norms(scores)
    sink = None if call.sink is None else heads_of(call.sink, slab, call.group, call.accumulator_dtype)
    for i0, i1 in row_blocks(z.sq, config):
        block = Block(slab, call.group, i0, i1)
        block_tiles = scores.visited(tiles(call.spec, i0, i1, z.sq, z.sk, config))
        scores.start(block)
        if entmax is not None:
            entmax.start(block)
            if known_lse is None:
                block_lse, o, block_u = entmax.forward(scores, v, block_tiles)
            else:
                block_lse = block.rows_of(known_lse[..., None])
                o, block_u = entmax.summands(scores, v, base2(block_lse), block_tiles)
            if out.u is not None:
                block.put_rows(out.u, block_u)
        elif known_lse is None:
            block_lse, o, peaks = softmax_sweep(scores, v, sink, block_tiles, with_output=elastic is None)
            if out.peaks is not None:
                block.put_rows(out.peaks[..., None], peaks)
        else:
            block_lse = block.rows_of(known_lse[..., None])
        if elastic is not None:
            elastic.start(block)
            o, block_u = _elastic_sweep(scores, v, elastic, block_lse, block_tiles, with_u=out.u is not None)
            if out.u is not None:
                block.put_rows(out.u, block_u)
        if call.gate is not None:
            o.mul_(torch.sigmoid(block.rows_of(call.gate).to(o.dtype)))
        block.put_rows(out.y, o)
        if out.low is not None:
            block.put_rows(out.low, o - o.to(out.y.dtype))
        block.put_rows(out.lse[..., None], block_lse)


def entmax_sums(call: Call) -> Tensor:
    """[4,B,Hq,Sq]: F, W, W2 and the sum of p ln p of a part's rows at its lse."""
    assert call.part is not None
    assert call.part.lse is not None
    sums = call.q.new_zeros(4, *call.q.shape[:3], dtype=call.accumulator_dtype)
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        z, scores, entmax = slab.segment, Scores(call, slab, workspace), Entmax(call, slab)
        for i0, i1 in row_blocks(z.sq, config):
            block = Block(slab, call.group, i0, i1)
            block_tiles = scores.visited(tiles(call.spec, i0, i1, z.sq, z.sk, config))
            scores.start(block)
            entmax.start(block)
            lse2 = base2(block.rows_of(call.part.lse[..., None]))
            for total, found in zip(sums, entmax.row_sums(scores, lse2, block_tiles), strict=True):
                block.put_rows(total[..., None], found)
    return sums


def start(scores: Scores, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """The maximum and the sum of a block's rows before the first key, [N, rows, 1]."""
    if sink is None:
        maximum = scores.q.new_full((*scores.q.shape[:2], 1), -math.inf, dtype=scores.dtype)
        return maximum, torch.zeros_like(maximum)
    # kept finite, for what is subtracted from it; below it every other weight is 0
    maximum = scores.block.repeat_positions(sink * LOG2E).clamp_(max=torch.finfo(scores.dtype).max)
    return maximum, torch.ones_like(maximum)


def finish(scores: Scores, sink: Tensor | None, maximum: Tensor, total: Tensor) -> Tensor:
    """lse of a block's rows after the last key."""
    lse = (maximum + torch.log2(total)) * LN2
    if sink is not None:
        lse.masked_fill_(scores.block.repeat_positions(sink) == math.inf, math.inf)
    return lse


def softmax_sweep(
    scores: Scores, v: Tensor, sink: Tensor | None, block_tiles: list[Tile], with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. 31: (lse [N, rows, 1], o [N, rows, Dv], largest logits [N, rows, 1] where they are wanted) of the started block.

    o has no columns when only lse is wanted.
    """
    m, l = start(scores, sink)  # noqa: E741 - the letter of eq. 31
    peaks = torch.full_like(m, -math.inf)
    acc = v.new_zeros(*scores.q.shape[:2], v.shape[-1] if with_output else 0, dtype=scores.dtype)
    for tile in block_tiles:
        part = scores.block.part(tile)
        s2 = scores.tile(tile)
        m_old, l_part, acc_part = m[:, part], l[:, part], acc[:, part]
        largest = s2.amax(dim=-1, keepdim=True)
        if scores.call.max_logit:
            peaks[:, part] = torch.maximum(peaks[:, part], scores.largest_logits(s2, largest))
        m_new = torch.maximum(m_old, largest)
        m_safe = m_new.masked_fill(m_new == -math.inf, 0)
        rescale = torch.exp2(m_old - m_safe)
        p = s2.sub_(m_safe).exp2_()
        l_part.mul_(rescale).add_(p.sum(dim=-1, keepdim=True))
        if with_output:
            acc_part.mul_(rescale)
            add_product_(acc_part, p.to(v.dtype), v[:, tile.j0 : tile.j1])
        m_old.copy_(m_new)
    return finish(scores, sink, m, l), acc.div_(l.masked_fill(l == 0, 1)), peaks


def _elastic_sweep(
    scores: Scores, v: Tensor, elastic: Elastic, lse: Tensor, block_tiles: list[Tile], with_u: bool
) -> tuple[Tensor, Tensor]:
    """Second sweep of eq. 32: (o, u) of the started block from its final lse."""
    o = v.new_zeros(*scores.q.shape[:2], v.shape[-1], dtype=scores.dtype)
    u = torch.zeros_like(o)
    lse2 = base2(lse)
    for tile in block_tiles:
        part, keys = scores.block.part(tile), v[:, tile.j0 : tile.j1]
        p = elastic.exact_single_(scores.tile(tile).sub_(lse2[:, part]).exp2_(), tile)
        a, m = elastic.weights(p, tile, scores)
        add_product_(o[:, part], a.to(v.dtype), keys)
        if with_u:
            add_product_(u[:, part], m.to(v.dtype), keys)
    return o, u.div_(elastic.n)


def base2(lse: Tensor) -> Tensor:
    """lse in base 2, 0 for rows that see nothing: their logits are all -inf and must stay so."""
    return (lse * LOG2E).masked_fill(lse == -math.inf, 0)
