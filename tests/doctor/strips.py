"""A fourth flash attention of the tests' own, with bugs that others had in offsets, lists of keys, groups, splits and sums.

Forward: rows in tiles, keys in two splits where a bug lives in their merge, each split in tiles with a running maximum.
Backward: row tile by row tile, with scratch for delta, dk and dv of every query head and a sum over groups. `bug` is one line
of the kind that a public kernel got wrong (`wild_strips` has the list), "" for none. It shares nothing with the doctor, nor
with `tiles` and `slabs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

ROWS, KEYS = 16, 8
INF = math.inf
# rows that an offset reaches before it wraps
REACH = 24
# query heads that one program of a decoding kernel takes
HEADS_AT_ONCE = 2


class Strips:
    """forward and backward, with one bug or none."""

    def __init__(self, bug: str = ""):
        self.bug = bug

    def group_of(self, h: int, group: int) -> int:
        """The key/value head of a query head."""
        if self.bug == "tiles of heads cross groups":
            # that of the first head of the tile
            return h // HEADS_AT_ONCE * HEADS_AT_ONCE // group
        return h // group

    # --- forward ----------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, q, k, v, *, causal=False, window=None, pair_bias=None, sink=None):
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        lse = q.new_zeros(q.shape[:3], dtype=torch.float32)
        splits = 2 if self.bug in ("", "statistics by fixed strides") else 1
        for b, h, i in tiles(q):
            if self.bug == "first head alone" and causal and h:
                continue
            kv = self.group_of(h, q.shape[1] // k.shape[1])
            see = Sight(i, q.shape[2], k.shape[2], causal, window, added(pair_bias, b, h))
            parts = [
                self.part(see, q[b, h, i].float(), k[b, kv].float(), v[b, kv].float(), span, v.dtype)
                for span in see.spans(splits)
            ]
            outs, lses = [part[0] for part in parts], [part[1] for part in parts]
            if sink is not None:
                outs, lses = [*outs, torch.zeros_like(outs[0])], [*lses, torch.full_like(lses[0], float(sink[h]))]
            o[b, h, i], lse[b, h, i] = merge(outs, lses, o.dtype)
        if self.bug == "statistics by fixed strides":
            self.combine(o, lse, q, k, v, causal, window, pair_bias)
        return o, lse

    def part(self, see: Sight, q, k, v, span: range, dtype) -> tuple[Tensor, Tensor]:
        """o and lse of some rows over a span of keys."""
        m, total = torch.full((len(q),), -INF), torch.zeros(len(q))
        acc = torch.zeros(len(q), v.shape[1])
        for j in see.key_tiles(span):
            s = q @ k[j].T * q.shape[1] ** -0.5 + see.bias(j)
            seen = see.seen(j)
            if self.bug == "left edge of the window unmasked" and int(j[-1]) <= int(see.i[0]) + see.offset:
                # before the diagonal nothing needs a mask, it was thought
                seen = torch.ones_like(seen)
            s = torch.where(seen, s, -INF)
            higher = torch.maximum(m, s.amax(1))
            safe = torch.where(higher == -INF, 0.0, higher)
            p, fade = torch.exp(s - safe[:, None]), torch.exp(m - safe)
            if self.bug == "maximum of a hidden tile":
                # what is safe to subtract is kept as the maximum
                higher = safe
            total, m = total * fade + p.sum(1), higher
            acc = acc * fade[:, None] + p.to(dtype).float() @ v[j]
            if self.bug == "divided at every tile":
                acc = acc / torch.where(total == 0, 1.0, total)[:, None]
        if self.bug != "divided at every tile":
            acc = acc / torch.where(total == 0, 1.0, total)[:, None]
        return acc, m + torch.log(total)

    def combine(self, o, lse, q, k, v, causal, window, pair_bias) -> None:
        """A second kernel merges the splits; where their lse lies it is told, the first one takes for granted."""
        batch, heads, rows = q.shape[:3]
        outs = q.new_zeros(2, *o.shape, dtype=torch.float32)
        # [batch, heads, split, rows] was asked for
        kept = q.new_zeros(batch * heads * 2 * rows, dtype=torch.float32)
        for b, h, i in tiles(q):
            kv = self.group_of(h, heads // k.shape[1])
            see = Sight(i, rows, k.shape[2], causal, window, added(pair_bias, b, h))
            for n, span in enumerate(see.spans(2)):
                part, its = self.part(see, q[b, h, i].float(), k[b, kv].float(), v[b, kv].float(), span, v.dtype)
                outs[n, b, h, i] = part
                # [split, batch, heads, rows]
                kept[((n * batch + b) * heads + h) * rows + i] = its
        read = kept.view(batch, heads, 2, rows)
        o[:], lse[:] = merge(list(outs), [read[:, :, 0], read[:, :, 1]], o.dtype)

    # --- backward ---------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def backward(self, do, q, k, v, o, lse, *, causal=False, window=None, pair_bias=None, sink=None):
        group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
        dq = torch.zeros(q.shape)
        # of every query head, summed over groups below
        dk, dv = (torch.zeros(*q.shape[:2], *x.shape[2:]) for x in (k, v))
        dpairs = None if pair_bias is None else torch.zeros(pair_bias.shape)
        dsink = None if sink is None else torch.zeros(sink.shape)
        for b, h, i in tiles(q):
            kv = h // group
            see = Sight(i, q.shape[2], k.shape[2], causal, window, added(pair_bias, b, h))
            j = torch.arange(k.shape[2])
            a, c, d, dy = (x.float() for x in (q[b, h, i], k[b, kv], v[b, kv], do[b, h, i]))
            at = i % REACH if self.bug == "offsets of delta wrap" else i
            delta = (do[b, h, at].float() * o[b, h, at].float()).sum(1)
            if sink is not None:
                terms = torch.exp(sink[h].float() - lse[b, h, i]) * delta
                dsink[h] -= (terms.to(q.dtype).float() if self.bug == "terms of the sink rounded" else terms).sum()
            row = torch.where(lse[b, h, i] == -INF, 0.0, lse[b, h, i])
            p = torch.where(see.seen(j), torch.exp(a @ c.T * scale + see.bias(j) - row[:, None]), 0.0)
            ds = p * (dy @ d.T - delta[:, None])
            narrow = (ds.to(q.dtype).float() * scale if self.bug == "narrowed before the scale" else ds * scale).to(q.dtype)
            dq[b, h, i] = narrow.float() @ c
            into = j
            if self.bug == "columns of the list beyond the keys":
                # keys stand in a list of half as many entries again, behind those that are not used
                into = j[j + len(j) // 2 < len(j)]
            dk[b, h, into] += (narrow.float().T @ a)[into]
            dv[b, h, into] += (p.to(v.dtype).float().T @ dy)[into]
            if dpairs is not None:
                self.to_pairs(dpairs, b, h, i, ds)
        sums = {"dk": dk.unflatten(1, (-1, group)).sum(2).to(k.dtype), "dv": dv.unflatten(1, (-1, group)).sum(2).to(v.dtype)}
        found = {"dq": dq.to(q.dtype), **sums, "dpair_bias": dpairs, "dsink": dsink}
        return {name: x for name, x in found.items() if x is not None}

    def to_pairs(self, whole: Tensor, b: int, h: int, i: Tensor, ds: Tensor) -> None:
        own = whole[min(b, len(whole) - 1), min(h, whole.shape[1] - 1)]
        if len(own) > 1:
            own[i] += ds
        elif self.bug == "rows of a shared bias stored":
            # the stride of rows is 0, and the last one stored wins
            own[0] = ds[-1]
        else:
            own[0] += ds.sum(0)


class OutputAlone(Strips):
    """The same, for those that return no lse."""

    def forward(self, q, k, v, *, causal=False):
        return super().forward(q, k, v, causal=causal)[0]


class Sight:
    """What some rows see, and what is added to their scores."""

    def __init__(self, i: Tensor, rows: int, keys: int, causal: bool, window, pairs: Tensor | None):
        self.i, self.keys, self.offset = i, keys, keys - rows
        left, right = window or (None, None)
        self.left, self.right, self.pairs = left, 0 if causal else right, pairs

    def seen(self, j: Tensor) -> Tensor:
        distance = self.i[:, None] + self.offset - j[None, :]
        found = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            found &= distance <= self.left
        if self.right is not None:
            found &= distance >= -self.right
        return found

    def bias(self, j: Tensor) -> Tensor | float:
        return 0.0 if self.pairs is None else self.pairs[self.i if len(self.pairs) > 1 else self.i * 0][:, j]

    def spans(self, count: int) -> list[range]:
        step = -(-self.keys // count)
        return [range(first, min(first + step, self.keys)) for first in range(0, self.keys, step)]

    def key_tiles(self, span: range) -> Iterator[Tensor]:
        first = span.start
        if self.left is not None:
            first = max(first, (int(self.i[0]) + self.offset - self.left) // KEYS * KEYS)
        end = span.stop
        if self.right is not None:
            end = min(end, int(self.i[-1]) + self.offset + self.right + 1)
        for j0 in range(first, end, KEYS):
            yield torch.arange(j0, min(j0 + KEYS, end))


def merge(outs: list[Tensor], lses: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    both = torch.stack(lses).logsumexp(0)
    shift = torch.where(both == -INF, 0.0, both)
    whole = sum(torch.exp(lse - shift)[..., None] * out for out, lse in zip(outs, lses, strict=True))
    return whole.to(dtype), both


def added(pair_bias: Tensor | None, b: int, h: int) -> Tensor | None:
    if pair_bias is None:
        return None
    return pair_bias[min(b, len(pair_bias) - 1), min(h, pair_bias.shape[1] - 1)].float()


def tiles(x: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """Batch entry, head and rows of every tile."""
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            for i0 in range(0, x.shape[2], ROWS):
                yield b, h, torch.arange(i0, min(i0 + ROWS, x.shape[2]))
