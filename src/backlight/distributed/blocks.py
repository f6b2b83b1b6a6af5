"""Geometry of a sharded problem: which blocks of rows x keys two ranks share, each as an ordinary attention call.

Rows ending at position e_q (exclusive, eq. 1) against keys ending at e_k are aligned to the bottom right of their own block, so
a distance inside the block is smaller by d0 = e_q - e_k than the distance in the whole problem. Hence inside the block

    window = (left - d0, right + d0)        bias_origin = bias_origin + d0

once rows that see none of the keys, and keys seen by none of the rows, have been cut off: then both sides are >= 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from backlight.distributed.layout import Borders, Range, lengths, pieces, positions_of
from backlight.spec import AttentionSpec, Segment, packed_segments


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [q0, q1) of a rank's shard against keys [k0, k1) of another's; several packed segments when it has `borders`."""

    q0: int
    q1: int
    k0: int
    k1: int
    spec: AttentionSpec
    borders: Borders | None = None

    @property
    def pairs(self) -> int:
        """Visible (row, key) pairs of one head."""
        if self.borders is None:
            return self.spec.visible_pairs(self.q1 - self.q0, self.k1 - self.k0)
        return sum(self.spec.visible_pairs(z.sq, z.sk) for z in packed_segments(*self.borders))


@dataclass(frozen=True, slots=True)
class Shards:
    """One attention problem cut over `world` ranks. borders: of packed sequences; n_bias: length of the table."""

    spec: AttentionSpec
    layout: str
    world: int
    sq: int
    sk: int
    borders: Borders | None = None
    n_bias: int = 0

    @property
    def segments(self) -> tuple[Segment, ...]:
        if self.borders is None:
            return (Segment(0, 0, self.sq, 0, self.sk),)
        return packed_segments(*self.borders)

    def rows(self, rank: int) -> tuple[Range, ...]:
        return pieces(self.layout, self.sq, self.world)[rank]

    def keys(self, rank: int) -> tuple[Range, ...]:
        return pieces(self.layout, self.sk, self.world)[rank]

    def n_rows(self, rank: int) -> int:
        return lengths(self.layout, self.sq, self.world)[rank]

    def n_keys(self, rank: int) -> int:
        return lengths(self.layout, self.sk, self.world)[rank]

    def blocks(self, rank: int, source: int) -> tuple[Block, ...]:
        """The calls that make up rows of `rank` against keys of `source`; empty when no key is visible."""
        return _blocks(self, rank, source)

    def sees(self, rank: int, source: int) -> bool:
        return bool(self.blocks(rank, source))

    def pairs(self, rank: int) -> int:
        """Visible pairs of one head over all keys: the work of a rank."""
        return sum(block.pairs for source in range(self.world) for block in self.blocks(rank, source))

    def counts(self, rank: int, device: torch.device) -> Tensor:
        """n_i of eq. 3 for the rows of a rank, over the keys of all ranks: int32."""
        return _counts(self, rank, device)


@lru_cache(maxsize=128)
def _counts(shards: Shards, rank: int, device: torch.device) -> Tensor:
    counts = torch.cat([shards.spec.visible_counts(z.sq, z.sk) for z in shards.segments])
    return counts[positions_of(shards.rows(rank))].to(device, torch.int32)


@lru_cache(maxsize=4096)
def _blocks(shards: Shards, rank: int, source: int) -> tuple[Block, ...]:
    single = [block for segment in shards.segments for block in _cut(shards, rank, source, segment)]
    if len(single) > 1:
        return _packed(shards, single) if shards.borders is not None else _joined(shards, rank, source) or tuple(single)
    return tuple(single)


def _cut(shards: Shards, rank: int, source: int, segment: Segment) -> Iterator[Block]:
    for i0, i1, row in _overlaps(shards.rows(rank), segment.q0, segment.q1):
        for j0, j1, key in _overlaps(shards.keys(source), segment.k0, segment.k1):
            block = _block(shards, segment.sq, segment.sk, i0, i1, j0, j1, row, key)
            if block is not None:
                yield block


