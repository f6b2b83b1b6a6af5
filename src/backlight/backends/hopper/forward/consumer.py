"""A consumer partition of the forward without tau: a warpgroup that owns 64 rows of every tile (eq. 31).

The next S = Q K^T is issued before O += P V of the previous block is waited on, so the softmax runs under a matmul; P goes from
the accumulator's registers straight into the second matmul. Registers: S and O fp32, P 16 bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from backlight.backends.hopper.compat import arguments, warpgroup_mma_wait
from backlight.backends.hopper.forward.overflow import largest_sum, stores_tile, ticket_of
from backlight.backends.hopper.forward.peaks import first_peak, store_peaks, with_scores, with_weights
from backlight.backends.hopper.forward.ring import hand_on_turn, release, ring_stage, skip_stage, wait_full, wait_turn
from backlight.backends.hopper.forward.scores import (
    at_edge,
    cap_of,
    far_blocks_end,
    first_max_step,
    first_sums,
    hide,
    hide_outside,
    lse_of,
    release_k,
    scored,
    seen_scores,
    with_bias,
)
from backlight.backends.hopper.forward.steps import (
    accumulator,
    first_head,
    load_gate,
    low_half,
    lse_target,
    next_head,
    no_products,
    release_q,
    row_totals,
    scores_of,
    start_scores,
    store_low,
    store_rows,
    wait_gate,
    write_columns,
    write_o,
)
from backlight.backends.hopper.forward.tiles import END, place_of, q_buffer, view_of
from backlight.backends.hopper.primitives import INF, WM, as_weights, columns_beyond, first_columns, rescaled, softmax_step


@arguments
class Rows:
    """What a warpgroup carries from block to block: O, weights of the last block (still to be multiplied by V), sums of rows.

    o_beyond: the last columns of O (`columns_beyond`), any number where there are none; rescale: what O has to be multiplied by
    before those weights are added; peak: see peaks.py.
    """

    o: gl.tensor
    o_beyond: gl.tensor
    weights: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    rescale: gl.tensor
    peak: gl.tensor


@gluon.jit
def skip_blocks(p, n, count, W: gl.constexpr):
    """Release n blocks that this warpgroup has no use for."""
    for _ in range(n):
        if p.V.PINGPONG:
            wait_turn(p, W)
            hand_on_turn(p, W)
        skip_stage(p.k, count)
        count = skip_stage(p.v, count)
    return count


@gluon.jit
def both_rescaled(o, o_beyond, rescale, BEYOND: gl.constexpr):
    o = rescaled(o, rescale)
    if BEYOND > 0:
        o_beyond = rescaled(o_beyond, rescale)
    return o, o_beyond


@gluon.jit
def rescaled_after(p, o, o_beyond, rescale, block, far_end):
    """O, rescaled as the softmax of `block` asks for."""
    BEYOND: gl.constexpr = columns_beyond(p.V.DV, p.V.BDV)
    if p.V.KEEP_FIRST_MAX:
        if block >= far_end:
            o, o_beyond = both_rescaled(o, o_beyond, rescale, BEYOND)
    else:
        o, o_beyond = both_rescaled(o, o_beyond, rescale, BEYOND)
    return o, o_beyond


@gluon.jit
def start_outputs(p, weights, stage, o, o_beyond):
    """O += P V of a stage of the ring, in flight."""
    BEYOND: gl.constexpr = columns_beyond(p.V.DV, p.V.BDV)
    v = p.v.tiles.index(stage)
    o = warpgroup_mma(weights, first_columns(v, BEYOND), o, is_async=True)
    if BEYOND > 0:
        weights = gl.convert_layout(weights, gl.DotOperandLayout(0, accumulator(BEYOND), 2), assert_trivial=True)
        o_beyond = warpgroup_mma(weights, v.slice(2 * BEYOND, BEYOND, 1), o_beyond, is_async=True)
    return o, o_beyond


@gluon.jit
def rising_step(p, products, s, row_max, row_sum, peak):
    """`softmax_step` of a block, with the largest of its raw products."""
    peak = with_scores(p, peak, products, s)
    p32, row_max, row_sum, rescale = softmax_step(s, row_max, row_sum, p.scale.unit_log2, p.V.MASKED)
    return p32, row_max, row_sum, rescale, peak


@gluon.jit
def first_block(p, q, view, row_max, row_sum, count):
    """`Rows` after the block that the mask may cut, the last one."""
    BEYOND: gl.constexpr = columns_beyond(p.V.DV, p.V.BDV)
    FIRST: gl.constexpr = 2 * BEYOND if BEYOND > 0 else p.V.BDV
    o = no_products(FIRST)
    o_beyond = count
    if BEYOND > 0:
        o_beyond = no_products(BEYOND)
    products = scores_of(p, q, count)
    release_k(p, view, ring_stage(p.k, count), view.end - 1)
    s = with_bias(p, view, scored(p, products, cap_of(p, products)), view.end - 1)
    if p.V.INTERVALS > 0:
        if at_edge(view, view.end - 1):
            s = hide_outside(p, view, s, count)
    elif p.V.MASKED:
        s = hide(p, s, view.position, view.end - 1, view.sk)
    p32, row_max, row_sum, rescale, peak = rising_step(p, products, s, row_max, row_sum, first_peak(p, view.i0))
    return Rows(o, o_beyond, as_weights(p32, o, p.q_desc.dtype), row_max, row_sum, rescale, peak)


@gluon.jit
def advance(p, q, view, rows, count, block, far_end, W: gl.constexpr):
    """S of a block, O += P V of the one before it, then the softmax of this block under that matmul."""
    dtype: gl.constexpr = p.q_desc.dtype
    BEYOND: gl.constexpr = columns_beyond(p.V.DV, p.V.BDV)
    o = rows.o
    o_beyond = rows.o_beyond
    row_max = rows.row_max
    row_sum = rows.row_sum
    stage = ring_stage(p.k, count)
    previous = ring_stage(p.v, count - 1)
    if p.V.PINGPONG:
        wait_turn(p, W)
    s_token = start_scores(p, q, stage)
    if p.V.LATE_RESCALE:
        o, o_beyond = rescaled_after(p, o, o_beyond, rows.rescale, block + 1, far_end)
    wait_full(p.v, count - 1)
    o_token, beyond_token = start_outputs(p, rows.weights, previous, o, o_beyond)
    if p.V.PINGPONG:
        hand_on_turn(p, W)
    peak = with_weights(p, rows.peak, rows.weights)
    s = warpgroup_mma_wait(2 if BEYOND > 0 else 1, deps=[s_token])
    release_k(p, view, stage, block)
    products = s
    rescale = gl.full([WM], 1.0, gl.float32, gl.SliceLayout(1, s.type.layout))
    y = cap_of(p, s)
    if p.V.BIAS_KEEPS_MAX:
        s = with_bias(p, view, s, block)
    if p.V.FULL_FIRST:
        s = seen_scores(p, view, s, y, block, count)
    if p.V.KEEP_FIRST_MAX:
        if block < far_end:
            peak = with_scores(p, peak, products, s)
            p32, row_sum = first_max_step(p, s, y, row_max, row_sum)
        else:
            if not p.V.FULL_FIRST:
                s = seen_scores(p, view, s, y, block, count)
            p32, row_max, row_sum, rescale, peak = rising_step(p, products, s, row_max, row_sum, peak)
    else:
        s = seen_scores(p, view, s, y, block, count)
        p32, row_max, row_sum, rescale, peak = rising_step(p, products, s, row_max, row_sum, peak)
    if p.V.EARLY_P:
        new_weights = as_weights(p32, o, dtype)
    # the wait for the next K tile ends the basic block: without it ptxas hoists the wgmma wait above the softmax
    wait_full(p.k, count + 1, block > view.begin)
    o_beyond = beyond_token
    if p.V.EARLY_P:
        if BEYOND > 0:
            o, o_beyond, weights = warpgroup_mma_wait(0, deps=[o_token, beyond_token, new_weights])
        else:
            o, weights = warpgroup_mma_wait(0, deps=[o_token, new_weights])
    else:
        if BEYOND > 0:
            o, o_beyond, p32 = warpgroup_mma_wait(0, deps=[o_token, beyond_token, p32])
        else:
            o, p32 = warpgroup_mma_wait(0, deps=[o_token, p32])
        weights = as_weights(p32, o, dtype)
    release(p.v, previous)
    if not p.V.LATE_RESCALE:
        o, o_beyond = rescaled_after(p, o, o_beyond, rescale, block, far_end)
    return Rows(o, o_beyond, weights, row_max, row_sum, rescale, peak)


@gluon.jit
def normalised(p, o, inverse):
    """Sums of rows weighed by p, divided by the sums of p."""
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    o = o * inverse
    if p.V.MASKED or p.V.BIAS:
        # rows without a visible key: their sum is 0, and o may be 0 * inf
        o = gl.where(inverse == INF, 0.0, o)
    return o


@gluon.jit
def finish(p, rows, begin, far_end, count, turn, W: gl.constexpr):
    """O += P V of the first block, lse, and O on its way to global memory."""
    BEYOND: gl.constexpr = columns_beyond(p.V.DV, p.V.BDV)
    o = rows.o
    o_beyond = rows.o_beyond
    if p.V.LATE_RESCALE:
        o, o_beyond = rescaled_after(p, o, o_beyond, rows.rescale, begin, far_end)
    if not p.V.SHARE_QO and not p.V.KEEP_FIRST_MAX:
        release_q(p, turn, W)
    elif p.V.GATE and p.V.SHARE_QO:
        load_gate(p, W, turn)
    last = ring_stage(p.v, count - 1)
    wait_full(p.v, count - 1)
    o_token, beyond_token = start_outputs(p, rows.weights, last, o, o_beyond)
    peak = with_weights(p, rows.peak, rows.weights)
    total = row_totals(rows.row_sum, accumulator(p.V.BN))
    lse = lse_of(p, rows.row_max, total)
    # read again: registers are short in the loops
    place = place_of(p, turn & 3, W)
    ticket = ticket_of(p, turn & 3)
    offset, keep = lse_target(p, place, total, ticket, largest_sum(p.q_desc.dtype), W)
    if p.V.KEEP_FIRST_MAX and not p.V.SHARE_QO:
        release_q(p, turn, W)
    gl.store(p.lse_ptr + offset, gl.where(total == 0.0, -INF, lse), mask=keep)
    store_peaks(p, peak, rows.row_max, place.head, offset, keep)
    inverse = 1.0 / total
    if not p.V.GATE:
        # the store of the tile before has left the buffer
        tma.store_wait(0)
    if BEYOND > 0:
        o, o_beyond = warpgroup_mma_wait(0, deps=[o_token, beyond_token])
    else:
        o = warpgroup_mma_wait(0, deps=[o_token])
    release(p.v, last)
    if BEYOND > 0:
        wait_gate(p, turn, W)
        o = write_columns(p, normalised(p, o, inverse), 0, W)
        o_beyond = write_columns(p, normalised(p, o_beyond, inverse), 2 * BEYOND, W)
    else:
        o = write_o(p, normalised(p, o, inverse), turn, W)
    if p.V.LOW_SHARED:
        p.buffers.low.index(W).store(low_half(p, o))
    fence_async_shared()
    if stores_tile(p, ticket, W):
        store_rows(p, p.o_desc, place, p.buffers.o.index(W))
        if p.V.LOW_SHARED:
            store_rows(p, p.low_desc, place, p.buffers.low.index(W))
        store_low(p, o, 0, place)
        if BEYOND > 0:
            store_low(p, o_beyond, 2 * BEYOND, place)
    if p.V.SHARE_QO:
        tma.store_wait(0)
        release_q(p, turn, W)


@gluon.jit
def plain_consumer(p, W: gl.constexpr):
    s_l: gl.constexpr = accumulator(p.V.BN)
    if p.V.PINGPONG and W == p.V.NC - 1:
        hand_on_turn(p, W)
    head = first_head(p, W)
    count = head * 0
    turn = head * 0
    while head != END:
        q = p.buffers.q.index(q_buffer(p, turn, W))
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        ticket = ticket_of(p, turn & 3)
        if p.V.GATE and not p.V.SHARE_QO:
            load_gate(p, W, turn)
        row_max, row_sum = first_sums(p, head, s_l)
        if p.V.HAS_RIGHT:
            count = skip_blocks(p, view.tile_end - view.end, count, W)
        rows = first_block(p, q, view, row_max, row_sum, count)
        count += 1
        wait_full(p.k, count, view.end - view.begin > 1)
        far_end = far_blocks_end(p, view, ticket < 0, not p.V.BIAS_KEEPS_MAX)
        for j in range(view.end - 1 - view.begin):
            rows = advance(p, q, view, rows, count, view.end - 2 - j, far_end, W)
            count += 1
        finish(p, rows, view.begin, far_end, count, turn, W)
        if p.V.HAS_LEFT:
            count = skip_blocks(p, view.begin - view.tile_begin, count, W)
        turn += 1
        head = next_head(p, turn, W)
    tma.store_wait(0)
    if p.V.PINGPONG and W == 0:
        wait_turn(p, W)
