"""A consumer partition of the forward with tau (eq. 32): the relu needs the final lse, so keys are visited twice.

  normaliser   S = Q K^T, online softmax without P V: lse
  output       S again, A = relu(P + tau / n) and survivors M from registers into O += A V and U += M V; nothing is rescaled

The normaliser's chain is serial; its arithmetic runs under the matmuls of the other warpgroups. In the output sweep the weights
of a block are made under the products of the block before. Registers: S, O and U fp32, A and M 16 bit. Dead tiles are not
skipped: the test would need all four warps of a warpgroup to meet at every block.
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
from backlight.backends.hopper.forward.overflow import LARGEST_SUM, rows_to_store, stores_tile, ticket_of
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
    seen_in,
    view_of,
    with_bias,
)
from backlight.backends.hopper.primitives import (
    INF,
    WM,
    bar_arrive,
    mma_over_columns,
    phase_of,
    softmax_step,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.terms import (
    LOG2E,
    sigmoid,
    survivors,
    survivors_of,
    threshold,
    visible_count,
    weights16,
)


@arguments
class Weighing:
    """What makes weights of a row's scores (eq. 11): its lse in base 2, tau / n, and the `threshold` of survivors."""

    lse2: gl.tensor
    share: gl.tensor
    bar: gl.tensor


@gluon.jit
def skip_stage(full, EMPTY: gl.constexpr, count, p):
    """Release a tile of a ring that this warpgroup has no use for."""
    mbarrier.wait(full.index(stage_of(count, p.ST)), phase_of(count, p.ST))
    bar_arrive(EMPTY + stage_of(count, p.ST), p.RING_THREADS)
    return count + 1


@gluon.jit
def skip_keys(p, n, k_count):
    for _ in range(n):
        k_count = skip_stage(p.k_full, K_EMPTY, k_count, p)
    return k_count


@gluon.jit
def skip_keys_and_values(p, n, k_count, v_count):
    """K and V in turns, as they come."""
    for _ in range(n):
        k_count = skip_stage(p.k_full, K_EMPTY, k_count, p)
        v_count = skip_stage(p.v_full, p.V_EMPTY, v_count, p)
    return k_count, v_count


@gluon.jit
def take_scores(p, q, count, s_l: gl.constexpr):
    """Q K^T of the next tile of the ring, which is released."""
    stage = stage_of(count, p.ST)
    mbarrier.wait(p.k_full.index(stage), phase_of(count, p.ST))
    token = mma_over_columns(q, p.k_s.index(stage), gl.zeros([WM, p.BN], gl.float32, s_l), p.D)
    s = warpgroup_mma_wait(0, deps=[token])
    bar_arrive(K_EMPTY + stage, p.RING_THREADS)
    return s


@arguments
class Output:
    """O and U, and what the block before adds to them: its A and M, operands of matmuls to come."""

    o: gl.tensor
    u: gl.tensor
    a: gl.tensor
    m: gl.tensor


@gluon.jit
def weighed(p, view, weighing, s, block, far_end):
    """Shifted weights of a block's products, -inf where a key is hidden."""
    row_l: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    s = scored(p, s, cap_of(p, s))
    share = gl.expand_dims(gl.convert_layout(weighing.share, row_l, assert_trivial=True), 1)
    lse2 = gl.expand_dims(gl.convert_layout(weighing.lse2, row_l, assert_trivial=True), 1)
    if block >= far_end:
        s = with_bias(p, view, s, block)
    weight = gl.exp2(s * p.unit_log2 - lse2) + share
    if p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if (block >= view.plain_end) | (block < view.plain_begin):
            position = view.i0 + view.sk - view.sq + gl.arange(0, WM, row_l)
            if not p.SINK:
                # the only key of its row has p = 1 exactly, and sits on the kink when tau = -1
                alone = visible_count(position, view.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT) == 1
                weight = gl.where(gl.expand_dims(alone, 1), 1.0 + share, weight)
            weight = gl.where(seen_in(p, s, position, block, view.sk), weight, -INF)
    return weight


