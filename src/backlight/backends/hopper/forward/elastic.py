"""A consumer partition of the forward with tau (eq. 32): the relu needs the final lse, so keys are visited twice.

  normaliser   S = Q K^T, online softmax without P V: lse
  output       S again, A = relu(P + tau / n) and survivors M from registers into O += A V and U += M V; nothing is rescaled

The normaliser's chain is serial; its arithmetic runs under the matmuls of the other warpgroups. In the output sweep the weights
of a block are made under the products of the block before. Registers: S, O and U fp32, A and M 16 bit. Dead tiles are not
skipped: the test would need all four warps of a warpgroup to meet at every block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from backlight.backends.hopper.compat import arguments, warpgroup_mma_wait
from backlight.backends.hopper.forward.overflow import LARGEST_SUM, stores_tile, ticket_of
from backlight.backends.hopper.forward.peaks import first_peak, store_peaks, with_scores
from backlight.backends.hopper.forward.ring import release, ring_stage, skip_stage, wait_full
from backlight.backends.hopper.forward.scores import (
    at_edge,
    cap_of,
    far_blocks_end,
    first_max_step,
    first_sums,
    hide,
    lse_of,
    scored,
    seen_in,
    with_bias,
)
from backlight.backends.hopper.forward.steps import (
    accumulator,
    first_head,
    load_gate,
    lse_target,
    next_head,
    no_products,
    release_q,
    row_totals,
    start_scores,
    store_rows,
    take_scores,
    write_o,
)
from backlight.backends.hopper.forward.tiles import END, place_of, q_buffer, view_of
from backlight.backends.hopper.primitives import INF, WM, softmax_step
from backlight.backends.hopper.terms import (
    LOG2E,
    survivors,
    survivors_of,
    threshold,
    visible_count,
    weights16,
)


@gluon.jit
def skip_keys(p, n, k_count):
    """Release n tiles of K that this warpgroup has no use for."""
    for _ in range(n):
        k_count = skip_stage(p.k, k_count)
    return k_count


@gluon.jit
def skip_keys_and_values(p, n, k_count, v_count):
    """The same for K and V in turns, as they come."""
    for _ in range(n):
        k_count = skip_stage(p.k, k_count)
        v_count = skip_stage(p.v, v_count)
    return k_count, v_count


# --- normaliser --------------------------------------------------------------------------------------------------------------


@gluon.jit
def normaliser(p, q, view, row_max, row_sum, careful, k_count):
    """(maximum, partial sums, `first_peak` after them, tiles of K so far) of rows that have met the keys they see."""
    peak = first_peak(p, view.i0)
    far_end = far_blocks_end(p, view, careful, True)
    free_end = far_blocks_end(p, view, careful, not p.V.BIAS_KEEPS_MAX)
    for j in range(view.end - free_end):
        block = view.end - 1 - j
        products = take_scores(p, q, k_count)
        k_count += 1
        s = with_bias(p, view, scored(p, products, cap_of(p, products)), block)
        if p.V.MASKED:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
            if at_edge(view, block):
                s = hide(p, s, view.position, block, view.sk)
        peak = with_scores(p, peak, products, s)
        _p, row_max, row_sum, _rescale = softmax_step(s, row_max, row_sum, p.scale.unit_log2, p.V.MASKED)
    if p.V.BIAS_KEEPS_MAX:
        for j in range(free_end - far_end):
            products = take_scores(p, q, k_count)
            k_count += 1
            s = with_bias(p, view, products, free_end - 1 - j)
            peak = with_scores(p, peak, products, s)
            _p, row_sum = first_max_step(p, s, products, row_max, row_sum)
    if not p.V.HAS_LEFT:
        for _ in range(far_end - view.begin):
            s = take_scores(p, q, k_count)
            k_count += 1
            peak = with_scores(p, peak, s, s)
            y = cap_of(p, s)
            if p.V.KEEP_FIRST_MAX:
                _p, row_sum = first_max_step(p, s, y, row_max, row_sum)
            else:
                _p, row_max, row_sum, _rescale = softmax_step(scored(p, s, y), row_max, row_sum, p.scale.unit_log2, False)
    return row_max, row_sum, peak, k_count


@gluon.jit
def store_lse(p, row_max, row_sum, peak, turn, W: gl.constexpr):
    """(sums of rows, their lse, which is stored with their largest logits, batch * heads + head)."""
    total = row_totals(row_sum, accumulator(p.V.BN))
    lse = gl.where(total == 0.0, -INF, lse_of(p, row_max, total))
    # read again: registers are short in the loops
    place = place_of(p, turn & 3, W)
    offset, keep = lse_target(p, place, total, ticket_of(p, turn & 3), LARGEST_SUM, W)
    gl.store(p.lse_ptr + offset, lse, mask=keep)
    store_peaks(p, peak, row_max, place.head, offset, keep)
    return total, lse, place.head


# --- output ------------------------------------------------------------------------------------------------------------------


@arguments
class Weighing:
    """What makes weights of a row's scores (eq. 11): its lse in base 2, tau / n, and the `threshold` of survivors."""

    lse2: gl.tensor
    share: gl.tensor
    bar: gl.tensor


