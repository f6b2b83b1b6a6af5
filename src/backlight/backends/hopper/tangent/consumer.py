"""A consumer partition of the tangent: a warpgroup that owns 64 rows of every tile (eq. 52).

Of a block, s = q.k is multiplied behind the outputs of the block before (AHEAD), then ts, under which runs all that depends on
s alone; p and g go from registers into three products. Registers: o, w, s, ts fp32, p and g 16 bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from backlight.backends.hopper.compat import Maybe, arguments, barrier, warpgroup_mma_wait
from backlight.backends.hopper.forward.consumer import skip_blocks
from backlight.backends.hopper.forward.ring import hand_on_turn, release, ring_stage, wait_full, wait_turn
from backlight.backends.hopper.forward.scores import at_edge, hide, lse_of
from backlight.backends.hopper.forward.steps import (
    accumulator,
    first_turn,
    next_head,
    no_products,
    release_q,
    row_totals,
    start_scores,
    store_rows,
)
from backlight.backends.hopper.forward.tiles import END, place_of, view_of
from backlight.backends.hopper.primitives import (
    INF,
    LN2,
    WM,
    as_weights,
    before,
    load_tile,
    mma_over_columns,
    per_thread,
    pieces,
    rematerialised,
    rescaled,
)


@arguments
class Rows:
    """What a warpgroup carries from block to block.

    o, w: sums of p v, and of g v + p tv. weights, moved: p and g of the last block, still to be multiplied. row_sum, e, e_cast:
    each thread's sums of p, of g, and of g as it is multiplied: what v has in common cancels exactly then. nu: what ts is
    relative to, the mean of the first keys that a row meets. Where y and lse are known, row_max is base-2 lse (+inf of rows
    that see nothing), and o stands for nothing.
    """

    o: gl.tensor
    w: gl.tensor
    weights: gl.tensor
    moved: Maybe
    row_max: gl.tensor
    row_sum: gl.tensor
    e: gl.tensor
    e_cast: gl.tensor
    nu: gl.tensor


@gluon.constexpr_function
def thread_sums_layout(BN):
    """[64, 4] sums of what each thread holds of an accumulator [64, BN]."""
    registers = [[0, 0, 0, 1], [8, 0, 0, 0]]
    column = 1
    while column < BN // 8:
        registers.append([0, column, 0, 0])
        column *= 2
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    warps = [[16, 0, 0, 0], [32, 0, 0, 0]]
    whole = gl.DistributedLinearLayout(registers, lanes, warps, [], [64, BN // 8, 4, 2])
    return gl.SliceLayout(1, gl.SliceLayout(3, whole))


@gluon.jit
def thread_sums(x, sums):
    pairs = gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2]), 3)
    return gl.convert_layout(gl.sum(pairs, 1), sums.type.layout, assert_trivial=True)


@gluon.jit
def beside(sums, factor):
    """Sums, multiplied by a factor for each row."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, sums.type.layout), assert_trivial=True)
    return sums * gl.expand_dims(factor, 1)


@gluon.jit
def rounded(x, dtype: gl.constexpr):
    """x in 16 bits, two numbers by one instruction: where they are widened again, the compiler would take two slow ones."""
    y = x
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)
    else:
        y = x.to(dtype)
    return y


@gluon.jit
def widened(x, dtype: gl.constexpr):
    """fp32 of what `rounded` gives."""
    y = x
    if dtype == gl.bfloat16:
        y = gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        y = x.to(gl.float32)
    return y


@gluon.constexpr_function
def groups(D, BD):
    """Matmuls that a product over D is made of."""
    return len(pieces(D, BD))


@gluon.jit
def start_moves(p, q, tq, stage):
    """tQ K^T + Q tK^T of a stage of the ring, in flight."""
    ts = no_products(p.V.BN)
    if p.V.TQ:
        ts = mma_over_columns(tq, p.k.tiles.index(stage), ts, p.V.D)
    if p.V.TK:
        ts = mma_over_columns(q, p.buffers.tk.index(stage), ts, p.V.D, p.V.TQ)
    return ts


@gluon.jit
def start_outputs(p, rows, stage):
    """o += p V and w += g V + p tV of a stage of the ring, in flight."""
    v = p.v.tiles.index(stage)
    o = rows.o
    if not p.V.KNOWN:
        o = warpgroup_mma(rows.weights, v, rows.o, is_async=True)
    w = rows.w
    if p.V.TV:
        w = warpgroup_mma(rows.weights, p.buffers.tv.index(stage), w, is_async=True)
    if p.V.TQ or p.V.TK:
        w = warpgroup_mma(rows.moved, v, w, is_async=True)
    return o, w


