"""Backward through the tangent, in the tiled backend (eq. 56-58): double backward and forward over reverse are the same sweep.

A pre-pass over rows, then one sweep over the tiles of each row block, laid out as in `backward.py`. Both brackets of eq. 58 are
centred by row sums that are dot products of saved tensors. Parity contract: tests/derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.backward import backward
from backlight.backends.tiled.config import Slab, Tile, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.forward import base2
from backlight.backends.tiled.moving import Moving
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
from backlight.backends.tiled.tangent import Results
from backlight.call import Call
from backlight.config import Config
from backlight.spec import LEARNED, SEQUENCE_OF

# those made of the gradient at s (ds), those made of the gradient at ts (dr)
OF_SCORES = frozenset({"dq", "dk", "dbias", "dpair_bias"})
OF_TANGENTS = frozenset({"dtq", "dtk", "dtbias", "dtpair_bias"})
SCORE_GRADIENTS = OF_SCORES | OF_TANGENTS
VALUE_GRADIENTS = frozenset({"dv", "dtv"})
PAIR_GRADIENTS = frozenset({"dpair_bias", "dtpair_bias"})


@dataclass(frozen=True, slots=True)
class Cotangents:
    """Gradients of a loss at y, lse, ty and tlse; None is zero."""

    dy: Tensor | None
    dlse: Tensor | None
    dty: Tensor | None
    dtlse: Tensor | None


def second(
    call: Call, tangents: Mapping[str, Tensor], results: Results, incoming: Cotangents, needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in `needs`: dq, dk, ... by the inputs and dtq, dtk, ... by their tangents."""
    if incoming.dty is None and incoming.dtlse is None:
        return _first_order(call, tangents, results, incoming, needs)
    given = [(name, f"d{name}", getattr(call, name)) for name in LEARNED]
    given += [(name, f"dt{name}", tangents.get(name)) for name in LEARNED]
    wanted = {gradient: x for _, gradient, x in given if gradient in needs and x is not None}
    out = {gradient: torch.empty_like(x) for name, gradient, x in given if gradient in wanted and name in SEQUENCE_OF}
    sums = {
        name: blank_gradient(call) if name in PAIR_GRADIENTS else torch.zeros_like(x, dtype=call.accumulator_dtype)
        for name, x in wanted.items()
        if name not in out
    }
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        _Sweep(call, tangents, slab, config, workspace).run(results, incoming, out, sums)
    return out | {name: total.to(wanted[name].dtype) for name, total in sums.items()}


def _first_order(
    call: Call, tangents: Mapping[str, Tensor], results: Results, incoming: Cotangents, needs: frozenset[str]
) -> dict[str, Tensor]:
    """A loss that does not look at the tangent has the gradients of a backward, and none at tangents."""
    dy = torch.zeros_like(results.y) if incoming.dy is None else incoming.dy
    primal = needs.intersection(call.gradients)
    found = backward(call, results.y, results.lse, results.u, dy, incoming.dlse, primal) if primal else {}
    return found | {f"dt{name}": torch.zeros_like(x) for name, x in tangents.items() if f"dt{name}" in needs}


@dataclass(slots=True)
class _Sums:
    """What tiles add to, by the name of the gradient.

    Of rows [N, rows, D], of keys [N, D, Sk], of mirrored distance tables [N, r, n], and shaped like the pair bias.
    """

    queries: dict[str, Tensor]
    keys: dict[str, Tensor]
    tables: dict[str, Tensor]
    pairs: dict[str, Tensor]

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset((*self.queries, *self.keys, *self.tables, *self.pairs))


@dataclass(slots=True)
class _Rows:
    """Of a block's rows, [N, rows, *]: base-2 lse, mu = tlse, the gradients at o (do) and at to (dto), and both row sums."""

    lse2: Tensor
    mu: Tensor
    do: Tensor | None
    dto: Tensor | None
    eta: Tensor
    delta: Tensor