@arguments
class Output:
    """O and U, and what the block before adds to them: its A and M, operands of matmuls to come."""

    o: gl.tensor
    u: gl.tensor
    a: gl.tensor
    m: gl.tensor


@gluon.jit
def weighing_of(p, view, head, total, lse):
    # from the natural logarithm, which the backward reads: both decide alike who survives
    lse2 = gl.where(total == 0.0, 0.0, lse * LOG2E)
    tau = gl.load(p.terms.tau_ptr + head % p.heads).to(gl.float32)
    n = visible_count(view.position, view.sk, p.left, p.right, p.V.HAS_LEFT, p.V.HAS_RIGHT)
    return Weighing(lse2, tau / gl.maximum(n, 1).to(gl.float32), threshold(tau))


@gluon.jit
def weighed(p, view, weighing, s, block, far_end):
    """Shifted weights of a block's products, -inf where a key is hidden."""
    row_l: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    s = scored(p, s, cap_of(p, s))
    share = gl.expand_dims(gl.convert_layout(weighing.share, row_l, assert_trivial=True), 1)
    lse2 = gl.expand_dims(gl.convert_layout(weighing.lse2, row_l, assert_trivial=True), 1)
    if block >= far_end:
        s = with_bias(p, view, s, block)
    weight = gl.exp2(s * p.scale.unit_log2 - lse2) + share
    if p.V.MASKED:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if at_edge(view, block):
            position = view.i0 + view.sk - view.sq + gl.arange(0, WM, row_l)
            if not p.V.SINK:
                # the only key of its row has p = 1 exactly, and sits on the kink when tau = -1
                alone = visible_count(position, view.sk, p.left, p.right, p.V.HAS_LEFT, p.V.HAS_RIGHT) == 1
                weight = gl.where(gl.expand_dims(alone, 1), 1.0 + share, weight)
            weight = gl.where(seen_in(p, s, position, block, view.sk), weight, -INF)
    return weight


@gluon.jit
def operands(p, weighing, weight):
    """A and M of shifted weights, as register operands of the products with V."""
    dtype: gl.constexpr = p.q_desc.dtype
    a_l: gl.constexpr = gl.DotOperandLayout(0, accumulator(p.V.BDV), 2)
    a = gl.convert_layout(weights16(weight, dtype), a_l, assert_trivial=True)
    m = a
    if p.V.SAVE_U:
        if dtype == gl.bfloat16 and not p.V.MASKED:
            m = survivors_of(a, weighing.bar)
        else:
            m = gl.convert_layout(survivors(weight, weighing.bar, dtype), a_l, assert_trivial=True)
    return a, m


@gluon.jit
def add_products(p, rows, stage):
    """O += A V and U += M V, in flight."""
    v = p.v.tiles.index(stage)
    o = warpgroup_mma(rows.a, v, rows.o, is_async=True)
    u = rows.u
    if p.V.SAVE_U:
        u = warpgroup_mma(rows.m, v, rows.u, is_async=True)
    return o, u


@gluon.jit
def first_block(p, view, weighing, s, far_end):
    """`Output` before any product: zeros, and the operands of the last block."""
    a, m = operands(p, weighing, weighed(p, view, weighing, s, view.end - 1, far_end))
    return Output(no_products(p.V.BDV), no_products(p.V.BDV), a, m)


