"""Forward mode of the tiled backend: tangents of y and lse beside them, in one sweep (eq. 52), two with tau (eq. 53).

With entmax a sweep comes after those of the forward (eq. 110).

A row owns what its forward owns and in addition a scalar `e`, a reference `nu` and a Dv-wide `w`. Where lse is known, the sweep
needs no running maximum, and y and u cost no product. Any subset of tangents costs the products of that subset (eq. 55).
Parity contract: tests/derivatives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile, config_of, row_blocks, slabs, tiles
from backlight.backends.tiled.entmax_moving import MovingEntmax
from backlight.backends.tiled.forward import base2, finish, softmax_sweep, start
from backlight.backends.tiled.moving import Moving
from backlight.backends.tiled.primitives import (
    Block,
    Elastic,
    Scores,
    Workspace,
    add_product_,
    heads_of,
    keys_of,
    sink_weight,
)
from backlight.call import Call
from backlight.config import Config

Saved = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Results:
    """Like y [B,Hq,Sq,Dv] and lse [B,Hq,Sq]; u only with tau or entmax, tu only with tau, and where they are to be saved."""

    y: Tensor
    lse: Tensor
    u: Tensor | None
    ty: Tensor
    tlse: Tensor
    tu: Tensor | None

    @property
    def all(self) -> tuple[Tensor | None, ...]:
        return self.y, self.lse, self.u, self.ty, self.tlse, self.tu


def tangent(call: Call, tangents: Mapping[str, Tensor], saved: Saved | None, save_u: bool) -> Results:
    """tangents: by name of the input, any subset. saved: y, lse and, with tau or entmax, u; they are returned."""
    out = _allocate(call, tangents, saved, save_u)
    config = config_of(call)
    workspace = Workspace(config.heads * call.group * config.block_m * config.block_n, call.q.detach(), call.accumulator_dtype)
    for slab in slabs(call, config):
        _Sweep(call, tangents, slab, config, workspace, saved is not None).run(out)
    return out


def _allocate(call: Call, tangents: Mapping[str, Tensor], saved: Saved | None, save_u: bool) -> Results:
    dv = call.v.shape[-1]
    elastic = call.tau is not None
    if saved is None:
        y = torch.empty_like(call.q, dtype=call.output_dtype)
        y = y if dv == call.q.shape[-1] else y.new_empty(*call.q.shape[:3], dv)
        lse = call.q.new_empty(call.q.shape[:3], dtype=call.accumulator_dtype)
        u = torch.empty_like(y) if call.spec.keeps_u and save_u else None
    else:
        y, lse, u = saved
    tu = torch.empty_like(y) if elastic and save_u and "v" in tangents else None
    return Results(y, lse, u, torch.empty_like(y), torch.empty_like(lse), tu)


@dataclass(slots=True)
class _Rows:
    """What a sweep leaves of a block's rows, [N, rows, *]: numbers of the normalised row.

    o, u: absent where they are known or nobody needs them. e: the sum of g, with entmax over that of slopes; e_cast: the sum of
    what was multiplied with v.
    """

    lse: Tensor
    o: Tensor | None
    u: Tensor | None
    tu: Tensor | None
    w: Tensor
    e: Tensor
    e_cast: Tensor
    nu: Tensor


class _Sweep:
    """All row blocks of a slab."""

    def __init__(
        self,
        call: Call,
        tangents: Mapping[str, Tensor],
        slab: Slab,
        config: Config,
        workspace: Workspace,
        known: bool,
    ):
        self.call, self.tangents, self.slab, self.config, self.known = call, tangents, slab, config, known
        self.workspace, dtype, group = workspace, call.accumulator_dtype, call.group
        self.scores = Scores(call, slab, workspace)
        self.moving = Moving(call, slab, self.scores, tangents)
        self.v = keys_of(call.v, slab).to(self.scores.operand)
        self.tv = keys_of(tangents["v"], slab).to(self.scores.operand) if "v" in tangents else None
        self.elastic = Elastic(call, slab, workspace) if call.tau is not None else None
        self.entmax = MovingEntmax(call, slab, self.scores, self.moving, tangents) if call.entmax is not None else None

        def per_head(parameter: Tensor | None) -> Tensor | None:
            return None if parameter is None else heads_of(parameter, slab, group, dtype)

        self.sink, self.tsink, self.ttau = map(per_head, (call.sink, tangents.get("sink"), tangents.get("tau")))

    def run(self, out: Results) -> None:
        z = self.slab.segment
        for i0, i1 in row_blocks(z.sq, self.config):
            block = Block(self.slab, self.call.group, i0, i1)
            block_tiles = self.scores.visited(tiles(self.call.spec, i0, i1, z.sq, z.sk, self.config))
            self.scores.start(block)
            self.moving.start(block)
            part = self.call.part
            if self.entmax is not None:
                rows = self._sparse(self.entmax, out, block_tiles)
            elif part is not None and part.lse is not None:
                assert part.tlse is not None
                lse, tlse = (block.rows_of(x[..., None]) for x in (part.lse, part.tlse))
                rows = self._known(lse, block_tiles, fresh=True, with_tu=out.tu is not None, tlse=tlse)
            elif self.known:
                rows = self._known(block.rows_of(out.lse[..., None]), block_tiles, fresh=False, with_tu=out.tu is not None)
            elif self.elastic is None:
                rows = self._online(block_tiles)
            else:
                lse, *_ = softmax_sweep(self.scores, self.v, self.sink, block_tiles, with_output=False)
                rows = self._known(lse, block_tiles, fresh=True, with_tu=out.tu is not None)
            self._put(out, block, rows)

    def _zeros(self, width: int) -> Tensor:
        return self.scores.q.new_zeros(*self.scores.q.shape[:2], width, dtype=self.scores.dtype)

    def _online(self, block_tiles: list[Tile]) -> _Rows:
        """Eq. 52."""
        scores, operand = self.scores, self.scores.operand
        m, l = start(scores, self.sink)  # noqa: E741 - the letter of eq. 31
        acc, w, nu = self._zeros(self.v.shape[-1]), self._zeros(self.v.shape[-1]), self._zeros(1)
        e = self._zeros(1) if self.tsink is None else scores.block.repeat_positions(self.tsink)
        e_cast = e if operand == scores.dtype else e.clone()
        first = _First(scores)
        for tile in block_tiles:
            part, keys = scores.block.part(tile), slice(tile.j0, tile.j1)
            s2 = scores.tile(tile)
            ts = self.moving.tile(tile, tuple(s2.shape))
            m_new = torch.maximum(m[:, part], s2.amax(dim=-1, keepdim=True))
            m_safe = m_new.masked_fill(m_new == -math.inf, 0)
            rescale = torch.exp2(m[:, part] - m_safe)
            p = s2.sub_(m_safe).exp2_()
            for sums in {id(x): x for x in (l, e, e_cast, acc, w)}.values():
                sums[:, part].mul_(rescale)
            total = p.sum(dim=-1, keepdim=True)
            if ts is not None:
                # what is in l already is the sink's
                moved = first.reference(nu, p, ts, total, part) * l[:, part]
                for sums in {id(x): x for x in (e, e_cast)}.values():
                    sums[:, part].sub_(moved)
                g = ts.sub_(nu[:, part]).mul_(p)
                e[:, part].add_(g.sum(dim=-1, keepdim=True))
                g = g.to(operand)
                if e_cast is not e:
                    e_cast[:, part].add_(g.sum(dim=-1, keepdim=True, dtype=scores.dtype))
                add_product_(w[:, part], g, self.v[:, keys])
            l[:, part].add_(total)
            p = p.to(operand)
            add_product_(acc[:, part], p, self.v[:, keys])
            if self.tv is not None:
                add_product_(w[:, part], p, self.tv[:, keys])
            m[:, part].copy_(m_new)
        scale = l.masked_fill(l == 0, 1).reciprocal_()
        lse = finish(scores, self.sink, m, l)
        return _Rows(lse, acc * scale, None, None, w * scale, e * scale, e_cast * scale, nu)

    def _known(self, lse: Tensor, block_tiles: list[Tile], fresh: bool, with_tu: bool, tlse: Tensor | None = None) -> _Rows:
        """The sweep of rows whose lse is known: the second of eq. 53, without tau too. fresh: o and u are not known.

        tlse: where it is known too, as of a part; weights move by their distance from it, and e is nothing (eq. 50).
        """
        scores, operand, elastic = self.scores, self.scores.operand, self.elastic
        width, lse2 = self.v.shape[-1], base2(lse)
        w, e = self._zeros(width), self._zeros(1)
        nu = self._zeros(1) if tlse is None else tlse.to(scores.dtype)
        e_cast = e if operand == scores.dtype or elastic is not None else e.clone()
        o, u = (self._zeros(width) if fresh else None for _ in range(2))
        tu = self._zeros(width) if with_tu else None
        first = _First(scores)
        if elastic is not None:
            elastic.start(scores.block)
        if not (fresh or self.moving.moves or self.tv is not None):
            block_tiles = []
        for tile in block_tiles:
            part, keys = scores.block.part(tile), slice(tile.j0, tile.j1)
            p = scores.tile(tile).sub_(lse2[:, part]).exp2_()
            ts = self.moving.tile(tile, tuple(p.shape))
            a, m = p, None
            if elastic is not None:
                a, m = elastic.weights(elastic.exact_single_(p, tile), tile, scores)
            if ts is None and tlse is not None:
                ts = torch.zeros_like(p)
            if ts is not None:
                if tlse is None:
                    first.reference(nu, p, ts, p.sum(dim=-1, keepdim=True), part)
                g = ts.sub_(nu[:, part]).mul_(p)
                if tlse is None:
                    e[:, part].add_(g.sum(dim=-1, keepdim=True))
                g = (g if m is None else g.mul_(m)).to(operand)
                if e_cast is not e:
                    e_cast[:, part].add_(g.sum(dim=-1, keepdim=True, dtype=scores.dtype))
                add_product_(w[:, part], g, self.v[:, keys])
            a = a.to(operand)
            if o is not None:
                add_product_(o[:, part], a, self.v[:, keys])
            if u is not None and m is not None:
                add_product_(u[:, part], m.to(operand), self.v[:, keys])
            if self.tv is not None:
                add_product_(w[:, part], a, self.tv[:, keys])
                if tu is not None and m is not None:
                    add_product_(tu[:, part], m.to(operand), self.tv[:, keys])
        if elastic is not None:
            for mean in (u, tu):
                if mean is not None:
                    mean.div_(elastic.n)
        if tlse is None and (self.tsink is not None or (self.sink is not None and self.moving.moves)):
            assert self.sink is not None
            weight = sink_weight(scores.block.repeat_positions(self.sink), lse)
            tsink = 0 if self.tsink is None else scores.block.repeat_positions(self.tsink)
            moved = weight * (tsink - nu)
            e, e_cast = e + moved, e_cast + moved
        return _Rows(lse, o, u, tu, w, e, e_cast, nu)

    def _sparse(self, entmax: MovingEntmax, out: Results, block_tiles: list[Tile]) -> _Rows:
        """Eq. 110, after the thresholds where lse is not known."""
        scores, operand = self.scores, self.scores.operand
        block = scores.block
        entmax.start(block)
        o: Tensor | None = None
        u: Tensor | None = None
        if self.known:
            lse = block.rows_of(out.lse[..., None])
        else:
            lse, o, u = entmax.entmax.forward(scores, self.v, block_tiles)
        w, e, nu, slopes = self._zeros(self.v.shape[-1]), self._zeros(1), self._zeros(1), self._zeros(1)
        e_cast = e if operand == scores.dtype else e.clone()
        first = _First(scores)
        for each in entmax.visits(lse, block_tiles if entmax.moves or self.tv is not None else []):
            part, keys = each.part, slice(each.tile.j0, each.tile.j1)
            if each.r is not None:
                total = each.w.sum(dim=-1, keepdim=True)
                slopes[:, part].add_(total)
                first.reference(nu, each.w, each.r, total, part)
                g = each.r.sub_(nu[:, part]).mul_(each.w)
                e[:, part].add_(g.sum(dim=-1, keepdim=True))
                g = g.to(operand)
                if e_cast is not e:
                    e_cast[:, part].add_(g.sum(dim=-1, keepdim=True, dtype=scores.dtype))
                add_product_(w[:, part], g, self.v[:, keys])
            if self.tv is not None:
                add_product_(w[:, part], each.p.to(operand), self.tv[:, keys])
        sink = entmax.sink(lse)
        if sink is not None and entmax.moves:
            moved = sink.w * (sink.r - nu)
            e, e_cast, slopes = e + moved, e_cast + moved, slopes + sink.w
        return _Rows(lse, o, u, None, w, e / slopes.masked_fill_(slopes == 0, 1), e_cast, nu)

    def _put(self, out: Results, block: Block, rows: _Rows) -> None:
        """ty and tlse of the block's rows, and y, lse and u where they are new (eq. 51; sigma * o is y)."""
        dtype, gate, elastic = self.scores.dtype, self.call.gate, self.elastic
        weight = None if gate is None else torch.sigmoid(block.rows_of(gate).to(dtype))

        def gated(x: Tensor) -> Tensor:
            return x if weight is None else x * weight

        y = block.rows_of(out.y).to(dtype) if rows.o is None else gated(rows.o)
        mean = y
        if self.entmax is not None:
            # of v by the slopes
            assert rows.u is not None or out.u is not None
            mean = gated(block.rows_of(out.u).to(dtype) if rows.u is None else rows.u)  # type: ignore[arg-type]
        ty = gated(rows.w)
        ty = ty.sub_(rows.e_cast * mean) if ty is not rows.w else ty - rows.e_cast * mean
        if elastic is not None:
            u = rows.u
            if u is None and out.u is not None:
                u = block.rows_of(out.u).to(dtype)
            if u is not None:
                moved = rows.e * elastic.tau
                if self.ttau is not None:
                    moved = moved + block.repeat_positions(self.ttau)
                ty += gated(u) * moved
        if weight is not None and "gate" in self.tangents:
            ty += y * (1 - weight) * block.rows_of(self.tangents["gate"]).to(dtype)
        block.put_rows(out.ty, ty)
        block.put_rows(out.tlse[..., None], (rows.nu + rows.e).masked_fill_(rows.lse == -math.inf, 0))
        if rows.tu is not None:
            assert out.tu is not None
            block.put_rows(out.tu, rows.tu)
        if rows.o is not None:
            block.put_rows(out.y, y)
            block.put_rows(out.lse[..., None], rows.lse)
            if out.u is not None:
                assert rows.u is not None
                block.put_rows(out.u, rows.u)


class _First:
    """The reference nu of a row: the mean of ts in the first tile of which the row has a weight."""

    def __init__(self, scores: Scores):
        self._open = torch.ones(*scores.q.shape[:2], 1, dtype=torch.bool, device=scores.q.device)
        self._left = True

    def reference(self, nu: Tensor, p: Tensor, ts: Tensor, total: Tensor, part: slice) -> Tensor:
        """Sets nu of rows that have none; returns it for those rows, 0 for the others."""
        if not self._left:
            return total.new_zeros(())
        now = self._open[:, part] & (total > 0)
        mean = ((p * ts).sum(dim=-1, keepdim=True) / total).masked_fill_(~now, 0)
        nu[:, part].add_(mean)
        self._open[:, part] &= ~now
        self._left = bool(self._open.any())
        return mean
