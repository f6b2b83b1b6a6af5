"""q, k and v of 16 bits into e4m3 (eq. 96, 97): the pre-pass of the forward in e4m3, and the way back of its gradients.

Three launches, the first two of which are for keys alone: sums of the columns of k and maxima of those of v by chunks; mean and
scales of columns; then a program for each 128 rows of q, of k and of v. Products with the Hadamard matrix, whose entries are 1
and -1 in the dtype of q, are exact; the mean is taken off after the turn, which is linear. `quantising` has the same in torch
operations: sums in another order, so that an entry in 10^4 may be the neighbour of what it is there. Parity contract:
tests/interpreted/test_quantise.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backlight.backends.triton.loads import at
from backlight.quantising import BLOCK as _BLOCK

BLOCK = tl.constexpr(_BLOCK)
# rows that a program adds up at a time
STEP = tl.constexpr(16)
# below every number that matters, and far above those whose inverse is none
SMALLEST = tl.constexpr(448.0 * 2.0**-100)
# 1.5 * 2^14: fp32 has steps of 2^-9 around it, as e4m3 has below 2^-6
STEPS_OF_SMALL = tl.constexpr(24576.0)


class Columns(NamedTuple):
    """Of each key head: sums of k and maxima of v by chunks [B * Hkv, chunks, D], then what they give, [B, Hkv, D].

    turned_ptr: the mean, turned; turn_ptr: the Hadamard matrix with its signs, [D, D].
    """

    turn_ptr: Any
    sums_ptr: Any
    largest_ptr: Any
    mean_ptr: Any
    turned_ptr: Any
    v_scale_ptr: Any


class Codes(NamedTuple):
    """What a pre-pass writes: codes, or in the place of them rounded numbers of 16 bits; scales of blocks; offsets of rows."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    q_scale_ptr: Any
    k_scale_ptr: Any
    offset_ptr: Any


class Sources(NamedTuple):
    """Packed sequences: the first row of each tile of rows and of keys, and how many of its rows there are."""

    q_ptr: Any
    q_count_ptr: Any
    k_ptr: Any
    k_count_ptr: Any


class Sizes(NamedTuple):
    """q_tiles and k_tiles: blocks of a head, 0 where queries or keys are not asked for."""

    batch: Any
    heads: Any
    group: Any
    sq: Any
    sk: Any
    q_tiles: Any
    k_tiles: Any


class Variant(NamedTuple):
    """PACKED: tiles begin where sequences do. ROUNDED: numbers instead of codes. BY_HAND: Triton's interpreter cuts fp32 off
    where it should round to e4m3."""

    D: int
    PACKED: bool
    ROUNDED: bool
    BY_HAND: bool


# --- arithmetic --------------------------------------------------------------------------------------------------------------


@triton.jit
def to_e4m3(x, V: tl.constexpr):
    """The nearest codes of numbers up to 448."""
    if V.BY_HAND:
        bits = x.to(tl.int32, bitcast=True)
        near = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        x = tl.where(tl.abs(x) < 0.015625, (x + STEPS_OF_SMALL) - STEPS_OF_SMALL, near)
    return x.to(tl.float8e4nv)


@triton.jit
def powers_of_two(largest):
    """`quantising.power_of_two` and its inverse: 448 is 1.75 * 2^8."""
    bits = tl.maximum(largest, SMALLEST).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def key_at(place):
    """The key whose weight lies at a place of a block (`quantising.in_register_order`)."""
    return (place & -16) + ((place >> 1) & 1) * 8 + ((place >> 2) & 3) * 2 + (place & 1)


@triton.jit
def signs(turn_ptr, D: tl.constexpr):
    columns = tl.arange(0, D)
    return tl.load(turn_ptr + columns[:, None] * D + columns[None, :])


