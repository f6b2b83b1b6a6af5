"""Small kernels in front of the large ones of a call with a mask by row intervals (math.md section 12).

Kernels read intervals by key tiles: `folded` [masks, key tiles + 1, 2 w, BN], rows counted from the first of the key's own
sequence, causal and window folded in (eq. 62). Two intervals are disjoint (eq. 61) and come as one with a hole: first, end, and
those of the hole. Keys that do not exist and keys that nobody sees have intervals without a row; so has every key of the last
tile, which a program visits that has nothing to visit.

Which tiles are visited is a list for each tile that a program owns: live [masks, owned tiles, most]. What has to be masked
stands at its front, the rest at its end in reverse, so that one sweep fills it; `counts` [masks, owned tiles, 2] says how many
of either. An entry is KINDS times the number of the other tile plus what is to be compared, of FIRST, END, HOLE and GEOMETRY.
"""

from __future__ import annotations

import triton
import triton.language as tl

from backlight.backends.intervals.arguments import Rows, Sequence, Sizes

# rows below every one and beyond every one; differences of two of them stay within 32 bits
NO_ROW = tl.constexpr(1 << 30)
# what a visited tile has to compare: rows with the first of each interval, its end, its hole; positions with causal and window
FIRST, END, HOLE, GEOMETRY = (tl.constexpr(1 << bit) for bit in range(4))
KINDS = tl.constexpr(16)


@triton.jit
def segment_at(tile, cu_tiles_ptr, n_segments):
    """Packed sequences: which one a tile belongs to; n_segments where there is none."""
    low = 0
    high = n_segments
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_tiles_ptr + middle + 1) <= tile:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def sequence_of(tile, packing, sq, sk, n_segments, VARLEN: tl.constexpr, OF_ROWS: tl.constexpr):
    found = Sequence(0, 0, sq, sk, 0, 0, tile)
    if VARLEN:
        if OF_ROWS:
            z = segment_at(tile, packing.cu_row_tiles, n_segments)
        else:
            z = segment_at(tile, packing.cu_key_tiles, n_segments)
        z = tl.minimum(z, n_segments - 1)
        q_start = tl.load(packing.cu_q + z)
        k_start = tl.load(packing.cu_k + z)
        row_tile = tl.load(packing.cu_row_tiles + z)
        key_tile = tl.load(packing.cu_key_tiles + z)
        own_sq = tl.load(packing.cu_q + z + 1) - q_start
        own_sk = tl.load(packing.cu_k + z + 1) - k_start
        if OF_ROWS:
            tile = tile - row_tile
        else:
            tile = tile - key_tile
        found = Sequence(q_start, k_start, own_sq, own_sk, row_tile, key_tile, tile)
    return found


@triton.jit
def folded_interval(rows, which, key, own, exists, sizes, V: tl.constexpr):
    """[first, end) of one interval of keys (eq. 62), (NO_ROW, 0) where it holds no row (with POS (NO_ROW, -NO_ROW))."""
    first = tl.load(rows.ptr + 2 * which * rows.end, mask=exists, other=0)
    end = tl.load(rows.ptr + (2 * which + 1) * rows.end, mask=exists, other=0)
    nobody = 0
    if V.POS:
        nobody = -NO_ROW
        first = tl.maximum(first, -NO_ROW)
        end = tl.minimum(end, NO_ROW)
    else:
        first = tl.maximum(first, own.q_start) - own.q_start
        end = tl.minimum(tl.maximum(end, own.q_start) - own.q_start, own.sq)
        shift = own.sk - own.sq
        if V.RIGHT:
            first = tl.maximum(first, key - sizes.right - shift)
        if V.LEFT:
            end = tl.minimum(end, key + sizes.left + 1 - shift)
    holds = exists & (first < end)
    return tl.where(holds, first, NO_ROW), tl.where(holds, end, nobody)


