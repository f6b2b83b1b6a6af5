"""Backward through the tangent, in the tiled backend (eq. 56-58): double backward and forward over reverse are the same sweep.

A pre-pass over rows, then one sweep over the tiles of each row block, laid out as in `backward.py`. Both brackets of eq. 58 are
centred by row sums that are dot products of saved tensors; with entmax some of them are summed over the tiles before (eq. 112).
Parity contract: tests/derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.backward import backward
from backlight.backends.tiled.config import Slab, Tile, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.entmax_moving import MovingEntmax
from backlight.backends.tiled.entmax_second import AlphaTwice, Means, Values, at_sink, means
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
OF_SCORES = frozenset({"dq", "dk", "dbias", "dpair_bias", "dentmax"})
OF_TANGENTS = frozenset({"dtq", "dtk", "dtbias", "dtpair_bias", "dtentmax"})
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

    Of rows [N, rows, D], of keys [N, D, Sk], of mirrored distance tables [N, r, n], and shaped like the pair bias; of gradients
    by alpha, which have sums of their own, the names.
    """

    queries: dict[str, Tensor]
    keys: dict[str, Tensor]
    tables: dict[str, Tensor]
    pairs: dict[str, Tensor]

    alphas: frozenset[str]

    @property
    def wanted(self) -> frozenset[str]:
        return frozenset((*self.queries, *self.keys, *self.tables, *self.pairs)) | self.alphas


@dataclass(slots=True)
class _Rows:
    """Of a block's rows, [N, rows, *]: lse, mu = tlse, the gradients at o (do) and at to (dto), and both row sums."""

    lse: Tensor
    mu: Tensor
    do: Tensor | None
    dto: Tensor | None
    eta: Tensor
    delta: Tensor


@dataclass(slots=True)
class _Tile:
    """Of a tile: what multiplies v, what the brackets have before them (with entmax slopes), survivors; how far ts, or r of
    eq. 108, is from the row's mean, and what of it stands before dr in ds. u: of eq. 80, with entmax."""

    tile: Tile
    a: Tensor
    p: Tensor
    m: Tensor | None
    centred: Tensor
    bend: Tensor
    u: Tensor | None = None


