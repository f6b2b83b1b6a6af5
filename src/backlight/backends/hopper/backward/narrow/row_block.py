"""One row block of a warpgroup in the kernel for narrow heads: products 1, 2, 3 and 5 of it, product 4 of the block before."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from backlight.backends.hopper.backward.dq_convert import dq_half_layout
from backlight.backends.hopper.backward.key_tiles import OUTSIDE, PLAIN, row_limits, rows_within, seen_rows
from backlight.backends.hopper.barriers import (
    BOTH_GROUPS,
    BOTH_GROUPS_AND_WARP,
    GROUP_AND_WARP,
    NARROW_DO_EMPTY,
    NARROW_DQ_FULL,
    NARROW_DS_FULL,
    NARROW_Q_EMPTY,
)
from backlight.backends.hopper.compat import arguments, smem_reinterpret, warpgroup_mma_wait
from backlight.backends.hopper.primitives import WM, bar_arrive, bar_sync, mma_over_columns, phase_of, pieces, stage_of
from backlight.backends.hopper.scores import gradient, hidden_out, weights, with_slopes


@arguments
class Sums:
    """What a warpgroup carries from block to block; `before`: where K of the block before lies."""

    dk: gl.tensor
    dv: gl.tensor
    count: gl.tensor
    before: gl.tensor


@gluon.constexpr_function
def tile_layout(N):
    """Accumulator of a warpgroup's product [64, N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.jit
def dq_of_before(p, count, side, W: gl.constexpr):
    """This warpgroup's rows of dq = ds k of the block before, over the keys of both; in flight."""
    BD: gl.constexpr = p.buffers.k.shape[2]
    before = (count & 1) ^ 1
    dq = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
    bar_sync(NARROW_DS_FULL + (1 - W) * 2 + before, BOTH_GROUPS)
    for w in gl.static_range(2):
        ds = p.buffers.ds.index(before * 2 + w).slice(W * WM, WM, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), p.buffers.k.index(side * 2 + w), dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def leave_dq(p, dq, uses, W: gl.constexpr):
    """Put dq where `reducer` finds it."""
    mbarrier.wait(p.buffers.out_empty.index(W), (uses & 1) ^ 1)
    smem_reinterpret(p.buffers.out.index(W), gl.float32, dq.shape, dq_half_layout(dq.shape[1])).store(dq)


@gluon.jit
def row_block(p, turn, sums, side, member, i, W: gl.constexpr, MASK: gl.constexpr):
    """One row block: dq of the one before goes out, dk and dv grow."""
    dk = sums.dk
    dv = sums.dv
    count = sums.count
    BM: gl.constexpr = p.V.BM
    dtype: gl.constexpr = p.q_desc.dtype
    s_l: gl.constexpr = tile_layout(BM)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    PIECES: gl.constexpr = len(pieces(p.V.DV, p.buffers.v.shape[2]))
    zero = gl.zeros([WM, BM], gl.float32, s_l)
    stage = stage_of(count, p.V.ST)
    phase = phase_of(count, p.V.ST)
    q = p.buffers.q.index(stage)
    do = p.buffers.do.index(stage)
    mbarrier.wait(p.buffers.q_full.index(stage), phase)
    # 1: s^T = k q^T
    s_token = mma_over_columns(p.buffers.k.index(side * 2 + W), q, zero, p.V.D)
    mbarrier.wait(p.buffers.do_full.index(stage), phase)
    # 2: dp^T = v do^T
    dp_token = mma_over_columns(p.buffers.v.index(side * 2 + W), do, zero, p.V.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    # row values are read late: registers are short
    pt = weights(s, p.buffers.lse.index(stage).load(row_l), p.units.scale_log2, True, p.V.ENTMAX)
    if MASK == OUTSIDE:
        limits = row_limits(p, turn, W * WM, member, gl.SliceLayout(1, s_l), WM)
        pt = hidden_out(pt, rows_within(p, s, limits, i), False)
    elif MASK != PLAIN:
        pt = hidden_out(pt, seen_rows(p, turn, s, W * WM, i, MASK), False)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    pt, slopes = with_slopes(pt, p.units.e, p.V.ENTMAX)
    p16 = gl.convert_layout(pt.to(dtype), a_l, assert_trivial=True)
    ds16 = gradient(slopes, dp, p.buffers.delta.index(stage).load(row_l), True).to(dtype)
    # 4, of the block before: dq += ds k
    dq_token = dq_of_before(p, count, sums.before, W)
    # 3: dv += p^T do
    dv_token = warpgroup_mma(p16, do, dv, is_async=True)
    # 5: dk += ds^T q
    dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
    # both stores run under the matmuls of dv and dk
    leave_dq(p, warpgroup_mma_wait(2, deps=[dq_token]), count + turn, W)
    p.buffers.ds.index((count & 1) * 2 + W).store(ds16)
    fence_async_shared()
    bar_arrive(NARROW_DQ_FULL + W, GROUP_AND_WARP)
    bar_arrive(NARROW_DS_FULL + W * 2 + (count & 1), BOTH_GROUPS)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    bar_arrive(NARROW_DO_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    bar_arrive(NARROW_Q_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    return Sums(dk=dk, dv=dv, count=count + 1, before=side)
