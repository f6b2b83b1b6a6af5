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
    BATCH,
    FIRST_TILE,
    J0,
    KV_HEAD,
    OUTSIDE,
    PLAIN,
    SK,
    SQ,
    read_field,
    row_limits,
    rows_within,
    seen_rows,
)
from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, Q_EMPTY, dq_full
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
from backlight.backends.hopper.scores import gradient, hidden_out, of_rows, surviving, weights, with_slopes
from backlight.backends.hopper.terms import TABLE_PAD, bias_tile, cap_slope, capped, weights16


@arguments
class Sums:
    """What goes from block to block; blocks and flushes of diagonals are counted over all tiles."""

    dk: gl.tensor
    dv: gl.tensor
    count: gl.tensor
    flushes: gl.tensor


@arguments
class Block:
    """A row block in its stage of the rings, and the keys that meet it."""

    i: gl.tensor
    member: gl.tensor
    stage: gl.tensor
    phase: gl.tensor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor


@gluon.constexpr_function
def tile_layout(WIDE, N):
    """Accumulator of a [BN, N] product: 128 keys over both warpgroups, or 64 keys with columns split between them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2] if WIDE else [8, 1], [16, N // 2 if WIDE else N, 16])


@gluon.jit
def block_bias(p, turn, tile, b):
    """The bias of a row block, like `tile`."""
    head = read_field(p, turn, KV_HEAD, p.V.WARPS) * p.group + b.member
    column = b.i * p.V.BM + read_field(p, turn, SK, p.V.WARPS) - read_field(p, turn, SQ, p.V.WARPS)
    column = column - read_field(p, turn, J0, p.V.WARPS) + p.origin
    return bias_tile(p.terms.table_ptr + head.to(gl.int64) * (p.n_bias + 2 * TABLE_PAD), column, p.n_bias, tile, True)


@gluon.jit
def block_weights(p, turn, s, lse, b, limits, MASK: gl.constexpr):
    """p of a tile of scores; limits: row intervals, where those decide what is seen."""
    pt = weights(s, lse, p.units.scale_log2, True, p.V.ENTMAX)
    if MASK == OUTSIDE:
        pt = hidden_out(pt, rows_within(p, s, limits, b.i), p.V.TAU)
    elif MASK != PLAIN:
        pt = hidden_out(pt, seen_rows(p, turn, s, 0, b.i, MASK), p.V.TAU)
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
    at = pt + of_rows(p.buffers.share.index(stage).slice(FIRST, ROWS).load(row_l), True)
    at16 = weights16(at, p.q_desc.dtype)
    dp = surviving(dp, at, limit)
    if MASK != PLAIN:
        pt = gl.maximum(pt, 0.0)
    return at16, gradient(pt, dp, p.buffers.delta.index(stage).slice(FIRST, ROWS).load(row_l), True)


@gluon.jit
def block_of(p, count, member, i):
    """Row block i of a query head, where the rings have it."""
    stage = stage_of(count, p.V.ST)
    return Block(
        i=i,
        member=member,
        stage=stage,
        phase=phase_of(count, p.V.ST),
        q=p.buffers.q.index(stage),
        do=p.buffers.do.index(stage),
        k=rematerialised(p.buffers.k, count),
        v=rematerialised(p.buffers.v, count),
    )


@gluon.jit
def weights_and_dp(p, turn, b, MASK: gl.constexpr, BIASED: gl.constexpr):
    """Products 1 and 2, and p under the second: (s, p, dp, delta). s is for the slope of a cap; tau reads delta later."""
    BM: gl.constexpr = p.V.BM
    BN: gl.constexpr = p.V.BN
    s_l: gl.constexpr = tile_layout(p.V.WIDE, BM)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    PIECES: gl.constexpr = len(pieces(p.V.DV, p.buffers.v.shape[1]))
    # scores grow on top of the bias, which then has no registers and no additions of its own; products over many columns would
    # wait for each other
    ON_TOP: gl.constexpr = BIASED and not (p.V.SOFTCAP or p.V.WIDE)
    limits = b.i
    if MASK == OUTSIDE:
        limits = row_limits(p, turn, 0, b.member, gl.SliceLayout(1, s_l), BN)
    zero = gl.zeros([BN, BM], gl.float32, s_l)
    bias = zero
    if ON_TOP:
        bias = block_bias(p, turn, zero, b)
    mbarrier.wait(p.buffers.q_full.index(b.stage), b.phase)
    # 1: s^T = k q^T
    s_token = mma_over_columns(b.k, b.q, bias, p.V.D, ON_TOP)
    # row values are read late where registers are short
    if p.V.OVERLAP:
        lse = p.buffers.lse.index(b.stage).load(row_l)
    # both warpgroups have read ds of the block before
    barrier()
    mbarrier.wait(p.buffers.do_full.index(b.stage), b.phase)
    # 2: dp^T = v do^T
    dp_token = mma_over_columns(b.v, b.do, zero, p.V.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    if not p.V.OVERLAP:
        lse = p.buffers.lse.index(b.stage).load(row_l)
    if p.V.SOFTCAP:
        # its slope is needed later: the capped score stays in registers, p comes after dp
        pt = capped(s, p.units.cap)
    else:
        if BIASED and not ON_TOP:
            s = s + block_bias(p, turn, zero, b)
        pt = block_weights(p, turn, s, lse, b, limits, MASK)
    delta = lse
    if p.V.OVERLAP:
        if not p.V.TAU:
            delta = p.buffers.delta.index(b.stage).load(row_l)
        pt = end_block(pt)
        dp, pt = warpgroup_mma_wait(0, deps=[dp_token, pt])
    else:
        dp = warpgroup_mma_wait(0, deps=[dp_token])
    if not (p.V.TAU or p.V.OVERLAP):
        delta = p.buffers.delta.index(b.stage).load(row_l)
    if p.V.SOFTCAP:
        s = pt
        if BIASED:
            pt = s + block_bias(p, turn, zero, b)
        pt = block_weights(p, turn, pt, lse, b, limits, MASK)
    return s, pt, dp, delta


@gluon.jit
def weights_and_ds(p, b, pt, dp, delta, limit, MASK: gl.constexpr, BIASED: gl.constexpr):
    """Weights in 16 bits, and ds before the slope of a cap."""
    s_l: gl.constexpr = pt.type.layout
    if p.V.TAU and p.V.DBIAS and BIASED and p.V.BM == 128:
        # one half after the other: together with the sums of ds, all that belongs to them does not fit into registers
        pt_left, pt_right = halves(pt)
        dp_left, dp_right = halves(dp)
        at_right, ds_right = elastic(p, pt_right, dp_right, b.stage, limit, p.V.BM // 2, MASK)
        ds_right = end_block(ds_right)
        at_left, ds_left = elastic(p, pt_left, dp_left, b.stage, limit, 0, MASK)
        at16 = whole(at_left, at_right, s_l)
        ds = whole(ds_left, ds_right, s_l)
    elif p.V.TAU:
        at16, ds = elastic(p, pt, dp, b.stage, limit, 0, MASK)
    else:
        at, slopes = with_slopes(pt, p.units.e, p.V.ENTMAX)
        at16 = at.to(p.q_desc.dtype)
        ds = gradient(slopes, dp, delta, True)
    return at16, ds


@gluon.jit
def operand(tile16, dk):
    """A tile [keys, rows] as the register operand of a product like dk."""
    return gl.convert_layout(
        tile16, gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2), assert_trivial=True
    )


@gluon.jit
def no_dq(p):
    """A tile of dq that product 4 overwrites."""
    BM: gl.constexpr = p.V.BM
    BD: gl.constexpr = p.buffers.k.shape[1]
    return gl.zeros([BM, BD], gl.float32, dq_fragments(BM, BD))


@gluon.jit
def grown(p, b, dk_token, dv_token):
    """dk and dv, when products 3 and 5 are the last in flight; do and q are released."""
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    bar_arrive(p.DO_EMPTY + b.stage, BOTH_GROUPS_AND_WARP)
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    bar_arrive(Q_EMPTY + b.stage, BOTH_GROUPS_AND_WARP)
    return dk, dv


@gluon.jit
def wide_products(p, turn, b, dk, dv, at16, ds16):
    """Products 3 to 5 of wide heads: both operands in shared memory, dq added from registers."""
    p.buffers.p.store(at16)
    p.buffers.ds.store(ds16)
    fence_async_shared()
    dq_token = no_dq(p)
    if not p.V.SPLIT:
        # 4: dq += ds k
        dq_token = warpgroup_mma(p.buffers.ds.permute((1, 0)), b.k, dq_token, use_acc=False, is_async=True)
    # 3: dv += p^T do
    dv_token = warpgroup_mma(p.buffers.p, b.do, dv, is_async=True)
    # 5: dk += ds^T q
    dk_token = warpgroup_mma(p.buffers.ds, b.q, dk, is_async=True)
    if not p.V.SPLIT:
        # no room for a tile in shared memory; the additions run under the matmuls of dv and dk
        head = read_field(p, turn, BATCH, p.V.WARPS) * p.heads + read_field(p, turn, KV_HEAD, p.V.WARPS) * p.group + b.member
        row = (head * p.row_tiles + read_field(p, turn, FIRST_TILE, p.V.WARPS) + b.i) * p.V.BM
        add_fragments(p.acc_ptr, row, warpgroup_mma_wait(2, deps=[dq_token]))
    return grown(p, b, dk_token, dv_token)


@gluon.jit
def products_without_dq(p, b, dk, dv, at16, ds16):
    """Products 3 and 5: dq has a kernel of its own (SPLIT)."""
    # 3: dv += p^T do
    dv_token = warpgroup_mma(operand(at16, dk), b.do, dv, is_async=True)
    # 5: dk += ds^T q
    dk_token = warpgroup_mma(operand(ds16, dk), b.q, dk, is_async=True)
    return grown(p, b, dk_token, dv_token)


@gluon.jit
def products(p, turn, count, b, dk, dv, at16, ds16):
    """Products 3 to 5; the tile of dq leaves through shared memory."""
    at16 = operand(at16, dk)
    p.buffers.ds.store(ds16)
    # 3: dv += p^T do
    dv_token = warpgroup_mma(at16, b.do, dv, is_async=True)
    fence_async_shared()
    # 4: dq += ds k
    dq_token = warpgroup_mma(p.buffers.ds.permute((1, 0)), b.k, no_dq(p), use_acc=False, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    bar_arrive(p.DO_EMPTY + b.stage, BOTH_GROUPS_AND_WARP)
    # 5: dk += ds^T q
    dk_token = warpgroup_mma(operand(ds16, dk), b.q, dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=[dq_token])
    mbarrier.wait(p.buffers.dq_empty.index(0), ((count + turn if p.V.EARLY else count) & 1) ^ 1)
    p.buffers.dq.store(dq)
    fence_async_shared()
    bar_arrive(dq_full(p.V.ST), BOTH_GROUPS_AND_WARP)
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    bar_arrive(Q_EMPTY + b.stage, BOTH_GROUPS_AND_WARP)
    return dk, dv


@gluon.jit
def row_block(p, turn, sums, member, limit, i, MASK: gl.constexpr, BIASED: gl.constexpr):
    """One row block: its dq goes out, dk and dv grow."""
    b = block_of(p, sums.count, member, i)
    s, pt, dp, delta = weights_and_dp(p, turn, b, MASK, BIASED)
    at16, ds = weights_and_ds(p, b, pt, dp, delta, limit, MASK, BIASED)
    if p.V.DBIAS and BIASED:
        leave_diagonals(p, ds, sums.flushes)
    if p.V.SOFTCAP:
        ds = ds * cap_slope(s)
    ds16 = ds.to(p.q_desc.dtype)
    if p.V.WIDE:
        dk, dv = wide_products(p, turn, b, sums.dk, sums.dv, at16, ds16)
    elif p.V.SPLIT:
        dk, dv = products_without_dq(p, b, sums.dk, sums.dv, at16, ds16)
    else:
        dk, dv = products(p, turn, sums.count, b, sums.dk, sums.dv, at16, ds16)
    flushes = sums.flushes
    if p.V.DBIAS and BIASED:
        flushes += 1
    return Sums(dk=dk, dv=dv, count=sums.count + 1, flushes=flushes)