class _Sweep:
    """All tiles of a slab; gradients that nobody asked for are not formed."""

    def __init__(self, call: Call, tangents: Mapping[str, Tensor], slab: Slab, config: Config, workspace: Workspace):
        self.call, self.tangents, self.slab, self.config, self.workspace = call, tangents, slab, config, workspace
        self.scores = Scores(call, slab, workspace)
        self.moving = Moving(call, slab, self.scores, tangents)
        self.v_columns = columns(keys_of(call.v, slab).to(self.scores.operand))
        self.tv_columns = columns(keys_of(tangents["v"], slab).to(self.scores.operand)) if "v" in tangents else None
        self.elastic = Elastic(call, slab, workspace) if call.tau is not None else None
        self.entmax = MovingEntmax(call, slab, self.scores, self.moving, tangents) if call.entmax is not None else None
        self.alphas: AlphaTwice | None = None
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
        alphas = frozenset({"dentmax", "dtentmax"} & sums.keys())
        sweeps = not (SCORE_GRADIENTS | VALUE_GRADIENTS).isdisjoint(wanted)
        for i0, i1 in row_blocks(z.sq, self.config):
            block = Block(self.slab, call.group, i0, i1)
            block_tiles = scores.visited(tiles(call.spec, i0, i1, z.sq, z.sk, self.config))
            scores.start(block)
            moving.start(block)
            if elastic is not None:
                elastic.start(block)
            if self.entmax is not None:
                self.entmax.start(block)
            rows = self._prepass(block, block_tiles, results, incoming, out, sums)
            if not sweeps:
                continue
            queries: dict[str, Tensor] = {
                name: torch.zeros_like(scores.q, dtype=dtype) for name in ("dq", "dtq") if name in out
            }
            if self.entmax is None:
                tiles_of = self._softmax(rows, block_tiles)
            else:
                tiles_of = self._sparse(self.entmax, rows, block_tiles)
            for found in tiles_of:
                self._tile(found, rows, _Sums(queries, keys, tables, pairs, alphas))
            if self.alphas is not None:
                by_name = {"dentmax": self.alphas.by_alpha, "dtentmax": self.alphas.by_tangent}
                for name in alphas:
                    add_heads_(sums[name], self.slab, call.group, block.sum_positions(by_name[name]))
            for name, total in queries.items():
                block.put_rows(out[name], total.mul_(call.scale))
        for name, total in keys.items():
            put_keys(out[name], self.slab, (total.mul_(scores.dk_factor) if name.endswith("k") else total).mT)
        for name, total in tables.items():
            add_heads_(sums[name], self.slab, call.group, total.flip(-1))

    def _prepass(
        self,
        block: Block,
        block_tiles: list[Tile],
        results: Results,
        incoming: Cotangents,
        out: dict[str, Tensor],
        sums: dict[str, Tensor],
    ) -> _Rows:
        """Eq. 56, 57, with entmax 112; adds to the gradients of gate, tau and sink and of their tangents."""
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
        dlse, dtlse = (zero if x is None else x.masked_fill(empty, 0) for x in (dlse, dtlse))
        do, dto = self._gated(block, y, ty, dy, dty, out)
        if self.entmax is not None:
            known = Means(zero + dot(dto, u), zero + dot(do, u))
            do, dto = (None if x is None else x.to(operand) for x in (do, dto))
            rows = _Rows(lse, mu, do, dto, known.eta, known.delta)
            return self._sparse_rows(self.entmax, rows, block_tiles, (dlse, dtlse), sums, out.keys() | sums.keys())
        eta = dot(dty, y) - dtlse
        delta = dot(dy, y) + dot(dty, ty) - dlse
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
        return _Rows(lse, mu, do, dto, eta, delta)

    def _sparse_rows(
        self,
        entmax: MovingEntmax,
        rows: _Rows,
        block_tiles: list[Tile],
        at_lse: tuple[Tensor, Tensor],
        sums: dict[str, Tensor],
        wanted: Set[str],
    ) -> _Rows:
        """Eq. 112 and the sink's part; starts the sums of alpha's gradients."""
        if bool(at_lse[1].any()) or not {*OF_SCORES, "dsink"}.isdisjoint(wanted):
            values = Values(self.v_columns, self.tv_columns, rows.dto)
            visits, known = entmax.visits(rows.lse, block_tiles), Means(rows.eta, rows.delta)
            found = means(entmax, visits, rows.lse, rows.mu, values, known, at_lse, self.workspace)
            rows.eta, rows.delta = found.eta, found.delta
        self.alphas = None if {"dentmax", "dtentmax"}.isdisjoint(sums) else AlphaTwice(entmax)
        sink = entmax.sink(rows.lse)
        if sink is not None:
            ds, dr = at_sink(entmax, sink, rows.mu, Means(rows.eta, rows.delta))
            for name, total in (("dsink", ds), ("dtsink", dr)):
                if name in sums:
                    add_heads_(sums[name], self.slab, self.call.group, self.scores.block.sum_positions(total))
            if self.alphas is not None:
                self.alphas.add_(sink.u, sink.r - rows.mu, slice(None), ds, dr)
        return rows

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

    def _softmax(self, rows: _Rows, block_tiles: list[Tile]) -> Iterator[_Tile]:
        """The weights of each tile and how they move."""
        scores, elastic, lse2 = self.scores, self.elastic, base2(rows.lse)
        for tile in block_tiles:
            part = scores.block.part(tile)
            p = scores.tile(tile).sub_(lse2[:, part]).exp2_()
            ts = self.moving.tile(tile, tuple(p.shape))
            a, m = p, None
            if elastic is not None:
                a, m = elastic.weights(elastic.exact_single_(p, tile), tile, scores)
            # what is left of ts is its distance from the row's mean
            centred = (torch.zeros_like(p) if ts is None else ts).sub_(rows.mu[:, part])
            yield _Tile(tile, a, p, m, centred, centred)

    def _sparse(self, entmax: MovingEntmax, rows: _Rows, block_tiles: list[Tile]) -> Iterator[_Tile]:
        """The same with entmax, of tiles in which something weighs."""
        for each in entmax.visits(rows.lse, block_tiles):
            centred = (torch.zeros_like(each.u) if each.r is None else each.r).sub_(rows.mu[:, each.part])
            yield _Tile(each.tile, each.p, each.w, None, centred, entmax.bend(each.u, centred, each.part), each.u)

    def _tile(self, found: _Tile, rows: _Rows, sums: _Sums) -> None:
        """Eq. 58, with entmax 111, of one tile."""
        scores, operand, tile = self.scores, self.scores.operand, found.tile
        queries, keys, wanted, p, m = sums.queries, sums.keys, sums.wanted, found.p, found.m
        part, here = scores.block.part(tile), slice(tile.j0, tile.j1)
        do, dto = (None if x is None else x[:, part] for x in (rows.do, rows.dto))
        self._values(keys, here, found, do, dto, part)
        if SCORE_GRADIENTS.isdisjoint(wanted):
            return
        dr = self._bracket("dr", dto, self.v_columns[:, :, here], None, None, p, m, rows.eta[:, part])
        self._terms("dt", dr, tile, sums)
        both = not OF_SCORES.isdisjoint(wanted)
        ds = dr
        if both:
            tv = None if self.tv_columns is None else self.tv_columns[:, :, here]
            ds = self._bracket("ds", do, self.v_columns[:, :, here], dto, tv, p, m, rows.delta[:, part])
            ds.addcmul_(found.bend, dr)
            self._terms("d", ds, tile, sums)
        if self.alphas is not None:
            assert found.u is not None
            self.alphas.add_(found.u, found.centred, part, ds if both else None, dr)
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
        found: _Tile,
        do: Tensor | None,
        dto: Tensor | None,
        part: slice,
    ) -> None:
        """dv += a^T do + ta^T dto and dtv += a^T dto, with ta of eq. 50."""
        operand = self.scores.operand
        if VALUE_GRADIENTS.isdisjoint(keys):
            return
        a = found.a.to(operand)
        if "dv" in keys and do is not None:
            add_product_(keys["dv"][:, :, here], do.mT, a)
        if dto is None:
            return
        if "dtv" in keys:
            add_product_(keys["dtv"][:, :, here], dto.mT, a)
        if "dv" in keys:
            ta = torch.mul(found.p, found.centred, out=self.workspace.take("ta", *found.p.shape))
            if found.m is not None:
                assert self.elastic is not None
                if self.ttau is not None:
                    moved = self.scores.block.repeat_positions(self.ttau) / self.elastic.n
                    ta.add_(moved[:, part])
                ta.mul_(found.m)
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
