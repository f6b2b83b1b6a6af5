"""Scores of a key block in the forward: cap, bias and mask, softmax steps, and lse at the end.

`p` is the argument class of the kernel (arguments.py), `view` what a warpgroup sees of its tile (tiles.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.forward.ring import release, ring_stage
from backlight.backends.hopper.primitives import (
    INF,
    LN2,
    WM,
    before,
    between,
    clamp,
    key_limits,
    log2_of_sum,
    partial_sums,
    row_sum_layout,
    stage_of,
)
from backlight.backends.hopper.terms import bias_tile, cap_ratio, cap_whole, sink_sums
from backlight.backends.intervals.kernels import END as LAST
from backlight.backends.intervals.kernels import FIRST, HOLE

# in the place of +inf where it stands in a difference: 2^127, which fp32 holds exactly
LARGEST = gl.constexpr(1.7014118346046923e38)
# in the place of -inf: below all scores, and finite in whatever units
LOWEST = gl.constexpr(-(2.0**100))


@gluon.jit
def cap_of(p, s):
    """What makes scores of raw products under softcap (`scored`): a factor for each or, where O is wide, the scores."""
    y = s
    if p.V.SOFTCAP:
        if p.V.BDV <= 64:
            y = cap_ratio(s, p.terms.cap_factor, p.terms.cap_log2)
        else:
            # with tau there are u and two operands as well, with a bias its addresses
            y = cap_whole(s, p.terms.cap_factor, p.terms.cap_log2, 16 if p.V.TAU or p.V.BIAS else 32)
    return y


@gluon.jit
def scored(p, s, y):
    """Scores of a key block that does not meet the table."""
    if p.V.SOFTCAP:
        if p.V.BDV <= 64:
            # as assembly: the compiler would move a plain product above the branch to `first_max_step`, which has it in an FMA
            s = gl.inline_asm_elementwise("mul.f32 $0, $1, $2;", "=f,f,f", [s, y], dtype=gl.float32, is_pure=True, pack=1)
        else:
            s = y
    return s


@gluon.jit
def with_bias(p, view, s, block):
    """Scores of one key block, biased where the block meets the table."""
    if p.V.BIAS:
        here = view.column - block * s.shape[1]
        if (here > -s.shape[0]) & (here < p.n_bias + s.shape[1] - 1):
            if p.V.SOFTCAP:
                s = s + bias_tile(view.table_ptr, here, p.n_bias, s, False) * p.terms.cap_log2
            else:
                s = s + bias_tile(view.table_ptr, here, p.n_bias, s, False)
    return s


@gluon.jit
def seen_in(p, s, position, block, sk):
    """Visible keys (eq. 2) of one key block: a tile like s."""
    B: gl.constexpr = s.shape[1]
    columns = gl.arange(0, B, gl.SliceLayout(0, s.type.layout))
    first, end = key_limits(position, sk, p.left, p.right, p.V.HAS_LEFT, p.V.HAS_RIGHT)
    if p.V.HAS_LEFT:
        seen = between(first - block * B, end - block * B, columns)
    else:
        seen = before(end - block * B, columns)
    return seen


@gluon.jit
def hide(p, s, position, block, sk):
    """Masked scores of one key block."""
    return gl.where(seen_in(p, s, position, block, sk), s, -INF)


@gluon.jit
def hide_outside(p, view, s, count):
    """Scores of a block, masked by the row intervals that have come with tile number `count` of K, which is released."""
    stage = ring_stage(p.k, count)
    place = stage_of(count, p.V.PLACES)
    s = hide_by_entry(p, view, s, read_entry(p, place), place)
    if p.V.PLACES == p.V.ST:
        release(p.k, stage)
    return s


@gluon.jit
def read_entry(p, place):
    """What the list of tiles to visit says of the tile of K whose intervals lie at `place`."""
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(p.buffers.entry.index(place).load(four), 0)


@gluon.jit
def hide_by_entry(p, view, s, entry, place):
    """Scores of a block, compared with those of its intervals that its entry names."""
    row = gl.expand_dims(view.i0 + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout)), 1)
    if (entry & FIRST) != 0:
        s = gl.where(row >= limit_of(p, s, place, 0), s, -INF)
    if (entry & LAST) != 0:
        s = gl.where(row < limit_of(p, s, place, 1), s, -INF)
    if p.V.INTERVALS == 2:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if (entry & HOLE) != 0:
            s = gl.where((row < limit_of(p, s, place, 2)) | (row >= limit_of(p, s, place, 3)), s, -INF)
    return s


@gluon.jit
def limit_of(p, s, place, WHICH: gl.constexpr):
    """First rows or ends of a block's keys beside its scores."""
    limits = p.buffers.intervals.index(place * (2 * p.V.INTERVALS) + WHICH)
    return gl.expand_dims(limits.load(gl.SliceLayout(0, s.type.layout)), 0)