# --- columns of keys ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["heads", "keys", "length"])
def _columns_kernel(k, v, columns, heads, keys, length, D: tl.constexpr):
    """Sums of k and maxima of v over `length` keys. fp64: the sum is then the same in any order."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    first = tl.program_id(0) * length
    column = tl.arange(0, D)
    total = tl.zeros([STEP, D], tl.float64)
    largest = tl.zeros([STEP, D], tl.float32)
    for step in range(0, length, STEP):
        row = first + step + tl.arange(0, STEP)
        inside = ((row < keys) & (row < first + length))[:, None]
        place = tl.cast(row, tl.int64)[:, None]
        total += tl.load(at(k, b, h, 0) + place * k.row + column[None, :], mask=inside, other=0.0).to(tl.float64)
        here = tl.load(at(v, b, h, 0) + place * v.row + column[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.abs(here.to(tl.float32)))
    out = (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * D + column
    tl.store(columns.sums_ptr + out, tl.sum(total, 0))
    tl.store(columns.largest_ptr + out, tl.max(largest, 0))


@triton.jit(do_not_specialize=["keys", "chunks"])
def _mean_kernel(columns, keys, chunks, D: tl.constexpr, CENTRED: tl.constexpr):
    """The mean of k, also turned, and the scales of v."""
    head = tl.program_id(0)
    column = tl.arange(0, D)
    total = tl.zeros([D], tl.float64)
    largest = tl.zeros([D], tl.float32)
    for chunk in range(chunks):
        place = (head * chunks + chunk).to(tl.int64) * D + column
        total += tl.load(columns.sums_ptr + place)
        largest = tl.maximum(largest, tl.load(columns.largest_ptr + place))
    mean = (total / keys).to(tl.float32) if CENTRED else tl.zeros([D], tl.float32)
    tl.store(columns.mean_ptr + head * D + column, mean)
    scale, _ = powers_of_two(largest)
    tl.store(columns.v_scale_ptr + head * D + column, scale)
    # read again as a column, [D, 1]
    tl.debug_barrier()
    turned = tl.zeros([D], tl.float32)
    for begin in range(0, D, STEP):
        row = begin + tl.arange(0, STEP)
        part = tl.load(columns.mean_ptr + head * D + row)
        turned += tl.sum(part[:, None] * tl.load(columns.turn_ptr + row[:, None] * D + column[None, :]).to(tl.float32), 0)
    tl.store(columns.turned_ptr + head * D + column, turned * (D**-0.5))


# --- tiles -------------------------------------------------------------------------------------------------------------------


@triton.jit
def source_of(tile, n, source_ptr, count_ptr, V: tl.constexpr):
    """The first row of a tile, and how many rows it has."""
    if V.PACKED:
        first = tl.load(source_ptr + tile)
        count = tl.load(count_ptr + tile)
    else:
        first = tile * BLOCK
        count = tl.minimum(n - first, BLOCK)
    return first, count


@triton.jit
def store_rows(ptr, scale_ptr, x, exists, at_head, tile, tiles, first, n, V: tl.constexpr):
    """A tile of rows, rounded; its scale."""
    scale, inverse = powers_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
    codes = to_e4m3(x * inverse, V)
    lanes = tl.arange(0, BLOCK)
    columns = tl.arange(0, V.D)
    if V.ROUNDED:
        place = (tl.cast(at_head, tl.int64) * n + first) * V.D + lanes[:, None] * V.D + columns[None, :]
        tl.store(ptr + place, (codes.to(tl.float32) * scale).to(ptr.dtype.element_ty), mask=exists)
    else:
        rows = tiles * BLOCK if V.PACKED else n
        place = (tl.cast(at_head, tl.int64) * rows + tile * BLOCK) * V.D + lanes[:, None] * V.D + columns[None, :]
        tl.store(ptr + place, codes, mask=exists | V.PACKED)
        tl.store(scale_ptr + at_head * tiles + tile, scale)


@triton.jit
def quantise_queries(q, codes, columns, sources, sizes, tile, b, h, scale, V: tl.constexpr):
    first, count = source_of(tile, sizes.sq, sources.q_ptr, sources.q_count_ptr, V)
    lanes = tl.arange(0, BLOCK)
    column = tl.arange(0, V.D)
    exists = (lanes < count)[:, None]
    x = tl.load(at(q, b, h, first) + tl.cast(lanes, tl.int64)[:, None] * q.row + column[None, :], mask=exists, other=0.0)
    at_head = b * sizes.heads + h
    at_key_head = b * (sizes.heads // sizes.group) + h // sizes.group
    mean = tl.load(columns.mean_ptr + at_key_head * V.D + column)
    offset = tl.sum(x.to(tl.float32) * mean[None, :], 1) * scale
    tl.store(codes.offset_ptr + tl.cast(at_head, tl.int64) * sizes.sq + first + lanes, offset, mask=lanes < count)
    turned = tl.dot(x, signs(columns.turn_ptr, V.D)) * (V.D**-0.5)
    store_rows(codes.q_ptr, codes.q_scale_ptr, turned, exists, at_head, tile, sizes.q_tiles, first, sizes.sq, V)


@triton.jit
def quantise_keys(k, codes, columns, sources, sizes, tile, b, h, V: tl.constexpr):
    first, count = source_of(tile, sizes.sk, sources.k_ptr, sources.k_count_ptr, V)
    lanes = tl.arange(0, BLOCK)
    column = tl.arange(0, V.D)
    exists = (lanes < count)[:, None]
    x = tl.load(at(k, b, h, first) + tl.cast(lanes, tl.int64)[:, None] * k.row + column[None, :], mask=exists, other=0.0)
    at_head = b * (sizes.heads // sizes.group) + h
    turned = tl.dot(x, signs(columns.turn_ptr, V.D)) * (V.D**-0.5)
    turned = tl.where(exists, turned - tl.load(columns.turned_ptr + at_head * V.D + column)[None, :], 0.0)
    store_rows(codes.k_ptr, codes.k_scale_ptr, turned, exists, at_head, tile, sizes.k_tiles, first, sizes.sk, V)


@triton.jit
def quantise_values(v, codes, columns, sources, sizes, tile, b, h, V: tl.constexpr):
    """Read in the order of the places, so that only whole tiles are transposed."""
    first, count = source_of(tile, sizes.sk, sources.k_ptr, sources.k_count_ptr, V)
    lanes = tl.arange(0, BLOCK)
    column = tl.arange(0, V.D)
    row = lanes if V.ROUNDED else key_at(lanes)
    exists = (row < count)[:, None]
    x = tl.load(at(v, b, h, first) + tl.cast(row, tl.int64)[:, None] * v.row + column[None, :], mask=exists, other=0.0)
    at_head = b * (sizes.heads // sizes.group) + h
    scale = tl.load(columns.v_scale_ptr + at_head * V.D + column)
    inverse = ((254 << 23) - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    found = to_e4m3(x.to(tl.float32) * inverse[None, :], V)
    if V.ROUNDED:
        place = (tl.cast(at_head, tl.int64) * sizes.sk + first) * V.D + row[:, None] * V.D + column[None, :]
        tl.store(codes.v_ptr + place, (found.to(tl.float32) * scale[None, :]).to(codes.v_ptr.dtype.element_ty), mask=exists)
    else:
        pitch = sizes.k_tiles * BLOCK
        place = tl.cast(at_head, tl.int64) * V.D * pitch + tile * BLOCK
        tl.store(codes.v_ptr + place + tl.cast(column, tl.int64)[:, None] * pitch + lanes[None, :], tl.trans(found))


@triton.jit
def _quantise_kernel(q, k, v, codes, columns, sources, sizes, scale, V: tl.constexpr):
    """A tile of q, of k or of v, by the number of the program."""
    program = tl.program_id(0)
    of_queries = sizes.batch * sizes.heads * sizes.q_tiles
    kv_heads = sizes.heads // sizes.group
    of_keys = sizes.batch * kv_heads * sizes.k_tiles
    if program < of_queries:
        tile, head = program % sizes.q_tiles, program // sizes.q_tiles
        quantise_queries(q, codes, columns, sources, sizes, tile, head // sizes.heads, head % sizes.heads, scale, V)
    elif program < of_queries + of_keys:
        program -= of_queries
        tile, head = program % sizes.k_tiles, program // sizes.k_tiles
        quantise_keys(k, codes, columns, sources, sizes, tile, head // kv_heads, head % kv_heads, V)
    else:
        program -= of_queries + of_keys
        tile, head = program % sizes.k_tiles, program // sizes.k_tiles
        quantise_values(v, codes, columns, sources, sizes, tile, head // kv_heads, head % kv_heads, V)


@triton.jit(do_not_specialize=["heads", "rows"])
def _turn_back_kernel(x, out, turn_ptr, heads, rows, D: tl.constexpr):
    """Gradients of turned rows as those of rows."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.arange(0, D)
    place = tl.cast(lanes, tl.int64)[:, None]
    exists = (lanes < rows)[:, None]
    turned = tl.load(at(x, b, h, 0) + place * x.row + column[None, :], mask=exists, other=0.0)
    found = tl.dot(turned, tl.trans(signs(turn_ptr, D))) * (D**-0.5)
    tl.store(at(out, b, h, 0) + place * out.row + column[None, :], found.to(out.ptr.dtype.element_ty), mask=exists)