@gluon.jit
def outputs(p, o_token, w_token, LATER: gl.constexpr):
    """o and w, when no more than LATER products behind them are in flight."""
    if p.V.KNOWN:
        o = o_token
        w = warpgroup_mma_wait(LATER, deps=[w_token])
    else:
        o, w = warpgroup_mma_wait(LATER, deps=[o_token, w_token])
    return o, w


@gluon.jit
def mean_of_first(p, p32, ts, nu, row_max):
    """nu, of rows that have met no key before this block the mean of ts in it."""
    total = gl.sum(p32, 1)
    mean = gl.sum(p32 * ts, 1) * p.scale.unit / gl.where(total > 0.0, total, 1.0)
    return gl.where(row_max == -INF, mean, nu)


@gluon.jit
def mean_of_block(p, view, p32, ts, block):
    """nu from a block whose weights may all be 0, hidden or beyond the range of fp32: then the plain mean of its keys."""
    row_l: gl.constexpr = gl.SliceLayout(1, p32.type.layout)
    columns = gl.arange(0, p.V.BN, gl.SliceLayout(0, p32.type.layout))
    keys = view.sk
    if p.V.VARLEN:
        # of a sequence without keys, the mean of one that is 0
        keys = gl.maximum(keys, 1)
    exists = before(gl.zeros([WM], gl.int32, row_l) + (keys - block * p.V.BN), columns)
    weight = gl.where(exists, p32 + 2.0**-100, 0.0)
    return gl.sum(weight * ts, 1) * p.scale.unit / gl.sum(weight, 1)


@gluon.jit
def seen(p, view, s, block, FIRST: gl.constexpr):
    """Scores of a block, -inf where the mask hides the key."""
    if FIRST:
        if p.V.MASKED:
            s = hide(p, s, view.position, block, view.sk)
    elif p.V.HAS_LEFT or p.V.HAS_RIGHT:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if at_edge(view, block):
            s = hide(p, s, view.position, block, view.sk)
    return s


@gluon.jit
def known_weights(p, view, s, lse2, block, FIRST: gl.constexpr):
    """p of a block where lse is known."""
    s = seen(p, view, s, block, FIRST)
    return gl.exp2(s * p.scale.unit_log2 - gl.expand_dims(lse2, 1))


@gluon.jit
def softmax(p, view, s, row_max, block, FIRST: gl.constexpr):
    """(p, the new maximum, what came before is to be multiplied by) of a block."""
    s = seen(p, view, s, block, FIRST)
    new_max = gl.maximum(row_max, gl.max(s, 1))
    if p.V.LAZY:
        # exact with any maximum: a factor of 2^8 is no trouble to anything
        new_max = gl.where((new_max - row_max) * p.scale.unit_log2 > 8.0, new_max, row_max)
    top = new_max * p.scale.unit_log2
    if p.V.MASKED:
        # a row that has not met a visible key yet
        top = gl.where(new_max == -INF, 0.0, top)
    rescale = gl.exp2(row_max * p.scale.unit_log2 - top)
    return gl.exp2(s * p.scale.unit_log2 - gl.expand_dims(top, 1)), new_max, rescale


@gluon.constexpr_function
def _unless_ones(n):
    """Assembly that multiplies n numbers, which belong to two rows, unless the factors of all rows of the warp are 1."""
    first, third = f"${2 * n}", f"${2 * n + 2}"
    lines = [".reg .pred any, other;", f"setp.neu.f32 any, {first}, 0f3F800000;", f"setp.neu.f32 other, {third}, 0f3F800000;"]
    lines += ["or.pred any, any, other;", "vote.sync.any.pred any, any, 0xffffffff;", "@!any bra DONE;"]
    return " ".join(["{", *lines, *(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)), "DONE:", "}"])