@gluon.jit
def at_edge(view, block):
    """Whether a key block needs a mask."""
    return (block >= view.plain_end) | (block < view.plain_begin)


@gluon.jit
def release_k(p, view, stage, block):
    """K of a block whose product is done; what is to be masked by row intervals is released when they have been read."""
    if p.V.INTERVALS > 0 and p.V.PLACES == p.V.ST:
        if not at_edge(view, block):
            release(p.k, stage)
    else:
        release(p.k, stage)


@gluon.jit
def seen_scores(p, view, s, y, block, count):
    """Scores of one key block with terms and, where the block needs it, masked."""
    if not p.V.BIAS_KEEPS_MAX:
        s = with_bias(p, view, scored(p, s, y), block)
    if p.V.INTERVALS > 0:
        if at_edge(view, block):
            s = hide_outside(p, view, s, count)
    elif p.V.HAS_LEFT or p.V.HAS_RIGHT:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if at_edge(view, block):
            s = hide(p, s, view.position, block, view.sk)
    return s


@gluon.jit
def sink_maximum(p, head):
    """The sink of a head in units of scores."""
    sink = gl.load(p.terms.sink_ptr + head % p.heads).to(gl.float32)
    # kept finite, for what is subtracted from it (`lse_of`); below it every other weight is 0
    return gl.minimum(sink / p.scale.unit, LARGEST)


@gluon.jit
def first_sums(p, head, s_l: gl.constexpr):
    """(maximum, partial sums) of rows that have met no key: the sink, or nothing."""
    row_max = gl.full([WM], -INF, gl.float32, gl.SliceLayout(1, s_l))
    row_sum = gl.zeros([WM, 8], gl.float32, row_sum_layout(p.V.BN))
    if p.V.SINK:
        row_max = gl.full([WM], sink_maximum(p, head), gl.float32, gl.SliceLayout(1, s_l))
        row_sum = sink_sums(row_sum)
    if p.V.BIAS and not p.V.MASKED:
        # a bias of -inf may hide all keys of the first blocks: no look at a maximum expects that where there is no mask
        if p.V.SINK:
            row_sum = row_sum * gl.where(sink_maximum(p, head) == -INF, 0.0, 1.0)
        row_max = gl.maximum(row_max, LOWEST)
    return row_max, row_sum


@gluon.jit
def first_max_step(p, s, y, row_max, row_sum):
    """`softmax_step` of a block that needs no mask, without a look for a new maximum (`overflow.overflowed`)."""
    if p.V.SOFTCAP:
        top = gl.expand_dims(row_max, 1)
        if p.V.BDV <= 64:
            weights = gl.exp2(s * y - top)
        else:
            weights = gl.exp2(y - top)
    else:
        weights = gl.exp2(s * p.scale.unit_log2 - gl.expand_dims(row_max * p.scale.unit_log2, 1))
    return weights, row_sum + partial_sums(weights, row_sum)


@gluon.jit
def far_blocks_end(p, view, careful, BEYOND_TABLE: gl.constexpr):
    """Blocks [begin, this) are free of masks (and of the bias), and every row has met a key before them; none if careful."""
    far_end = view.begin
    if not p.V.HAS_LEFT:
        far_end = view.plain_end - 1
        if p.V.FULL_FIRST:
            far_end = gl.where(view.plain_begin < view.end, far_end, view.begin)
        if p.V.BIAS and BEYOND_TABLE:
            far_end = gl.minimum(far_end, gl.maximum(view.column - p.n_bias + 1, 0) // p.V.BN)
        far_end = clamp(far_end, view.begin, view.end)
        if p.V.KEEP_FIRST_MAX:
            far_end = gl.where(careful, view.begin, far_end)
    return far_end


@gluon.jit
def lse_of(p, row_max, total):
    """lse (natural) of rows from their maximum and the sum relative to it.

    unit_rest is what two rounded constants, in the exponent and here, differ by; it would show in the last bits.
    """
    exponent, rest = log2_of_sum(total)
    lse = row_max * p.scale.unit + (row_max * p.scale.unit_rest + rest * LN2 + exponent * LN2)
    if p.V.SINK:
        lse = gl.where(row_max == LARGEST, INF, lse)
    return lse
