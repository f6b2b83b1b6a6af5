"""Backward with entmax: the tiles in which it leaves a weight, and lists of those for kernels that own keys (eq. 85).

Thresholds are known: one sweep over the keys, by the kernel of the forward, finds what lives and W of rows, which a gradient at
lse needs. The lists are those of a mask by row intervals (intervals/kernels.py), into which causal and window are folded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.forward.host import look_for_living
from backlight.backends.hopper.launch import Launch
from backlight.backends.intervals.arguments import Packing as Borders
from backlight.backends.intervals.kernels import NO_ROW, appended, classified, segment_at, sequence_of
from backlight.backends.intervals.tiles import CHUNK, LiveTiles

# rows that a byte of the forward stands for
GRANULE = tl.constexpr(64)


@dataclass(frozen=True, slots=True)
class Alive:
    """Bytes of the forward's blocks (`forward.entmax.Living`), the keys of a block, the consumers of its tiles, W of rows."""

    bytes: Tensor
    block_n: int
    consumers: int
    slopes: Tensor


class Tiles(NamedTuple):
    """Tiles of a kernel of the backward: rows, keys, and how many tiles of rows there are."""

    block_m: int
    block_n: int
    row_tiles: int


class Variant(NamedTuple):
    """What is compiled in: what causal and window cut, packed sequences; the forward's consumers and keys of a block."""

    LEFT: bool
    RIGHT: bool
    VARLEN: bool
    CONSUMERS: int
    BLOCK: int


def look(launch: Launch, lse: Tensor) -> Alive:
    living, config = look_for_living(launch, lse)
    assert living.slopes is not None
    return Alive(living.live, config.block_n, config.consumers, living.slopes)


@triton.jit
def fold_keys(folded_ptr, own, last, left, right, V: tl.constexpr, BN: tl.constexpr):
    """(first, end) of the rows that see each key of the program's tile, which are stored; none for keys that do not exist."""
    lanes = tl.arange(0, BN)
    key = own.tile * BN + lanes
    shift = own.sk - own.sq
    first = key * 0
    end = first + own.sq
    if V.RIGHT:
        first = tl.maximum(first, key - right - shift)
    if V.LEFT:
        end = tl.minimum(end, key + left + 1 - shift)
    holds = (key < own.sk) & (first < end) & (last == 0)
    first = tl.where(holds, first, NO_ROW)
    end = tl.where(holds, end, 0)
    tl.store(folded_ptr + lanes, first)
    tl.store(folded_ptr + BN + lanes, end)
    return first, end


