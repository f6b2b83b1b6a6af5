"""Backward of the tiled backend: a pre-pass over rows, then one sweep over tiles with five matmuls each (eq. 33).

Row blocks are outermost, so dq of a block is finished in one [N, rows, D] accumulator; dk and dv of the whole
slab are accumulated transposed, [N, D, Sk], because `rows x keys` tiles are read fastest that way round. Every sum has a fixed
order: results repeat bitwise. Parity contract: tests/conformance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.forward import base2
from backlight.backends.tiled.primitives import (
    Elastic,
    Scores,
    Workspace,
    add_heads_,
    add_product_,
    heads_of,
    keys_of,
    operand_dtype,
    product,
    put_keys,
    put_rows,
    rows_of,
)
from backlight.call import Call
from backlight.config import Config

SCORE_GRADIENTS = frozenset({"dq", "dk", "dbias"})


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    inputs = {"dq": call.q, "dk": call.k, "dv": call.v, "dgate": call.gate}
    out = {name: torch.empty_like(x) for name, x in inputs.items() if name in needs and x is not None}
    parameters = {"dbias": call.bias, "dsink": call.sink, "dtau": call.tau}
    sums = {
        name: torch.zeros_like(x, dtype=call.accumulator_dtype)
        for name, x in parameters.items()
        if name in needs and x is not None
    }
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        rows = _prepass(call, slab, y, lse, u, dy, dlse, out, sums)
        if needs & (SCORE_GRADIENTS | {"dv"}):
            _sweep(call, slab, config, workspace, rows, out, sums)
    return out | {name: total.to(parameters[name].dtype) for name, total in sums.items()}  # type: ignore[union-attr]


class _Rows:
    """Per-row data of a slab that the sweep reads: do [N, rows, Dv], base-2 lse and delta [N, rows, 1]."""

    __slots__ = ("delta", "do", "lse2")

    def __init__(self, do: Tensor, lse2: Tensor, delta: Tensor):
        self.do, self.lse2, self.delta = do, lse2, delta


def _prepass(
    call: Call,
    slab: Slab,
    y: Tensor,
    lse: Tensor,
    u: Tensor | None,
    dy: Tensor,
    dlse: Tensor | None,
    out: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> _Rows:
    """do and dgate (eq. 18), delta (eq. 27, 28) less dlse (eq. 20), dtau (eq. 24), dsink (eq. 23)."""
    group, dtype, z = call.group, call.accumulator_dtype, slab.segment
    y_rows = rows_of(y, slab, group).to(dtype)
    do = rows_of(dy, slab, group).to(dtype)
    lse_rows = rows_of(lse[..., None], slab, group)
    delta = (do * y_rows).sum(dim=-1, keepdim=True)
    if call.gate is not None:
        weight = torch.sigmoid(rows_of(call.gate, slab, group).to(dtype))
        if "dgate" in out:
            put_rows(out["dgate"], slab, group, 0, z.sq, do * y_rows * (1 - weight))
        do = do * weight
    if call.tau is not None:
        assert u is not None
        n = call.spec.visible_counts(z.sq, z.sk, do.device).clamp(min=1).repeat_interleave(group)[None, :, None]
        mean = (do * rows_of(u, slab, group)).sum(dim=-1, keepdim=True) / n
        delta -= heads_of(call.tau, slab, group, dtype).repeat(1, z.sq)[..., None] * mean
        if "dtau" in sums:
            add_heads_(sums["dtau"], slab, group, _sum_positions(mean, group))
    if dlse is not None:
        # rows that see nothing have no lse to differentiate, unless a sink gives them one
        seen = lse_rows > -torch.inf
        delta -= rows_of(dlse[..., None], slab, group).to(dtype).masked_fill(~seen, 0)
    if "dsink" in sums:
        assert call.sink is not None
        kappa = heads_of(call.sink, slab, group, dtype).repeat(1, z.sq)[..., None]
        add_heads_(sums["dsink"], slab, group, _sum_positions(torch.exp(kappa - lse_rows) * delta, group).neg_())
    return _Rows(do.to(operand_dtype(call)), base2(lse_rows), delta)


def _sum_positions(rows: Tensor, group: int) -> Tensor:
    """[N, Sq * r, 1] -> [N, r]."""
    return rows.squeeze(-1).unflatten(1, (-1, group)).sum(dim=1)


def _sweep(
    call: Call,
    slab: Slab,
    config: Config,
    workspace: Workspace,
    rows: _Rows,
    out: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> None:
    """Eq. 33 over every tile of the slab."""
    spec, z, group, dtype = call.spec, slab.segment, call.group, call.accumulator_dtype
    operand = operand_dtype(call)
    scores = Scores(call, slab, workspace)
    v = keys_of(call.v, slab).to(operand)
    elastic = Elastic(call, slab, workspace) if call.tau is not None else None
    want_ds = not SCORE_GRADIENTS.isdisjoint(out.keys() | sums.keys())

    def accumulator(name: str, like: Tensor) -> Tensor | None:
        return like.new_zeros(like.shape[0], like.shape[2], z.sk, dtype=dtype) if name in out else None

    dk, dv = accumulator("dk", scores.k), accumulator("dv", v)
    dmirrored = torch.zeros_like(scores.bias.mirrored) if scores.bias is not None and "dbias" in sums else None
    for i0, i1 in row_blocks(z.sq, config):
        dq = scores.q.new_zeros(scores.q.shape[0], (i1 - i0) * group, scores.q.shape[-1], dtype=dtype)
        for tile in tiles(spec, i0, i1, z.sq, z.sk, config):
            part, keys = scores.rows(tile), slice(tile.j0, tile.j1)
            do, delta = rows.do[:, part], rows.delta[:, part]
            p = scores.tile(tile).sub_(rows.lse2[:, part]).exp2_()
            a, m = p, None
            if elastic is not None:
                a, m = elastic.weights(elastic.exact_single_(p, tile), tile, scores)
            if dv is not None:
                add_product_(dv[:, :, keys], do.mT, a.to(operand))
            if not want_ds:
                continue
            dp = product(do, v[:, keys].mT, workspace.take("dp", *p.shape))
            if m is not None:
                dp.mul_(m)
            ds = dp.sub_(delta).mul_(p)
            if dmirrored is not None:
                assert scores.bias is not None
                scores.bias.add_diagonals_(dmirrored, ds, tile)
            if scores.tanh is not None:
                ds.mul_(scores.tanh.square_().neg_().add_(1))
            dx = ds.to(operand)
            if "dq" in out:
                add_product_(dq[:, (tile.i0 - i0) * group : (tile.i1 - i0) * group], dx, scores.k[:, keys])
            if dk is not None:
                add_product_(dk[:, :, keys], scores.q[:, part].mT, dx)
        if "dq" in out:
            put_rows(out["dq"], slab, group, i0, i1, dq.mul_(call.scale))
    if dk is not None:
        # scores.q carries the factor of the logits; dk wants scale * q (eq. 26)
        put_keys(out["dk"], slab, dk.mul_(call.scale / scores.q_factor).mT)
    if dv is not None:
        put_keys(out["dv"], slab, dv.mT)
    if dmirrored is not None:
        add_heads_(sums["dbias"], slab, group, dmirrored.flip(-1))
