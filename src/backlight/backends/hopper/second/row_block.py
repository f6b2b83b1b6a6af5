"""One row block of a warpgroup's 64 keys (eq. 58): ten products, and what lies between them, in tiles [keys, rows].

1  s^T   = k q^T                       2, 3  ts^T = k tq^T + tk q^T         both operands in shared memory
4  b^T   = v dto^T                     5     c^T  = tv dto^T                both operands in shared memory
6  dv   += (p (ts - mu))^T dto         7, 8  dk  += dr^T tq + ds^T q        the first operand from registers
9, 10  dq^T = k^T ds + tk^T dr         of this warpgroup's keys alone: it never waits for the other
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from backlight.backends.hopper.backward.dq_convert import add_quads, turned_tile_layout
from backlight.backends.hopper.backward.key_tiles import BATCH, FIRST_TILE, KV_HEAD, PLAIN, read_field, seen_rows
from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, GROUP_AND_WARP, SECOND_ROWS_EMPTY, second_out_full
from backlight.backends.hopper.compat import Maybe, arguments, barrier, smem_reinterpret, warpgroup_mma_wait
from backlight.backends.hopper.primitives import WM, bar_arrive, mma_over_columns, phase_of, pieces, stage_of
from backlight.backends.hopper.scores import hidden_out, of_rows, weights
from backlight.backends.hopper.second.arguments import DELTA, ETA, LSE, MU


@arguments
class Sums:
    """What a warpgroup carries from block to block: also (AHEAD) s and ts of the next one, and how many there are left."""

    dk: gl.tensor
    dv: gl.tensor
    s: Maybe
    ts: Maybe
    count: gl.tensor
    left: gl.tensor


@gluon.constexpr_function
def tile_layout(N):
    """Accumulator of a warpgroup's product [64, N] or [128, N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.constexpr_function
def groups(D, BD):
    """Matmuls that a product over D is made of."""
    return len(pieces(D, BD))


@gluon.jit
def state_of(p, stage, WHICH: gl.constexpr):
    """A vector of the row block, beside a tile."""
    row_l: gl.constexpr = gl.SliceLayout(0, tile_layout(p.V.BM))
    return of_rows(p.buffers.state.index(stage).slice(WHICH * p.V.BM, p.V.BM).load(row_l), True)


@gluon.jit
def operand(tile16, acc):
    """A tile [keys, rows] as the register operand of a product like acc."""
    return gl.convert_layout(
        tile16, gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2), assert_trivial=True
    )


@gluon.jit
def start_scores(p, count, wanted, W: gl.constexpr):
    """1, and 2 and 3, in flight; of anything at all where no block is `wanted`."""
    BM: gl.constexpr = p.V.BM
    zero = gl.zeros([WM, BM], gl.float32, tile_layout(BM))
    stage = stage_of(count, p.V.ST)
    q = p.buffers.q.index(stage)
    mbarrier.wait(p.buffers.rows_full.index(stage), phase_of(count, p.V.ST), pred=wanted)
    s = mma_over_columns(p.buffers.k.index(W), q, zero, p.V.D)
    ts = zero
    if p.V.TQ:
        ts = mma_over_columns(p.buffers.k.index(W), p.buffers.tq.index(stage), ts, p.V.D)
    if p.V.TK:
        ts = mma_over_columns(p.buffers.tk.index(W), q, ts, p.V.D, p.V.TQ)
    return s, ts


@gluon.jit
def first_scores(p, count, left, W: gl.constexpr):
    """s and ts of a tile's first block."""
    s, ts = start_scores(p, count, left > 0, W)
    return warpgroup_mma_wait(0, deps=[s, ts])


@gluon.jit
def block_weights(p, turn, stage, s, i, W: gl.constexpr, MASK: gl.constexpr):
    row_l: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    pt = weights(s, p.buffers.state.index(stage).slice(LSE * p.V.BM, p.V.BM).load(row_l), p.units.scale_log2, True)
    if MASK != PLAIN:
        pt = hidden_out(pt, seen_rows(p, turn, s, W * WM, i, MASK), False)
    return pt


@gluon.jit
def start_dq(p, W: gl.constexpr):
    """9 and 10, in flight."""
    BD: gl.constexpr = p.V.BD
    BM: gl.constexpr = p.V.BM
    dq = gl.zeros([BD, BM], gl.float32, tile_layout(BM))
    if p.V.TK:
        dq = warpgroup_mma(p.buffers.tk.index(W).permute((1, 0)), p.buffers.dr.index(W), dq, use_acc=False, is_async=True)
    return warpgroup_mma(p.buffers.k.index(W).permute((1, 0)), p.buffers.ds.index(W), dq, use_acc=p.V.TK, is_async=True)


@gluon.jit
def leave_dq(p, dq, count, W: gl.constexpr):
    """Put dq where `reducer` finds it."""
    mbarrier.wait(p.buffers.out_empty.index(W), (count & 1) ^ 1)
    smem_reinterpret(p.buffers.out.index(W), gl.float32, dq.shape, turned_tile_layout(p.V.BD, p.V.BM)).store(dq)
    fence_async_shared()
    bar_arrive(second_out_full(p.V.ST) + W, GROUP_AND_WARP)