class _Sweep:
    """All tiles of a slab; gradients that nobody asked for are not formed."""

    def __init__(self, call: Call, tangents: Mapping[str, Tensor], slab: Slab, config: Config, workspace: Workspace):
        self.call, self.tangents, self.slab, self.config, self.workspace = call, tangents, slab, config, workspace
        self.scores = Scores(call, slab, workspace)
        self.moving = Moving(call, slab, self.scores, tangents)
        self.v_columns = columns(keys_of(call.v, slab).to(self.scores.operand))
        self.tv_columns = columns(keys_of(tangents["v"], slab).to(self.scores.operand)) if "v" in tangents else None
        self.elastic = Elastic(call, slab, workspace) if call.tau is not None else None
        tau = tangents.get("tau")
        self.ttau = None if tau is None else heads_of(tau, slab, call.group, call.accumulator_dtype)

    def run(self, results: Results, incoming: Cotangents, out: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
        scores, moving, elastic, call = self.scores, self.moving, self.elastic, self.call
        z, dtype, wanted = self.slab.segment, call.accumulator_dtype, out.keys() | sums.keys()
        like = {"dk": scores.k_columns, "dtk": scores.k_columns, "dv": self.v_columns, "dtv": self.v_columns}
        keys = {name: torch.zeros_like(x, dtype=dtype) for name, x in like.items() if name in out}
        tables: dict[str, Tensor] = {}
        if scores.bias is not None:
            tables = {name: torch.zeros_like(scores.bias.mirrored) for name in ("dbias", "dtbias") if name in sums}
        pairs = {name: total for name, total in sums.items() if name in PAIR_GRADIENTS}
        sweeps = not (SCORE_GRADIENTS | VALUE_GRADIENTS).isdisjoint(wanted)
        for i0, i1 in row_blocks(z.sq, self.config):
            block = Block(self.slab, call.group, i0, i1)
            if elastic is not None:
                elastic.start(block)
            rows = self._prepass(block, results, incoming, out, sums)
            if not sweeps:
                continue
            scores.start(block)
            moving.start(block)
            queries: dict[str, Tensor] = {
                name: torch.zeros_like(scores.q, dtype=dtype) for name in ("dq", "dtq") if name in out
            }
            for tile in scores.visited(tiles(call.spec, i0, i1, z.sq, z.sk, self.config)):
                self._tile(tile, rows, _Sums(queries, keys, tables, pairs))
            for name, total in queries.items():
                block.put_rows(out[name], total.mul_(call.scale))
        for name, total in keys.items():
            put_keys(out[name], self.slab, (total.mul_(scores.dk_factor) if name.endswith("k") else total).mT)
        for name, total in tables.items():
            add_heads_(sums[name], self.slab, call.group, total.flip(-1))

    def _prepass(
        self, block: Block, results: Results, incoming: Cotangents, out: dict[str, Tensor], sums: dict[str, Tensor]
    ) -> _Rows:
        """Eq. 56, 57; adds to the gradients of gate, tau and sink and of their tangents."""
        call, dtype, operand, slab, group = self.call, self.scores.dtype, self.scores.operand, self.slab, self.call.group

        def rows_of(x: Tensor | None) -> Tensor | None:
            return None if x is None else block.rows_of(x if x.dim() == 4 else x[..., None]).to(dtype)

        def dot(a: Tensor | None, b: Tensor | None) -> Tensor | float:
            return 0.0 if a is None or b is None else (a * b).sum(dim=-1, keepdim=True)

        y, ty, u, tu = map(rows_of, (results.y, results.ty, results.u, results.tu))
        lse, mu = rows_of(results.lse), rows_of(results.tlse)
        dy, dty, dlse, dtlse = map(rows_of, (incoming.dy, incoming.dty, incoming.dlse, incoming.dtlse))
        assert y is not None
        assert lse is not None
        assert mu is not None
        zero = torch.zeros_like(lse)
        # a row that sees nothing has no lse to differentiate, unless a sink gives it one
        empty = lse == -math.inf
        eta = zero + dot(dty, y)
        delta = zero + dot(dy, y) + dot(dty, ty)
        if dtlse is not None:
            eta -= dtlse.masked_fill(empty, 0)
        if dlse is not None:
            delta -= dlse.masked_fill(empty, 0)
        do, dto = self._gated(block, y, ty, dy, dty, out)
        if self.elastic is not None:
            u_dto, moved = dot(dto, u), dot(do, u) + dot(dto, tu)
            eta -= self.elastic.tau * u_dto
            delta -= self.elastic.tau * moved
            if self.ttau is not None:
                delta -= block.repeat_positions(self.ttau) * u_dto
            for name, total in (("dtau", moved), ("dttau", u_dto)):
                if name in sums:
                    add_heads_(sums[name], slab, group, block.sum_positions(zero + total))
        if call.sink is not None and not {"dsink", "dtsink"}.isdisjoint(sums):
            weight = sink_weight(block.repeat_positions(heads_of(call.sink, slab, group, dtype)), lse)
            tsink = self.tangents.get("sink")
            moved = -mu if tsink is None else block.repeat_positions(heads_of(tsink, slab, group, dtype)) - mu
            for name, total in (("dsink", delta + eta * moved), ("dtsink", eta)):
                if name in sums:
                    add_heads_(sums[name], slab, group, block.sum_positions(weight * total).neg_())
        do, dto = (None if x is None else x.to(operand) for x in (do, dto))
        return _Rows(base2(lse), mu, do, dto, eta, delta)

    def _gated(
        self, block: Block, y: Tensor, ty: Tensor | None, dy: Tensor | None, dty: Tensor | None, out: dict[str, Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """(do, dto) of eq. 56; stores the gradients of the gate and of its tangent."""
        gate, tgate = self.call.gate, self.tangents.get("gate")
        if gate is None:
            return dy, dty
        weight = torch.sigmoid(block.rows_of(gate).to(y.dtype))
        moved = None if tgate is None else block.rows_of(tgate).to(y.dtype)
        do = None if dy is None else dy * weight
        if dty is not None and moved is not None:
            part = dty * moved * weight * (1 - weight)
            do = part if do is None else do + part
        if "dgate" in out:
            total = torch.zeros_like(y) if dy is None else dy * y
            if dty is not None:
                assert ty is not None
                total = total + dty * (ty if moved is None else ty - weight * y * moved)
            block.put_rows(out["dgate"], total * (1 - weight))
        if "dtgate" in out:
            block.put_rows(out["dtgate"], torch.zeros_like(y) if dty is None else dty * y * (1 - weight))
        return do, None if dty is None else dty * weight

    def _tile(self, tile: Tile, rows: _Rows, sums: _Sums) -> None:
        """Eq. 58 of one tile."""
        scores, operand = self.scores, self.scores.operand
        queries, keys, wanted = sums.queries, sums.keys, sums.wanted
        part, here = scores.block.part(tile), slice(tile.j0, tile.j1)
        do, dto = (None if x is None else x[:, part] for x in (rows.do, rows.dto))
        p = scores.tile(tile).sub_(rows.lse2[:, part]).exp2_()
        ts = self.moving.tile(tile, tuple(p.shape))
        a, m = p, None
        if self.elastic is not None:
            a, m = self.elastic.weights(self.elastic.exact_single_(p, tile), tile, scores)
        # what is left of ts is its distance from the row's mean
        centred = torch.zeros_like(p) if ts is None else ts
        centred = centred.sub_(rows.mu[:, part])
        self._values(keys, here, p, a, m, centred, do, dto, part)
        if SCORE_GRADIENTS.isdisjoint(wanted):
            return
        dr = self._bracket("dr", dto, self.v_columns[:, :, here], None, None, p, m, rows.eta[:, part])
        self._terms("dt", dr, tile, sums)
        both = not OF_SCORES.isdisjoint(wanted)
        ds = dr
        if both:
            tv = None if self.tv_columns is None else self.tv_columns[:, :, here]
            ds = self._bracket("ds", do, self.v_columns[:, :, here], dto, tv, p, m, rows.delta[:, part])
            ds.addcmul_(centred, dr)
            self._terms("d", ds, tile, sums)
        slope = self.moving.slope
        if slope is not None:
            dr.mul_(slope)
            if both:
                ds.mul_(slope)
                if self.moving.tx is not None:
                    assert scores.tanh is not None
                    assert scores.spec.softcap is not None
                    ds.addcmul_(scores.tanh.mul_(self.moving.tx), dr, value=-2 / scores.spec.softcap)
        dtx, dx = dr.to(operand), ds.to(operand)
        moving, q = self.moving, scores.q[:, part]
        if "dq" in queries:
            add_product_(queries["dq"][:, part], dx, scores.k[:, here])
            if moving.tk is not None:
                add_product_(queries["dq"][:, part], dtx, moving.tk[:, here])
        if "dtq" in queries:
            add_product_(queries["dtq"][:, part], dtx, scores.k[:, here])
        if "dk" in keys:
            add_product_(keys["dk"][:, :, here], q.mT, dx)
            if moving.tq is not None:
                add_product_(keys["dk"][:, :, here], moving.tq[:, part].mT, dtx)
        if "dtk" in keys:
            add_product_(keys["dtk"][:, :, here], q.mT, dtx)

    def _values(
        self,
        keys: dict[str, Tensor],
        here: slice,
        p: Tensor,
        a: Tensor,
        m: Tensor | None,
        centred: Tensor,
        do: Tensor | None,
        dto: Tensor | None,
        part: slice,
    ) -> None:
        """dv += a^T do + ta^T dto and dtv += a^T dto, with ta of eq. 50."""
        operand = self.scores.operand
        if VALUE_GRADIENTS.isdisjoint(keys):
            return
        a = a.to(operand)
        if "dv" in keys and do is not None:
            add_product_(keys["dv"][:, :, here], do.mT, a)
        if dto is None:
            return
        if "dtv" in keys:
            add_product_(keys["dtv"][:, :, here], dto.mT, a)
        if "dv" in keys:
            ta = torch.mul(p, centred, out=self.workspace.take("ta", *p.shape))
            if m is not None:
                assert self.elastic is not None
                if self.ttau is not None:
                    moved = self.scores.block.repeat_positions(self.ttau) / self.elastic.n
                    ta.add_(moved[:, part])
                ta.mul_(m)
            add_product_(keys["dv"][:, :, here], dto.mT, ta.to(operand))

    def _bracket(
        self,
        name: str,
        left: Tensor | None,
        right: Tensor,
        more_left: Tensor | None,
        more_right: Tensor | None,
        p: Tensor,
        m: Tensor | None,
        mean: Tensor,
    ) -> Tensor:
        """p * (m * (left right + more_left more_right) - mean)."""
        out = self.workspace.take(name, *p.shape)
        if left is None:
            out.zero_()
        else:
            product(left, right, out)
        if more_left is not None and more_right is not None:
            add_product_(out, more_left, more_right)
        if m is not None:
            out.mul_(m)
        return out.sub_(mean).mul_(p)

    def _terms(self, prefix: str, values: Tensor, tile: Tile, sums: _Sums) -> None:
        """Gradients at scores, or at their tangents, are those of what is added to them (eq. 22, 68)."""
        if (table := sums.tables.get(f"{prefix}bias")) is not None:
            assert self.scores.bias is not None
            self.scores.bias.add_diagonals_(table, values, tile)
        if (pairs := sums.pairs.get(f"{prefix}pair_bias")) is not None:
            assert self.scores.pair_bias is not None
            self.scores.pair_bias.add_gradient_(pairs, values, tile)