@gluon.constexpr_function
def _in_place(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@gluon.jit
def rescaled_where_needed(o, factor):
    """`rescaled`; a warp whose factors are all 1 does nothing."""
    N: gl.constexpr = min(32, per_thread(o.shape, o.type.layout))
    factor = gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    return gl.inline_asm_elementwise(_unless_ones(N), _in_place(N), [o, factor], dtype=gl.float32, is_pure=True, pack=N)


@gluon.jit
def multiplied(p, o, factor):
    if p.V.LAZY:
        o = rescaled_where_needed(o, factor)
    else:
        o = rescaled(o, factor)
    return o


@gluon.jit
def gathered(p, view, p32, ts, rows, products, new_max, rescale, block, FIRST: gl.constexpr):
    """`Rows` with p and ts of a block in their sums; products: o and w."""
    o, w = products
    dtype: gl.constexpr = p.q_desc.dtype
    row_sum = rows.row_sum
    if not p.V.KNOWN:
        row_sum = beside(rows.row_sum, rescale) + thread_sums(p32, rows.row_sum)
    weights = as_weights(p32, w, dtype)
    nu = rows.nu
    e = rows.e
    e_cast = rows.e_cast
    moved = None
    if p.V.TQ or p.V.TK:
        if p.V.KNOWN:
            if FIRST:
                nu = mean_of_block(p, view, p32, ts, block)
        elif FIRST:
            nu = mean_of_first(p, p32, ts, nu, rows.row_max)
        elif p.V.HAS_RIGHT:  # noqa: SIM102
            if block >= view.plain_end - 1:
                nu = mean_of_first(p, p32, ts, nu, rows.row_max)
        g = p32 * (ts * p.scale.unit - gl.expand_dims(nu, 1))
        g_cast = rounded(g, dtype)
        if not p.V.KNOWN:
            e = beside(e, rescale)
            e_cast = beside(e_cast, rescale)
        e = e + thread_sums(g, e)
        e_cast = e_cast + thread_sums(widened(g_cast, dtype), e_cast)
        moved = gl.convert_layout(g_cast, gl.DotOperandLayout(0, w.type.layout, 2), assert_trivial=True)
    return Rows(o, w, weights, moved, new_max, row_sum, e, e_cast, nu)


@gluon.jit
def weigh(p, view, s, ts_token, rows, o, w, block, count, FIRST: gl.constexpr):
    """`Rows` after the softmax of a block whose ts is still in flight."""
    new_max = rows.row_max
    rescale = rows.row_max
    if p.V.KNOWN:
        p32 = known_weights(p, view, s, rows.row_max, block, FIRST)
    else:
        p32, new_max, rescale = softmax(p, view, s, rows.row_max, block, FIRST)
        if not FIRST:
            o = multiplied(p, o, rescale)
            w = multiplied(p, w, rescale)
    # ends the basic block: without it ptxas hoists the wgmma wait above the softmax
    wait_full(p.v, count)
    ts = p32
    if p.V.TQ or p.V.TK:
        ts, p32 = warpgroup_mma_wait(0, deps=[ts_token, p32])
    release(p.k, ring_stage(p.k, count))
    return gathered(p, view, p32, ts, rows, (o, w), new_max, rescale, block, FIRST)


@gluon.jit
def known_lse(p, view, head, row_l: gl.constexpr):
    """Base-2 lse of a warpgroup's rows, +inf of rows that see nothing or do not exist."""
    numbers = view.i0 + gl.arange(0, WM, row_l)
    at = head.to(gl.int64) * p.sq + view.q_start + numbers
    lse = gl.load(p.lse_ptr + at, mask=numbers < view.sq, other=-INF)
    return gl.where(lse == -INF, INF, lse * (1.0 / LN2))


@gluon.jit
def first_block(p, q, tq, view, head, count):
    """`Rows` after the block that the mask may cut, the last one."""
    PIECES: gl.constexpr = groups(p.V.D, p.V.BD)
    row_l: gl.constexpr = gl.SliceLayout(1, accumulator(p.V.BN))
    nothing = gl.zeros([WM, 4], gl.float32, thread_sums_layout(p.V.BN))
    w = no_products(p.V.BDV)
    o = w
    if p.V.KNOWN:
        row_max = known_lse(p, view, head, row_l)
        o = row_max
    else:
        row_max = gl.full([WM], -INF, gl.float32, row_l)
    nu = gl.zeros([WM], gl.float32, row_l)
    stage = ring_stage(p.k, count)
    wait_full(p.k, count)
    s_token = start_scores(p, q, stage)
    ts_token = start_moves(p, q, tq, stage)
    s = warpgroup_mma_wait(PIECES * (p.V.TQ + p.V.TK), deps=[s_token])
    rows = Rows(o, w, w, None, row_max, nothing, nothing, nothing, nu)
    return weigh(p, view, s, ts_token, rows, o, w, view.end - 1, count, True)


@gluon.jit
def advance(p, q, tq, view, rows, count, block, W: gl.constexpr):
    """Outputs of the block before, s of this one, then ts, and the softmax under it."""
    PIECES: gl.constexpr = groups(p.V.D, p.V.BD)
    stage = ring_stage(p.k, count)
    previous = ring_stage(p.v, count - 1)
    if p.V.PINGPONG:
        wait_turn(p, W)
    o_token, w_token = start_outputs(p, rows, previous)
    if p.V.AHEAD:
        wait_full(p.k, count)
        s_token = start_scores(p, q, stage)
        o, w = outputs(p, o_token, w_token, PIECES)
    else:
        o, w = outputs(p, o_token, w_token, 0)
        wait_full(p.k, count)
        s_token = start_scores(p, q, stage)
    release(p.v, previous)
    ts_token = start_moves(p, q, tq, stage)
    if p.V.PINGPONG:
        hand_on_turn(p, W)
    s = warpgroup_mma_wait(PIECES * (p.V.TQ + p.V.TK), deps=[s_token])
    return weigh(p, view, s, ts_token, rows, o, w, block, count, False)


@gluon.jit
def finish(p, rows, count, turn, W: gl.constexpr):
    """Outputs of the first block, lse and its tangent, y and ty on their way to global memory."""
    last = ring_stage(p.v, count - 1)
    o_token, w_token = start_outputs(p, rows, last)
    s_l: gl.constexpr = accumulator(p.V.BN)
    total = row_totals(rows.row_sum, s_l)
    inverse = 1.0 / total
    # read again: registers are short in the loop
    place = place_of(p, turn & 3, W)
    numbers = place.i0 + gl.arange(0, WM, total.type.layout)
    at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
    keep = numbers < place.sq
    gl.store(p.lse_ptr + at, gl.where(total == 0.0, -INF, lse_of(p, rows.row_max, total)), mask=keep)
    tlse = gl.where(total == 0.0, 0.0, rows.nu + row_totals(rows.e, s_l) * inverse)
    gl.store(p.tlse_ptr + at, tlse, mask=keep)
    shift = row_totals(rows.e_cast, s_l) * inverse
    o, w = warpgroup_mma_wait(0, deps=[o_token, w_token])
    release(p.v, last)
    row_l: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    inverse = gl.expand_dims(gl.convert_layout(inverse, row_l, assert_trivial=True), 1)
    shift = gl.expand_dims(gl.convert_layout(shift, row_l, assert_trivial=True), 1)
    y = o * inverse
    ty = w * inverse - shift * y
    if p.V.MASKED:
        # rows without a visible key: total is 0
        y = gl.where(inverse == INF, 0.0, y)
        ty = gl.where(inverse == INF, 0.0, ty)
    p.buffers.q.index(W).store(y.to(p.q_desc.dtype))
    p.buffers.tq.index(W).store(ty.to(p.q_desc.dtype))
    fence_async_shared()
    store_rows(p, p.y_desc, place, p.buffers.q.index(W))
    store_rows(p, p.ty_desc, place, p.buffers.tq.index(W))
    tma.store_wait(0)
    release_q(p, turn, W)


@gluon.jit
def finish_known(p, rows, count, turn, W: gl.constexpr):
    """Outputs of the first block, the tangent of lse, ty on its way to global memory."""
    last = ring_stage(p.v, count - 1)
    _, w_token = start_outputs(p, rows, last)
    s_l: gl.constexpr = accumulator(p.V.BN)
    # all warps have done with Q: y comes there
    barrier()
    place = place_of(p, turn & 3, W)
    full = p.buffers.y_full.index(W)
    q = p.buffers.q.index(W)
    mbarrier.expect(full, p.y_desc.block_type.nbytes)
    load_tile(p.y_desc, place.b, place.h, place.q_start, place.sq, place.i0, full, q, p.V.VARLEN)
    numbers = place.i0 + gl.arange(0, WM, rows.nu.type.layout)
    at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
    tlse = gl.where(rows.row_max == INF, 0.0, rows.nu + row_totals(rows.e, s_l))
    gl.store(p.tlse_ptr + at, tlse, mask=numbers < place.sq)
    shift = row_totals(rows.e_cast, s_l)
    w = warpgroup_mma_wait(0, deps=[w_token])
    release(p.v, last)
    shift = gl.expand_dims(gl.convert_layout(shift, gl.SliceLayout(1, w.type.layout), assert_trivial=True), 1)
    mbarrier.wait(full, turn & 1)
    ty = w - shift * q.load(w.type.layout).to(gl.float32)
    p.buffers.tq.index(W).store(ty.to(p.q_desc.dtype))
    fence_async_shared()
    store_rows(p, p.ty_desc, place, p.buffers.tq.index(W))
    tma.store_wait(0)
    release_q(p, turn, W)


@gluon.jit
def consumer(p, W: gl.constexpr):
    s_l: gl.constexpr = accumulator(p.V.BN)
    head, count, turn = first_turn(p, W)
    while head != END:
        q = p.buffers.q.index(W)
        tq = p.buffers.tq.index(W)
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        if p.V.HAS_RIGHT:
            count = skip_blocks(p, view.tile_end - view.end, count, W)
        rows = first_block(p, q, tq, view, head, count)
        count += 1
        for j in range(view.end - 1 - view.begin):
            # in registers their places would be held over the loop
            q = rematerialised(p.buffers.q.index(W), count)
            tq = rematerialised(p.buffers.tq.index(W), count)
            rows = advance(p, q, tq, view, rows, count, view.end - 2 - j, W)
            count += 1
        if p.V.KNOWN:
            finish_known(p, rows, count, turn, W)
        else:
            finish(p, rows, count, turn, W)
        if p.V.HAS_LEFT:
            count = skip_blocks(p, view.begin - view.tile_begin, count, W)
        turn += 1
        head = next_head(p, turn, W)
    if p.V.PINGPONG and W == 0:
        wait_turn(p, W)
