"""One row block of the backward's main kernel (`kernel.py`): the five products and what lies between them.

`p` is the kernel's argument class, `turn` counts its tiles (`key_tiles.read_field`). Blocks with a mask have loops of their
own, like those that meet the bias table.
"""

# device code: compiled by Triton from its own types, never run by Python

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from backlight.backends.hopper.backward.dbias import leave_diagonals
from backlight.backends.hopper.backward.dq_convert import add_fragments, dq_fragments
from backlight.backends.hopper.backward.key_tiles import (
    BAND_BEGIN,
    BAND_END,
    BATCH,
    BEGIN,
    BOTH_ENDS,
    CAREFUL_END,
    END,
    FIRST_ROWS,
    FIRST_TILE,
    J0,
    KV_HEAD,
    LAST_ROWS,
    PLAIN,
    PLAIN_BEGIN,
    PLAIN_END,
    SK,
    SQ,
    read_field,
    seen_rows,
)
from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, Q_EMPTY
from backlight.backends.hopper.compat import arguments, barrier, warpgroup_mma_wait
from backlight.backends.hopper.primitives import (
    bar_arrive,
    end_block,
    mma_over_columns,
    phase_of,
    pieces,
    rematerialised,
    stage_of,
)
from backlight.backends.hopper.scores import gradient, hidden_out, of_rows, surviving, weights
from backlight.backends.hopper.terms import TABLE_PAD, bias_tile, cap_slope, capped, threshold, weights16


@arguments
class Sums:
    """What goes from block to block; blocks and flushes of diagonals are counted over all tiles."""

    dk: gl.tensor
    dv: gl.tensor
    count: gl.tensor
    flushes: gl.tensor


