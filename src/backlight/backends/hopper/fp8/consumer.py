"""A consumer partition: a warpgroup that owns 64 rows of every tile.

Weights leave the softmax as e4m3 of 256 p relative to an integer power of two (eq. 98) and go from registers into the product
with V transposed, whose keys the quantisation has put in the order of those registers (eq. 96). The product of each block
begins at zero and is added to O in fp32 (eq. 99), in the multiply-add that rescales O.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from backlight.backends.hopper.compat import arguments, warpgroup_mma_wait
from backlight.backends.hopper.forward.consumer import skip_blocks
from backlight.backends.hopper.forward.ring import hand_on_turn, release, ring_stage, wait_full, wait_turn
from backlight.backends.hopper.forward.scores import at_edge, hide
from backlight.backends.hopper.forward.steps import first_head, load_gate, next_head, release_q, store_rows, wait_gate
from backlight.backends.hopper.forward.tiles import BLOCK, END, SEGMENT, place_of, read_field, view_of
from backlight.backends.hopper.fp8.producer import first_tiles
from backlight.backends.hopper.primitives import INF, LN2, WM, log2_of_sum, row_sum_layout
from backlight.backends.hopper.terms import LOG2E, bias_tile, cap_whole, sigmoid, sink_sums

# 2^8 times the weights: e4m3 reaches 448, and what is below 2^-14 of the maximum's power of two is rounded to less than 4 bits
HEADROOM = gl.constexpr(8.0)
# of a sink, in the place of +inf where it stands in a difference
LARGEST = gl.constexpr(1e30)


@arguments
class Rows:
    """What a warpgroup carries from block to block: O, scores of the next block, sums of rows; factor: of the scores.

    Weights are not carried, since the compiler would take a register for each of them: matmuls of one warpgroup run under the
    softmax of the other.
    """

    o: gl.tensor
    s: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    factor: gl.tensor


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
def start_outputs(p, weights, stage):
    """P V of a stage of the ring, from zero, in flight."""
    v = p.v.tiles.index(stage)
    return warpgroup_mma(weights, v.permute((1, 0)), no_products(p.V.D), use_acc=False, is_async=True)


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
    """(e4m3 of a block's weights, maximum, sums, factor of what came before), eq. 98; sums are those of the rounded weights."""
    new_max = gl.maximum(row_max, next_integer(gl.max(s, 1) * factor))
    top = new_max
    if p.V.MASKED:
        # a row that has not met a visible key yet
        top = gl.where(new_max == -INF, 0.0, new_max)
    rescale = gl.exp2(row_max - top)
    p8 = gl.exp2(s * factor - gl.expand_dims(top - HEADROOM, 1)).to(gl.float8e4nv)
    # ulps of 16 bits: what 16 of the weights add up to is rounded once more by a thousandth
    sums = gl.sum(gl.reshape(p8.to(gl.float16), [WM, p8.shape[1] // 8, 8]), 1)
    sums = gl.convert_layout(sums.to(gl.float32), row_sum.type.layout, assert_trivial=True)
    before = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)
    return p8, new_max, row_sum * gl.expand_dims(before, 1) + sums, rescale


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
def seen_scores(p, view, s, factor, block):
    """Scores of a block with terms and, where the block needs it, masked; their factor."""
    s, factor = termed(p, view, s, factor, block)
    if p.V.HAS_LEFT or p.V.HAS_RIGHT:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
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
    return row_max, row_sum


@gluon.jit
def added(o, rescale, part):
    """O of the blocks before, rescaled, and of one more."""
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, o.type.layout), assert_trivial=True)
    return o * gl.expand_dims(rescale, 1) + part


@gluon.jit
def first_scores(p, q, view, head, q_scale, k_scale_ptr, count):
    """`Rows` before the block that the mask may cut, the last one."""
    row_max, row_sum = first_sums(p, view, head)
    factor = factor_of(p, q_scale, k_scale_ptr, view.end - 1)
    wait_full(p.k, count)
    s = warpgroup_mma_wait(0, deps=[start_scores(p, q, ring_stage(p.k, count))])
    release(p.k, ring_stage(p.k, count))
    s, factor = termed(p, view, s, factor, view.end - 1)
    if p.V.MASKED:
        s = hide(p, s, view.position, view.end - 1, view.sk)
    return Rows(no_products(p.V.D), s, row_max, row_sum, factor)


@gluon.jit
def advance(p, q, view, rows, q_scale, k_scale_ptr, count, block, W: gl.constexpr):
    """The softmax of block + 1, then S of `block` and P V of block + 1."""
    following = factor_of(p, q_scale, k_scale_ptr, block)
    p8, row_max, row_sum, rescale = softmax_step(p, rows.s, rows.factor, rows.row_max, rows.row_sum)
    weights = as_weights(p8)
    wait_full(p.k, count + 1)
    wait_full(p.v, count)
    if p.V.PINGPONG:
        wait_turn(p, W)
    s_token = start_scores(p, q, ring_stage(p.k, count + 1))
    part_token = start_outputs(p, weights, ring_stage(p.v, count))
    if p.V.PINGPONG:
        hand_on_turn(p, W)
    s = warpgroup_mma_wait(1, deps=[s_token])
    release(p.k, ring_stage(p.k, count + 1))
    if not p.V.SOFTCAP:
        s, following = seen_scores(p, view, s, following, block)
    part = warpgroup_mma_wait(0, deps=[part_token])
    release(p.v, ring_stage(p.v, count))
    o = added(rows.o, rescale, part)
    if p.V.SOFTCAP:
        # its squares do not fit into registers beside the product
        s, following = seen_scores(p, view, s, following, block)
    return Rows(o, s, row_max, row_sum, following)


@gluon.jit
def finish(p, rows, kv_head, count, turn, W: gl.constexpr):
    """The softmax and P V of the first block, lse, and O on its way to global memory."""
    release_q(p, turn, W)
    p8, row_max, row_sum, rescale = softmax_step(p, rows.s, rows.factor, rows.row_max, rows.row_sum)
    weights = as_weights(p8)
    wait_full(p.v, count)
    part_token = start_outputs(p, weights, ring_stage(p.v, count))
    row_l: gl.constexpr = gl.SliceLayout(1, accumulator(p.V.BN))
    total = gl.convert_layout(gl.sum(row_sum, 1), row_l, assert_trivial=True)
    # read again: registers are short in the loops
    place = place_of(p, turn & 3, W)
    numbers = place.i0 + gl.arange(0, WM, row_l)
    at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
    keep = numbers < place.sq
    offset = gl.load(p.scales.offset_ptr + at, mask=keep, other=0.0)
    exponent, rest = log2_of_sum(total)
    lse = (row_max + exponent - HEADROOM) * LN2 + rest * LN2 + offset
    if p.V.SINK:
        lse = gl.where(row_max == LARGEST, INF, lse)
    gl.store(p.lse_ptr + at, gl.where(total == 0.0, -INF, lse), mask=keep)
    inverse = 1.0 / total
    if not p.V.GATE:
        # the store of the tile before has left the buffer
        tma.store_wait(0)
    part = warpgroup_mma_wait(0, deps=[part_token])
    release(p.v, ring_stage(p.v, count))
    o = added(rows.o, rescale, part)
    columns = gl.arange(0, p.V.D, gl.SliceLayout(0, o.type.layout))
    v_scale = gl.load(p.scales.v_ptr + kv_head * p.V.D + columns)
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    o = o * inverse * gl.expand_dims(v_scale, 0)
    if p.V.MASKED:
        # rows without a visible key: total is 0, and o may be 0 * inf
        o = gl.where(inverse == INF, 0.0, o)
    wait_gate(p, turn, W)
    if p.V.GATE:
        o = o * sigmoid(p.buffers.o.index(W).load(o.type.layout).to(gl.float32))
    p.buffers.o.index(W).store(o.to(p.o_desc.dtype))
    fence_async_shared()
    store_rows(p, p.o_desc, place, p.buffers.o.index(W))


@gluon.jit
def consumer(p, W: gl.constexpr):
    s_l: gl.constexpr = accumulator(p.V.BN)
    if p.V.PINGPONG and W == p.V.NC - 1:
        hand_on_turn(p, W)
    head = first_head(p, W)
    count = head * 0
    turn = head * 0
    while head != END:
        q = p.buffers.q.index(W)
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        kv_head = head // p.heads * (p.heads // p.group) + head % p.heads // p.group
        before, keys_before = first_tiles(p, read_field(p, turn & 3, SEGMENT))
        block = before + read_field(p, turn & 3, BLOCK)
        q_scale = gl.load(p.scales.q_ptr + head * p.row_tiles + block) * p.unit_log2
        k_scale_ptr = p.scales.k_ptr + kv_head * p.key_tiles + keys_before
        if p.V.GATE:
            load_gate(p, W, turn)
        if p.V.HAS_RIGHT:
            count = skip_blocks(p, view.tile_end - view.end, count, W)
        rows = first_scores(p, q, view, head, q_scale, k_scale_ptr, count)
        for j in range(view.end - 1 - view.begin):
            rows = advance(p, q, view, rows, q_scale, k_scale_ptr, count, view.end - 2 - j, W)
            count += 1
        finish(p, rows, kv_head, count, turn, W)
        count += 1
        if p.V.HAS_LEFT:
            count = skip_blocks(p, view.begin - view.tile_begin, count, W)
        turn += 1
        head = next_head(p, turn, W)
    tma.store_wait(0)
    if p.V.PINGPONG and W == 0:
        wait_turn(p, W)
