"""Backward of the tiled backend: per row block a pre-pass, then a sweep over its tiles with five matmuls each (eq. 33).

Row blocks are outermost, so dq of a block is finished in one [N, rows, D] accumulator; dk and dv of the whole
slab are accumulated transposed, [N, D, Sk], because `rows x keys` tiles are read fastest that way round. Every sum has a fixed
order: results repeat bitwise. Parity contract: tests/conformance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.entmax import ByAlpha, Entmax
from backlight.backends.tiled.forward import base2
from backlight.backends.tiled.pair_bias import blank_gradient
from backlight.backends.tiled.primitives import (
    Block,
    Elastic,
    Scores,
    Workspace,
    add_heads_,
    add_product_,
    columns,
    heads_of,
    keys_of,
    product,
    put_keys,
    sink_weight,
)
from backlight.call import Call
from backlight.config import Config
from backlight.spec import PER_HEAD, SEQUENCE_OF

SCORE_GRADIENTS = frozenset({"dq", "dk", "dbias", "dpair_bias", "dentmax"})


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    inputs = {f"d{name}": getattr(call, name) for name in SEQUENCE_OF}
    out = {name: torch.empty_like(x, dtype=call.output_dtype) for name, x in inputs.items() if name in needs and x is not None}
    parameters = {f"d{name}": getattr(call, name) for name in PER_HEAD}
    sums = {
        name: torch.zeros_like(x, dtype=call.accumulator_dtype)
        for name, x in parameters.items()
        if name in needs and x is not None
    }
    if call.pair_bias is not None:
        parameters["dpair_bias"] = call.pair_bias
        if "dpair_bias" in needs:
            sums["dpair_bias"] = blank_gradient(call)
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        _backward_slab(_Incoming(y, lse, u, dy, dlse), call, slab, config, workspace, out, sums)
    return out | {name: total.to(parameters[name].dtype) for name, total in sums.items()}


@dataclass(frozen=True, slots=True)
class _Incoming:
    """What the forward saved and the gradients that come in, all [B,Hq,Sq,*]."""

    y: Tensor
    lse: Tensor
    u: Tensor | None
    dy: Tensor
    dlse: Tensor | None

    def rows(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """lse and dlse of a block's rows."""
        lse = block.rows_of(self.lse[..., None])
        return lse, None if self.dlse is None else block.rows_of(self.dlse[..., None]).to(lse.dtype)