@gluon.jit
def add_dq(p, turn, member, i, dq):
    """Add dq to the accumulator from registers, in the order of `turned_tile_layout`."""
    BD: gl.constexpr = p.V.BD
    BM: gl.constexpr = p.V.BM
    layout: gl.constexpr = dq.type.layout
    head = read_field(p, turn, BATCH, p.V.WARPS) * p.heads + read_field(p, turn, KV_HEAD, p.V.WARPS) * p.group + member
    tile = head * p.row_tiles + read_field(p, turn, FIRST_TILE, p.V.WARPS) + i
    line = gl.expand_dims(gl.arange(0, BD, gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, layout)), 0)
    # what the thread has in common first: the rest is an immediate
    thread = column % 8 // 2 * 4 + line % 8 * 16 + line % 64 // 16 * (16 * BM)
    fixed = column % 2 + line // 8 % 2 * 2 + column // 8 * 128 + line // 64 * (64 * BM)
    add_quads(((p.acc_ptr + tile.to(gl.int64) * (BM * BD)) + thread) + fixed, dq)


@gluon.jit
def weights_and_moves(p, turn, sums, stage, i, W: gl.constexpr, MASK: gl.constexpr):
    """(p, its tangent, b and c in flight)."""
    BM: gl.constexpr = p.V.BM
    MOVES: gl.constexpr = groups(p.V.D, p.V.BD) * (p.V.TQ + p.V.TK)
    VALUES: gl.constexpr = groups(p.V.DV, p.V.BDV) * (1 + p.V.TV)
    zero = gl.zeros([WM, BM], gl.float32, tile_layout(BM))
    dto = p.buffers.dto.index(stage)
    s = sums.s
    ts = sums.ts
    if not p.V.AHEAD:
        s, ts = start_scores(p, sums.count, sums.count >= 0, W)
    # 4 and 5
    b = mma_over_columns(p.buffers.v.index(W), dto, zero, p.V.DV)
    c = zero
    if p.V.TV:
        c = mma_over_columns(p.buffers.tv.index(W), dto, zero, p.V.DV)
    if not p.V.AHEAD:
        s = warpgroup_mma_wait(MOVES + VALUES, deps=[s])
    pt = block_weights(p, turn, stage, s, i, W, MASK)
    if not p.V.AHEAD:
        ts, pt = warpgroup_mma_wait(VALUES, deps=[ts, pt])
    return pt, pt * (ts * p.units.scale - state_of(p, stage, MU)), b, c


@gluon.jit
def row_block(p, turn, sums, member, i, W: gl.constexpr, MASK: gl.constexpr):
    """One row block: its dq goes out, dk and dv grow."""
    dtype: gl.constexpr = p.q_desc.dtype
    VALUES: gl.constexpr = groups(p.V.DV, p.V.BDV)
    SCORES: gl.constexpr = groups(p.V.D, p.V.BD) * (1 + p.V.TQ + p.V.TK) if p.V.AHEAD else 0
    count = sums.count
    stage = stage_of(count, p.V.ST)
    q = p.buffers.q.index(stage)
    pt, ta, b_token, c_token = weights_and_moves(p, turn, sums, stage, i, W, MASK)
    # 6: dv += (p (ts - mu))^T dto
    dv_token = warpgroup_mma(operand(ta.to(dtype), sums.dv), p.buffers.dto.index(stage), sums.dv, is_async=True)
    b, ta, pt = warpgroup_mma_wait(1 + VALUES * p.V.TV, deps=[b_token, ta, pt])
    b = b - state_of(p, stage, ETA)
    dr16 = (pt * b).to(dtype)
    part = ta * b
    dk_token = sums.dk
    # all warps have done with ds and dr of the block before
    barrier()
    if p.V.TQ:
        # 7: dk += dr^T tq
        dk_token = warpgroup_mma(operand(dr16, sums.dk), p.buffers.tq.index(stage), dk_token, is_async=True)
    if p.V.TK:
        p.buffers.dr.index(W).store(dr16)
    ds = part - pt * state_of(p, stage, DELTA)
    if p.V.TV:
        c, pt, part = warpgroup_mma_wait(1 + p.V.TQ, deps=[c_token, pt, part])
        ds = pt * (c - state_of(p, stage, DELTA)) + part
    ds16 = ds.to(dtype)
    # 8: dk += ds^T q
    dk_token = warpgroup_mma(operand(ds16, sums.dk), q, dk_token, is_async=True)
    p.buffers.ds.index(W).store(ds16)
    fence_async_shared()
    dq_token = start_dq(p, W)
    s = sums.s
    ts = sums.ts
    if p.V.AHEAD:
        s, ts = start_scores(p, count + 1, sums.left > 1, W)
    dk, dv = warpgroup_mma_wait(SCORES + 1 + p.V.TK, deps=[dk_token, dv_token])
    bar_arrive(SECOND_ROWS_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    dq = warpgroup_mma_wait(SCORES, deps=[dq_token])
    if p.V.DIRECT:
        add_dq(p, turn, member, i, dq)
    else:
        leave_dq(p, dq, count, W)
    if p.V.AHEAD:
        s, ts = warpgroup_mma_wait(0, deps=[s, ts])
    return Sums(dk=dk, dv=dv, s=s, ts=ts, count=count + 1, left=sums.left - 1)
