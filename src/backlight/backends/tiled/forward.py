"""Forward of the tiled backend: one sweep over the keys (eq. 31), two for the elastic softmax (eq. 32).

Per slab and row block: the running maximum `m` and sum `l` in base 2 and an fp32 accumulator, [N, rows, *]. Nothing larger than
a score tile is ever allocated. Parity contract: tests/conformance.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.primitives import (
    Elastic,
    Scores,
    Workspace,
    add_product_,
    heads_of,
    keys_of,
    operand_dtype,
    put_rows,
    rows_of,
)
from backlight.call import Call
from backlight.config import Config
from backlight.spec import LN2, LOG2E


def forward(call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    dv = call.v.shape[-1]
    y = torch.empty_like(call.q) if dv == call.q.shape[-1] else call.q.new_empty(*call.q.shape[:3], dv)
    lse = call.q.new_empty(call.q.shape[:3], dtype=call.accumulator_dtype)
    u = torch.empty_like(y) if save_u and call.tau is not None else None
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        _forward_slab(call, slab, config, workspace, y, lse, u)
    return y, lse, u


def _forward_slab(
    call: Call, slab: Slab, config: Config, workspace: Workspace, y: Tensor, lse: Tensor, u: Tensor | None
) -> None:
    spec, z, group = call.spec, slab.segment, call.group
    scores = Scores(call, slab, workspace)
    v = keys_of(call.v, slab).to(operand_dtype(call))
    elastic = Elastic(call, slab, workspace) if call.tau is not None else None
    sink = None if call.sink is None else heads_of(call.sink, slab, group, call.accumulator_dtype)
    gate = None if call.gate is None else rows_of(call.gate, slab, group)
    for i0, i1 in row_blocks(z.sq, config):
        block_tiles = tiles(spec, i0, i1, z.sq, z.sk, config)
        block_lse, o = _softmax_sweep(scores, v, sink, block_tiles, i0, i1, with_output=elastic is None)
        if elastic is not None:
            o, block_u = _elastic_sweep(scores, v, elastic, block_lse, block_tiles, i0, i1, with_u=u is not None)
            if u is not None:
                put_rows(u, slab, group, i0, i1, block_u)
        if gate is not None:
            o.mul_(torch.sigmoid(gate[:, i0 * group : i1 * group].to(o.dtype)))
        put_rows(y, slab, group, i0, i1, o)
        put_rows(lse[..., None], slab, group, i0, i1, block_lse)


def _softmax_sweep(
    scores: Scores, v: Tensor, sink: Tensor | None, block_tiles: list[Tile], i0: int, i1: int, with_output: bool
) -> tuple[Tensor, Tensor]:
    """Eq. 31: (lse [N, rows, 1], o [N, rows, Dv]) of positions [i0, i1); o stays 0 when only lse is wanted."""
    n, rows = v.shape[0], (i1 - i0) * scores.group
    if sink is None:
        m = v.new_full((n, rows, 1), -math.inf, dtype=scores.dtype)
        l = torch.zeros_like(m)  # noqa: E741 - the letter of eq. 31
    else:
        m = (sink * LOG2E).repeat(1, i1 - i0)[..., None]
        l = torch.ones_like(m)  # noqa: E741
    acc = v.new_zeros(n, rows, v.shape[-1] if with_output else 0, dtype=scores.dtype)
    for tile in block_tiles:
        part = slice((tile.i0 - i0) * scores.group, (tile.i1 - i0) * scores.group)
        s2 = scores.tile(tile)
        m_old, l_tile = m[:, part], l[:, part]
        m_new = torch.maximum(m_old, s2.amax(dim=-1, keepdim=True))
        m_safe = m_new.masked_fill(m_new == -math.inf, 0)
        rescale = torch.exp2(m_old - m_safe)
        p = s2.sub_(m_safe).exp2_()
        l_tile.mul_(rescale).add_(p.sum(dim=-1, keepdim=True))
        if with_output:
            acc_tile = acc[:, part]
            acc_tile.mul_(rescale)
            add_product_(acc_tile, p.to(v.dtype), v[:, tile.j0 : tile.j1])
        m[:, part] = m_new
    lse = (m + torch.log2(l)) * LN2
    return lse, acc.div_(l.masked_fill(l == 0, 1))


def _elastic_sweep(
    scores: Scores,
    v: Tensor,
    elastic: Elastic,
    lse: Tensor,
    block_tiles: list[Tile],
    i0: int,
    i1: int,
    with_u: bool,
) -> tuple[Tensor, Tensor]:
    """Second sweep of eq. 32: (o, u) of positions [i0, i1) from their final lse."""
    n, rows = v.shape[0], (i1 - i0) * scores.group
    o = v.new_zeros(n, rows, v.shape[-1], dtype=scores.dtype)
    u = torch.zeros_like(o) if with_u else o.new_empty(0)
    lse2 = base2(lse)
    for tile in block_tiles:
        part = slice((tile.i0 - i0) * scores.group, (tile.i1 - i0) * scores.group)
        p = elastic.exact_single_(scores.tile(tile).sub_(lse2[:, part]).exp2_(), tile)
        a, m = elastic.weights(p, tile, scores)
        keys = v[:, tile.j0 : tile.j1]
        add_product_(o[:, part], a.to(v.dtype), keys)
        if with_u:
            add_product_(u[:, part], m.to(v.dtype), keys)
    return o, u


def base2(lse: Tensor) -> Tensor:
    """lse in base 2, 0 for rows that see nothing: their logits are all -inf and must stay so."""
    return (lse * LOG2E).masked_fill(lse == -math.inf, 0)
