"""Device code that every Triton kernel shares: geometry, scores, mask, elastic weights, loads.

Written once, used by both directions. Functions are elementwise over `position` (i' of eq. 1) and `key`, so the same code
serves [rows, keys] tiles in the forward and dq kernels and [keys, rows] tiles in the dk/dv kernel. Logits are in base 2.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# a range of tiles is visited in five phases: masked, plain, plain within the bias table, plain, masked
PHASES = tl.constexpr(5)


@triton.jit
def phase_bounds(PHASE: tl.constexpr, lo, hi, full_lo, full_hi, band_lo, band_hi, B: tl.constexpr, HAS_BIAS: tl.constexpr):
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
    if not HAS_BIAS:
        return full_first, full_last
    band_first = tl.minimum(tl.maximum(tl.maximum(band_lo, 0) // B * B, full_first), full_last)
    band_last = tl.minimum(tl.maximum(tl.cdiv(tl.maximum(band_hi, 0), B) * B, band_first), full_last)
    if PHASE == 1:
        return full_first, band_first
    if PHASE == 2:
        return band_first, band_last
    return band_last, full_last


@triton.jit
def key_phase(
    PHASE: tl.constexpr,
    first_position,
    last_position,
    sk,
    left,
    right,
    n_bias,
    bias_origin,
    BN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Keys that rows at positions first .. last visit in a phase."""
    lo = 0
    hi = sk
    full_lo = 0
    full_hi = sk
    if HAS_LEFT:
        lo = tl.maximum(first_position - left, 0)
        full_lo = last_position - left
    if HAS_RIGHT:
        hi = tl.maximum(tl.minimum(sk, last_position + right + 1), 0)
        full_hi = tl.minimum(sk, first_position + right + 1)
    lo = tl.minimum(lo, sk)
    hi = tl.maximum(hi, lo)
    band_lo = first_position + bias_origin - n_bias + 1
    band_hi = last_position + bias_origin + 1
    return phase_bounds(PHASE, lo, hi, full_lo, full_hi, band_lo, band_hi, BN, HAS_BIAS)


@triton.jit
def row_phase(
    PHASE: tl.constexpr,
    first_key,
    last_key,
    sq,
    sk,
    left,
    right,
    n_bias,
    bias_origin,
    BM: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Rows that keys first .. last are visited by in a phase: `key_phase` the other way round."""
    shift = sk - sq
    lo = 0
    hi = sq
    full_lo = 0
    full_hi = sq
    if HAS_RIGHT:
        lo = tl.maximum(first_key - right - shift, 0)
        full_lo = last_key - right - shift
    if HAS_LEFT:
        hi = tl.maximum(tl.minimum(sq, last_key + left - shift + 1), 0)
        full_hi = tl.minimum(sq, first_key + left - shift + 1)
    lo = tl.minimum(lo, sq)
    hi = tl.maximum(hi, lo)
    band_lo = first_key - bias_origin - shift
    band_hi = last_key - bias_origin - shift + n_bias
    return phase_bounds(PHASE, lo, hi, full_lo, full_hi, band_lo, band_hi, BM, HAS_BIAS)


@triton.jit
def visible(position, key, sk, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Eq. 2."""
    seen = (key < sk) & (position == position)
    if HAS_LEFT:
        seen = seen & (position - key <= left)
    if HAS_RIGHT:
        seen = seen & (key - position <= right)
    return seen


@triton.jit
def visible_count(position, sk, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """n_i of eq. 3."""
    first = position * 0
    last = first + (sk - 1)
    if HAS_LEFT:
        first = tl.maximum(position - left, 0)
    if HAS_RIGHT:
        last = tl.minimum(position + right, sk - 1)
    return tl.maximum(last - first + 1, 0)


@triton.jit
def tanh(x):
    """tanh to fp32 accuracy: 1 - 2 / (1 + e^2x) cancels near 0, where a short series takes over."""
    square = x * x
    series = x * (1.0 + square * (-0.3333333333 + square * (0.1333333333 - square * 0.0539682540)))
    ratio = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E)))
    return tl.where(square < 0.0625, series, ratio)


@triton.jit
def logits(t, position, key, bias_ptr, factor, cap2, n_bias, bias_origin, HAS_SOFTCAP: tl.constexpr, BIAS: tl.constexpr):
    """(s * log2 e before the mask, tanh of the softcap or t): eq. 4 to 6. factor = scale * log2 e, or scale / softcap."""
    capped = t * factor
    s2 = capped
    if HAS_SOFTCAP:
        capped = tanh(capped)
        s2 = capped * cap2
    if BIAS:
        column = position - key + bias_origin
        inside = (column >= 0) & (column < n_bias)
        s2 += tl.load(bias_ptr + column, mask=inside, other=0.0).to(s2.dtype) * LOG2E
    return s2, capped


@triton.jit
def elastic(p, seen, n, tau, HAS_SINK: tl.constexpr):
    """(p, a, m) of eq. 9 to 11: p exact where a row sees one key, weights, survivors as a mask."""
    if not HAS_SINK:
        p = tl.where((n == 1) & seen, 1.0, p)
    shifted = p + tau / tl.maximum(n, 1)
    # tau >= 0: every visible key survives, also where p underflowed
    m = seen & (shifted > tl.where(tau >= 0, float("-inf"), 0.0))
    return p, tl.where(m, shifted, 0.0), m


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
def load_rows(ptr, stride, rows, n_rows, D: tl.constexpr, BD: tl.constexpr):
    """[rows, BD], zero beyond n_rows and beyond D."""
    columns = tl.arange(0, BD)
    mask = (rows < n_rows)[:, None]
    if D != BD:
        mask = mask & (columns < D)[None, :]
    return tl.load(ptr + rows[:, None] * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_rows(ptr, stride, rows, n_rows, value, D: tl.constexpr, BD: tl.constexpr):
    columns = tl.arange(0, BD)
    mask = (rows < n_rows)[:, None]
    if D != BD:
        mask = mask & (columns < D)[None, :]
    tl.store(ptr + rows[:, None] * stride + columns[None, :], value.to(ptr.dtype.element_ty), mask=mask)
