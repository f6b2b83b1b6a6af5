"""Device code of masks by row intervals: which tiles a program visits, and which of their pairs are seen.

What kernels read was prepared for them by tiles (`backends/intervals/kernels.py` says how it lies in memory). Without a mask
the same functions hand out the steps of a span, and nothing is read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backlight.backends.intervals.kernels import KINDS


class Mask(NamedTuple):
    """A mask in memory: intervals by key tiles, lists of tiles to visit, how many of them are cut, the first key tile of each
    packed sequence, pos. pos_batch: 1 where each batch entry has its own pos, else 0."""

    folded: Any
    live: Any
    counts: Any
    first_key_tiles: Any
    pos: Any
    pos_batch: Any


class Intervals(NamedTuple):
    """The mask of one head and sequence: where the intervals of its first key tile and the pos of its first row lie."""

    ends: Any
    pos: Any


class Visits(NamedTuple):
    """Steps of a main loop from start to stop, a tile each. Under a mask the tiles stand in a list of `most` entries: those
    that it cuts at the front, the others at the end in reverse."""

    start: Any
    stop: Any
    live: Any
    cut: Any
    most: Any


@triton.jit
def mask_number(b, h, geometry):
    """Which mask belongs to a head; 64-bit."""
    return tl.cast(b * geometry.mask_batch + h * geometry.mask_head, tl.int64)


@triton.jit
def tiles_of(length, n_segments, V: tl.constexpr, B: tl.constexpr):
    """Tiles of one head as `Launch.tiles` counts them."""
    tiles = tl.cdiv(length, B)
    if V.VARLEN:
        tiles = length // B + n_segments
    return tiles


@triton.jit
def intervals_of(mask, b, h, segment, sq, sk, n_segments, geometry, V: tl.constexpr, BN: tl.constexpr):
    """sq, sk: lengths of whole tensors."""
    intervals = Intervals(0, 0)
    if V.INTERVALS > 0:
        tile = mask_number(b, h, geometry) * (tiles_of(sk, n_segments, V, BN) + 1)
        if V.VARLEN:
            tile += tl.load(mask.first_key_tiles + segment.number)
        pos = mask.pos + tl.cast(b * mask.pos_batch, tl.int64) * sq + segment.q_start
        intervals = Intervals(mask.folded + tile * (2 * V.INTERVALS * BN), pos)
    return intervals


@triton.jit
def in_intervals(row, key, intervals, sq, V: tl.constexpr, BN: tl.constexpr):
    """Whether rows see keys as far as the mask says, both counted in their sequence; keys end with the last tile."""
    if V.POS:
        row = tl.load(intervals.pos + row, mask=(row >= 0) & (row < sq), other=0)
    ends = intervals.ends + (key // BN * (2 * V.INTERVALS * BN) + key % BN)
    seen = (row >= tl.load(ends)) & (row < tl.load(ends + BN))
    if V.INTERVALS == 2:
        seen = seen & ((row < tl.load(ends + 2 * BN)) | (row >= tl.load(ends + 3 * BN)))
    return seen


@triton.jit
def visits_of(span, mask, b, h, tile, owned, others, geometry, V: tl.constexpr, B: tl.constexpr):
    """What the program visits that owns a tile, one of `owned` in a mask, of `others` tiles of size B of the other kind."""
    visits = Visits(span.start, span.stop, 0, 0, 0)
    if V.INTERVALS > 0:
        owner = mask_number(b, h, geometry) * owned + tile
        most = tl.maximum(others, 1)
        cut = tl.load(mask.counts + owner * 2)
        steps = cut + tl.load(mask.counts + owner * 2 + 1)
        visits = Visits(0, steps * B, mask.live + owner * most, cut, most)
    if V.LIVE:
        owner = tl.cast(b * geometry.heads + h, tl.int64) * owned + tile
        visits = Visits(0, tl.load(mask.counts + owner) * B, mask.live + owner * tl.maximum(others, 1), 0, 0)
    return visits


@triton.jit
def visited(at, visits, V: tl.constexpr, B: tl.constexpr):
    """(where the tile of a step begins, whether the mask cuts it)."""
    begin = at
    is_cut = False
    if V.INTERVALS > 0:
        step = at // B
        is_cut = step < visits.cut
        entry = tl.load(visits.live + tl.where(is_cut, step, visits.most - 1 - step + visits.cut))
        begin = entry // KINDS * B
    if V.LIVE:
        begin = tl.load(visits.live + at // B) * B
    return begin, is_cut