@triton.jit
def any_alive(bytes_ptr, other, own, first_block, key_blocks, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Which tiles [BM, BN] of the program's keys and rows `other` hold a block that lives."""
    DOWN: tl.constexpr = BM // GRANULE
    ACROSS: tl.constexpr = BN // V.BLOCK
    alive = other * 0
    for i in tl.static_range(DOWN):
        for j in tl.static_range(ACROSS):
            row = other * DOWN + i
            key = own.tile * ACROSS + j
            inside = (row * GRANULE < own.sq) & (key * V.BLOCK < own.sk)
            place = (first_block + row).to(tl.int64) * key_blocks + key
            alive |= tl.load(bytes_ptr + place, mask=inside, other=0).to(tl.int32)
    return alive


class Given(NamedTuple):
    """The forward's first tile of each packed sequence; borders of those and their first tiles here."""

    first_tiles_ptr: Any
    packing: Any


class Made(NamedTuple):
    """`LiveTiles`, and where their number is added."""

    folded_ptr: Any
    live_ptr: Any
    counts_ptr: Any
    total_ptr: Any


class Sizes(NamedTuple):
    """Packed sequences, how far window and causal reach, the forward's blocks of rows and keys, entries of a list, and where
    the number of all of them is."""

    n_segments: Any
    left: Any
    right: Any
    row_blocks: Any
    key_blocks: Any
    most: Any
    total_at: Any


@triton.jit(do_not_specialize=["sq", "sk"])
def _alive_kernel(
    bytes_ptr, given, made, sq, sk, sizes, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program (key tile, head): the rows that see its keys, and the list of the row tiles in which it lives."""
    tile = tl.program_id(0)
    m = tl.program_id(1)
    tiles = tl.num_programs(0)
    packing = given.packing
    # not a constant, whatever it is
    n_segments = sizes.n_segments + tile * 0
    own = sequence_of(tl.minimum(tile, tiles - 2), packing, sq, sk, n_segments, V.VARLEN, False)
    at = tl.cast(m, tl.int64) * tiles + tile
    first, end = fold_keys(made.folded_ptr + at * (2 * BN), own, tile == tiles - 1, sizes.left, sizes.right, V, BN)
    extremes = tl.min(first, 0), tl.max(first, 0), tl.min(end, 0), tl.max(end, 0)
    first_block = m * sizes.row_blocks
    if V.VARLEN:
        z = tl.minimum(segment_at(tile, packing.cu_key_tiles, n_segments), n_segments - 1)
        first_block += tl.load(given.first_tiles_ptr + z) * V.CONSUMERS
    live_ptr = made.live_ptr + at * sizes.most
    begin = tl.where(extremes[0] < extremes[3], extremes[0], 0) // BM
    n = tl.where(extremes[0] < extremes[3], tl.cdiv(extremes[3], BM), 0)
    partial = 0
    full = 0
    for start in range(begin, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        row = other * BM
        empty, kind = classified(extremes, extremes, row, tl.minimum(row + BM, own.sq), 1)
        alive = any_alive(bytes_ptr, other, own, first_block, sizes.key_blocks, V, BM, BN)
        partial, full = appended(live_ptr, sizes.most, partial, full, other, (other < n) & (alive > 0), empty, kind)
    tl.store(made.counts_ptr + at * 2, partial)
    tl.store(made.counts_ptr + at * 2 + 1, full)
    tl.atomic_add(made.total_ptr + sizes.total_at, tl.cast(partial + full, tl.float32), sem="relaxed")


def alive_tiles(launch: Launch, alive: Alive, packing: Packing, tiles: Tiles, total: tuple[Tensor, int]) -> LiveTiles:
    """The row tiles that each key tile visits; how many there are is added to a place of a float tensor."""
    call, spec = launch.call, launch.call.spec
    heads, owned, most = launch.batch * launch.heads, launch.key_tiles(tiles.block_n) + 1, max(tiles.row_tiles, 1)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=call.q.device)

    folded, live, counts = new(heads, 2 * owned, tiles.block_n), new(heads, owned, most), new(heads, owned, 2)
    borders, first_tiles, n_segments = Borders(folded, folded, folded, folded), folded, 0
    if call.varlen:
        borders = Borders(packing.cu_q_ptr, packing.cu_k_ptr, packing.cu_row_tiles_ptr, packing.cu_tiles_ptr)
        first_tiles, n_segments = launch.first_tiles(call.cu_seqlens_q, 64 * alive.consumers), borders.cu_q.shape[0] - 1
    sizes = Sizes(n_segments, spec.left or 0, spec.right or 0, *alive.bytes.shape[1:], most, total[1])
    variant = Variant(spec.left is not None, spec.right is not None, call.varlen, alive.consumers, alive.block_n)
    constants = {"V": variant, "BM": tiles.block_m, "BN": tiles.block_n, "CHUNK": CHUNK}
    given, made = Given(first_tiles, borders), Made(folded, live, counts, total[0])
    args = [alive.bytes, given, made, launch.sq, launch.sk, sizes]
    launch.start_beside(_alive_kernel, (owned, heads), args, constants, "keys")
    return LiveTiles(folded, live, counts, borders.cu_key_tiles, folded, launch.heads, 1)
