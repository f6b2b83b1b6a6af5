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
# zeros on both sides of the expanded bias table: no tile is wider than this
TABLE_PAD = tl.constexpr(512)


class Rows(NamedTuple):
    """A [B,H,S,D] tensor in memory: pointer and strides; the last dimension is contiguous."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Geometry(NamedTuple):
    """What a kernel must know of the spec at run time. factor: scale * log2 e, or scale / softcap."""

    heads: Any
    group: Any
    left: Any
    right: Any
    n_bias: Any
    bias_origin: Any
    factor: Any
    cap2: Any


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
    # a positive scale and no term after it: row maxima may be taken before scaling
    LINEAR: bool
    FP32: bool
    NVIDIA: bool
    PRECISION: str


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
def tanh(x, V: tl.constexpr):
    """1 - 2e / (1 + e), e = e^-2|x|: absolutely accurate to an ulp of 1, which is all that a 16-bit softmax can tell.

    The quotient is a parabola and two Newton steps: 1 + e lies in (1, 2], and the special function unit is what is short here.
    fp32 asks for relative accuracy near 0, where the difference cancels and a short series takes over.
    """
    magnitude = tl.abs(x)
    twice = tl.exp2(1.0 - magnitude * (2.0 * LOG2E))
    divisor = 1.0 + 0.5 * twice
    inverse = 2.1212121212 + divisor * (-1.4545454545 + divisor * 0.3232323232)
    inverse = inverse * (2.0 - divisor * inverse)
    inverse = inverse * (2.0 - divisor * inverse)
    ratio = 1.0 - twice * inverse
    ratio = tl.where(x < 0, -ratio, ratio)
    if not V.FP32:
        return ratio
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    return tl.where(square < 0.0625, series, ratio)


@triton.jit
def bias_tile(table_ptr, column, down, across, geometry, V: tl.constexpr):
    """Bias of a tile whose first row and key lie `column` apart in the table.

    The distance inside it is a sum of `down` [:, None] and `across` [None, :], added in this order: then what is constant for a
    thread ends up in the instruction and not in a register per element.
    """
    # beyond the padding all is zero, wherever the tile lies
    column = tl.minimum(tl.maximum(column, -TABLE_PAD // 2), geometry.n_bias + TABLE_PAD // 2) + TABLE_PAD
    if V.NVIDIA:
        # a load that Triton does not recognise stays where it is used: its pipeliner would copy the tile through shared memory
        address = (table_ptr + column + down + across).to(tl.int64)
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [address], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.load(table_ptr + column + down + across)


@triton.jit
def logits(t, bias2, geometry, V: tl.constexpr, BIAS: tl.constexpr):
    """(s * log2 e before the mask, tanh of the softcap or t): eq. 4 to 6; bias2 in base 2."""
    capped = t * geometry.factor
    s2 = capped
    if V.SOFTCAP:
        capped = tanh(capped, V)
        s2 = capped * geometry.cap2
    if BIAS:
        s2 += bias2
    return s2, capped


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
def tile_gradient(
    t, dp, lse2, delta, bias2, share, threshold, alone, seen, geometry, V: tl.constexpr, MASK: tl.constexpr, BIAS: tl.constexpr
):
    """(a, ds, dx) of a tile in either orientation: eq. 33 from the raw products t = q.k and dp = do.v."""
    s2, capped = logits(t, bias2, geometry, V, BIAS)
    p = tl.exp2(s2 - lse2)
    if MASK:
        p = tl.where(seen, p, 0.0)
    a = p
    if V.TAU:
        p, a, m = elastic(p, share, threshold, alone, seen, MASK, V)
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