@gluon.jit
def advance(p, q, view, weighing, rows, k_count, v_count, block, far_end):
    """S of a block, the products of the one before it, then the weights of this block under those."""
    stage = ring_stage(p.k, k_count)
    previous = ring_stage(p.v, v_count - 1)
    s_token = start_scores(p, q, stage)
    wait_full(p.v, v_count - 1)
    o, u = add_products(p, rows, previous)
    s = warpgroup_mma_wait(2 if p.V.SAVE_U else 1, deps=[s_token])
    release(p.k, stage)
    weight = weighed(p, view, weighing, s, block, far_end)
    # ends the basic block: ptxas would move the wait for the products above the weights
    wait_full(p.k, k_count + 1, block > view.begin)
    if p.V.SAVE_U:
        o, u, weight = warpgroup_mma_wait(0, deps=[o, u, weight])
    else:
        o, weight = warpgroup_mma_wait(0, deps=[o, weight])
    release(p.v, previous)
    a, m = operands(p, weighing, weight)
    return Output(o, u, a, m)


@gluon.jit
def finish(p, rows, v_count, turn, W: gl.constexpr):
    """The products of the first block; O and U on their way to global memory."""
    last = ring_stage(p.v, v_count - 1)
    wait_full(p.v, v_count - 1)
    o, u = add_products(p, rows, last)
    if p.V.SAVE_U:
        o, u = warpgroup_mma_wait(0, deps=[o, u])
    else:
        o = warpgroup_mma_wait(0, deps=[o])
    release(p.v, last)
    place = place_of(p, turn & 3, W)
    if not p.V.GATE:
        # the stores of the tile before have left the buffers
        tma.store_wait(0)
    write_o(p, o, turn, W)
    if p.V.SAVE_U:
        position = place.i0 + place.sk - place.sq + gl.arange(0, WM, gl.SliceLayout(1, accumulator(p.V.BDV)))
        n = visible_count(position, place.sk, p.left, p.right, p.V.HAS_LEFT, p.V.HAS_RIGHT)
        u = u * gl.expand_dims(1.0 / gl.maximum(n, 1).to(gl.float32), 1)
        p.buffers.u.index(W).store(u.to(p.q_desc.dtype))
    fence_async_shared()
    if stores_tile(p, ticket_of(p, turn & 3), W):
        store_rows(p, p.o_desc, place, p.buffers.o.index(W))
        if p.V.SAVE_U:
            store_rows(p, p.u_desc, place, p.buffers.u.index(W))


@gluon.jit
def elastic_consumer(p, W: gl.constexpr):
    s_l: gl.constexpr = accumulator(p.V.BN)
    head = first_head(p, W)
    k_count = head * 0
    v_count = head * 0
    turn = head * 0
    while head != END:
        q = p.buffers.q.index(q_buffer(p, turn, W))
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        ticket = ticket_of(p, turn & 3)
        if p.V.GATE:
            load_gate(p, W, turn)
        row_max, row_sum = first_sums(p, head, s_l)
        if p.V.HAS_RIGHT:
            k_count = skip_keys(p, view.tile_end - view.end, k_count)
        row_max, row_sum, peak, k_count = normaliser(p, q, view, row_max, row_sum, ticket < 0, k_count)
        if p.V.HAS_LEFT:
            k_count = skip_keys(p, view.begin - view.tile_begin, k_count)
        total, lse, head = store_lse(p, row_max, row_sum, peak, turn, W)

        weighing = weighing_of(p, view, head, total, lse)
        if p.V.HAS_RIGHT:
            k_count, v_count = skip_keys_and_values(p, view.tile_end - view.end, k_count, v_count)
        far_end = far_blocks_end(p, view, ticket_of(p, turn & 3) < 0, True)
        s = take_scores(p, q, k_count)
        k_count += 1
        v_count += 1
        rows = first_block(p, view, weighing, s, far_end)
        wait_full(p.k, k_count, view.end - view.begin > 1)
        for j in range(view.end - 1 - view.begin):
            rows = advance(p, q, view, weighing, rows, k_count, v_count, view.end - 2 - j, far_end)
            k_count += 1
            v_count += 1
        release_q(p, turn, W)
        finish(p, rows, v_count, turn, W)
        if p.V.HAS_LEFT:
            k_count, v_count = skip_keys_and_values(p, view.begin - view.tile_begin, k_count, v_count)
        turn += 1
        head = next_head(p, turn, W)
    tma.store_wait(0)