def _overlaps(ranges: tuple[Range, ...], start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Where `ranges` meet [start, end): (first, last + 1) counted from `start`, and where that lies in the shard."""
    taken = 0
    for a, b in ranges:
        lo, hi = max(a, start), min(b, end)
        if lo < hi:
            yield lo - start, hi - start, taken + lo - a
        taken += b - a


def _block(shards: Shards, sq: int, sk: int, i0: int, i1: int, j0: int, j1: int, row: int, key: int) -> Block | None:
    """Rows [i0, i1) and keys [j0, j1) of a segment, found at `row` and `key` of the shards, cut to what is visible."""
    spec = shards.spec
    first_row, end_row = spec.row_range(j0, j1, sq, sk)
    first_row, end_row = max(i0, first_row), min(i1, end_row)
    if first_row >= end_row:
        return None
    first_key, end_key = spec.key_range(first_row, end_row, sq, sk)
    first_key, end_key = max(j0, first_key), min(j1, end_key)
    if first_key >= end_key:
        return None
    m, n = end_row - first_row, end_key - first_key
    ahead = end_row + sk - sq - end_key
    local = spec.replace(causal=False, window=_window(spec, ahead, m, n))
    # columns that distances 1 - m .. n - 1 of the block read
    origin = spec.bias_origin + ahead
    met = spec.bias and origin + n - 1 >= 0 and origin + 1 - m < shards.n_bias
    local = local.replace(bias=met, bias_origin=origin if met else 0)
    row, key = row + first_row - i0, key + first_key - j0
    return Block(row, row + m, key, key + n, local)


def _window(spec: AttentionSpec, ahead: int, m: int, n: int) -> tuple[int | None, int | None]:
    """The window as seen from inside a block of m rows and n keys; None where it hides nothing there."""
    left = None if spec.left is None or spec.left - ahead >= n - 1 else spec.left - ahead
    right = None if spec.right is None or spec.right + ahead >= m - 1 else spec.right + ahead
    return left, right


def _joined(shards: Shards, rank: int, source: int) -> tuple[Block, ...] | None:
    """All rows against all keys of two shards as one call, where one window describes what is visible.

    Keys lie in ascending order in a shard, so a row sees a range of them. Causal zigzag shards always join: their own block is
    causal again, and of two different ranks one half sees all of the other's half.
    """
    spec = shards.spec
    rows, keys = positions_of(shards.rows(rank)) + (shards.sk - shards.sq), positions_of(shards.keys(source))
    if spec.bias and _meets_table(spec, rows, keys, shards.n_bias):
        return None
    first = torch.zeros_like(rows) if spec.left is None else torch.searchsorted(keys, rows - spec.left)
    end = torch.full_like(rows, len(keys)) if spec.right is None else torch.searchsorted(keys, rows + spec.right, right=True)
    seeing = (first < end).nonzero().flatten()
    q0, q1 = int(seeing[0]), int(seeing[-1]) + 1
    k0, k1 = int(first[q0]), int(end[q1 - 1])
    m, n = q1 - q0, k1 - k0
    first, end = first[q0:q1] - k0, end[q0:q1] - k0
    aligned = torch.arange(m) + n - m
    lefts, rights = (aligned - first)[first > 0], (end - 1 - aligned)[end < n]
    left, right = int(lefts[0]) if len(lefts) else None, int(rights[0]) if len(rights) else None
    if (left or 0) < 0 or (right or 0) < 0:
        return None
    local = spec.replace(causal=False, window=(left, right), bias=False, bias_origin=0)
    i = torch.arange(m)
    same = torch.equal(local.first_key(i, m, n), first) and torch.equal(local.last_key(i, m, n) + 1, end)
    return (Block(q0, q1, k0, k1, local),) if same else None


def _meets_table(spec: AttentionSpec, rows: Tensor, keys: Tensor, n_bias: int) -> bool:
    columns = spec.bias_origin + int(rows[0] - keys[-1]), spec.bias_origin + int(rows[-1] - keys[0])
    return columns[1] >= 0 and columns[0] < n_bias


def _packed(shards: Shards, single: list[Block]) -> tuple[Block, ...]:
    """Blocks of one spec that follow each other in rows and in keys become one packed call."""
    groups: list[list[Block]] = []
    for block in single:
        group = next((g for g in groups if g[-1].spec == block.spec and g[-1].q1 <= block.q0 and g[-1].k1 <= block.k0), None)
        if group is None:
            groups.append([block])
        else:
            group.append(block)
    return tuple(_pack(group) for group in groups)


def _pack(group: list[Block]) -> Block:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    cu_q, cu_k = [0], [0]
    for block in group:
        # rows and keys between two blocks: sequences without keys, and without rows
        if block.q0 - first.q0 > cu_q[-1]:
            cu_q.append(block.q0 - first.q0)
            cu_k.append(cu_k[-1])
        if block.k0 - first.k0 > cu_k[-1]:
            cu_q.append(cu_q[-1])
            cu_k.append(block.k0 - first.k0)
        cu_q.append(block.q1 - first.q0)
        cu_k.append(block.k1 - first.k0)
    return Block(first.q0, last.q1, first.k0, last.k1, first.spec, (tuple(cu_q), tuple(cu_k)))
