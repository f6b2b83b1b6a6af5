"""Forward with tau (eq. 32), partitions of `_fwd_kernel`: the relu needs the final lse, so keys are visited twice.

  normaliser   S = Q K^T, online softmax without P V: lse
  output       S again, A = relu(P + tau / n) and survivors M from registers into O += A V and U += M V; nothing is rescaled

One warpgroup's chain is serial; its arithmetic runs under the matmuls of the others, and in the output sweep the right half of
a block under the two products of the left half. Registers: S, O and U fp32, A and M 16 bit. Dead tiles are not skipped: the
test would need all four warps of a warpgroup to meet at every block.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backlight.backends.hopper.again import LARGEST_SUM, doubtful, first_again, next_again, remember, ticket_of, valid
from backlight.backends.hopper.primitives import (
    INF,
    WM,
    bar_arrive,
    bar_sync,
    clamp,
    load_tile,
    mma_over_columns,
    phase_of,
    row_sum_layout,
    softmax_step,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.terms import (
    LOG2E,
    sigmoid,
    sink_sums,
    survivors,
    survivors_of,
    threshold,
    visible_count,
    weights16,
)
from backlight.backends.hopper.tiles import (
    BLOCK,
    END,
    HEAD,
    K_EMPTY,
    SEGMENT,
    cap_of,
    draw,
    head_table,
    hide,
    lengths,
    load_gate,
    lse_of,
    nearest,
    place,
    publish,
    published,
    scored,
    seen_in,
    tile_blocks,
    trusting,
    with_bias,
)


@gluon.jit
def elastic_send(p, head, z, block, ticket, k_count, v_count, turn):
    """Q of a tile, K of all its blocks, then K and V of all blocks; the rings of K and V count by themselves."""
    BM: gl.constexpr = p.NC * WM
    ST: gl.constexpr = p.ST
    b = head // p.heads
    h = head % p.heads
    q_start, k_start, sq, sk = lengths(p, z)
    i0 = block * BM
    begin, _, _, end = tile_blocks(p, i0, BM, sq, sk)
    publish(p, turn & 3, head, z, block, ticket)
    for w in gl.static_range(p.NC):
        mbarrier.wait(p.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.expect(p.q_full.index(w), p.q_desc.block_type.nbytes)
        load_tile(p.q_desc, b, h, q_start, sq, i0 + w * WM, p.q_full.index(w), p.q_s.index(w), p.VARLEN)
    for j in range(2 * (end - begin)):
        output = j >= end - begin
        key = (end - 1 - j) * p.BN
        if output:
            key += (end - begin) * p.BN
        stage = stage_of(k_count, ST)
        if k_count >= ST:
            bar_sync(K_EMPTY + stage, p.EVERYBODY)
        mbarrier.expect(p.k_full.index(stage), p.k_desc.block_type.nbytes)
        load_tile(p.k_desc, b, h // p.group, k_start, sk, key, p.k_full.index(stage), p.k_s.index(stage), p.VARLEN)
        k_count += 1
        if output:
            stage = stage_of(v_count, ST)
            if v_count >= ST:
                bar_sync(p.V_EMPTY + stage, p.EVERYBODY)
            mbarrier.expect(p.v_full.index(stage), p.v_desc.block_type.nbytes)
            load_tile(p.v_desc, b, h // p.group, k_start, sk, key, p.v_full.index(stage), p.v_s.index(stage), p.VARLEN)
            v_count += 1
    return k_count, v_count


@gluon.jit
def elastic_producer(p):
    ST: gl.constexpr = p.ST
    tile = gl.program_id(0)
    k_count = tile * 0
    v_count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        next_tile, head, z, block, exists = draw(p, tile)
        if exists:
            k_count, v_count = elastic_send(p, head, z, block, tile, k_count, v_count, turn)
            turn += 1
        tile = next_tile
    if p.TRUST:
        for w in gl.static_range(p.NC):
            mbarrier.wait(p.q_empty.index(w), (turn & 1) ^ 1)
        for w in gl.static_range(p.NC):
            tile = first_again(p, w)
            while tile >= 0:
                head, z, block, _ = place(p, tile)
                next_tile = next_again(p, head, z, block, w)
                k_count, v_count = elastic_send(p, head, z, block, -1 - (4 * tile + w), k_count, v_count, turn)
                turn += 1
                tile = next_tile
    # every arrival of the consumers is met, those of the last round included
    for i in gl.static_range(ST):
        if k_count >= ST - i:
            bar_sync(K_EMPTY + stage_of(k_count + i, ST), p.EVERYBODY)
        if v_count >= ST - i:
            bar_sync(p.V_EMPTY + stage_of(v_count + i, ST), p.EVERYBODY)
    publish(p, turn & 3, END, 0, 0, 0)
    for w in gl.static_range(p.NC):
        mbarrier.wait(p.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.arrive(p.q_full.index(w), count=1)


@gluon.jit
def pass_by(full, EMPTY: gl.constexpr, n, count, ST: gl.constexpr, EVERYBODY: gl.constexpr):
    """Release n tiles of a ring that this warpgroup has no use for."""
    for _ in range(n):
        mbarrier.wait(full.index(stage_of(count, ST)), phase_of(count, ST))
        bar_arrive(EMPTY + stage_of(count, ST), EVERYBODY)
        count += 1
    return count


@gluon.jit
def take_scores(p, q, count, s_l: gl.constexpr):
    """Q K^T of the next tile of the ring, which is released."""
    stage = stage_of(count, p.ST)
    mbarrier.wait(p.k_full.index(stage), phase_of(count, p.ST))
    token = mma_over_columns(q, p.k_s.index(stage), gl.zeros([WM, p.BN], gl.float32, s_l), p.D)
    s = warpgroup_mma_wait(0, deps=[token])
    bar_arrive(K_EMPTY + stage, p.EVERYBODY)
    return s


@gluon.jit
def add_block(
    p,
    q,
    o,
    u,
    lse2,
    share,
    bar,
    table_ptr,
    column,
    first,
    block,
    plain_begin,
    plain_end,
    sk,
    k_count,
    v_count,
    PLAIN: gl.constexpr,
):
    """O and U with one block more. first: position of the first row; PLAIN: no mask, no bias."""
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, p.BN, 16])
    s = take_scores(p, q, k_count, s_l)
    s = scored(p, s, cap_of(p, s))
    if not PLAIN:
        s = with_bias(p, s, table_ptr, column, block)
    left, right = halves(s)
    stage = stage_of(v_count, p.ST)
    mbarrier.wait(p.v_full.index(stage), phase_of(v_count, p.ST))
    outside = (block >= plain_end) | (block < plain_begin)
    o, u = add_half(p, o, u, left, stage, lse2, share, bar, first, block, outside, sk, 0, PLAIN)
    o, u = add_half(p, o, u, right, stage, lse2, share, bar, first, block, outside, sk, 1, PLAIN)
    if p.SAVE_U:
        o, u = warpgroup_mma_wait(0, deps=[o, u])
    else:
        o = warpgroup_mma_wait(0, deps=[o])
    bar_arrive(p.V_EMPTY + stage, p.EVERYBODY)
    return o, u


@gluon.jit
def halves(s):
    """[rows, n] as two tiles [rows, n / 2], left and right: registers only."""
    R: gl.constexpr = s.shape[0]
    HALF: gl.constexpr = s.shape[1] // 2
    half_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(gl.permute(gl.reshape(s, [R, 2, HALF]), (0, 2, 1)))
    return gl.convert_layout(left, half_l, assert_trivial=True), gl.convert_layout(right, half_l, assert_trivial=True)


@gluon.jit
def add_half(p, o, u, s, stage, lse2, share, bar, first, block, outside, sk, SIDE: gl.constexpr, PLAIN: gl.constexpr):
    """O and U with one half of a block; the products are left in flight. first: position of the first row."""
    HALF: gl.constexpr = s.shape[1]
    row_l: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    dtype: gl.constexpr = p.q_desc.dtype
    share = gl.expand_dims(gl.convert_layout(share, row_l, assert_trivial=True), 1)
    weight = gl.exp2(s * p.unit_log2 - gl.expand_dims(gl.convert_layout(lse2, row_l, assert_trivial=True), 1)) + share
    if (p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN) and not PLAIN:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if outside:
            position = first + gl.arange(0, WM, row_l)
            if not p.SINK:
                # the only key of its row has p = 1 exactly, and sits on the kink when tau = -1
                alone = visible_count(position, sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT) == 1
                weight = gl.where(gl.expand_dims(alone, 1), 1.0 + share, weight)
            weight = gl.where(seen_in(p, s, position, 2 * block + SIDE, sk), weight, -INF)
    v = p.v_s.index(stage).slice(SIDE * HALF, HALF, 0)
    o_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.v_s.shape[2], 16])
    a_l: gl.constexpr = gl.DotOperandLayout(0, o_l, 2)
    a = weights16(weight, dtype)
    o = warpgroup_mma(gl.convert_layout(a, a_l, assert_trivial=True), v, o, is_async=True)
    if p.SAVE_U:
        if PLAIN and dtype == gl.bfloat16:
            m = survivors_of(a, bar)
        else:
            m = survivors(weight, bar, dtype)
        u = warpgroup_mma(gl.convert_layout(m, a_l, assert_trivial=True), v, u, is_async=True)
    return o, u


@gluon.jit
def leave(p, b, h, q_start, sq, i0, W: gl.constexpr):
    """O and U of a tile to global memory."""
    store_tile(p.o_desc, b, h, q_start, sq, i0, p.o_s.index(W), p.VARLEN)
    if p.SAVE_U:
        store_tile(p.u_desc, b, h, q_start, sq, i0, p.u_s.index(W), p.VARLEN)


@gluon.jit
def elastic_consumer(p, W: gl.constexpr):
    BN: gl.constexpr = p.BN
    BDV: gl.constexpr = p.v_s.shape[2]
    NC: gl.constexpr = p.NC
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    MASKED: gl.constexpr = p.HAS_LEFT or p.HAS_RIGHT or not p.EVEN
    s_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    o_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BDV, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)

    q = p.q_s.index(W)
    mbarrier.wait(p.q_full.index(W), 0)
    head = published(p, 0, HEAD)
    k_count = head * 0
    v_count = head * 0
    turn = head * 0
    while head != END:
        tile = published(p, turn & 3, BLOCK) * (NC * WM)
        q_start, _, sq, sk = lengths(p, published(p, turn & 3, SEGMENT))
        i0 = tile + W * WM
        position = i0 + sk - sq + gl.arange(0, WM, row_l)
        tile_begin, _, _, tile_end = tile_blocks(p, tile, NC * WM, sq, sk)
        begin, plain_begin, plain_end, end = tile_blocks(p, i0, WM, sq, sk)
        begin = gl.minimum(begin, tile_end - 1)
        end = clamp(end, begin + 1, tile_end)
        ticket = ticket_of(p, turn & 3)
        table_ptr = p.table_ptr
        column = i0
        if p.BIAS:
            table_ptr = head_table(p, head)
            column = i0 + sk - sq + p.bias_origin
        if p.GATE:
            load_gate(p, W, turn)

        row_max = gl.full([WM], -INF, gl.float32, row_l)
        row_sum = gl.zeros([WM, 8], gl.float32, row_sum_layout(BN))
        if p.SINK:
            row_max = gl.full([WM], gl.load(p.sink_ptr + head % p.heads).to(gl.float32) / p.unit, gl.float32, row_l)
            row_sum = sink_sums(row_sum)
        if p.HAS_RIGHT:
            k_count = pass_by(p.k_full, K_EMPTY, tile_end - end, k_count, ST, p.EVERYBODY)
        near = nearest(p, begin, plain_end, end, column, ticket < 0)
        for j in range(end - near):
            block = end - 1 - j
            s = take_scores(p, q, k_count, s_l)
            k_count += 1
            s = with_bias(p, scored(p, s, cap_of(p, s)), table_ptr, column, block)
            if MASKED:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
                if (block >= plain_end) | (block < plain_begin):
                    s = hide(p, s, position, block, sk)
            _p, row_max, row_sum, _rescale = softmax_step(s, row_max, row_sum, p.unit_log2, MASKED)
        if p.FAR:
            for _ in range(near - begin):
                s = take_scores(p, q, k_count, s_l)
                k_count += 1
                y = cap_of(p, s)
                if p.TRUST:
                    _p, row_sum = trusting(p, s, y, row_max, row_sum)
                else:
                    _p, row_max, row_sum, _rescale = softmax_step(scored(p, s, y), row_max, row_sum, p.unit_log2, False)
        if p.HAS_LEFT:
            k_count = pass_by(p.k_full, K_EMPTY, begin - tile_begin, k_count, ST, p.EVERYBODY)
        total = gl.convert_layout(gl.sum(row_sum, 1), row_l, assert_trivial=True)
        lse = gl.where(total == 0.0, -INF, lse_of(p, row_max, total))
        rows = i0 + gl.arange(0, WM, row_l)
        lse_row = head.to(gl.int64) * p.sq + q_start
        keep = rows < sq
        if p.TRUST:
            if doubtful(total, rows, sq, ticket, LARGEST_SUM):
                remember(p, ticket, lse_row, i0, W)
            keep = keep & valid(p, ticket, W)
        gl.store(p.lse_ptr + lse_row + rows, lse, mask=keep)

        # from the natural logarithm, which the backward reads: both decide alike who survives
        lse2 = gl.where(total == 0.0, 0.0, lse * LOG2E)
        tau = gl.load(p.tau_ptr + head % p.heads).to(gl.float32)
        n = visible_count(position, sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        share = tau / gl.maximum(n, 1).to(gl.float32)
        bar = threshold(tau)
        o = gl.zeros([WM, BDV], gl.float32, o_l)
        u = gl.zeros([WM, BDV], gl.float32, o_l)
        if p.HAS_RIGHT:
            k_count = pass_by(p.k_full, K_EMPTY, tile_end - end, k_count, ST, p.EVERYBODY)
            v_count = pass_by(p.v_full, p.V_EMPTY, tile_end - end, v_count, ST, p.EVERYBODY)
        near = nearest(p, begin, plain_end, end, column, ticket_of(p, turn & 3) < 0)
        for j in range(end - near):
            o, u = add_block(
                p,
                q,
                o,
                u,
                lse2,
                share,
                bar,
                table_ptr,
                column,
                i0 + sk - sq,
                end - 1 - j,
                plain_begin,
                plain_end,
                sk,
                k_count,
                v_count,
                False,
            )
            k_count += 1
            v_count += 1
        if p.FAR:
            for j in range(near - begin):
                o, u = add_block(
                    p, q, o, u, lse2, share, bar, table_ptr, column, i0, near - 1 - j, 0, 0, sk, k_count, v_count, True
                )
                k_count += 1
                v_count += 1
        mbarrier.arrive(p.q_empty.index(W), count=1)
        # read again: registers are short in the loops
        head = published(p, turn & 3, HEAD)
        i0 = published(p, turn & 3, BLOCK) * (NC * WM) + W * WM
        q_start, _, sq, sk = lengths(p, published(p, turn & 3, SEGMENT))
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
        if p.TRUST:
            if valid(p, ticket_of(p, turn & 3), W):
                leave(p, b, h, q_start, sq, i0, W)
        else:
            leave(p, b, h, q_start, sq, i0, W)
        if p.HAS_LEFT:
            k_count = pass_by(p.k_full, K_EMPTY, begin - tile_begin, k_count, ST, p.EVERYBODY)
            v_count = pass_by(p.v_full, p.V_EMPTY, begin - tile_begin, v_count, ST, p.EVERYBODY)
        turn += 1
        mbarrier.wait(p.q_full.index(W), turn & 1)
        head = published(p, turn & 3, HEAD)
    tma.store_wait(0)