def _prepass(
    incoming: _Incoming,
    call: Call,
    block: Block,
    elastic: Elastic | None,
    out: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """(do, base-2 lse, delta) of a block's rows, [N, rows, *]: eq. 18, 20, 27, 28; adds to dgate, dtau (24) and dsink (23)."""
    dtype, slab, group = call.accumulator_dtype, block.slab, block.group
    y, do = block.rows_of(incoming.y).to(dtype), block.rows_of(incoming.dy).to(dtype)
    lse = block.rows_of(incoming.lse[..., None])
    if call.exact_delta and incoming.u is not None:
        y = y + block.rows_of(incoming.u).to(dtype)
    delta = (do * y).sum(dim=-1, keepdim=True)
    if call.gate is not None:
        weight = torch.sigmoid(block.rows_of(call.gate).to(dtype))
        if "dgate" in out:
            block.put_rows(out["dgate"], do * y * (1 - weight))
        do = do * weight
    if elastic is not None:
        assert incoming.u is not None
        mean = (do * block.rows_of(incoming.u)).sum(dim=-1, keepdim=True)
        delta -= elastic.tau * mean
        if "dtau" in sums:
            add_heads_(sums["dtau"], slab, group, block.sum_positions(mean))
    if incoming.dlse is not None:
        # a row that sees nothing has no lse to differentiate, unless a sink gives it one
        delta -= block.rows_of(incoming.dlse[..., None]).to(dtype).masked_fill(lse == -math.inf, 0)
    if "dsink" in sums:
        assert call.sink is not None
        kappa = block.repeat_positions(heads_of(call.sink, slab, group, dtype))
        add_heads_(sums["dsink"], slab, group, block.sum_positions(sink_weight(kappa, lse) * delta).neg_())
    return do, base2(lse), delta


def _prepass_entmax(
    incoming: _Incoming,
    scores: Scores,
    entmax: Entmax,
    block_tiles: list[Tile],
    out: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """`_prepass` of rows with entmax: delta by u (eq. 87), dlse over the sum of slopes; adds to dgate and dsink."""
    call, block = scores.call, scores.block
    dtype = call.accumulator_dtype
    assert incoming.u is not None
    y, do = block.rows_of(incoming.y).to(dtype), block.rows_of(incoming.dy).to(dtype)
    lse = block.rows_of(incoming.lse[..., None])
    lse2 = base2(lse)
    if call.gate is not None:
        weight = torch.sigmoid(block.rows_of(call.gate).to(dtype))
        if "dgate" in out:
            block.put_rows(out["dgate"], do * y * (1 - weight))
        do = do * weight
    delta = (do * block.rows_of(incoming.u)).sum(dim=-1, keepdim=True)
    if incoming.dlse is not None:
        dlse = block.rows_of(incoming.dlse[..., None]).to(dtype).masked_fill(lse == -math.inf, 0)
        # of a part it is -delta of the whole row
        delta -= dlse if call.part is not None else dlse / entmax.slope_sums(scores, lse, lse2, block_tiles)
    if "dsink" in sums:
        dsink = block.sum_positions(entmax.sink_weights(lse)[1] * delta).neg_()
        add_heads_(sums["dsink"], block.slab, block.group, dsink)
    return do, lse2, delta


def _backward_slab(
    incoming: _Incoming,
    call: Call,
    slab: Slab,
    config: Config,
    workspace: Workspace,
    out: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> None:
    """Eq. 33 over every tile of the slab; gradients that nobody asked for are not formed."""
    z, dtype = slab.segment, call.accumulator_dtype
    wanted = out.keys() | sums.keys()
    want_ds = not SCORE_GRADIENTS.isdisjoint(wanted)
    scores = Scores(call, slab, workspace)
    v_columns = columns(keys_of(call.v, slab).to(scores.operand))
    elastic = Elastic(call, slab, workspace) if call.tau is not None else None
    entmax = Entmax(call, slab) if call.entmax is not None else None
    if entmax is not None:
        entmax.skip_by_norms(scores)

    dk = torch.zeros_like(scores.k_columns, dtype=dtype) if "dk" in out else None
    dv = torch.zeros_like(v_columns, dtype=dtype) if "dv" in out else None
    dmirrored = torch.zeros_like(scores.bias.mirrored) if scores.bias is not None and "dbias" in sums else None
    for i0, i1 in row_blocks(z.sq, config):
        block = Block(slab, call.group, i0, i1)
        if elastic is not None:
            elastic.start(block)
        scores.start(block)
        block_tiles = scores.visited(tiles(call.spec, i0, i1, z.sq, z.sk, config))
        if entmax is not None:
            entmax.start(block)
            block_tiles = entmax.left(block_tiles, block.rows_of(incoming.lse[..., None]))
            do_exact, lse2, delta = _prepass_entmax(incoming, scores, entmax, block_tiles, out, sums)
        else:
            do_exact, lse2, delta = _prepass(incoming, call, block, elastic, out, sums)
        if not want_ds and dv is None:
            continue
        by_alpha = ByAlpha(entmax) if entmax is not None and "dentmax" in sums else None
        do = do_exact.to(scores.operand)
        dq = torch.zeros_like(scores.q, dtype=dtype)
        for tile in block_tiles:
            part, keys = block.part(tile), slice(tile.j0, tile.j1)
            if entmax is None:
                p = scores.tile(tile).sub_(lse2[:, part]).exp2_()
                a, m = p, None
            else:
                above = entmax.above(scores.tile(tile), lse2, part)
                # elsewhere the question would wait for a device
                if above.device.type == "cpu" and not bool(above.any()):
                    continue
                # ds has the slope where that of a softmax has p
                (a, p), m = entmax.weights(above, part), None
            if elastic is not None:
                a, m = elastic.weights(elastic.exact_single_(p, tile), tile, scores)
            if dv is not None:
                add_product_(dv[:, :, keys], do[:, part].mT, a.to(scores.operand))
            if not want_ds:
                continue
            dp = product(do[:, part], v_columns[:, :, keys], workspace.take("dp", *p.shape))
            if m is not None:
                dp.mul_(m)
            if by_alpha is not None:
                by_alpha.add_(above, (a, p), dp, part)
            ds = dp.sub_(delta[:, part]).mul_(p)
            if dmirrored is not None:
                assert scores.bias is not None
                scores.bias.add_diagonals_(dmirrored, ds, tile)
            if "dpair_bias" in sums:
                assert scores.pair_bias is not None
                scores.pair_bias.add_gradient_(sums["dpair_bias"], ds, tile)
            if scores.tanh is not None:
                ds.mul_(scores.tanh.square_().neg_().add_(1))
            dx = ds.to(scores.operand)
            if "dq" in out:
                add_product_(dq[:, part], dx, scores.k[:, keys])
            if dk is not None:
                add_product_(dk[:, :, keys], scores.q[:, part].mT, dx)
        if by_alpha is not None:
            eta = None if call.part is None else call.part.eta
            rows = by_alpha.rows(*incoming.rows(block)) if eta is None else by_alpha.of_part(block.rows_of(eta[..., None]))
            add_heads_(sums["dentmax"], slab, call.group, block.sum_positions(rows))
        if "dq" in out:
            block.put_rows(out["dq"], dq.mul_(call.scale))
    if dk is not None:
        put_keys(out["dk"], slab, dk.mul_(scores.dk_factor).mT)
    if dv is not None:
        put_keys(out["dv"], slab, dv.mT)
    if dmirrored is not None:
        add_heads_(sums["dbias"], slab, call.group, dmirrored.flip(-1))