@gluon.constexpr_function
def tile_layout(WIDE, N):
    """Accumulator of a [BN, N] product: 128 keys over both warpgroups, or 64 keys with columns split between them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2] if WIDE else [8, 1], [16, N // 2 if WIDE else N, 16])


@gluon.jit
def block_bias(p, turn, tile, member, i):
    """The bias of a row block, like `tile`."""
    head = read_field(p, turn, KV_HEAD, p.WARPS) * p.group + member
    column = i * p.BM + read_field(p, turn, SK, p.WARPS) - read_field(p, turn, SQ, p.WARPS)
    column = column - read_field(p, turn, J0, p.WARPS) + p.origin
    return bias_tile(p.table_ptr + head.to(gl.int64) * (p.n_bias + 2 * TABLE_PAD), column, p.n_bias, tile, True)


@gluon.jit
def block_weights(p, turn, s, lse, i, MASK: gl.constexpr):
    """p of a tile of scores."""
    pt = weights(s, lse, p.scale_log2, True)
    if MASK != PLAIN:
        pt = hidden_out(pt, seen_rows(p, turn, s, 0, i, MASK), p.TAU)
    return pt


@gluon.jit
def halves(tile):
    """[keys, n] as two tiles [keys, n / 2], left and right: registers only."""
    K: gl.constexpr = tile.shape[0]
    HALF: gl.constexpr = tile.shape[1] // 2
    half_l: gl.constexpr = tile_layout(False, HALF)
    left, right = gl.split(gl.permute(gl.reshape(tile, [K, 2, HALF]), (0, 2, 1)))
    return gl.convert_layout(left, half_l, assert_trivial=True), gl.convert_layout(right, half_l, assert_trivial=True)


@gluon.jit
def whole(left, right, layout: gl.constexpr):
    """The inverse of `halves`."""
    K: gl.constexpr = left.shape[0]
    N: gl.constexpr = 2 * left.shape[1]
    return gl.convert_layout(gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [K, N]), layout, assert_trivial=True)


@gluon.jit
def elastic(p, pt, dp, stage, limit, FIRST: gl.constexpr, MASK: gl.constexpr):
    """Weights (16 bits) and ds with tau of rows from FIRST on (eq. 10, 11)."""
    row_l: gl.constexpr = gl.SliceLayout(0, pt.type.layout)
    ROWS: gl.constexpr = pt.shape[1]
    at = pt + of_rows(p.share_s.index(stage).slice(FIRST, ROWS).load(row_l), True)
    at16 = weights16(at, p.q_desc.dtype)
    dp = surviving(dp, at, limit)
    if MASK != PLAIN:
        pt = gl.maximum(pt, 0.0)
    return at16, gradient(pt, dp, p.delta_s.index(stage).slice(FIRST, ROWS).load(row_l), True)


@gluon.jit
def row_block(p, turn, sums, member, limit, i, MASK: gl.constexpr, BIASED: gl.constexpr):
    """One row block: its dq goes out, dk and dv grow."""
    dk = sums.dk
    dv = sums.dv
    count = sums.count
    BM: gl.constexpr = p.BM
    BN: gl.constexpr = p.BN
    BD: gl.constexpr = p.k_s.shape[1]
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    dq_l: gl.constexpr = dq_fragments(BM, BD)
    s_l: gl.constexpr = tile_layout(p.WIDE, BM)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[1]))
    zero = gl.zeros([BN, BM], gl.float32, s_l)
    stage = stage_of(count, ST)
    phase = phase_of(count, ST)
    q = p.q_s.index(stage)
    do = p.do_s.index(stage)
    k = rematerialised(p.k_s, count)
    v = rematerialised(p.v_s, count)

    # scores grow on top of the bias, which then has no registers and no additions of its own; products over many columns would
    # wait for each other
    ON_TOP: gl.constexpr = BIASED and not (p.SOFTCAP or p.WIDE)
    bias = zero
    if ON_TOP:
        bias = block_bias(p, turn, zero, member, i)
    mbarrier.wait(p.q_full.index(stage), phase)
    s_token = mma_over_columns(k, q, bias, p.D, ON_TOP)
    # row values are read late where registers are short
    if p.OVERLAP:
        lse = p.lse_s.index(stage).load(row_l)
    # both warpgroups have read ds of the block before
    barrier()
    mbarrier.wait(p.do_full.index(stage), phase)
    dp_token = mma_over_columns(v, do, zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    if not p.OVERLAP:
        lse = p.lse_s.index(stage).load(row_l)
    if p.SOFTCAP:
        # its slope is needed later: the capped score stays in registers, p comes after dp
        pt = capped(s, p.cap)
    else:
        if BIASED and not ON_TOP:
            s = s + block_bias(p, turn, zero, member, i)
        pt = block_weights(p, turn, s, lse, i, MASK)
    if p.OVERLAP:
        if not p.TAU:
            delta = p.delta_s.index(stage).load(row_l)
        pt = end_block(pt)
        dp, pt = warpgroup_mma_wait(0, deps=[dp_token, pt])
    else:
        dp = warpgroup_mma_wait(0, deps=[dp_token])
    if not (p.TAU or p.OVERLAP):
        delta = p.delta_s.index(stage).load(row_l)
    if p.SOFTCAP:
        s = pt
        if BIASED:
            pt = s + block_bias(p, turn, zero, member, i)
        pt = block_weights(p, turn, pt, lse, i, MASK)
    if p.TAU and p.DBIAS and BIASED and BM == 128:
        # one half after the other: together with the sums of ds, all that belongs to them does not fit into registers
        pt_left, pt_right = halves(pt)
        dp_left, dp_right = halves(dp)
        at_right, ds_right = elastic(p, pt_right, dp_right, stage, limit, BM // 2, MASK)
        ds_right = end_block(ds_right)
        at_left, ds_left = elastic(p, pt_left, dp_left, stage, limit, 0, MASK)
        at16 = whole(at_left, at_right, s_l)
        ds = whole(ds_left, ds_right, s_l)
    elif p.TAU:
        at16, ds = elastic(p, pt, dp, stage, limit, 0, MASK)
    else:
        at16 = pt.to(dtype)
        ds = gradient(pt, dp, delta, True)
    if p.DBIAS and BIASED:
        leave_diagonals(p, ds, sums.flushes)
    if p.SOFTCAP:
        ds = ds * cap_slope(s)
    ds16 = ds.to(dtype)
    if p.WIDE:
        p.p_s.store(at16)
        p.ds_s.store(ds16)
        fence_async_shared()
        dq_token = gl.zeros([BM, BD], gl.float32, dq_l)
        if not p.SPLIT:
            dq_token = warpgroup_mma(p.ds_s.permute((1, 0)), k, dq_token, use_acc=False, is_async=True)
        dv_token = warpgroup_mma(p.p_s, do, dv, is_async=True)
        dk_token = warpgroup_mma(p.ds_s, q, dk, is_async=True)
        if not p.SPLIT:
            # no room for a tile in shared memory; the additions run under the matmuls of dv and dk
            head = read_field(p, turn, BATCH, p.WARPS) * p.heads + read_field(p, turn, KV_HEAD, p.WARPS) * p.group + member
            row = (head * p.row_tiles + read_field(p, turn, FIRST_TILE, p.WARPS) + i) * BM
            add_fragments(p.acc_ptr, row, warpgroup_mma_wait(2, deps=[dq_token]))
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH_GROUPS_AND_WARP)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    elif p.SPLIT:
        dv_token = warpgroup_mma(gl.convert_layout(at16, a_l, assert_trivial=True), do, dv, is_async=True)
        dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH_GROUPS_AND_WARP)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    else:
        at16 = gl.convert_layout(at16, a_l, assert_trivial=True)
        p.ds_s.store(ds16)
        dv_token = warpgroup_mma(at16, do, dv, is_async=True)
        fence_async_shared()
        dq_token = warpgroup_mma(p.ds_s.permute((1, 0)), k, gl.zeros([BM, BD], gl.float32, dq_l), use_acc=False, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH_GROUPS_AND_WARP)
        dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq_token])
        mbarrier.wait(p.dq_empty.index(0), ((count + turn if p.EARLY else count) & 1) ^ 1)
        p.dq_s.store(dq)
        fence_async_shared()
        bar_arrive(p.DQ_FULL, BOTH_GROUPS_AND_WARP)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    flushes = sums.flushes
    if p.DBIAS and BIASED:
        flushes += 1
    return Sums(dk=dk, dv=dv, count=count + 1, flushes=flushes)


@gluon.jit
def row_loop(
    p,
    turn,
    sums,
    member,
    limit,
    FIRST: gl.constexpr,
    LAST: gl.constexpr,
    MASK: gl.constexpr = PLAIN,
    BIASED: gl.constexpr = False,
):
    """Row blocks between two of the published borders."""
    for i in range(read_field(p, turn, FIRST, p.WARPS), read_field(p, turn, LAST, p.WARPS)):
        sums = row_block(p, turn, sums, member, limit, i, MASK, BIASED)
    return sums


@gluon.jit
def row_loops(p, turn, sums, member):
    """All row blocks of one query head."""
    limit = 0.0
    if p.TAU:
        limit = threshold(gl.load(p.tau_ptr + read_field(p, turn, KV_HEAD, p.WARPS) * p.group + member).to(gl.float32))
    if p.WIDE:
        # few scores a thread: masking all of them costs less than a second loop
        EVERY: gl.constexpr = BOTH_ENDS if p.HAS_LEFT else FIRST_ROWS
        sums = row_loop(p, turn, sums, member, limit, BEGIN, END, EVERY, p.BIAS)
    else:
        if p.HAS_LEFT:
            sums = row_loop(p, turn, sums, member, limit, BEGIN, CAREFUL_END, BOTH_ENDS, p.BIAS)
        sums = row_loop(p, turn, sums, member, limit, CAREFUL_END, PLAIN_BEGIN, FIRST_ROWS, p.BIAS)
        if p.BIAS:
            # rows before the table, rows that meet it
            if not p.BAND_FIRST:
                sums = row_loop(p, turn, sums, member, limit, PLAIN_BEGIN, BAND_BEGIN)
            sums = row_loop(p, turn, sums, member, limit, BAND_BEGIN, BAND_END, PLAIN, True)
        sums = row_loop(p, turn, sums, member, limit, BAND_END, PLAIN_END)
        if p.HAS_LEFT:
            sums = row_loop(p, turn, sums, member, limit, PLAIN_END, END, LAST_ROWS, p.BIAS)
    return sums
