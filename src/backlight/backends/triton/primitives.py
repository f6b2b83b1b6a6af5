"""Device code that every Triton kernel shares: arguments, geometry, scores, mask, elastic weights.

Written once, used by both directions. Elementwise functions take `position` (i' of eq. 1) and `key`, so the same code serves
[rows, keys] tiles in the forward, dq and dbias kernels and [keys, rows] tiles in the dk/dv kernel. Logits are in base 2.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backlight.backends.intervals.kernels import segment_at
from backlight.backends.triton.powers import above, raised
from backlight.backends.triton.softcap import softcapped
from backlight.backends.triton.visits import in_intervals, intervals_of, mask_number, tiles_of, visits_of

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Rows(NamedTuple):
    """A [B,H,S,D] tensor in memory: pointer and strides; the last dimension is contiguous."""

    ptr: Any
    batch: Any
    head: Any
    row: Any


class Geometry(NamedTuple):
    """What a kernel must know of the spec at run time. Base-2 logits are unit * (factor * q.k + table), with a softcap
    unit * (tanh(factor * q.k) + table); unit is positive. The mask of head h of batch entry b is number
    b * mask_batch + h * mask_head."""

    heads: Any
    group: Any
    left: Any
    right: Any
    n_bias: Any
    bias_origin: Any
    factor: Any
    unit: Any
    mask_batch: Any
    mask_head: Any
    # of entmax, one for each head
    alphas: Any = None


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
    """The sequence a program works on: where it begins in packed tensors, its lengths, and which of them it is."""

    q_start: Any
    k_start: Any
    sq: Any
    sk: Any
    number: Any


class Block(NamedTuple):
    """What a program owns that owns rows: batch, query head and its key head, its first row in the tensor, how many rows of
    the segment there are from it on, and their positions (i' of eq. 1). tile: which of all row tiles of a head it is."""

    segment: Any
    tile: Any
    b: Any
    h: Any
    g: Any
    row: Any
    n_rows: Any
    first_position: Any
    last_position: Any
    position: Any


class OwnRows(NamedTuple):
    """Rows of a program of a pre-pass, as those of `Block`. exists, in_buffer: which of its lanes are rows of the segment, and
    which have a place in buffers with room up to the pitch; packed sequences have no such room between them."""

    segment: Any
    b: Any
    h: Any
    i0: Any
    row: Any
    n_rows: Any
    lanes: Any
    exists: Any
    in_buffer: Any


class Sight(NamedTuple):
    """What decides which keys rows of one sequence see, besides `Geometry`: intervals of keys (`intervals_of`), the sequence,
    and where their number is told."""

    intervals: Any
    segment: Any
    packing: Any


class Packing(NamedTuple):
    """Packed sequences: borders of the segments, and the first tile of each. n: visible keys per row, read by parts and under a
    mask by row intervals, which has as many rows of them as there are masks."""

    cu_q: Any
    cu_k: Any
    cu_tiles: Any
    n: Any


class Frame(NamedTuple):
    """How rows and keys of a call lie and which of them meet."""

    mask: Any
    packing: Any
    geometry: Any


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
    # 0 without a pair bias, 1 by key, 2 by row and key
    PAIR: int
    SINK: bool
    TAU: bool
    # 0 without entmax, its exponent where that is compiled in, else -1
    ENTMAX: int
    # main loops follow lists of the tiles in which entmax leaves anything
    LIVE: bool
    GATE: bool
    VARLEN: bool
    # one part of a row with tau or entmax: lse of the whole row is given, with tau also n
    PART: bool
    # of each key, in a mask by row intervals: 0 without a mask, 1 or 2
    INTERVALS: int
    # they are compared with pos; otherwise LEFT and RIGHT are in them
    POS: bool
    # factor is 1
    LINEAR: bool
    FP32: bool
    NVIDIA: bool
    # bf16 compared in pairs: Hopper or later
    PAIRED: bool
    PRECISION: str


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
def keys_of(block, mask, sq, sk, n_segments, geometry, V: tl.constexpr, BN: tl.constexpr):
    """(span, visits, intervals) of the keys that a block of rows meets; sq, sk: lengths of whole tensors."""
    span = key_span(block, geometry, V, BN)
    key_tiles = tiles_of(sk, n_segments, V, BN)
    visits = visits_of(span, mask, block.b, block.h, block.tile, tl.num_programs(0), key_tiles, geometry, V, BN)
    intervals = intervals_of(mask, block.b, block.h, block.segment, sq, sk, n_segments, geometry, V, BN)
    return span, visits, intervals


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
def visible(position, key, intervals, segment, geometry, V: tl.constexpr, BN: tl.constexpr):
    """Eq. 2 and, under a mask, its intervals, which say all of it where they are compared with rows."""
    if V.INTERVALS > 0:
        row = position - (segment.sk - segment.sq)
        seen = in_intervals(row, key, intervals, segment.sq, V, BN)
        if V.POS and (V.LEFT or V.RIGHT):
            seen = seen & within_reach(position, key, segment.sk, geometry, V)
    else:
        seen = within_reach(position, key, segment.sk, geometry, V)
    return seen


@triton.jit
def within_reach(position, key, sk, geometry, V: tl.constexpr):
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
    """n_i of eq. 3; a part of an elastic row is told (`Part.n`), and so is a row under a mask (`own_counts`)."""
    if V.PART or V.INTERVALS > 0:
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
def cut_rows(i0, span, at_edge, V: tl.constexpr):
    """Whether an edge cuts the rows from i0 on; under a mask by intervals that is known already."""
    if V.INTERVALS == 0:
        if V.LEFT and V.RIGHT:
            at_edge = (i0 < span.low) | (i0 > span.high)
        elif V.LEFT:
            at_edge = i0 > span.high
        elif V.RIGHT:
            at_edge = i0 < span.low
    return at_edge


@triton.jit
def own_counts(packing, b, h, sq, geometry, V: tl.constexpr):
    """`packing` with the n of the rows of one head; sq: rows of q."""
    if V.INTERVALS > 0 and V.TAU:
        n = packing.n + mask_number(b, h, geometry) * sq
        packing = Packing(packing.cu_q, packing.cu_k, packing.cu_tiles, n)
    return packing


@triton.jit
def logits_of(t, gain, addend, geometry, V: tl.constexpr, SLOPE: tl.constexpr):
    """Eq. 4 and 5 from the raw product: gain * factor * t + addend; with a softcap gain * tanh(factor * t) + addend, and what
    is left to multiply by of its slope at t (`softcapped`). With gain = unit they are base-2 logits."""
    if V.SOFTCAP:
        return softcapped(t, geometry.factor, gain, addend, V, SLOPE)
    if V.LINEAR:
        return t * gain + addend, t
    return t * (geometry.factor * gain) + addend, t


@triton.jit
def tile_weights(s, share, floor, position, key, at_edge, sight, geometry, V: tl.constexpr, BN: tl.constexpr):
    """(p, a) of eq. 8 to 11 of a tile in either orientation from s, the base-2 logits less lse2; share = tau / n.

    With tau a row that sees one key has p = 1 exactly; such a row is always cut by an edge. With entmax share is alpha, a the
    weight and p its slope w, which ds has in the place of p (eq. 80, 87).
    """
    if V.ENTMAX != 0:
        u = above(s, share)
        p = raised(u, 1 / (share - 1), V, 1)
        a = p * u
    else:
        p = tl.exp2(s)
        a = p
    if V.TAU:
        a = tl.maximum(p + share, floor)
    if at_edge:
        seen = visible(position, key, sight.intervals, sight.segment, geometry, V, BN)
        if V.TAU and not V.SINK:
            p = tl.where(visible_count(position, sight.segment, sight.packing, geometry, V) == 1, 1.0, p)
        p = tl.where(seen, p, 0.0)
        if V.ENTMAX != 0:
            a = tl.where(seen, a, 0.0)
        else:
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
def tile_gradient(p, m, dp, delta, slope, V: tl.constexpr):
    """(ds, dx) of a tile in either orientation: eq. 33 from the raw products dp = do.v; with tau m marks survivors."""
    if V.TAU:
        dp = dp * m
    dp = dp - delta
    dx = p * dp
    if V.SOFTCAP:
        # this product first: it can be done before dp is there, and leaves one number to keep
        dx = (p * slope) * dp
    return p * dp, dx


@triton.jit
def nth_segment(z, packing):
    """Segment z of packed sequences."""
    q_start = tl.load(packing.cu_q + z)
    k_start = tl.load(packing.cu_k + z)
    return Segment(q_start, k_start, tl.load(packing.cu_q + z + 1) - q_start, tl.load(packing.cu_k + z + 1) - k_start, z)


@triton.jit
def one_segment(z, packing, sq, sk, V: tl.constexpr):
    """Segment z of packed sequences, or the only one there is."""
    segment = Segment(0, 0, sq, sk, 0)
    if V.VARLEN:
        segment = nth_segment(z, packing)
    return segment


@triton.jit
def segment_of(tile, packing, sq, sk, n_segments, V: tl.constexpr):
    """(segment of a program's tile, number of the tile inside it); a tile beyond the last segment finds one without rows."""
    segment = Segment(0, 0, sq, sk, 0)
    if V.VARLEN:
        z, tile = locate(tile, packing.cu_tiles, n_segments)
        exists = (z < n_segments).to(tl.int32)
        found = nth_segment(tl.minimum(z, n_segments - 1), packing)
        segment = Segment(found.q_start, found.k_start, found.sq * exists, found.sk * exists, found.number)
    return segment, tile


@triton.jit
def row_block(packing, sq, sk, n_segments, geometry, V: tl.constexpr, BM: tl.constexpr):
    """The block of a program that owns BM rows."""
    segment, tile = segment_of(tl.program_id(0), packing, sq, sk, n_segments, V)
    number = tl.program_id(0)
    if (V.RIGHT or V.INTERVALS > 0) and not V.VARLEN:
        # causal, and most masks: the longest rows first, so that the last wave is short
        tile = tl.num_programs(0) - 1 - tile
        number = tile
    i0 = tile * BM
    first_position = i0 + segment.sk - segment.sq
    last_position = tl.minimum(i0 + BM, segment.sq) - 1 + segment.sk - segment.sq
    b = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    position = (first_position + tl.arange(0, BM))[:, None]
    g = h // geometry.group
    return Block(segment, number, b, h, g, segment.q_start + i0, segment.sq - i0, first_position, last_position, position)


@triton.jit
def own_rows(packing, sq, sk, n_segments, geometry, V: tl.constexpr, BM: tl.constexpr):
    """The rows of a program of a pre-pass, which owns BM of them."""
    b = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    segment, tile = segment_of(tl.program_id(0), packing, sq, sk, n_segments, V)
    i0 = tile * BM
    n_rows = segment.sq - i0
    lanes = tl.arange(0, BM)
    exists = lanes < n_rows
    in_buffer = exists
    if not V.VARLEN:
        in_buffer = lanes >= 0
    return OwnRows(segment, b, h, i0, segment.q_start + i0, n_rows, lanes, exists, in_buffer)


@triton.jit
def sink_weight(sink, lse, nothing):
    """p of the sink; an infinite one is all there is, or nothing. nothing: rows whose sink weighs 0 whatever it is."""
    return tl.where(nothing, 0.0, tl.where(lse == sink, 1.0, tl.exp2((sink - lse) * LOG2E)))


@triton.jit
def locate(tile, cu_tiles_ptr, n_segments):
    """Packed sequences: which segment a tile belongs to, and its number inside it; n_segments when there is none."""
    number = segment_at(tile, cu_tiles_ptr, n_segments)
    return number, tile - tl.load(cu_tiles_ptr + number)