@triton.jit
def folded_intervals(rows, key, own, exists, sizes, V: tl.constexpr):
    """(first, end, hole, hole_end) of keys; without a second interval the hole is not one."""
    first, end = folded_interval(rows, 0, key, own, exists, sizes, V)
    hole = first
    hole_end = end
    if V.W == 2:
        other, other_end = folded_interval(rows, 1, key, own, exists, sizes, V)
        # eq. 61
        swap = other < first
        lower = tl.where(swap, other, first)
        lower_end = tl.where(swap, other_end, end)
        upper = tl.where(swap, first, other)
        upper_end = tl.where(swap, end, other_end)
        joined = (upper == NO_ROW) | (upper <= lower_end)
        first = lower
        end = tl.maximum(lower_end, upper_end)
        hole = tl.where(joined, NO_ROW, lower_end)
        hole_end = tl.where(joined, -NO_ROW, upper)
    return first, end, hole, hole_end


@triton.jit(
    do_not_specialize=["batch_stride", "head_stride", "end_stride", "sq", "sk", "n_segments", "mask_heads", "left", "right"]
)
def _fold_kernel(
    rows_ptr, batch_stride, head_stride, end_stride, key_stride, folded_ptr, extremes_ptr, packing,
    sq, sk, n_segments, mask_heads, left, right, V: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Intervals of a key tile, and the smallest and largest of their ends and of those of their holes (eq. 64):
    extremes [masks, key tiles + 1, w, 4]."""
    tile = tl.program_id(0)
    m = tl.program_id(1)
    rows = Rows(rows_ptr, batch_stride, head_stride, end_stride, key_stride)
    sizes = Sizes(sq, sk, n_segments, mask_heads, left, right)
    _own, first, end, hole, hole_end = fold_tile(rows, folded_ptr, packing, sizes, V, BN)
    extremes_ptr += (tl.cast(m, tl.int64) * tl.num_programs(0) + tile) * (4 * V.W)
    store_extremes(extremes_ptr, first, end)
    if V.W == 2:
        store_extremes(extremes_ptr + 4, hole, hole_end)


@triton.jit
def fold_tile(rows, folded_ptr, packing, sizes, V: tl.constexpr, BN: tl.constexpr):
    """(the sequence of the program's key tile, first, end, hole, hole_end of its keys), which are stored."""
    tile = tl.program_id(0)
    m = tl.program_id(1)
    tiles = tl.num_programs(0)
    last = tile == tiles - 1
    own = sequence_of(tl.minimum(tile, tiles - 2), packing, sizes.sq, sizes.sk, sizes.n_segments, V.VARLEN, False)
    lanes = tl.arange(0, BN)
    key = own.tile * BN + lanes
    # without any key the tile before the last has keys below 0
    exists = key < tl.where(last, -NO_ROW, own.sk)
    offset = tl.cast(m // sizes.mask_heads, tl.int64) * rows.batch + tl.cast(m % sizes.mask_heads, tl.int64) * rows.head
    rows_ptr = rows.ptr + offset
    rows_ptr += (own.k_start + key).to(tl.int64) * rows.key
    own_rows = Rows(rows_ptr, rows.batch, rows.head, rows.end, rows.key)
    first, end, hole, hole_end = folded_intervals(own_rows, key, own, exists, sizes, V)
    folded_ptr += (tl.cast(m, tl.int64) * tiles + tile) * (2 * V.W * BN) + lanes
    if V.W == 2:
        tl.store(folded_ptr + 2 * BN, hole)
        tl.store(folded_ptr + 3 * BN, hole_end)
    tl.store(folded_ptr, first)
    tl.store(folded_ptr + BN, end)
    return own, first, end, hole, hole_end


@triton.jit
def store_extremes(ptr, first, end):
    tl.store(ptr, tl.min(first, 0))
    tl.store(ptr + 1, tl.max(first, 0))
    tl.store(ptr + 2, tl.min(end, 0))
    tl.store(ptr + 3, tl.max(end, 0))


@triton.jit(do_not_specialize=["batch_stride", "sq", "sk", "n_segments"])
def _order_kernel(
    pos_ptr, batch_stride, row_stride, made, packing, sq, sk, n_segments, VARLEN: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """pos as kernels compare it, held [B|1, Sq], and the smallest and largest of each row tile: order [B|1, row tiles, 2].

    As ends are, positions are kept where NO_ROW is beyond them: those below count as -NO_ROW, those above as NO_ROW - 1. So
    ends between -NO_ROW and NO_ROW are compared exactly with any position, and all that lie outside on one side are one.
    """
    tile = tl.program_id(0)
    own = sequence_of(tile, packing, sq, sk, n_segments, VARLEN, True)
    row = own.tile * BM + tl.arange(0, BM)
    exists = row < own.sq
    b = tl.cast(tl.program_id(1), tl.int64)
    pos_ptr += b * batch_stride + (own.q_start + row).to(tl.int64) * row_stride
    pos = tl.minimum(tl.maximum(tl.load(pos_ptr, mask=exists, other=0), -NO_ROW), NO_ROW - 1)
    tl.store(made.held_ptr + b * sq + own.q_start + row, pos, mask=exists)
    at = made.order_ptr + (b * tl.num_programs(0) + tile) * 2
    tl.store(at, tl.min(tl.where(exists, pos, NO_ROW), 0))
    tl.store(at + 1, tl.max(tl.where(exists, pos, -NO_ROW), 0))


@triton.jit
def compared(extremes_ptr, exists, first_row, end_row, W: tl.constexpr):
    """(whether rows [first_row, end_row) see nothing of a key tile, what of its intervals they have to be compared with)."""
    outer = loaded_extremes(extremes_ptr, exists)
    inner = outer
    if W == 2:
        inner = loaded_extremes(extremes_ptr + 4, exists)
    return classified(outer, inner, first_row, end_row, W)


@triton.jit
def loaded_extremes(ptr, exists):
    first_low = tl.load(ptr, mask=exists, other=NO_ROW)
    first_high = tl.load(ptr + 1, mask=exists, other=NO_ROW)
    end_low = tl.load(ptr + 2, mask=exists, other=-NO_ROW)
    end_high = tl.load(ptr + 3, mask=exists, other=-NO_ROW)
    return first_low, first_high, end_low, end_high


@triton.jit
def classified(outer, inner, first_row, end_row, W: tl.constexpr):
    """`compared`, of the extremes of intervals and of their holes."""
    first_low, first_high, end_low, end_high = outer
    empty = (first_low >= end_row) | (end_high <= first_row)
    kind = tl.where(first_high > first_row, FIRST, 0) + tl.where(end_low < end_row, END, 0)
    if W == 2:
        hole_low, hole_high, hole_end_low, hole_end_high = inner
        empty = empty | ((hole_high <= first_row) & (hole_end_low >= end_row))
        kind += tl.where((hole_low < end_row) & (hole_end_high > first_row), HOLE, 0)
    return empty, kind


@triton.jit
def appended(live_ptr, most, partial, full, other, exists, empty, kind):
    """Puts tiles on a list that holds (partial, full) of them; how many it holds then."""
    is_full = (exists & (empty == 0) & (kind == 0)).to(tl.int32)
    is_partial = (exists & (empty == 0) & (kind != 0)).to(tl.int32)
    tl.store(live_ptr + partial + tl.cumsum(is_partial, 0) - 1, other * KINDS + kind, mask=is_partial != 0)
    tl.store(live_ptr + most - full - tl.cumsum(is_full, 0), other * KINDS, mask=is_full != 0)
    return partial + tl.sum(is_partial, 0), full + tl.sum(is_full, 0)


@triton.jit
def geometric(row, row_end, key, own, left, right, V: tl.constexpr, BN: tl.constexpr):
    """(whether rows [row, row_end) see nothing of the BN keys from `key` on, all of them) by causal and window (eq. 30)."""
    shift = own.sk - own.sq
    key_end = tl.minimum(key + BN, own.sk)
    empty = key >= own.sk
    full = key + BN <= own.sk
    if V.RIGHT:
        empty = empty | (key > row_end - 1 + shift + right)
        full = full & (key_end - 1 <= row + shift + right)
    if V.LEFT:
        empty = empty | (key_end - 1 < row + shift - left)
        full = full & (key >= row_end - 1 + shift - left)
    return empty, full


@triton.jit(
    do_not_specialize=["order_stride", "sq", "sk", "n_segments", "mask_heads", "left", "right", "key_tiles", "most"],
)
def _live_kernel(
    extremes_ptr, order_ptr, order_stride, live_ptr, counts_ptr, packing,
    sq, sk, n_segments, mask_heads, left, right, key_tiles, most,
    V: tl.constexpr, OF_ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The list of the tiles to visit, for the program that owns a row tile (OF_ROWS) or a key tile."""
    tile = tl.program_id(0)
    m = tl.program_id(1)
    own = sequence_of(tile, packing, sq, sk, n_segments, V.VARLEN, OF_ROWS)
    at = tl.cast(m, tl.int64) * tl.num_programs(0) + tile
    live_ptr += at * most
    extremes_ptr += (tl.cast(m, tl.int64) * (key_tiles + 1) + own.key_tile) * (4 * V.W)
    order_ptr += (m // mask_heads) * order_stride + own.row_tile * 2
    # a tile beyond the last sequence begins beyond its rows or keys
    if OF_ROWS:
        n = tl.where(own.tile * BM < own.sq, tl.cdiv(own.sk, BN), 0)
    else:
        n = tl.where(own.tile * BN < own.sk, tl.cdiv(own.sq, BM), 0)
    partial = 0
    full = 0
    for start in range(0, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        exists = other < n
        if OF_ROWS:
            row_tile = own.tile + other * 0
            key_tile = other
        else:
            row_tile = other
            key_tile = own.tile + other * 0
        row = row_tile * BM
        row_end = tl.minimum(row + BM, own.sq)
        first_row = row
        end_row = row_end
        if V.POS:
            first_row = tl.load(order_ptr + row_tile * 2, mask=exists, other=NO_ROW)
            end_row = tl.load(order_ptr + row_tile * 2 + 1, mask=exists, other=-NO_ROW) + 1
        empty, kind = compared(extremes_ptr + key_tile * (4 * V.W), exists, first_row, end_row, V.W)
        if V.POS and (V.LEFT or V.RIGHT):
            far, near = geometric(row, row_end, key_tile * BN, own, left, right, V, BN)
            empty = empty | far
            kind = tl.where(near, kind, kind + GEOMETRY)
        partial, full = appended(live_ptr, most, partial, full, other, exists, empty, kind)
    if OF_ROWS:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if partial + full == 0:
            tl.store(live_ptr, (key_tiles - own.key_tile) * KINDS + FIRST + END)
            partial += 1
    tl.store(counts_ptr + at * 2, partial)
    tl.store(counts_ptr + at * 2 + 1, full)


@triton.jit(
    do_not_specialize=[
        *("batch_stride", "head_stride", "end_stride", "sq", "sk", "n_segments", "mask_heads", "left", "right", "most"),
        "total_at",
    ]
)
def _key_lists_kernel(
    rows_ptr, batch_stride, head_stride, end_stride, key_stride, folded_ptr, live_ptr, counts_ptr, packing,
    sq, sk, n_segments, mask_heads, left, right, most, total_ptr, total_at,
    V: tl.constexpr, TOTAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """`_fold_kernel` and `_live_kernel` of a key tile in one: the row tiles that see it follow from its own intervals alone.

    TOTAL: how many tiles live is added, as a float, to place `total_at` of a tensor.
    """
    tile = tl.program_id(0)
    m = tl.program_id(1)
    rows = Rows(rows_ptr, batch_stride, head_stride, end_stride, key_stride)
    sizes = Sizes(sq, sk, n_segments, mask_heads, left, right)
    own, first, end, hole, hole_end = fold_tile(rows, folded_ptr, packing, sizes, V, BN)
    outer = tl.min(first, 0), tl.max(first, 0), tl.min(end, 0), tl.max(end, 0)
    inner = tl.min(hole, 0), tl.max(hole, 0), tl.min(hole_end, 0), tl.max(hole_end, 0)
    at = tl.cast(m, tl.int64) * tl.num_programs(0) + tile
    live_ptr += at * most
    # row tiles outside of these see nothing
    begin = tl.maximum(tl.where(outer[0] < outer[3], outer[0], 0), 0) // BM
    n = tl.where(outer[0] < outer[3], tl.cdiv(tl.minimum(outer[3], own.sq), BM), 0)
    partial = 0
    full = 0
    for start in range(begin, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        row = other * BM
        empty, kind = classified(outer, inner, row, tl.minimum(row + BM, own.sq), V.W)
        partial, full = appended(live_ptr, most, partial, full, other, other < n, empty, kind)
    tl.store(counts_ptr + at * 2, partial)
    tl.store(counts_ptr + at * 2 + 1, full)
    if TOTAL:
        tl.atomic_add(total_ptr + total_at, tl.cast(partial + full, tl.float32), sem="relaxed")
