"""A flash attention of the tests' own on flat memory: tiles, loop bounds, strides, groups, scratch, and bugs that others had.

Four kernels, each a loop over tiles: forward, delta, dq, and dk with dv. They see tensors as a kernel does, as an address and
strides: `load` and `store` reach whatever lies there, inside the tensor or not. `bug` is one line of the kind that a public
kernel got wrong (`test_found_in_the_wild` has the list), "" for none. It shares nothing with the doctor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

TILE = 16


def load(x: Tensor, at: Tensor, mask: Tensor | None = None) -> Tensor:
    """Elements at offsets `at` from where x begins, 0 where `mask` forbids; beyond the storage there is nothing."""
    flat, at = memory(x), at + x.storage_offset()
    inside = (at >= 0) & (at < len(flat))
    inside = inside if mask is None else inside & mask
    return torch.where(inside, flat[at.clamp(0, len(flat) - 1)], 0).float()


def store(x: Tensor, at: Tensor, values: Tensor, mask: Tensor, add: bool = False) -> None:
    flat, at = memory(x), at + x.storage_offset()
    inside = mask & (at >= 0) & (at < len(flat))
    flat.index_put_((at[inside],), values.to(x.dtype)[inside], accumulate=add)


def memory(x: Tensor) -> Tensor:
    return x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)


def cells(strides: tuple[int, ...], b: int, h: int, rows: Tensor, width: int) -> Tensor:
    """Offsets of `rows` of one head, [rows, width]."""
    return b * strides[0] + h * strides[1] + rows[:, None] * strides[2] + torch.arange(width) * strides[3]


@dataclass
class Options:
    """What a call asks for, and the geometry that follows."""

    sq: int
    sk: int
    d: int
    dv: int
    group: int
    causal: bool
    window: int | None
    softcap: float | None
    # the keys before the first row's own
    offset: int
    # the width that the scale is taken of
    scaled: int

    @property
    def scale(self) -> float:
        return self.scaled**-0.5

    def first_key(self, i0: int) -> int:
        """The first key tile that rows from i0 on can see."""
        if self.window is None:
            return 0
        return max(0, (i0 + self.offset - self.window) // TILE * TILE)

    def end_of_keys(self, i0: int) -> int:
        return min(self.sk, i0 + TILE + self.offset) if self.causal else self.sk

    def first_row(self, j0: int) -> int:
        return max(0, (j0 - self.offset) // TILE * TILE) if self.causal else 0

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        distance = i[:, None] + self.offset - j[None, :]
        seen = (i[:, None] < self.sq) & (j[None, :] < self.sk)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= distance <= self.window
        return seen


class Tiles:
    """forward and backward, with one bug or none."""

    def __init__(self, bug: str = ""):
        self.bug = bug

    @torch.no_grad()
    def forward(self, q, k, v, *, causal=False, window=None, softcap=None, bias=None, sink=None):
        o = self._options(q, k, v, causal, window, softcap)
        out = torch.empty_like(q) if v.shape[-1] == q.shape[-1] else q.new_empty(*q.shape[:3], o.dv)
        if self.bug == "o by the width of a head":
            out = q.new_empty(len(q), o.sq, q.shape[1], o.dv).transpose(1, 2)
        elif self.bug == "sink not passed on":
            sink = None
        if self.bug == "as many columns as threads":
            out.zero_()
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        if self.bug in ("last ring step wins", "lse of a split scaled again", "sink in every split"):
            return self._splits(o, q, k, v, sink, out, lse)
        for b, h, i0 in tiles_of(q):
            self._forward(o, q, k, v, bias, sink, out, lse, b, h, i0)
        return out, lse

    def _options(self, q, k, v, causal, window, softcap) -> Options:
        left = None if window is None else window[0]
        causal = causal or (window is not None and window[1] == 0)
        return Options(
            q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[1] // k.shape[1], causal, left, softcap,
            k.shape[2] - q.shape[2], q.shape[3],
        )  # fmt: skip

    def _splits(self, o, q, k, v, sink, out, lse):
        """Two halves of the keys, one after the other, merged by their lse."""
        half = -(-o.sk // 2)
        for part in (slice(None, half), slice(half, None)):
            before, weight = out.clone(), lse.clone()
            step = replace(o, sk=k[:, :, part].shape[2])
            counted = sink if self.bug == "sink in every split" or part.start is None else None
            for b, h, i0 in tiles_of(q):
                self._forward(step, q, k[:, :, part], v[:, :, part], None, counted, out, lse, b, h, i0)
            if part.start is not None and self.bug != "last ring step wins":
                both = torch.logaddexp(weight, lse)
                out.copy_((weight - both).exp()[..., None] * before + (lse - both).exp()[..., None] * out)
                lse.copy_(both)
        return out, lse

    def _scores(self, o: Options, q, k, bias, h: int, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of a tile, and their derivative by q k."""
        s = q @ k.T * o.scale
        slope = torch.full_like(s, o.scale)
        if o.softcap is not None:
            bent = torch.tanh(s / o.softcap)
            slope = slope * (1 - bent**2)
            s = s * bent if self.bug == "scores times tanh" else o.softcap * bent
        if bias is not None:
            distance = i[:, None] + o.offset - j[None, :]
            inside = (distance >= 0) & (distance < bias.shape[1])
            added = load(bias, h * bias.stride(0) + distance * bias.stride(1), inside)
            s = s - added if self.bug == "bias sign" else s + added
        return s, slope

    def _forward(self, o: Options, q, k, v, bias, sink, out, lse, b: int, h: int, i0: int) -> None:
        i, kv = i0 + torch.arange(TILE), h // o.group
        rows = i[:, None] < o.sq
        # keys are visible to `seers`
        seers = i
        if self.bug == "four rows share one mask":
            seers = i // 4 * 4 + 3
        elif self.bug == "rows divided by the group":
            seers = i // o.group
        width = min(o.dv, 8) if self.bug == "as many columns as threads" else o.dv
        tile_q = load(q, self._cells(q, b, h, i), rows)
        m, total = torch.full((TILE,), -5e4 if self.bug == "finite start" else -torch.inf), torch.zeros(TILE)
        if sink is not None:
            m, total = torch.full((TILE,), float(sink[h])), torch.ones(TILE)
        acc = torch.zeros(TILE, o.dv)
        first = o.first_key(i0)
        if self.bug == "starts at the offset":
            first = max(first, o.offset)
        if self.bug == "scratch cleared at tile 0":
            # the sums of a program lie in scratch memory
            m, total, acc = (x.new_empty(x.shape) for x in (m, total, acc))
        end, step = o.end_of_keys(i0), TILE
        if self.bug == "bound by tiles of rows":
            # tiles of keys are half as long; past those that rows before these see, one is counted
            step = TILE // 2
            end = min(end, i0 + step + o.offset)
        for j0 in range(first, end, step):
            j = j0 + torch.arange(step)
            if self.bug == "scratch cleared at tile 0" and j0 == 0:
                m, total, acc = torch.full((TILE,), -torch.inf), torch.zeros(TILE), torch.zeros(TILE, o.dv)
            keys = j[:, None] < o.sk
            tile_k = load(k, self._cells(k, b, kv, j), keys)
            tile_v = load(v, self._cells(v, b, kv, j), keys)
            s, _ = self._scores(o, tile_q, tile_k, bias, h, i, j)
            hidden = -1e30 if self.bug == "finite mask" else -torch.inf
            if self.bug == "cap after the mask":
                # tanh makes -1 of -inf
                hidden = torch.where(j < o.sk, -o.softcap, -torch.inf)
            s = torch.where(o.visible(seers, j), s, hidden)
            higher = torch.maximum(m, s.amax(1))
            safe = higher if self.bug == "first tile hidden" else torch.where(higher == -torch.inf, 0.0, higher)
            p, fade = torch.exp(s - safe[:, None]), torch.exp(m - safe)
            if self.bug == "rescaling left out":
                # where the maximum moves by less than 8 the old one stays, for weights that were formed with the new one
                stays = higher - m < 8
                fade, higher = torch.where(stays, 1.0, fade), torch.where(stays, m, higher)
            total, m = total * fade + p.sum(1), higher
            acc = acc * fade[:, None] + p.to(v.dtype).float() @ tile_v
        acc = acc / torch.where(total == 0, 1.0, total)[:, None]
        at = self._cells(out, b, h, i)
        if self.bug == "o by the width of a head":
            # the first row of the tile by the width, the rows of the tile by their stride
            at = at - i0 * (out.stride(2) - o.dv)
        store(out, at, acc, rows & (torch.arange(o.dv) < width))
        if self.bug == "lse of a split scaled again":
            m = m * o.scale
        store(lse, b * lse.stride(0) + h * lse.stride(1) + i, m + torch.log(total), i < o.sq)

    def _cells(self, x: Tensor, b: int, h: int, rows: Tensor) -> Tensor:
        """Offsets of rows of one head of an input or of o."""
        strides = x.stride()
        if self.bug == "heads counted in rows":
            # the offset of a head as a number of rows
            strides = (strides[0] // strides[2] * strides[2], strides[1] // strides[2] * strides[2], *strides[2:])
        return cells(strides, b, h, rows, x.shape[3])

    # --- backward ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward(self, do, q, k, v, o, lse, *, causal=False, window=None, softcap=None, bias=None, sink=None):
        causal = causal or self.bug == "backward always causal"
        if self.bug == "window not passed on":
            causal, window = False, None
        g = self._options(q, k, v, causal, window, softcap)
        if self.bug == "backward aligned to the first key":
            g.offset = 0
        elif self.bug == "scale of the padded width":
            g.scaled = -(-g.d // 16) * 16
        elif self.bug == "sink not passed on":
            sink, unused = None, sink
        padded = -(-g.sq // TILE) * TILE
        # of every head one batch entry after the other
        delta = q.new_empty(q.shape[1], len(q), padded, dtype=torch.float32).transpose(0, 1)
        if self.bug != "delta after its use":
            self._deltas(g, do, o, delta)
        if self.bug == "sink left out of lse":
            # the sum over the keys alone
            lse = lse + torch.log1p(-torch.exp(sink[:, None] - lse))
        kept = self._rows_kept(lse, padded)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        if self.bug == "dv laid out like k":
            dv = torch.empty_like(k)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        dsink = None if sink is None else torch.zeros_like(sink, dtype=torch.float32)
        for b, h, i0 in tiles_of(q):
            self._dq(g, do, q, k, v, kept, delta, bias, sink, dq, dbias, dsink, b, h, i0)
        # dk and dv of each query head, summed over its group below
        parts = [q.new_empty(q.shape[0], q.shape[1], *x.shape[2:], dtype=torch.float32) for x in (k, v)]
        for b, h, j0 in tiles_of(parts[0]):
            self._dkdv(g, do, q, k, v, kept, delta, bias, parts, b, h, j0)
        if self.bug == "delta after its use":
            self._deltas(g, do, o, delta)
        for x, part in zip((dk, dv), parts, strict=True):
            whole = part.unflatten(1, (-1, g.group)).sum(2).to(x.dtype)
            strides = v.stride() if self.bug == "dv laid out like k" and x is dv else x.stride()
            for b in range(len(x)):
                for h in range(x.shape[1]):
                    at = cells(strides, b, h, torch.arange(x.shape[2]), x.shape[3])
                    store(x, at, whole[b, h], torch.ones_like(at, dtype=torch.bool))
        if self.bug == "sink not passed on" and unused is not None:
            dsink = torch.zeros_like(unused, dtype=torch.float32)
        found = {"dq": dq, "dk": dk, "dv": dv, "dbias": dbias, "dsink": dsink}
        return {name: x for name, x in found.items() if x is not None}

    def _rows_kept(self, lse: Tensor, padded: int) -> Tensor:
        """lse of whole tiles of rows, 0 beyond the end."""
        make = lse.new_empty if self.bug == "padded lse not written" else lse.new_zeros
        kept = make(*lse.shape[:2], padded)
        kept[:, :, : lse.shape[2]] = lse
        return kept

    def _deltas(self, g: Options, do, o, delta) -> None:
        strides = (g.sq * g.dv * o.shape[1], g.sq * g.dv, g.dv, 1)
        taken = strides if self.bug == "delta of contiguous rows" else None
        for b, h, i0 in tiles_of(o):
            i = i0 + torch.arange(TILE)
            a = load(do, cells(taken or do.stride(), b, h, i, g.dv), i[:, None] < g.sq)
            y = load(o, cells(taken or o.stride(), b, h, i, g.dv), i[:, None] < g.sq)
            everywhere = torch.ones(TILE, dtype=torch.bool)
            # rows of a batch entry are padded to whole tiles, here of another size
            entry = -(-g.sq // 32) * 32 if self.bug == "batch padded to other tiles" else delta.stride(0)
            store(delta, b * entry + h * delta.stride(1) + i, (a * y).sum(1), everywhere)

    def _weights(self, g: Options, tile_q, tile_k, kept, bias, b, h, i, j) -> tuple[Tensor, Tensor]:
        row = load(kept, b * kept.stride(0) + h * kept.stride(1) + i)
        s, slope = self._scores(g, tile_q, tile_k, bias, h, i, j)
        seen = g.visible(i, j)
        if self.bug == "empty rows in the backward":
            return torch.exp(torch.where(seen, s, -torch.inf) - row[:, None]), slope
        if self.bug == "cap after the mask":
            s, slope = torch.where(seen, s, -g.softcap), torch.where(seen, slope, 0.0)
            seen = (i[:, None] < g.sq) & (j[None, :] < g.sk)
        row = torch.where(row == -torch.inf, 0.0, row)
        p = torch.exp(s - row[:, None])
        if self.bug == "padded keys not masked":
            # the mask of the scores is for causality alone
            seen |= j[None, :] >= g.sk
        elif self.bug in ("padded lse not written", "rows of the last tile unchecked"):
            # q and dO are 0 there, which was thought to be enough
            seen |= i[:, None] >= g.sq
        elif self.bug == "keys bounded by the tile of rows":
            # how many rows of the last tile exist, taken for how many keys do
            seen &= j[None, :] - j[0] < min(TILE, g.sq - int(i[0]))
        elif self.bug == "two rows share one window":
            seen = g.visible(i // 2 * 2, j) & (i[:, None] < g.sq)
        return torch.where(seen, p, 0.0), slope

    def _dq(self, g: Options, do, q, k, v, kept, delta, bias, sink, dq, dbias, dsink, b, h, i0) -> None:
        i, kv = i0 + torch.arange(TILE), h // g.group
        rows = i[:, None] < g.sq
        tile_q = load(q, self._cells(q, b, h, i), rows)
        tile_do = load(do, cells(do.stride(), b, h, i, g.dv), rows)
        d = load(delta, b * delta.stride(0) + h * delta.stride(1) + i)
        acc, width = torch.zeros(TILE, g.d), g.d if self.bug == "v as wide as q" else g.dv
        if sink is not None and self.bug != "sink left out of lse":
            row = load(kept, b * kept.stride(0) + h * kept.stride(1) + i)
            dsink[h] -= torch.where(i < g.sq, torch.exp(sink[h] - row) * d, 0.0).sum()
        end = g.end_of_keys(i0)
        if self.bug == "end rounded up":
            end = -(-end // TILE) * TILE
        for j0 in range(g.first_key(i0), end, TILE):
            j = j0 + torch.arange(TILE)
            keys = j[:, None] < (end if self.bug == "end rounded up" else g.sk)
            source = j % (g.sk // 2) if self.bug == "ring keeps the first keys" else j
            tile_k = load(k, self._cells(k, b, kv, source), keys)
            tile_v = load(v, self._cells(v, b, kv, source)[:, :width], keys)
            counted = replace(g, sk=end) if self.bug == "end rounded up" else g
            p, slope = self._weights(counted, tile_q, tile_k, kept, bias, b, h, i, j)
            dp = tile_do[:, :width] @ tile_v.T
            ds = p * (dp - d[:, None])
            acc += (ds * slope).to(k.dtype).float() @ tile_k
            if dbias is not None:
                distance = i[:, None] + g.offset - j[None, :]
                inside = (distance >= 0) & (distance < dbias.shape[1])
                store(dbias, h * dbias.stride(0) + distance * dbias.stride(1), ds, inside, add=True)
        strides = q.stride() if self.bug == "dq with strides of q" else dq.stride()
        if self.bug == "accumulator cleared to a narrower width":
            # sums lie in scratch of whole vectors of columns; the last vector is not cleared
            scratch = acc.new_empty(acc.shape)
            scratch[:, : g.d // 32 * 32] = 0
            acc = scratch + acc
        store(dq, cells(strides, b, h, i, g.d), acc, rows)

    def _dkdv(self, g: Options, do, q, k, v, kept, delta, bias, parts, b, h, j0) -> None:
        j, kv = j0 + torch.arange(TILE), h // g.group
        keys = j[:, None] < g.sk
        source = j % (g.sk // 2) if self.bug == "ring keeps the first keys" else j
        tile_k = load(k, self._cells(k, b, kv, source), keys)
        tile_v = load(v, self._cells(v, b, kv, source), keys)
        dk, dv = torch.zeros(TILE, g.d), torch.zeros(TILE, g.dv)
        starts = range(g.first_row(j0), g.sq, TILE)
        if self.bug == "forward's list of tiles":
            # the key tiles of a row tile taken for the row tiles of a key tile
            starts = range(0, min(g.sq, g.end_of_keys(j0)), TILE)
        for i0 in starts:
            i = i0 + torch.arange(TILE)
            rows = i[:, None] < g.sq
            if self.bug == "rows of the last tile unchecked":
                rows = None
            elif self.bug == "tiles of rows stored over each other":
                dk, dv = torch.zeros_like(dk), torch.zeros_like(dv)
            tile_q = load(q, self._cells(q, b, h, i), rows)
            tile_do = load(do, cells(do.stride(), b, h, i, g.dv), rows)
            d = load(delta, b * delta.stride(0) + h * delta.stride(1) + i)
            p, slope = self._weights(g, tile_q, tile_k, kept, bias, b, h, i, j)
            dv += p.T.to(do.dtype).float() @ tile_do
            ds = p * (tile_do @ tile_v.T - d[:, None])
            dk += (ds * slope).T.to(q.dtype).float() @ tile_q
        at = h
        if self.bug == "heads split by the group":
            # head = share + group * kv, taken apart with the wrong count and put together again
            at = h % g.group * (q.shape[1] // g.group) + h // g.group * g.group
        for x, tile in zip(parts, (dk, dv), strict=True):
            where, inside = cells(x.stride(), b, at, j, x.shape[3]), j[:, None].expand_as(tile) < g.sk
            if self.bug == "whole tiles of dk stored":
                inside = torch.ones_like(inside)
            elif self.bug == "columns stored beyond the row":
                # the width is rounded up to whole vectors
                wide = -(-x.shape[3] // 16) * 16
                tile = torch.nn.functional.pad(tile, (0, wide - x.shape[3]))
                where, inside = cells(x.stride(), b, at, j, wide), j[:, None].expand_as(tile) < g.sk
            elif self.bug == "halves of dv stored apart" and x is parts[1]:
                # the second half of the columns goes where a second tensor would begin
                where = where + torch.where(torch.arange(x.shape[3]) < x.shape[3] // 2, 0, x.numel())
            elif self.bug == "columns of dv by the step of dk" and x is parts[1]:
                step = g.d // 2
                where = where // g.dv * g.dv + torch.arange(g.dv) // step * step + torch.arange(g.dv) % (step // 2) * 2 % step
            store(x, where, tile, inside)


def tiles_of(x: Tensor) -> list[tuple[int, int, int]]:
    """Batch entry, head and first position of every tile."""
    return [(b, h, i0) for b in range(x.shape[0]) for h in range(x.shape[1]) for i0 in range(0, x.shape[2], TILE)]
