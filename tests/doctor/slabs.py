"""A third flash attention of the tests' own, on slices of dense tensors, with bugs that others had in rings, splits and terms.

Forward: for every head the keys are taken in parts (the steps of a ring, the splits of a decoding kernel), each part in tiles
with a running maximum, and parts are merged by their lse. Backward: one loop over the same parts with the saved lse, dk and dv
summed over the heads of a group. `bug` is one line of the kind that a public kernel got wrong (`wild_slabs` has the list), ""
for none. It shares nothing with the doctor, nor with `tiles`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

TILE = 16
# keys that all rows see which come after them
FIRST_KEYS = 8
LOG2E = math.log2(math.e)
INF = math.inf


@dataclass
class Head:
    """One query head of one batch entry: its tensors, and what is added to its scores."""

    q: Tensor
    k: Tensor
    v: Tensor
    number: int
    entry: int
    scale: float
    causal: bool
    window: tuple[int | None, int | None] | None
    sink: Tensor | None
    table: Tensor | None
    pairs: Tensor | None
    rows: Tensor | None

    @property
    def offset(self) -> int:
        return len(self.k) - len(self.q)

    def seen(self, i: Tensor, j: Tensor) -> Tensor:
        """Which rows i see which keys j, [BM, BN]."""
        distance = i[:, None] + self.offset - j[None, :]
        left, right = self.window or (None, None)
        found = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            found &= distance >= 0
        if left is not None:
            found &= distance <= left
        if right is not None:
            found &= distance >= -right
        if self.rows is not None:
            first, end = self.rows[:, j]
            found &= (first <= i[:, None]) & (i[:, None] < end)
        return found


class Slabs:
    """forward and backward, with one bug or none."""

    def __init__(self, bug: str = ""):
        self.bug = bug
        # steps of a ring, or splits of the keys
        self.parts = 2 if bug in IN_PARTS else 1

    def heads(self, q, k, v, causal, window, sink, bias, pair_bias, rows) -> Iterator[tuple[int, int, int, Head]]:
        group = q.shape[1] // k.shape[1]
        if self.bug == "window without its right side" and window is not None:
            window = window[0], None
        for b in range(len(q)):
            for h in range(q.shape[1]):
                table = None if bias is None else bias[h]
                pairs = None
                if pair_bias is not None:
                    pairs = pair_bias[min(b, len(pair_bias) - 1), min(h, pair_bias.shape[1] - 1)].float()
                own = None if rows is None else rows[min(b, len(rows) - 1), min(h, rows.shape[1] - 1)]
                found = Head(
                    q[b, h].float(), k[b, h // group].float(), v[b, h // group].float(), h, b, q.shape[3] ** -0.5,
                    causal, window, None if sink is None else sink.float(), table, pairs, own,
                )  # fmt: skip
                yield b, h, h // group, found

    def borders(self, keys: int) -> list[tuple[int, int]]:
        """First and end of the keys of every part."""
        step = -(-keys // self.parts)
        return list(pairwise([*range(0, keys, step), keys]))

    # --- forward ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, q, k, v, *, causal=False, window=None, sink=None, bias=None, pair_bias=None, rows=None):
        o = q.new_empty(*q.shape[:3], v.shape[3])
        lse, width = (
            q.new_empty(q.shape[:3], dtype=torch.float32),
            TILE if self.bug == "as wide as the tutorial" else v.shape[3],
        )
        for b, h, _, head in self.heads(q, k, v, causal, window, sink, bias, pair_bias, rows):
            for i0 in range(0, q.shape[2], TILE):
                i = torch.arange(i0, min(i0 + TILE, q.shape[2]))
                rows_o, lse[b, h, i] = self.merged(head, i, v.dtype)
                o[b, h, i, :width] = rows_o[:, :width].to(o.dtype)
        return o, lse

    def merged(self, head: Head, i: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """o and lse of some rows: of every part, merged one after the other, and last the sink."""
        o, lse = torch.zeros(len(i), head.v.shape[1]), torch.full((len(i),), -INF)
        for first, end in self.borders(len(head.k)):
            part, its = self.part(head, i, first, end, dtype)
            o, lse = self.merge(o, lse, part, its)
        if head.sink is not None:
            at = torch.full((len(i),), head.number)
            if self.bug == "sink of a row":
                # which row of all heads and entries, where which head is wanted
                at = ((head.entry * len(head.sink) + head.number) * len(head.q) + i) % len(head.sink)
            o, lse = self.merge(o, lse, torch.zeros_like(o), head.sink[at])
        return o, lse

    def merge(self, o: Tensor, lse: Tensor, part: Tensor, its: Tensor) -> tuple[Tensor, Tensor]:
        if self.bug == "merge of two that saw nothing":
            highest = torch.maximum(lse, its)
            a, b = torch.exp(lse - highest), torch.exp(its - highest)
            return (a[:, None] * o + b[:, None] * part) / (a + b)[:, None], highest + torch.log(a + b)
        if self.bug == "exp of a difference":
            both = torch.where(lse == -INF, its, lse + torch.log(1 + torch.exp(its - lse)))
        else:
            both = torch.logaddexp(lse, its)
        shift = torch.where(both == -INF, 0.0, both)
        return torch.exp(lse - shift)[:, None] * o + torch.exp(its - shift)[:, None] * part, both

    def part(self, head: Head, i: Tensor, first: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """o and lse of rows i over keys first .. end - 1, tile by tile."""
        m, total = torch.full((len(i),), -INF), torch.zeros(len(i))
        acc = torch.zeros(len(i), head.v.shape[1])
        k = head.k
        if self.bug == "mean of a part of the keys":
            # the mean moves no weight of its part; it does move its lse
            k = k - k[first:end].mean(0)
        step, last = TILE, end
        if self.bug == "bound of the first row":
            # tiles of keys are half as long as those of rows
            step, last = TILE // 2, min(end, int(i[0]) + head.offset + 1)
        elif self.bug == "masked from the next tile on":
            step = 2 * TILE
        for j0 in range(first, last, step):
            j = torch.arange(j0, min(j0 + step, end))
            if self.bug == "tiles of a causal mask" and head.rows is not None and j0 > i[-1] + head.offset:
                continue
            s = self.scores(head, head.q[i], k[j], i, j, (j0 - first) // TILE)
            s = torch.where(self.visible(head, i, j), s, -INF)
            values = head.v[j]
            if self.bug == "padding of the mask is zero" and len(j) < TILE:
                # keys beyond the end are zeros, and so is what the mask adds there
                s = torch.cat([s, torch.zeros(len(i), TILE - len(j))], 1)
                values = torch.cat([values, values.new_zeros(TILE - len(j), values.shape[1])])
            higher = torch.maximum(m, s.amax(1))
            safe = torch.where(higher == -INF, 0.0, higher)
            p, fade = torch.exp(s - safe[:, None]), torch.exp(m - safe)
            total, m = total * fade + p.sum(1), higher
            acc = acc * fade[:, None] + p.to(dtype).float() @ values
        return acc / torch.where(total == 0, 1.0, total)[:, None], m + torch.log(total)

    def visible(self, head: Head, i: Tensor, j: Tensor) -> Tensor:
        found = head.seen(i, j)
        if self.bug == "half a tile has the mask of the other" and len(j) == TILE:
            found[:, TILE // 2 :] = found[:, : TILE // 2]
        elif self.bug == "masked from the next tile on":
            # tiles that begin before the first row's own key are taken for full
            found |= j[None, :] < -(-int(i[0]) // (2 * TILE)) * 2 * TILE
        elif self.bug == "first keys see no mask" and head.rows is not None:
            found |= j[None, :] < FIRST_KEYS
        elif self.bug == "one key more" and head.window is not None:
            found |= i[:, None] + head.offset - j[None, :] == head.window[0] + 1
        return found

    def scores(self, head: Head, q: Tensor, k: Tensor, i: Tensor, j: Tensor, tile: int) -> Tensor:
        if self.bug == "as wide as the tutorial":
            q, k = q[:, :TILE], k[:, :TILE]
        s = q @ k.T * (1.0 if self.bug == "scale of the fallback" else head.scale)
        if head.table is not None:
            distance = i[:, None] + head.offset - j[None, :]
            inside = (distance >= 0) & (distance < len(head.table))
            s = s + torch.where(inside, head.table[distance.clamp(0, len(head.table) - 1)], 0.0)
        if head.pairs is not None:
            columns = j
            if self.bug == "columns of the bias skipped":
                # a tile of keys moves on by the tiles of two blocks of rows
                columns = (j + tile * TILE) % len(head.k)
            pairs = head.pairs[i if len(head.pairs) > 1 else i * 0][:, columns]
            s = s + (pairs / LOG2E if self.bug == "bias in base e" else pairs)
        return s

    # --- backward ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward(self, do, q, k, v, o, lse, *, causal=False, window=None, sink=None, bias=None, pair_bias=None, rows=None):
        grads = {f"d{name}": torch.zeros(x.shape) for name, x in {"q": q, "k": k, "v": v}.items()}
        given = {"dsink": sink, "dbias": bias, "dpair_bias": pair_bias}
        grads |= {name: torch.zeros(x.shape) for name, x in given.items() if x is not None}
        for b, h, kv, head in self.heads(q, k, v, causal, window, sink, bias, pair_bias, rows):
            if self.bug == "keys transposed twice":
                # memory in the order of [S, H, D], read in that of [H, S, D]
                head.k, head.v = (x[b].transpose(0, 1).reshape(x.shape[1:])[kv].float() for x in (k, v))
            dy, y, row = do[b, h].float(), o[b, h].float(), lse[b, h]
            if self.bug == "as wide as the tutorial":
                dy, y, head.v = dy[:, :TILE], y[:, :TILE], head.v[:, :TILE]
            if self.bug == "sink added without a maximum":
                # the saved lse is that of the keys alone
                alone = row + torch.log1p(-torch.exp(head.sink[h] - row))
                row = torch.log(torch.exp(alone) + torch.exp(head.sink[h]))
            delta = (dy * y).sum(1)
            if sink is not None:
                grads["dsink"][h] -= (torch.exp(head.sink[h] - row) * delta).sum()
            for first, end in self.borders(k.shape[2]):
                its, own = row, delta
                if self.bug == "o and lse of a step":
                    everyone = torch.arange(len(dy))
                    part, its = self.part(head, everyone, first, end, v.dtype)
                    own = (dy * part).sum(1)
                dq, dk, dv, ds = self.step(head, dy, its, own, first, end, q.dtype)
                width = TILE if self.bug == "as wide as the tutorial" else None
                grads["dq"][b, h, :, :width] += dq[:, :width]
                grads["dk"][b, kv, first:end, :width] += dk[:, :width]
                grads["dv"][b, kv, first:end, :width] += dv[:, :width]
                self.to_terms(grads, head, ds, first, end)
        likes = {"dq": q, "dk": k, "dv": v}
        return {name: x.to(likes[name].dtype) if name in likes else x for name, x in grads.items()}

    def step(self, head: Head, dy, lse, delta, first: int, end: int, dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """dq, dk, dv and ds of one part of the keys."""
        i, j = torch.arange(len(dy)), torch.arange(first, end)
        k, v = head.k[first:end], head.v[first:end]
        if self.bug == "keys scaled in 16 bits":
            # the factor of the scores goes into the keys, which are rounded again
            scaled = (k * (head.scale * LOG2E)).to(dtype).float()
            p = torch.exp2(head.q @ scaled.T - lse[:, None] * LOG2E)
        else:
            s = self.scores(head, head.q, k, i, j, 0)
            p = torch.exp(s - torch.where(lse == -INF, 0.0, lse)[:, None])
        p = torch.where(self.visible(head, i, j), p, 0.0)
        ds = p * (dy @ v.T - delta[:, None])
        rounded = ds.to(dtype).float()
        return rounded @ k * head.scale, rounded.T @ head.q * head.scale, p.to(dtype).float().T @ dy, ds

    def to_terms(self, grads: dict[str, Tensor], head: Head, ds: Tensor, first: int, end: int) -> None:
        i, j = torch.arange(len(ds)), torch.arange(first, end)
        if "dbias" in grads:
            distance = i[:, None] + head.offset - j[None, :]
            inside = (distance >= 0) & (distance < grads["dbias"].shape[1])
            grads["dbias"][head.number].index_put_((distance[inside],), ds[inside], accumulate=True)
        if "dpair_bias" in grads:
            whole = grads["dpair_bias"]
            b, h = min(head.entry, len(whole) - 1), min(head.number, whole.shape[1] - 1)
            if self.bug == "bias of all stored by each":
                whole[b, h, :, first:end] = ds
            else:
                whole[b, h, :, first:end] += ds if whole.shape[2] > 1 else ds.sum(0)


class OwnSlopes(Slabs):
    """The same with ALiBi built in: the caller says how many heads there are, and no more."""

    def table(self, q, k) -> Tensor:
        heads, power = q.shape[1], 2 ** int(math.log2(q.shape[1]))
        slopes = [2.0 ** (-8 * (h + 1) / power) for h in range(power)]
        slopes += [2.0 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
        if self.bug == "slopes of any number of heads":
            # the rule for powers of two, for all
            slopes = [2.0 ** (-8 * (h + 1) / heads) for h in range(heads)]
        return -torch.tensor(slopes)[:, None] * torch.arange(k.shape[2])

    def forward(self, q, k, v, *, causal=False):
        return super().forward(q, k, v, causal=causal, bias=self.table(q, k))

    def backward(self, do, q, k, v, o, lse, *, causal=False):
        found = super().backward(do, q, k, v, o, lse, causal=causal, bias=self.table(q, k))
        return {name: found[name] for name in ("dq", "dk", "dv")}


IN_PARTS = ("exp of a difference", "mean of a part of the keys", "merge of two that saw nothing", "o and lse of a step")
