"""The kernels of `tiles` on packed sequences [T, H, D], and bugs that others had with the borders between them.

A sequence is a view into the packed tensors, so that an offset beyond its end reaches its neighbour. lse is [H, T]; in the
backward lse and delta lie in rows that are padded to whole tiles, each sequence at a tile of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from tiles import TILE, Options, Tiles, store, tiles_of
from torch import Tensor


class PackedTiles(Tiles):
    """forward and backward of packed sequences, with one bug or none."""

    @torch.no_grad()
    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k, *, causal=False, window=None):
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
        for rows, keys in self._sequences(cu_seqlens_q, cu_seqlens_k):
            if self.bug == "no keys, stored elsewhere" and keys.start == keys.stop:
                continue
            a, b, c, o = sequence(q, rows), sequence(k, keys), sequence(v, keys), sequence(out, rows)
            options = self._of(a, b, c, causal, window, cu_seqlens_q, cu_seqlens_k)
            for _, h, i0 in tiles_of(a):
                self._forward(options, a, b, c, None, None, o, lse[None, :, rows], 0, h, i0)
        if self.bug == "no keys, stored elsewhere":
            self._without_keys(out, lse, cu_seqlens_q, cu_seqlens_k)
        return out, lse

    def _without_keys(self, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
        """o and lse of sequences without keys, of programs that end early; lse as if it were [B, H, S]."""
        longest = int(cu_q.diff().max())
        for number, (rows, keys) in enumerate(self._sequences(cu_q, cu_k)):
            if keys.start == keys.stop:
                out[rows] = 0
                for h in range(len(lse)):
                    i = torch.arange(rows.stop - rows.start)
                    at = (number * len(lse) + h) * longest + i
                    store(lse, at, torch.full(i.shape, -torch.inf), torch.ones_like(i, dtype=torch.bool))

    def _sequences(self, cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[slice, slice]]:
        at = list(zip(cu_q.tolist(), cu_k.tolist(), strict=True))
        if self.bug == "first boundary alone":
            at = [*at[:2], at[-1]]
        for (q0, k0), (q1, k1) in pairwise(at):
            yield slice(q0, q1), slice(k0, k1)

    def _of(self, q, k, v, causal, window, cu_q: Tensor, cu_k: Tensor) -> Options:
        options = self._options(q, k, v, causal, window, None)
        if self.bug == "diagonal of the longest":
            options.offset = int(cu_k.diff().max() - cu_q.diff().max())
        elif self.bug == "rows of all sequences counted":
            options.offset = k.shape[2] - int(cu_q[-1])
        elif self.bug == "causal forgotten":
            options.causal = False
        return options

    @torch.no_grad()
    def backward(self, do, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_k, *, causal=False, window=None):
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        count = len(cu_seqlens_q) - 1
        kept, delta = (q.new_zeros(q.shape[1], len(q) + (count + 1) * 2 * TILE, dtype=torch.float32) for _ in range(2))
        sequences = list(enumerate(self._sequences(cu_seqlens_q, cu_seqlens_k)))
        for number, (rows, keys) in sequences:
            y, dy = sequence(o, rows), sequence(do, rows)
            options = self._of(y, sequence(k, keys), sequence(v, keys), causal, window, cu_seqlens_q, cu_seqlens_k)
            at = padded(number, rows, 2 * TILE if self.bug == "rows padded to other tiles" else TILE)
            kept[:, at : at + options.sq] = lse[:, rows]
            self._deltas(options, dy, y, delta[None, :, at:])
        for number, (rows, keys) in sequences:
            a, b, c, dy = sequence(q, rows), sequence(k, keys), sequence(v, keys), sequence(do, rows)
            options = self._of(a, b, c, causal, window, cu_seqlens_q, cu_seqlens_k)
            at = padded(number, rows, TILE)
            saved = [x[None, :, at:] for x in (kept, delta)]
            place = rows if self.bug != "dq of each at the first" else slice(0, rows.stop - rows.start)
            if self.bug == "no rows, nothing stored" and options.sq == 0:
                continue
            for _, h, i0 in tiles_of(a):
                self._dq(options, dy, a, b, c, *saved, None, None, sequence(dq, place), None, None, 0, h, i0)
            parts = [x.new_empty(1, q.shape[1], *x.shape[2:], dtype=torch.float32) for x in (b, c)]
            for _, h, j0 in tiles_of(parts[0]):
                self._dkdv(options, dy, a, b, c, *saved, None, parts, 0, h, j0)
            for x, part in zip((dk, dv), parts, strict=True):
                sequence(x, keys).copy_(part.unflatten(1, (-1, options.group)).sum(2))
        return {"dq": dq, "dk": dk, "dv": dv}


def sequence(x: Tensor, positions: slice) -> Tensor:
    """[T, H, D] -> [1, H, S, D], a view."""
    return x[positions].transpose(0, 1)[None]


def padded(number: int, rows: slice, tile: int) -> int:
    """Where the rows of a sequence begin among those that are padded to tiles."""
    return (rows.start + number * tile) // tile * tile
