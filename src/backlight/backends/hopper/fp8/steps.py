"""Steps of a consumer in e4m3: scores, weights as an operand, sums, what is added to O.

Weights leave the softmax as e4m3 of 256 p relative to an integer power of two (eq. 98) and go from registers into the product
with V transposed, whose keys the quantisation has put in the order of those registers (eq. 96).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from backlight.backends.hopper.forward.ring import release, ring_stage
from backlight.backends.hopper.forward.scores import LOWEST, at_edge, hide, hide_by_entry, read_entry
from backlight.backends.hopper.primitives import INF, WM, row_sum_layout, stage_of
from backlight.backends.hopper.terms import LOG2E, bias_tile, cap_whole, sink_sums

# 2^8 times the weights: e4m3 reaches 448, and what is below 2^-14 of the maximum's power of two is rounded to less than 4 bits
HEADROOM = gl.constexpr(8.0)
# of a sink, in the place of +inf where it stands in a difference
LARGEST = gl.constexpr(1e30)


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a warpgroup's products [64, columns] of e4m3."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.jit
def no_products(COLUMNS: gl.constexpr):
    return gl.zeros([WM, COLUMNS], gl.float32, accumulator(COLUMNS))


@gluon.jit
def start_scores(p, q, stage):
    """Q K^T of a stage of the ring, in flight."""
    k = p.k.tiles.index(stage)
    return warpgroup_mma(q, k.permute((1, 0)), no_products(p.V.BN), use_acc=False, is_async=True)


@gluon.jit
def as_weights(p8):
    """e4m3 of a block in the registers where they are, as the operand of the product with V.

    A thread holds columns 8 c + 2 t and 8 c + 2 t + 1 of products, four in a row of an operand: of 16 keys, number
    8 i + 2 t + c is taken for number 4 t + 2 i + c.
    """
    BN: gl.constexpr = p8.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator(BN), 4)
    places = gl.permute(gl.reshape(p8, [WM, BN // 16, 2, 4, 2]), [0, 1, 3, 2, 4])
    return gl.convert_layout(gl.reshape(places, [WM, BN]), operand, assert_trivial=True)


@gluon.jit
def next_integer(x):
    return gl.inline_asm_elementwise("cvt.rpi.f32.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def softmax_step(p, s, factor, row_max, row_sum):
    """(e4m3 of a block's weights as operand, maximum, sums, factor of what came before), eq. 98; sums are of those."""
    new_max = gl.maximum(row_max, next_integer(gl.max(s, 1) * factor))
    top = new_max
    if p.V.MASKED:
        # a row that has not met a visible key yet
        top = gl.where(new_max == -INF, 0.0, new_max)
    rescale = gl.exp2(row_max - top)
    p8 = gl.exp2(s * factor - gl.expand_dims(top - HEADROOM, 1)).to(gl.float8e4nv)
    # ulps of 16 bits: what 16 of the weights add up to is rounded once more by a thousandth
    sums = gl.sum(gl.reshape(p8.to(gl.float16), [WM, p8.shape[1] // 8, 8]), 1)
    row_sum = added(row_sum, rescale, gl.convert_layout(sums.to(gl.float32), row_sum.type.layout, assert_trivial=True))
    return as_weights(p8), new_max, row_sum, rescale


@gluon.jit
def factor_of(p, q_scale, k_scale_ptr, block):
    """log2 of weights over products of a block; k_scale_ptr: of the sequence's first block."""
    return q_scale * gl.load(k_scale_ptr + gl.maximum(block, 0))


@gluon.jit
def termed(p, view, s, factor, block):
    """Scores of a block with cap and bias, and their factor: 1 where they are in base 2 already."""
    if p.V.SOFTCAP:
        s = cap_whole(s, factor, p.terms.cap_log2, 32 if p.V.D == 64 else 16)
        factor = factor * 0.0 + 1.0
    if p.V.BIAS:
        here = view.column - block * s.shape[1]
        if (here > -s.shape[0]) & (here < p.n_bias + s.shape[1] - 1):
            s = s * factor + bias_tile(view.table_ptr, here, p.n_bias, s, False)
            factor = factor * 0.0 + 1.0
    return s, factor


@gluon.jit
def entry_of(p, count):
    """What the list of blocks to visit says of tile number `count` of K, which has arrived."""
    return read_entry(p, stage_of(count, p.V.PLACES))


@gluon.jit
def release_k(p, count):
    """K of a block whose product is done, which under a mask by row intervals waits for their being read."""
    if p.V.INTERVALS == 0:
        release(p.k, ring_stage(p.k, count))


@gluon.jit
def hide_and_release(p, view, s, entry, count):
    """Scores of a block, masked by the row intervals that have come with tile number `count` of K, which is released."""
    s = hide_by_entry(p, view, s, entry, stage_of(count, p.V.PLACES))
    release(p.k, ring_stage(p.k, count))
    return s


@gluon.jit
def seen_scores(p, view, s, factor, block, entry, count):
    """Scores of a block with terms and, where the block needs it, masked; their factor."""
    s, factor = termed(p, view, s, factor, block)
    if p.V.INTERVALS > 0:
        s = hide_and_release(p, view, s, entry, count)
    elif p.V.HAS_LEFT or p.V.HAS_RIGHT:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if at_edge(view, block):
            s = hide(p, s, view.position, block, view.sk)
    return s, factor


@gluon.jit
def first_sums(p, view, head):
    """(maximum, partial sums) of rows that have met no key: the sink, which stands beside scores without offset (eq. 97)."""
    row_l: gl.constexpr = gl.SliceLayout(1, accumulator(p.V.BN))
    row_max = gl.full([WM], -INF, gl.float32, row_l)
    row_sum = gl.zeros([WM, 8], gl.float32, row_sum_layout(p.V.BN))
    if p.V.SINK:
        rows = view.i0 + gl.arange(0, WM, row_l)
        at = head.to(gl.int64) * p.sq + view.q_start + rows
        offset = gl.load(p.scales.offset_ptr + at, mask=rows < view.sq, other=0.0)
        sink = gl.load(p.terms.sink_ptr + head % p.heads).to(gl.float32)
        sink = gl.minimum((sink - offset) * LOG2E, LARGEST)
        row_max = next_integer(sink)
        weight = gl.where(row_max == -INF, 0.0, gl.exp2(sink - row_max + HEADROOM))
        weight = gl.convert_layout(weight, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)
        row_sum = sink_sums(row_sum) * gl.expand_dims(weight, 1)
    if p.V.BIAS and not p.V.MASKED:
        row_max = gl.maximum(row_max, LOWEST)
    return row_max, row_sum


@gluon.jit
def added(o, rescale, part):
    """O of the blocks before, rescaled, and of one more."""
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    return o * gl.expand_dims(rescale, 1) + part
