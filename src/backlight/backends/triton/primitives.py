"""Device code that every Triton kernel shares: arguments, geometry, scores, mask, elastic weights, loads.

Written once, used by both directions. Elementwise functions take `position` (i' of eq. 1) and `key`, so the same code serves
[rows, keys] tiles in the forward, dq and dbias kernels and [keys, rows] tiles in the dk/dv kernel. Logits are in base 2.
"""

import struct
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# zeros on both sides of the expanded bias table: more than twice what the tiles of any kernel span
TABLE_PAD = tl.constexpr(512)


class Rows(NamedTuple):
    """A [B,H,S,D] tensor in memory: pointer and strides; the last dimension is contiguous."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Geometry(NamedTuple):
    """What a kernel must know of the spec at run time. Base-2 logits are unit * (factor * q.k + table), with a softcap
    unit * (tanh(factor * q.k) + table); unit is positive."""

    heads: Any
    group: Any
    left: Any
    right: Any
    n_bias: Any
    bias_origin: Any
    factor: Any
    unit: Any


class Span(NamedTuple):
    """Tiles of one dimension, by where they begin: visited from start to stop. Those below `low` or above `high` are cut by the
    edge on that side; those between the bands meet the bias table (eq. 30)."""

    start: Any
    stop: Any
    low: Any
    high: Any
    band_low: Any
    band_high: Any


class Segment(NamedTuple):
    """The sequence a program works on: where it begins in packed tensors, and its lengths."""

    q_start: Any
    k_start: Any
    sq: Any
    sk: Any


class Block(NamedTuple):
    """What a program owns that owns rows: batch, query head and its key head, its first row in the tensor, how many rows of
    the segment there are from it on, and their positions (i' of eq. 1)."""

    segment: Any
    b: Any
    h: Any
    g: Any
    row: Any
    n_rows: Any
    first_position: Any
    last_position: Any
    position: Any


class Packing(NamedTuple):
    """Packed sequences: borders of the segments, and the first tile of each. n: visible keys per row, read by parts only."""

    cu_q: Any
    cu_k: Any
    cu_tiles: Any
    n: Any


class Variant(NamedTuple):
    """What is compiled in: a kernel holds no trace of a term that the spec does not have."""

    D: int
    DV: int
    BD: int
    BDV: int
    LEFT: bool
    RIGHT: bool
    # right == 0
    CAUSAL: bool
    SOFTCAP: bool
    BIAS: bool
    SINK: bool
    TAU: bool
    GATE: bool
    VARLEN: bool
    # one part of an elastic row: lse and n of the whole row are given
    PART: bool
    # factor is 1
    LINEAR: bool
    FP32: bool
    NVIDIA: bool
    # bf16 compared in pairs: Hopper or later
    PAIRED: bool
    PRECISION: str


# tanh(x) = x (1 + x^2 P(x^2)) up to a largest |x|, relative error below 1.2e-7 (minimax): lowest coefficient first
NEAR, NEAR_1, NEAR_2, NEAR_3 = map(tl.constexpr, (0.4, -0.333318823, 0.13277629, -0.0477942206))


def _far_tanh_ptx(n: int) -> str:
    """tanh(t * factor) = 1 - 2 / (1 + e^2x) where it is not near 0, in warps that have such elements; n elements of a thread.

    Outputs hold what the polynomial made of t; then come t and factor, each n times.
    """
    ts, factor = [f"${2 * n + i}" for i in range(n)], f"${3 * n}"
    # four maxima side by side: one would wait for itself n times
    lines = [".reg .pred far;", ".reg .f32 most<4>, x, y;", *(f"abs.f32 most{i}, {ts[i]};" for i in range(4))]
    for i, t in enumerate(ts[4:]):
        lines += [f"abs.f32 x, {t};", f"max.f32 most{i % 4}, most{i % 4}, x;"]
    lines += ["max.f32 most0, most0, most1;", "max.f32 most2, most2, most3;", "max.f32 most0, most0, most2;"]
    lines += [f"mul.f32 most0, most0, {factor};", "abs.f32 most0, most0;", f"setp.gt.f32 far, most0, {_bits(NEAR.value)};"]
    lines += [
        "vote.sync.any.pred far, far, 0xffffffff;",
        "@!far bra.uni DONE;",
        f"mul.f32 y, {factor}, {_bits(2 * LOG2E.value)};",
    ]
    for i, t in enumerate(ts):
        lines += [f"mul.f32 x, {t}, y;", "abs.f32 most0, x;", f"setp.gt.f32 far, most0, {_bits(2 * LOG2E.value * NEAR.value)};"]
        lines += ["ex2.approx.ftz.f32 x, x;", "add.f32 x, x, 0f3F800000;", "rcp.approx.ftz.f32 x, x;"]
        lines += [f"@far fma.rn.f32 ${i}, x, 0fC0000000, 0f3F800000;"]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


def _bits(x: float) -> str:
    """A constant of PTX."""
    return f"0f{struct.unpack('>I', struct.pack('>f', x))[0]:08X}"


FAR_PACK = tl.constexpr(16)
FAR_PTX = tl.constexpr(_far_tanh_ptx(16))
FAR_NAMES = tl.constexpr(",".join(["=&f"] * 16 + [str(i) for i in range(16)] + ["f"] * 32))


@triton.jit
def span_of(lo, hi, low, high, band_lo, band_hi, B: tl.constexpr):
    """For needed [lo, hi), edges below `low` and from `high` on, and the table's [band_lo, band_hi)."""
    start = lo // B * B
    return Span(start, tl.maximum(tl.cdiv(tl.maximum(hi, lo), B) * B, start), low, high - B, band_lo - B, band_hi)


@triton.jit
def key_span(block, geometry, V: tl.constexpr, BN: tl.constexpr):
    """Keys that a block of rows visits: low is the left edge, high the right one."""
    first_position = block.first_position
    last_position = block.last_position
    sk = block.segment.sk
    lo = 0
    hi = sk
    low = 0
    high = sk
    if V.LEFT:
        lo = tl.minimum(tl.maximum(first_position - geometry.left, 0), sk)
        low = last_position - geometry.left
    if V.RIGHT:
        hi = tl.maximum(tl.minimum(sk, last_position + geometry.right + 1), 0)
        high = tl.minimum(sk, first_position + geometry.right + 1)
    band_lo = first_position + geometry.bias_origin - geometry.n_bias + 1
    band_hi = last_position + geometry.bias_origin + 1
    return span_of(lo, hi, low, high, band_lo, band_hi, BN)


@triton.jit
def row_span(first_key, last_key, sq, sk, geometry, V: tl.constexpr, BM: tl.constexpr):
    """Rows that keys first .. last are visited by, `key_span` the other way round: low is the right edge, high the left one."""
    shift = sk - sq
    lo = 0
    hi = sq
    low = 0
    high = sq
    if V.RIGHT:
        lo = tl.minimum(tl.maximum(first_key - geometry.right - shift, 0), sq)
        low = last_key - geometry.right - shift
    if V.LEFT:
        hi = tl.maximum(tl.minimum(sq, last_key + geometry.left - shift + 1), 0)
        high = first_key + geometry.left - shift + 1
    band_lo = first_key - geometry.bias_origin - shift
    band_hi = last_key - geometry.bias_origin - shift + geometry.n_bias
    return span_of(lo, hi, low, high, band_lo, band_hi, BM)


@triton.jit
def visible(position, key, sk, geometry, V: tl.constexpr):
    """Eq. 2. Rows that exist have positions below sk, so causal needs no test of the end."""
    if V.CAUSAL:
        seen = key <= position
    else:
        seen = (key < sk) & (position == position)
        if V.RIGHT:
            seen = seen & (key <= position + geometry.right)
    if V.LEFT:
        seen = seen & (key >= position - geometry.left)
    return seen


@triton.jit
def visible_count(position, segment, packing, geometry, V: tl.constexpr):
    """n_i of eq. 3; a part of an elastic row is told (`Part.n`)."""
    if V.PART:
        row = position - (segment.sk - segment.sq)
        return tl.load(packing.n + segment.q_start + row, mask=(row >= 0) & (row < segment.sq), other=0)
    first = position * 0
    last = first + (segment.sk - 1)
    if V.LEFT:
        first = tl.maximum(position - geometry.left, 0)
    if V.RIGHT:
        last = tl.minimum(position + geometry.right, segment.sk - 1)
    return tl.maximum(last - first + 1, 0)


@triton.jit
def tanh(t, factor, V: tl.constexpr):
    """tanh(t * factor) to a few units in the last place: its error is multiplied by the cap, which may be large.

    A polynomial, unless a warp has elements that are too large for it: the special function unit is what is short here, and
    softcaps are chosen so that few logits come near them.
    """
    if V.FP32:
        return precise_tanh(t * factor)
    square = t * t
    f2 = factor * factor
    f3 = factor * f2
    near = t * (factor + square * (NEAR_1 * f3 + square * (NEAR_2 * f3 * f2 + square * (NEAR_3 * f3 * f2 * f2))))
    if V.NVIDIA:
        return tl.inline_asm_elementwise(FAR_PTX, FAR_NAMES, [near, t, factor], dtype=tl.float32, is_pure=True, pack=FAR_PACK)
    x = t * factor
    return tl.where(tl.abs(x) > NEAR, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))), near)


