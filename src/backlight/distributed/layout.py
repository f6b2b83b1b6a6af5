"""Who holds what: how a sequence is cut over the ranks, and put together again.

contiguous: rank r holds the r-th of `world` chunks. Causal rows at the end see more keys, so the last rank works longest.
zigzag:     the sequence is cut into 2 * world chunks; rank r holds chunks r and 2 * world - 1 - r, one early and one late, so
            that causal work is the same everywhere. World 3::

                chunk   0  1  2  3  4  5
                rank    0  1  2  2  1  0

A chunk has ceil(length / chunks) positions, the last ones fewer or none: the rule of `torch.chunk` and of `DTensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

Range = tuple[int, int]
Pieces = tuple[tuple[Range, ...], ...]
# of packed sequences: cu_seqlens of the rows and of the keys
Borders = tuple[tuple[int, ...], tuple[int, ...]]


def _chunks(length: int, count: int) -> list[Range]:
    size = -(-length // count)
    return [(min(c * size, length), min((c + 1) * size, length)) for c in range(count)]


def _contiguous(length: int, world: int) -> list[list[Range]]:
    return [[chunk] for chunk in _chunks(length, world)]


def _zigzag(length: int, world: int) -> list[list[Range]]:
    chunks = _chunks(length, 2 * world)
    return [[chunks[r], chunks[2 * world - 1 - r]] for r in range(world)]


LAYOUTS: dict[str, Callable[[int, int], list[list[Range]]]] = {"contiguous": _contiguous, "zigzag": _zigzag}


@lru_cache(maxsize=256)
def pieces(layout: str, length: int, world: int) -> Pieces:
    """For every rank the ranges of positions it holds, ascending, empty ones left out and neighbours joined."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return tuple(_joined(ranges) for ranges in LAYOUTS[layout](length, world))


def _joined(ranges: list[Range]) -> tuple[Range, ...]:
    out: list[Range] = []
    for start, end in ranges:
        if start == end:
            continue
        if out and out[-1][1] == start:
            start = out.pop()[0]
        out.append((start, end))
    return tuple(out)


def lengths(layout: str, length: int, world: int) -> tuple[int, ...]:
    """How many positions each rank holds."""
    return tuple(sum(end - start for start, end in ranges) for ranges in pieces(layout, length, world))


def cut(tensor: Tensor, dim: int, ranges: Sequence[Range]) -> Tensor:
    """The positions in `ranges` along `dim`, one after another."""
    parts = [tensor.narrow(dim, start, end - start) for start, end in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else tensor.narrow(dim, 0, 0)


def assemble(shards: Sequence[Tensor], dim: int, layout: str) -> Tensor:
    """The whole sequence from the shards of all ranks, in rank order: the inverse of `cut`."""
    length = sum(shard.shape[dim] for shard in shards)
    shape = list(shards[0].shape)
    shape[dim] = length
    whole = shards[0].new_empty(shape)
    for shard, ranges in zip(shards, pieces(layout, length, len(shards)), strict=True):
        place(whole, dim, ranges, shard)
    return whole


def place(whole: Tensor, dim: int, ranges: Sequence[Range], shard: Tensor) -> None:
    """whole[ranges] = shard along `dim`."""
    taken = 0
    for start, end in ranges:
        whole.narrow(dim, start, end - start).copy_(shard.narrow(dim, taken, end - start))
        taken += end - start


def positions_of(ranges: Sequence[Range], device: torch.device | str | None = None) -> Tensor:
    """The positions a rank holds: int64 [length of its shard]."""
    return torch.cat([torch.arange(0, device=device), *(torch.arange(start, end, device=device) for start, end in ranges)])