@gluon.jit
def operands(p, weighing, weight, o_l: gl.constexpr):
    """A and M of shifted weights, as register operands of the products with V."""
    dtype: gl.constexpr = p.q_desc.dtype
    a_l: gl.constexpr = gl.DotOperandLayout(0, o_l, 2)
    a = gl.convert_layout(weights16(weight, dtype), a_l, assert_trivial=True)
    m = a
    if p.SAVE_U:
        if dtype == gl.bfloat16 and not (p.HAS_LEFT or p.HAS_RIGHT) and p.EVEN:
            m = survivors_of(a, weighing.bar)
        else:
            m = gl.convert_layout(survivors(weight, weighing.bar, dtype), a_l, assert_trivial=True)
    return a, m


@gluon.jit
def add_products(p, rows, stage):
    """O += A V and U += M V, in flight."""
    v = p.v_s.index(stage)
    o = warpgroup_mma(rows.a, v, rows.o, is_async=True)
    u = rows.u
    if p.SAVE_U:
        u = warpgroup_mma(rows.m, v, rows.u, is_async=True)
    return o, u


@gluon.jit
def advance(p, q, view, weighing, rows, k_count, v_count, block, far_end):
    """S of a block, the products of the one before it, then the weights of this block under those."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, p.BN, 16])
    stage = stage_of(k_count, p.ST)
    previous = stage_of(v_count - 1, p.ST)
    s_token = mma_over_columns(q, p.k_s.index(stage), gl.zeros([WM, p.BN], gl.float32, s_l), p.D)
    mbarrier.wait(p.v_full.index(previous), phase_of(v_count - 1, p.ST))
    o, u = add_products(p, rows, previous)
    s = warpgroup_mma_wait(2 if p.SAVE_U else 1, deps=[s_token])
    bar_arrive(K_EMPTY + stage, p.RING_THREADS)
    weight = weighed(p, view, weighing, s, block, far_end)
    # ends the basic block: ptxas would move the wait for the products above the weights
    mbarrier.wait(p.k_full.index(stage_of(k_count + 1, p.ST)), phase_of(k_count + 1, p.ST), pred=block > view.begin)
    if p.SAVE_U:
        o, u, weight = warpgroup_mma_wait(0, deps=[o, u, weight])
    else:
        o, weight = warpgroup_mma_wait(0, deps=[o, weight])
    bar_arrive(p.V_EMPTY + previous, p.RING_THREADS)
    o_l: gl.constexpr = rows.o.type.layout
    a, m = operands(p, weighing, weight, o_l)
    return Output(o, u, a, m)


@gluon.jit
def elastic_consumer(p, W: gl.constexpr):
    BN: gl.constexpr = p.BN
    BDV: gl.constexpr = p.v_s.shape[2]
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BDV, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)

    mbarrier.wait(p.q_full.index(W), 0)
    head = read_field(p, 0, HEAD)
    k_count = head * 0
    v_count = head * 0
    turn = head * 0
    while head != END:
        q = p.q_s.index(q_buffer(p, turn, W))
        view = view_of(p, head, turn & 3, W, row_l)
        ticket = ticket_of(p, turn & 3)
        if p.GATE:
            load_gate(p, W, turn)

        row_max, row_sum = first_sums(p, head, s_l)
        if p.HAS_RIGHT:
            k_count = skip_keys(p, view.tile_end - view.end, k_count)
        far_end = far_blocks_end(p, view, ticket < 0, True)
        band = far_blocks_end(p, view, ticket < 0, not p.BIAS_KEEPS_MAX)
        for j in range(view.end - band):
            block = view.end - 1 - j
            s = take_scores(p, q, k_count, s_l)
            k_count += 1
            s = with_bias(p, view, scored(p, s, cap_of(p, s)), block)
            if MASKED:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
                if (block >= view.plain_end) | (block < view.plain_begin):
                    s = hide(p, s, view.position, block, view.sk)
            _p, row_max, row_sum, _rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
        if p.BIAS_KEEPS_MAX:
            for j in range(band - far_end):
                s = take_scores(p, q, k_count, s_l)
                k_count += 1
                _p, row_sum = first_max_step(p, with_bias(p, view, s, band - 1 - j), s, row_max, row_sum)
        if p.FAR:
            for _ in range(far_end - view.begin):
                s = take_scores(p, q, k_count, s_l)
                k_count += 1
                y = cap_of(p, s)
                if p.KEEP_FIRST_MAX:
                    _p, row_sum = first_max_step(p, s, y, row_max, row_sum)
                else:
                    _p, row_max, row_sum, _rescale = softmax_step(scored(p, s, y), row_max, row_sum, p.unit_log2, False)
        if p.HAS_LEFT:
            k_count = skip_keys(p, view.begin - view.tile_begin, k_count)
        total = gl.convert_layout(gl.sum(row_sum, 1), row_l, assert_trivial=True)
        lse = gl.where(total == 0.0, -INF, lse_of(p, row_max, total))
        # read again: registers are short in the loops
        head, i0, q_start, sq, _ = place_of(p, turn & 3, W)
        numbers = i0 + gl.arange(0, WM, row_l)
        lse_row = head.to(gl.int64) * p.sq + q_start
        keep = rows_to_store(p, total, numbers, sq, ticket_of(p, turn & 3), lse_row, i0, LARGEST_SUM, W)
        gl.store(p.lse_ptr + lse_row + numbers, lse, mask=keep)

        # from the natural logarithm, which the backward reads: both decide alike who survives
        lse2 = gl.where(total == 0.0, 0.0, lse * LOG2E)
        tau = gl.load(p.tau_ptr + head % p.heads).to(gl.float32)
        n = visible_count(view.position, view.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        weighing = Weighing(lse2, tau / gl.maximum(n, 1).to(gl.float32), threshold(tau))
        if p.HAS_RIGHT:
            k_count, v_count = skip_keys_and_values(p, view.tile_end - view.end, k_count, v_count)
        far_end = far_blocks_end(p, view, ticket_of(p, turn & 3) < 0, True)
        s = take_scores(p, q, k_count, s_l)
        k_count += 1
        v_count += 1
        a, m = operands(p, weighing, weighed(p, view, weighing, s, view.end - 1, far_end), o_l)
        rows = Output(gl.zeros([WM, BDV], gl.float32, o_l), gl.zeros([WM, BDV], gl.float32, o_l), a, m)
        mbarrier.wait(p.k_full.index(stage_of(k_count, ST)), phase_of(k_count, ST), pred=view.end - view.begin > 1)
        for j in range(view.end - 1 - view.begin):
            rows = advance(p, q, view, weighing, rows, k_count, v_count, view.end - 2 - j, far_end)
            k_count += 1
            v_count += 1
        mbarrier.arrive(p.q_empty.index(q_buffer(p, turn, W)), count=1)
        last = stage_of(v_count - 1, ST)
        mbarrier.wait(p.v_full.index(last), phase_of(v_count - 1, ST))
        o, u = add_products(p, rows, last)
        if p.SAVE_U:
            o, u = warpgroup_mma_wait(0, deps=[o, u])
        else:
            o = warpgroup_mma_wait(0, deps=[o])
        bar_arrive(p.V_EMPTY + last, p.RING_THREADS)
        head, i0, q_start, sq, sk = place_of(p, turn & 3, W)
        b = head // p.heads
        h = head % p.heads
        if not p.GATE:
            # the stores of the tile before have left the buffers
            tma.store_wait(0)
        o_s = p.o_s.index(W)
        if p.GATE:
            mbarrier.wait(p.gate_full.index(W), turn & 1)
            o = o * sigmoid(o_s.load(o_l).to(gl.float32))
        o_s.store(o.to(dtype))
        if p.SAVE_U:
            position = i0 + sk - sq + gl.arange(0, WM, gl.SliceLayout(1, o_l))
            n = visible_count(position, sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
            u = u * gl.expand_dims(1.0 / gl.maximum(n, 1).to(gl.float32), 1)
            p.u_s.index(W).store(u.to(dtype))
        fence_async_shared()
        if stores_tile(p, ticket_of(p, turn & 3), W):
            store_tile(p.o_desc, b, h, q_start, sq, i0, o_s, p.VARLEN)
            if p.SAVE_U:
                store_tile(p.u_desc, b, h, q_start, sq, i0, p.u_s.index(W), p.VARLEN)
        if p.HAS_LEFT:
            k_count, v_count = skip_keys_and_values(p, view.begin - view.tile_begin, k_count, v_count)
        turn += 1
        mbarrier.wait(p.q_full.index(q_buffer(p, turn, W)), q_phase(p, turn))
        head = read_field(p, turn & 3, HEAD)
    tma.store_wait(0)