@triton.jit
def precise_tanh(x):
    """1 - 2e / (1 + e), e = e^-2|x|; near 0, where the difference cancels, a short series takes over."""
    magnitude = tl.abs(x)
    e = tl.exp2(-magnitude * (2.0 * LOG2E))
    ratio = 1.0 - 2.0 * e / (1.0 + e)
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    return tl.where(square < 0.0625, series, tl.where(x < 0, -ratio, ratio))


@triton.jit
def bias_tile(table_ptr, start, geometry, V: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """[DOWN, ACROSS] tile whose element (i, j) is entry start + j - i of a head's table, in the order the kernel reads it.

    Neighbours across are loaded in pairs. A pair that would start at an odd entry is taken from the second copy of the table,
    which lies one entry off. What tells threads of a matmul's fragment apart is added first: the rest, 8 down and multiples
    of 8 across, ends up in the instruction, and pairs on one diagonal are loaded once.
    """
    # beyond the padding all is zero, wherever the tile lies
    start = tl.minimum(tl.maximum(start, TABLE_PAD // 2), geometry.n_bias + 3 * (TABLE_PAD // 2))
    pitch = table_pitch(geometry)
    down = tl.arange(0, DOWN)[:, None]
    pairs = tl.arange(0, ACROSS // 2)[None, :] * 2
    first = start - (down - (down & 8))
    first += (first & 1) * (pitch - 1)
    address = (table_ptr + (first + (pairs & 6))) + ((pairs - (pairs & 6)) - (down & 8))
    if V.NVIDIA:
        # a load that Triton does not recognise stays where it is used: its pipeliner would copy the tile through shared memory
        even, odd = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [address.to(tl.int64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        even = tl.load(address)
        odd = tl.load(address + 1)
    return tl.join(even, odd).reshape([DOWN, ACROSS])


@triton.jit
def add_bias(x, factor, table_ptr, entry, tile, span, geometry, V: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """x + factor * bias for a tile of scores that begins at `tile` of a span; beyond the table nothing is read."""
    if (tile > span.band_low) & (tile < span.band_high):
        x += bias_tile(table_ptr, entry, geometry, V, DOWN, ACROSS) * factor
    return x


@triton.jit
def table_pitch(geometry):
    """Entries of one copy of a head's table: padded on both sides, and even."""
    return (geometry.n_bias + 2 * TABLE_PAD + 1) // 2 * 2


@triton.jit
def head_table(table_ptr, h, geometry, MIRRORED: tl.constexpr):
    """Both copies of a head's table by ascending distance, or by descending."""
    return table_ptr + (tl.cast(h, tl.int64) * 4 + MIRRORED * 2) * table_pitch(geometry)


@triton.jit
def table_entry(column, geometry, MIRRORED: tl.constexpr):
    """Where the bias of table column `column` stands in a head's table."""
    if MIRRORED:
        return geometry.n_bias + TABLE_PAD - 1 - column
    return column + TABLE_PAD


@triton.jit
def capped_product(t, geometry, V: tl.constexpr):
    """What `unit` turns into the base-2 logit of eq. 4 and 5: the product, or the softcap's tanh."""
    if V.SOFTCAP:
        return tanh(t, geometry.factor, V)
    if V.LINEAR:
        return t
    return t * geometry.factor


@triton.jit
def tile_weights(s, share, floor, position, key, at_edge, segment, packing, geometry, V: tl.constexpr):
    """(p, a) of eq. 8 to 11 of a tile in either orientation from s, the base-2 logits less lse2; share = tau / n.

    With tau a row that sees one key has p = 1 exactly; such a row is always cut by an edge.
    """
    p = tl.exp2(s)
    a = p
    if V.TAU:
        a = tl.maximum(p + share, floor)
    if at_edge:
        seen = visible(position, key, segment.sk, geometry, V)
        if V.TAU and not V.SINK:
            p = tl.where(visible_count(position, segment, packing, geometry, V) == 1, 1.0, p)
        p = tl.where(seen, p, 0.0)
        a = p
        if V.TAU:
            a = tl.where(seen, tl.maximum(p + share, floor), 0.0)
    return p, a


@triton.jit
def surviving(p, share, V: tl.constexpr):
    """1 where p + share > 0, else 0, if p > 0: as numbers, since predicates of a whole tile would have to be packed into
    registers. Sums are exact in sign; the factor makes 1 of every one that counts."""
    if V.NVIDIA:
        return tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, 0f71800000, $2;", "=f,f,f", [p, share * 2.0**100], tl.float32, is_pure=True, pack=1
        )
    return tl.minimum(tl.maximum(p * 2.0**100 + share * 2.0**100, 0.0), 1.0)


@triton.jit
def positive(a, weights, V: tl.constexpr):
    """1 where a > 0, else 0, in the dtype of weights, which are a in it. a is not negative."""
    if V.PAIRED:
        # bf16 underflows where fp32 does
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0; set.gt.bf16x2.bf16x2 $0, $1, zero; }",
            "=r,r",
            [weights],
            tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return tl.minimum(a * 1.7014118e38, 1.0).to(weights.dtype)


@triton.jit
def tile_gradient(p, m, dp, delta, capped, V: tl.constexpr):
    """(ds, dx) of a tile in either orientation: eq. 33 from the raw products dp = do.v; with tau m marks survivors."""
    if V.TAU:
        dp = dp * m
    ds = p * (dp - delta)
    dx = ds
    if V.SOFTCAP:
        dx = ds * (1.0 - capped * capped)
    return ds, dx


@triton.jit
def nth_segment(z, packing):
    """Segment z of packed sequences."""
    q_start = tl.load(packing.cu_q + z)
    k_start = tl.load(packing.cu_k + z)
    return Segment(q_start, k_start, tl.load(packing.cu_q + z + 1) - q_start, tl.load(packing.cu_k + z + 1) - k_start)


@triton.jit
def segment_of(tile, packing, sq, sk, n_segments, V: tl.constexpr):
    """(segment of a program's tile, number of the tile inside it); a tile beyond the last segment finds one without rows."""
    segment = Segment(0, 0, sq, sk)
    if V.VARLEN:
        z, tile = locate(tile, packing.cu_tiles, n_segments)
        exists = (z < n_segments).to(tl.int32)
        found = nth_segment(tl.minimum(z, n_segments - 1), packing)
        segment = Segment(found.q_start, found.k_start, found.sq * exists, found.sk * exists)
    return segment, tile


@triton.jit
def row_block(packing, sq, sk, n_segments, geometry, V: tl.constexpr, BM: tl.constexpr):
    """The block of a program that owns BM rows."""
    segment, tile = segment_of(tl.program_id(0), packing, sq, sk, n_segments, V)
    if V.RIGHT and not V.VARLEN:
        # causal: the longest rows first, so that the last wave is short
        tile = tl.num_programs(0) - 1 - tile
    i0 = tile * BM
    first_position = i0 + segment.sk - segment.sq
    last_position = tl.minimum(i0 + BM, segment.sq) - 1 + segment.sk - segment.sq
    b = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    position = (first_position + tl.arange(0, BM))[:, None]
    return Block(
        segment, b, h, h // geometry.group, segment.q_start + i0, segment.sq - i0, first_position, last_position, position
    )


@triton.jit
def locate(tile, cu_tiles_ptr, n_segments):
    """Packed sequences: which segment a tile belongs to, and its number inside it; n_segments when there is none."""
    low = 0
    high = n_segments
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_tiles_ptr + middle + 1) <= tile:
            low = middle + 1
        else:
            high = middle
    begin = tl.load(cu_tiles_ptr + low)
    return low, tile - begin


@triton.jit
def at(tensor, b, h, row):
    """Pointer to a row; 64-bit, since sizes beyond 2^31 elements are ordinary."""
    return (
        tensor.ptr
        + tl.cast(b, tl.int64) * tensor.batch
        + tl.cast(h, tl.int64) * tensor.head
        + tl.cast(row, tl.int64) * tensor.row
    )


@triton.jit
def load_tile(ptr, stride, start, n, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """[B, BD] of the rows from `start` on; zero outside of 0 .. n-1 and beyond D."""
    lanes = tl.arange(0, B)
    columns = tl.arange(0, BD)
    pointers = ptr + tl.cast(start, tl.int64) * stride + lanes[:, None] * stride + columns[None, :]
    inside = ((start + lanes >= 0) & (start + lanes < n))[:, None]
    if D != BD:
        inside = inside & (columns < D)[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def own_tile(tensor, block, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """`load_tile` of a block's rows."""
    return load_tile(at(tensor, block.b, block.h, block.row), tensor.row, 0, block.n_rows, B, D, BD)


@triton.jit
def stream_tile(
    tensor, descriptor, b, h, first, start, n, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr
):  # fmt: skip
    """`load_tile` in a main loop, of n rows from `first` on: through the tensor's descriptor where there is one, which costs
    no address registers."""
    if TMA:
        return descriptor.load([b, h, start, 0]).reshape([B, BD])
    return load_tile(at(tensor, b, h, first), tensor.row, start, n, B, D, BD)


@triton.jit
def key_tile(tensor, descriptor, block, j0, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TMA: tl.constexpr):
    """`stream_tile` of the keys from j0 on that a block of rows sees."""
    return stream_tile(tensor, descriptor, block.b, block.g, block.segment.k_start, j0, block.segment.sk, B, D, BD, TMA)


@triton.jit
def row_state(b, h, row, pitch16, geometry):
    """Offset of a row in the fp32 row buffers, whose pitch is a multiple of 16 so that vectors of them load aligned."""
    return tl.cast(b * geometry.heads + h, tl.int64) * (pitch16 * 16) + row


@triton.jit
def spread_vector(ptr, start, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """[DOWN, ACROSS] tile with rows ptr[start .. start + ACROSS), read in the layout of its use, by pairs (`bias_tile`)."""
    pairs = tl.broadcast_to(tl.arange(0, ACROSS // 2)[None, :] * 2, [DOWN, ACROSS // 2])
    even, odd = tl.inline_asm_elementwise(
        "ld.global.nc.v2.f32 {$0, $1}, [$2];",
        "=f,=f,l",
        [((ptr + start + (pairs & 6)) + (pairs - (pairs & 6))).to(tl.int64)],
        dtype=(tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )
    return tl.join(even, odd).reshape([DOWN, ACROSS])


@triton.jit
def row_tile(ptr, start, n, other, V: tl.constexpr, DIRECT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """One number per row for a [DOWN, ACROSS] tile of keys and rows."""
    if DIRECT:
        value = spread_vector(ptr, start, DOWN, ACROSS)
    else:
        value = load_vector(ptr, start, n, other, ACROSS, V.VARLEN)[None, :]
    return value


@triton.jit
def load_vector(ptr, start, n, other, B: tl.constexpr, EDGE: tl.constexpr):
    lanes = tl.arange(0, B)
    if EDGE:
        return tl.load(ptr + start + lanes, mask=start + lanes < n, other=other)
    return tl.load(ptr + start + lanes)


@triton.jit
def store_tile(ptr, stride, n, value, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """The first n rows and D columns of a tile."""
    lanes = tl.arange(0, B)
    columns = tl.arange(0, BD)
    mask = (lanes < n)[:, None]
    if D != BD:
        mask = mask & (columns < D)[None, :]
    tl.store(ptr + lanes[:, None] * stride + columns[None, :], value.to(ptr.dtype.element_ty), mask=mask)
