"""A consumer partition of the forward without tau: a warpgroup that owns 64 rows of every tile (eq. 31).

The next S = Q K^T is issued before O += P V of the previous block is waited on, so the softmax runs under a matmul; P goes from
the accumulator's registers straight into the second matmul. Registers: S and O fp32, P 16 bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from backlight.backends.hopper.compat import arguments, warpgroup_mma_wait
from backlight.backends.hopper.forward.overflow import largest_sum, rows_to_store, stores_tile, ticket_of
from backlight.backends.hopper.forward.tiles import (
    END,
    HEAD,
    K_EMPTY,
    cap_of,
    far_blocks_end,
    first_max_step,
    first_sums,
    hide,
    load_gate,
    lse_of,
    place_of,
    q_buffer,
    q_phase,
    read_field,
    scored,
    seen_scores,
    view_of,
    with_bias,
)
from backlight.backends.hopper.primitives import (
    INF,
    WM,
    as_weights,
    bar_arrive,
    bar_sync,
    mma_over_columns,
    phase_of,
    rescaled,
    softmax_step,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.terms import sigmoid


@arguments
class Rows:
    """What a warpgroup carries from block to block: O, weights of the last block (still to be multiplied by V), sums of rows.

    rescale: what O has to be multiplied by before those weights are added.
    """

    o: gl.tensor
    weights: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    rescale: gl.tensor


@gluon.jit
def skip_blocks(p, n, count, W: gl.constexpr):
    """Release n blocks that this warpgroup has no use for."""
    for _ in range(n):
        stage = stage_of(count, p.ST)
        phase = phase_of(count, p.ST)
        if p.PINGPONG:
            bar_sync(p.TURN + W, 256)
            bar_arrive(p.TURN + (W + 1) % p.NC, 256)
        mbarrier.wait(p.k_full.index(stage), phase)
        bar_arrive(K_EMPTY + stage, p.RING_THREADS)
        mbarrier.wait(p.v_full.index(stage), phase)
        bar_arrive(p.V_EMPTY + stage, p.RING_THREADS)
        count += 1
    return count


@gluon.jit
def rescaled_after(p, o, rescale, block, far_end):
    """O, rescaled as the softmax of `block` asks for."""
    if p.KEEP_FIRST_MAX:
        if block >= far_end:
            o = rescaled(o, rescale)
    else:
        o = rescaled(o, rescale)
    return o


@gluon.jit
def advance(p, q, view, rows, count, block, far_end, W: gl.constexpr):
    """S of a block, O += P V of the one before it, then the softmax of this block under that matmul."""
    BN: gl.constexpr = p.BN
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o = rows.o
    row_max = rows.row_max
    row_sum = rows.row_sum
    stage = stage_of(count, ST)
    previous = stage_of(count - 1, ST)
    if p.PINGPONG:
        bar_sync(p.TURN + W, 256)
    s_token = mma_over_columns(q, p.k_s.index(stage), gl.zeros([WM, BN], gl.float32, s_l), p.D)
    if p.LATE_RESCALE:
        o = rescaled_after(p, o, rows.rescale, block + 1, far_end)
    mbarrier.wait(p.v_full.index(previous), phase_of(count - 1, ST))
    o_token = warpgroup_mma(rows.weights, p.v_s.index(previous), o, is_async=True)
    if p.PINGPONG:
        bar_arrive(p.TURN + (W + 1) % p.NC, 256)
    s = warpgroup_mma_wait(1, deps=[s_token])
    bar_arrive(K_EMPTY + stage, p.RING_THREADS)
    rescale = gl.full([WM], 1.0, gl.float32, gl.SliceLayout(1, s_l))
    y = cap_of(p, s)
    if p.BIAS_KEEPS_MAX:
        s = with_bias(p, view, s, block)
    if p.KEEP_FIRST_MAX:
        if block < far_end:
            p32, row_sum = first_max_step(p, s, y, row_max, row_sum)
        else:
            s = seen_scores(p, view, s, y, block)
            p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
    else:
        s = seen_scores(p, view, s, y, block)
        p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
    if p.EARLY_P:
        new_weights = as_weights(p32, o, dtype)
    # the wait for the next K tile ends the basic block: without it ptxas hoists the wgmma wait above the softmax
    mbarrier.wait(p.k_full.index(stage_of(count + 1, ST)), phase_of(count + 1, ST), pred=block > view.begin)
    if p.EARLY_P:
        o, weights = warpgroup_mma_wait(0, deps=[o_token, new_weights])
    else:
        o, p32 = warpgroup_mma_wait(0, deps=[o_token, p32])
        weights = as_weights(p32, o, dtype)
    bar_arrive(p.V_EMPTY + previous, p.RING_THREADS)
    if not p.LATE_RESCALE:
        o = rescaled_after(p, o, rescale, block, far_end)
    return Rows(o, weights, row_max, row_sum, rescale)


@gluon.jit
def plain_consumer(p, W: gl.constexpr):
    BN: gl.constexpr = p.BN
    BDV: gl.constexpr = p.v_s.shape[2]
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BDV, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)

    if p.PINGPONG and W == p.NC - 1:
        bar_arrive(p.TURN, 256)
    mbarrier.wait(p.q_full.index(W), 0)
    head = read_field(p, 0, HEAD)
    count = head * 0
    turn = head * 0
    while head != END:
        q = p.q_s.index(q_buffer(p, turn, W))
        view = view_of(p, head, turn & 3, W, row_l)
        ticket = ticket_of(p, turn & 3)
        if p.GATE and not p.SHARE_QO:
            load_gate(p, W, turn)

        o = gl.zeros([WM, BDV], gl.float32, o_l)
        row_max, row_sum = first_sums(p, head, s_l)
        if p.HAS_RIGHT:
            count = skip_blocks(p, view.tile_end - view.end, count, W)
        mbarrier.wait(p.k_full.index(stage_of(count, ST)), phase_of(count, ST))
        s_token = mma_over_columns(q, p.k_s.index(stage_of(count, ST)), gl.zeros([WM, BN], gl.float32, s_l), p.D)
        s = warpgroup_mma_wait(0, deps=[s_token])
        bar_arrive(K_EMPTY + stage_of(count, ST), p.RING_THREADS)
        s = with_bias(p, view, scored(p, s, cap_of(p, s)), view.end - 1)
        if MASKED:
            s = hide(p, s, view.position, view.end - 1, view.sk)
        p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
        rows = Rows(o, as_weights(p32, o, dtype), row_max, row_sum, rescale)
        count += 1
        mbarrier.wait(p.k_full.index(stage_of(count, ST)), phase_of(count, ST), pred=view.end - view.begin > 1)
        far_end = far_blocks_end(p, view, ticket < 0, not p.BIAS_KEEPS_MAX)
        for j in range(view.end - 1 - view.begin):
            rows = advance(p, q, view, rows, count, view.end - 2 - j, far_end, W)
            count += 1
        o = rows.o
        if p.LATE_RESCALE:
            o = rescaled_after(p, o, rows.rescale, view.begin, far_end)

        if not p.SHARE_QO and not p.KEEP_FIRST_MAX:
            mbarrier.arrive(p.q_empty.index(q_buffer(p, turn, W)), count=1)
        elif p.GATE and p.SHARE_QO:
            load_gate(p, W, turn)
        last = stage_of(count - 1, ST)
        mbarrier.wait(p.v_full.index(last), phase_of(count - 1, ST))
        o_token = warpgroup_mma(rows.weights, p.v_s.index(last), o, is_async=True)
        total = gl.convert_layout(gl.sum(rows.row_sum, 1), row_l, assert_trivial=True)
        lse = lse_of(p, rows.row_max, total)
        # read again: registers are short in the loops
        head, i0, q_start, sq, _ = place_of(p, turn & 3, W)
        ticket = ticket_of(p, turn & 3)
        b = head // p.heads
        h = head % p.heads
        numbers = i0 + gl.arange(0, WM, row_l)
        lse_row = head.to(gl.int64) * p.sq + q_start
        keep = rows_to_store(p, total, numbers, sq, ticket, lse_row, i0, largest_sum(dtype), W)
        if p.KEEP_FIRST_MAX and not p.SHARE_QO:
            mbarrier.arrive(p.q_empty.index(q_buffer(p, turn, W)), count=1)
        gl.store(p.lse_ptr + lse_row + numbers, gl.where(total == 0.0, -INF, lse), mask=keep)
        inverse = gl.expand_dims(gl.convert_layout(1.0 / total, gl.SliceLayout(1, o_l), assert_trivial=True), 1)
        if not p.GATE:
            # the store of the tile before has left the buffer
            tma.store_wait(0)
        o = warpgroup_mma_wait(0, deps=[o_token])
        bar_arrive(p.V_EMPTY + last, p.RING_THREADS)
        o = o * inverse
        if MASKED:
            # rows without a visible key: total is 0, and o may be 0 * inf
            o = gl.where(inverse == INF, 0.0, o)
        o_s = p.o_s.index(W)
        if p.GATE:
            mbarrier.wait(p.gate_full.index(W), turn & 1)
            o = o * sigmoid(o_s.load(o_l).to(gl.float32))
        o_s.store(o.to(dtype))
        fence_async_shared()
        if stores_tile(p, ticket, W):
            store_tile(p.o_desc, b, h, q_start, sq, i0, o_s, p.VARLEN)
        if p.SHARE_QO:
            tma.store_wait(0)
            mbarrier.arrive(p.q_empty.index(q_buffer(p, turn, W)), count=1)
        if p.HAS_LEFT:
            count = skip_blocks(p, view.begin - view.tile_begin, count, W)
        turn += 1
        mbarrier.wait(p.q_full.index(q_buffer(p, turn, W)), q_phase(p, turn))
        head = read_field(p, turn & 3, HEAD)
    tma.store_wait(0)
    if p.PINGPONG and W == 0:
        bar_sync(p.TURN, 256)
