"""Device code that every Triton kernel shares: arguments, geometry, scores, mask, elastic weights, loads.

Written once, used by both directions. Elementwise functions take `position` (i' of eq. 1) and `key`, so the same code serves
[rows, keys] tiles in the forward, dq and dbias kernels and [keys, rows] tiles in the dk/dv kernel. Logits are in base 2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# a range of tiles is visited in five phases: masked, plain, plain within the bias table, plain, masked
PHASES = tl.constexpr(5)
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
    # the left edge lies further back than a tile reaches, so that no tile meets both edges
    WIDE: bool
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
    PRECISION: str


def _tanh_ptx(pack: int) -> str:
    """PTX for `pack` elements: outputs hold t at first; then c0 .. c3 of the polynomial and factor, each `pack` times."""
    c0, c1, c2, c3, factor = (f"${k * pack}" for k in range(2, 7))
    lines = [".reg .pred large;", ".reg .f32 x, y;", "abs.f32 x, $0;"]
    for i in range(1, pack):
        lines += [f"abs.f32 y, ${i};", "max.f32 x, x, y;"]
    lines += [f"mul.f32 x, x, {factor};", "abs.f32 x, x;", "setp.gt.f32 large, x, 0f3F000000;"]
    # warps whose elements are all small, the common case, go one way
    lines += ["vote.sync.any.pred large, large, 0xffffffff;", "@large bra.uni LARGE;"]
    for i in range(pack):
        lines += [f"mul.f32 x, ${i}, ${i};", f"fma.rn.f32 y, x, {c3}, {c2};", f"fma.rn.f32 y, x, y, {c1};"]
        lines += [f"fma.rn.f32 y, x, y, {c0};", f"mul.f32 ${i}, ${i}, y;"]
    lines += ["bra.uni DONE;", "LARGE:", f"mul.f32 y, {factor}, 0f4038AA3B;"]
    for i in range(pack):
        lines += [f"mul.f32 x, ${i}, y;", "ex2.approx.ftz.f32 x, x;", "add.f32 x, x, 0f3F800000;", "rcp.approx.ftz.f32 x, x;"]
        lines += [f"fma.rn.f32 ${i}, x, 0fC0000000, 0f3F800000;"]
    return "{ " + " ".join([*lines, "DONE:"]) + " }"


TANH_PACK = tl.constexpr(8)
TANH_PTX = tl.constexpr(_tanh_ptx(8))
TANH_CONSTRAINTS = tl.constexpr(",".join(["=&f"] * 8 + list("01234567") + ["f"] * 40))


@triton.jit
def phase_bounds(PHASE: tl.constexpr, lo, hi, full_lo, full_hi, band_lo, band_hi, B: tl.constexpr, BIAS: tl.constexpr):
    """Start and end of a phase, multiples of B, for needed [lo, hi), mask-free [full_lo, full_hi), table [band_lo, band_hi).

    Every element of [lo, hi) falls into one phase; phases 1 to 3 hold whole tiles of the mask-free range only (eq. 30).
    """
    first = lo // B * B
    last = tl.maximum(tl.cdiv(hi, B) * B, first)
    full_first = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(full_lo, 0), B) * B, first), last)
    full_last = tl.minimum(tl.maximum(tl.maximum(full_hi, 0) // B * B, full_first), last)
    if PHASE == 0:
        return first, full_first
    if PHASE == 4:
        return full_last, last
    if not BIAS:
        return full_first, full_last
    band_first = tl.minimum(tl.maximum(tl.maximum(band_lo, 0) // B * B, full_first), full_last)
    band_last = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(band_hi, 0), B) * B, band_first), full_last)
    if PHASE == 1:
        return full_first, band_first
    if PHASE == 2:
        return band_first, band_last
    return band_last, full_last


@triton.jit
def key_phase(PHASE: tl.constexpr, first_position, last_position, sk, geometry, V: tl.constexpr, BN: tl.constexpr):
    """Keys that rows at positions first .. last visit in a phase."""
    lo = 0
    hi = sk
    full_lo = 0
    full_hi = sk
    if V.LEFT:
        lo = tl.maximum(first_position - geometry.left, 0)
        full_lo = last_position - geometry.left
    if V.RIGHT:
        hi = tl.maximum(tl.minimum(sk, last_position + geometry.right + 1), 0)
        full_hi = tl.minimum(sk, first_position + geometry.right + 1)
    lo = tl.minimum(lo, sk)
    hi = tl.maximum(hi, lo)
    band_lo = first_position + geometry.bias_origin - geometry.n_bias + 1
    band_hi = last_position + geometry.bias_origin + 1
    return phase_bounds(PHASE, lo, hi, full_lo, full_hi, band_lo, band_hi, BN, V.BIAS)


@triton.jit
def row_phase(PHASE: tl.constexpr, first_key, last_key, sq, sk, geometry, V: tl.constexpr, BM: tl.constexpr):
    """Rows that keys first .. last are visited by in a phase: `key_phase` the other way round."""
    shift = sk - sq
    lo = 0
    hi = sq
    full_lo = 0
    full_hi = sq
    if V.RIGHT:
        lo = tl.maximum(first_key - geometry.right - shift, 0)
        full_lo = last_key - geometry.right - shift
    if V.LEFT:
        hi = tl.maximum(tl.minimum(sq, last_key + geometry.left - shift + 1), 0)
        full_hi = tl.minimum(sq, first_key + geometry.left - shift + 1)
    lo = tl.minimum(lo, sq)
    hi = tl.maximum(hi, lo)
    band_lo = first_key - geometry.bias_origin - shift
    band_hi = last_key - geometry.bias_origin - shift + geometry.n_bias
    return phase_bounds(PHASE, lo, hi, full_lo, full_hi, band_lo, band_hi, BM, V.BIAS)


@triton.jit
def visible(position, key, sk, geometry, V: tl.constexpr, LEFT: tl.constexpr = True, RIGHT: tl.constexpr = True):
    """Eq. 2. Rows that exist have positions below sk, so causal needs no test of the end.

    In a WIDE window a tile is tested against the one edge it can meet: the left, or the right and the end.
    """
    if V.WIDE and not RIGHT:
        return key >= position - geometry.left
    if V.CAUSAL:
        seen = key <= position
    else:
        seen = (key < sk) & (position == position)
        if V.RIGHT:
            seen = seen & (key <= position + geometry.right)
    if V.LEFT and (LEFT or not V.WIDE):
        seen = seen & (key >= position - geometry.left)
    return seen


@triton.jit
def visible_count(position, q_start, sq, sk, packing, geometry, V: tl.constexpr):
    """n_i of eq. 3; a part of an elastic row is told (`Part.n`)."""
    if V.PART:
        row = position - (sk - sq)
        return tl.load(packing.n + q_start + row, mask=(row >= 0) & (row < sq), other=0)
    first = position * 0
    last = first + (sk - 1)
    if V.LEFT:
        first = tl.maximum(position - geometry.left, 0)
    if V.RIGHT:
        last = tl.minimum(position + geometry.right, sk - 1)
    return tl.maximum(last - first + 1, 0)


@triton.jit
def tanh(t, factor, V: tl.constexpr):
    """tanh(t * factor) to 2e-7, which is what a logit needs; in fp32 relatively as well.

    A polynomial up to |x| = 0.5, beyond it 1 - 2 / (1 + e^2x): the special function unit is what is short here, and softcaps
    are chosen so that few logits come near them.
    """
    if V.FP32:
        return precise_tanh(t * factor)
    f2 = factor * factor
    c0 = 0.9999976762 * factor
    c1 = -0.3332065522 * factor * f2
    c2 = 0.1314514565 * factor * f2 * f2
    c3 = -0.0433724836 * factor * f2 * f2 * f2
    if V.NVIDIA:
        return tl.inline_asm_elementwise(
            TANH_PTX, TANH_CONSTRAINTS, [t, c0, c1, c2, c3, factor], dtype=tl.float32, is_pure=True, pack=TANH_PACK
        )
    square = t * t
    small = t * (c0 + square * (c1 + square * (c2 + square * c3)))
    x = t * factor
    return tl.where(tl.abs(x) > 0.5, 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E))), small)


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
    which lies one entry off. Across is added last: what is constant for a thread then ends up in the instruction.
    """
    # beyond the padding all is zero, wherever the tile lies
    start = tl.minimum(tl.maximum(start, TABLE_PAD // 2), geometry.n_bias + 3 * (TABLE_PAD // 2))
    pitch = table_pitch(geometry)
    first = start - tl.arange(0, DOWN)[:, None]
    first += (first & 1) * (pitch - 1)
    pairs = tl.arange(0, ACROSS // 2)[None, :] * 2
    if V.NVIDIA:
        # a load that Triton does not recognise stays where it is used: its pipeliner would copy the tile through shared memory
        even, odd = tl.inline_asm_elementwise(
            "ld.global.nc.v2.f32 {$0, $1}, [$2];",
            "=f,=f,l",
            [(table_ptr + first + pairs).to(tl.int64)],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        even = tl.load(table_ptr + first + pairs)
        odd = tl.load(table_ptr + first + pairs + 1)
    return tl.join(even, odd).reshape([DOWN, ACROSS])


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
def elastic(p, share, threshold, alone, seen, MASK: tl.constexpr, V: tl.constexpr):
    """(p, a, m) of eq. 9 to 11: p exact where a row sees one key, weights, survivors as a mask; share = tau / n.

    threshold is 0, or -inf for tau >= 0: then every visible key survives, also where p underflowed.
    """
    if MASK and not V.SINK:
        p = tl.where(alone & seen, 1.0, p)
    shifted = p + share
    m = shifted > threshold
    if MASK:
        m = m & seen
    return p, tl.where(m, shifted, 0.0), m


@triton.jit
def tile_weights(
    t, lse2, bias, share, threshold, alone, seen, geometry, V: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr
):
    """(p, a, m, tanh of the softcap) of a tile in either orientation from its raw products t = q.k; m only with tau."""
    capped = capped_product(t, geometry, V)
    if BIAS:
        # not as a sum with the product: Triton would start the product from it, and hold it in registers meanwhile
        p = tl.exp2(capped * geometry.unit + (bias * geometry.unit - lse2))
    else:
        p = tl.exp2(capped * geometry.unit - lse2)
    if MASK:
        p = tl.where(seen, p, 0.0)
    a = p
    m = seen
    if V.TAU:
        p, a, m = elastic(p, share, threshold, alone, seen, MASK, V)
    return p, a, m, capped


@triton.jit
def tile_gradient(
    t, dp, lse2, delta, bias, share, threshold, alone, seen, geometry, V: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr
):
    """(a, ds, dx) of a tile in either orientation: eq. 33 from the raw products t = q.k and dp = do.v."""
    p, a, m, capped = tile_weights(t, lse2, bias, share, threshold, alone, seen, geometry, V, MASK, BIAS)
    if V.TAU:
        dp = tl.where(m, dp, 0.0)
    ds = p * (dp - delta)
    dx = ds
    if V.SOFTCAP:
        dx = ds * (1.0 - capped * capped)
    return a, ds, dx


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
def load_tile(ptr, stride, start, n, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr):
    """[B, BD] of the rows from `start` on; at an EDGE zero outside of 0 .. n-1, always zero beyond D."""
    lanes = tl.arange(0, B)
    columns = tl.arange(0, BD)
    pointers = ptr + tl.cast(start, tl.int64) * stride + lanes[:, None] * stride + columns[None, :]
    inside = ((start + lanes >= 0) & (start + lanes < n))[:, None]
    if D != BD:
        if EDGE:
            return tl.load(pointers, mask=inside & (columns < D)[None, :], other=0.0)
        return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
    if EDGE:
        return tl.load(pointers, mask=inside, other=0.0)
    return tl.load(pointers)


@triton.jit
def stream_tile(
    tensor, descriptor, ptr, b, h, start, n, B: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, EDGE: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """`load_tile` in a main loop: through the tensor's descriptor where there is one, which costs no address registers."""
    if TMA:
        return descriptor.load([b, h, start, 0]).reshape([B, BD])
    return load_tile(ptr, tensor.row, start, n, B, D, BD, EDGE)


@triton.jit
def row_state(b, h, row, pitch16, geometry):
    """Offset of a row in the fp32 row buffers, whose pitch is a multiple of 16 so that vectors of them load aligned."""
    return tl.cast(b * geometry.heads + h, tl.int64) * (pitch16 * 16) + row


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
