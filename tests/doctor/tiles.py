"""A flash attention of the tests' own on flat memory: tiles, loop bounds, strides, groups, scratch, and bugs that others had.

Four kernels, each a loop over tiles: forward, delta, dq, and dk with dv. They see tensors as a kernel does, as an address and
strides: `load` and `store` reach whatever lies there, inside the tensor or not. `bug` is one line of the kind that a public
kernel got wrong (`test_found_in_the_wild` has the list), "" for none. It shares nothing with the doctor.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def scale(self) -> float:
        return self.d**-0.5

    def first_key(self, i0: int) -> int:
        """The first key tile that rows from i0 on can see."""
        if self.window is None:
            return 0
        return max(0, (i0 + self.sk - self.sq - self.window) // TILE * TILE)

    def end_of_keys(self, i0: int) -> int:
        return min(self.sk, i0 + TILE + self.sk - self.sq) if self.causal else self.sk

    def first_row(self, j0: int) -> int:
        return max(0, (j0 - (self.sk - self.sq)) // TILE * TILE) if self.causal else 0

    def visible(self, i: Tensor, j: Tensor) -> Tensor:
        distance = i[:, None] + (self.sk - self.sq) - j[None, :]
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
        if self.bug == "as many columns as threads":
            out.zero_()
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        if self.bug == "last ring step wins":
            return self._last_step(o, q, k, v, out, lse)
        for b, h, i0 in tiles_of(q):
            self._forward(o, q, k, v, bias, sink, out, lse, b, h, i0)
        return out, lse

    def _options(self, q, k, v, causal, window, softcap) -> Options:
        left = None if window is None else window[0]
        causal = causal or (window is not None and window[1] == 0)
        return Options(
            q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.shape[1] // k.shape[1], causal, left, softcap
        )  # fmt: skip

    def _last_step(self, o, q, k, v, out, lse):
        """A ring of two: the second step's o and lse replace the first's instead of being merged with them."""
        half = o.sk // 2
        for part in (slice(None, half), slice(half, None)):
            step = Options(o.sq, k[:, :, part].shape[2], o.d, o.dv, o.group, False, None, o.softcap)
            for b, h, i0 in tiles_of(q):
                self._forward(step, q, k[:, :, part], v[:, :, part], None, None, out, lse, b, h, i0)
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
            distance = i[:, None] + (o.sk - o.sq) - j[None, :]
            inside = (distance >= 0) & (distance < bias.shape[1])
            added = load(bias, h * bias.stride(0) + distance * bias.stride(1), inside)
            s = s - added if self.bug == "bias sign" else s + added
        return s, slope

    def _forward(self, o: Options, q, k, v, bias, sink, out, lse, b: int, h: int, i0: int) -> None:
        i, kv = i0 + torch.arange(TILE), h // o.group
        rows = i[:, None] < o.sq
        width = min(o.dv, 8) if self.bug == "as many columns as threads" else o.dv
        tile_q = load(q, cells(q.stride(), b, h, i, o.d), rows)
        m, total = torch.full((TILE,), -torch.inf), torch.zeros(TILE)
        if sink is not None:
            m, total = torch.full((TILE,), float(sink[h])), torch.ones(TILE)
        acc = torch.zeros(TILE, o.dv)
        first = o.first_key(i0)
        if self.bug == "starts at the offset":
            first = max(first, o.sk - o.sq)
        if self.bug == "scratch cleared at tile 0":
            # the sums of a program lie in scratch memory
            m, total, acc = (x.new_empty(x.shape) for x in (m, total, acc))
        for j0 in range(first, o.end_of_keys(i0), TILE):
            j = j0 + torch.arange(TILE)
            if self.bug == "scratch cleared at tile 0" and j0 == 0:
                m, total, acc = torch.full((TILE,), -torch.inf), torch.zeros(TILE), torch.zeros(TILE, o.dv)
            keys = j[:, None] < o.sk
            tile_k = load(k, cells(k.stride(), b, kv, j, o.d), keys)
            tile_v = load(v, cells(v.stride(), b, kv, j, o.dv), keys)
            s, _ = self._scores(o, tile_q, tile_k, bias, h, i, j)
            hidden = -1e30 if self.bug == "finite mask" else -torch.inf
            s = torch.where(o.visible(i, j), s, hidden)
            higher = torch.maximum(m, s.amax(1))
            safe = higher if self.bug == "first tile hidden" else torch.where(higher == -torch.inf, 0.0, higher)
            p, fade = torch.exp(s - safe[:, None]), torch.exp(m - safe)
            total, m = total * fade + p.sum(1), higher
            acc = acc * fade[:, None] + p.to(v.dtype).float() @ tile_v
        acc = acc / torch.where(total == 0, 1.0, total)[:, None]
        store(out, cells(out.stride(), b, h, i, o.dv), acc, rows & (torch.arange(o.dv) < width))
        store(lse, b * lse.stride(0) + h * lse.stride(1) + i, m + torch.log(total), i < o.sq)

    # --- backward ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward(self, do, q, k, v, o, lse, *, causal=False, window=None, softcap=None, bias=None, sink=None):
        causal = causal or self.bug == "backward always causal"
        g = self._options(q, k, v, causal, window, softcap)
        padded = -(-g.sq // TILE) * TILE
        delta = q.new_empty(*q.shape[:2], padded, dtype=torch.float32)
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
            store(delta, b * delta.stride(0) + h * delta.stride(1) + i, (a * y).sum(1), everywhere)

    def _weights(self, g: Options, tile_q, tile_k, kept, bias, b, h, i, j) -> tuple[Tensor, Tensor]:
        row = load(kept, b * kept.stride(0) + h * kept.stride(1) + i)
        row = torch.where(row == -torch.inf, 0.0, row)
        s, slope = self._scores(g, tile_q, tile_k, bias, h, i, j)
        p = torch.exp(s - row[:, None])
        seen = g.visible(i, j)
        if self.bug == "padded keys not masked":
            # the mask of the scores is for causality alone
            seen |= j[None, :] >= g.sk
        elif self.bug == "padded lse not written":
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
        tile_q = load(q, cells(q.stride(), b, h, i, g.d), rows)
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
            tile_k = load(k, cells(k.stride(), b, kv, source, g.d), keys)
            tile_v = load(v, cells(v.stride(), b, kv, source, width), keys)
            if self.bug == "end rounded up":
                geometry = Options(g.sq, g.sk, g.d, g.dv, g.group, g.causal, g.window, g.softcap)
                geometry.sk, shift = end, end - g.sk
                p, slope = self._weights_of(geometry, shift, tile_q, tile_k, kept, bias, b, h, i, j)
            else:
                p, slope = self._weights(g, tile_q, tile_k, kept, bias, b, h, i, j)
            dp = tile_do[:, :width] @ tile_v.T
            ds = p * (dp - d[:, None])
            acc += (ds * slope).to(k.dtype).float() @ tile_k
            if dbias is not None:
                distance = i[:, None] + (g.sk - g.sq) - j[None, :]
                inside = (distance >= 0) & (distance < dbias.shape[1])
                store(dbias, h * dbias.stride(0) + distance * dbias.stride(1), ds, inside, add=True)
        strides = q.stride() if self.bug == "dq with strides of q" else dq.stride()
        if self.bug == "accumulator cleared to a narrower width":
            # sums lie in scratch of whole vectors of columns; the last vector is not cleared
            scratch = acc.new_empty(acc.shape)
            scratch[:, : g.d // 32 * 32] = 0
            acc = scratch + acc
        store(dq, cells(strides, b, h, i, g.d), acc, rows)

    def _weights_of(self, g: Options, shift: int, tile_q, tile_k, kept, bias, b, h, i, j):
        """Weights where keys up to the end of the tile count: aligned as before."""
        g.sq += shift
        p, slope = self._weights(g, tile_q, tile_k, kept, bias, b, h, i, j)
        g.sq -= shift
        return torch.where(i[:, None] < g.sq, p, 0.0), slope

    def _dkdv(self, g: Options, do, q, k, v, kept, delta, bias, parts, b, h, j0) -> None:
        j, kv = j0 + torch.arange(TILE), h // g.group
        keys = j[:, None] < g.sk
        source = j % (g.sk // 2) if self.bug == "ring keeps the first keys" else j
        tile_k = load(k, cells(k.stride(), b, kv, source, g.d), keys)
        tile_v = load(v, cells(v.stride(), b, kv, source, g.dv), keys)
        dk, dv = torch.zeros(TILE, g.d), torch.zeros(TILE, g.dv)
        starts = range(g.first_row(j0), g.sq, TILE)
        if self.bug == "forward's list of tiles":
            # the key tiles of a row tile taken for the row tiles of a key tile
            starts = range(0, min(g.sq, g.end_of_keys(j0)), TILE)
        for i0 in starts:
            i = i0 + torch.arange(TILE)
            rows = i[:, None] < g.sq
            tile_q = load(q, cells(q.stride(), b, h, i, g.d), rows)
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
