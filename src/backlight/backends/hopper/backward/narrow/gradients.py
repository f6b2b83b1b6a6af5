"""The multiplying partitions of the kernel for narrow heads: a warpgroup each, and its loops over row blocks."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backlight.backends.hopper.backward.key_tiles import (
    BEGIN,
    BOTH_ENDS,
    CAREFUL_END,
    END,
    FIRST_ROWS,
    LAST_ROWS,
    OUTSIDE,
    PLAIN,
    PLAIN_BEGIN,
    PLAIN_END,
    VISIT,
    published,
    read_field,
)
from backlight.backends.hopper.backward.narrow.reducer import dk_dv_memory
from backlight.backends.hopper.backward.narrow.row_block import Sums, dq_of_before, leave_dq, row_block, tile_layout
from backlight.backends.hopper.backward.visits import published_count, published_visit
from backlight.backends.hopper.barriers import BOTH_GROUPS, GROUP_AND_WARP, NARROW_DQ_FULL, NARROW_DS_FULL
from backlight.backends.hopper.compat import smem_reinterpret, warpgroup_mma_wait
from backlight.backends.hopper.primitives import WM, bar_arrive, opaque


@gluon.jit
def row_loop(p, turn, sums, side, FIRST: gl.constexpr, LAST: gl.constexpr, W: gl.constexpr, MASK: gl.constexpr):
    """Row blocks between two of the published borders."""
    for i in range(read_field(p, turn, FIRST, p.V.WARPS), read_field(p, turn, LAST, p.V.WARPS)):
        sums = row_block(p, turn, sums, side, i, i, W, MASK)
    return sums


@gluon.jit
def listed_rows(p, turn, sums, side, member, W: gl.constexpr):
    """Row blocks of a query head under a mask by row intervals."""
    for j in range(published_count(p, turn, member, 0)):
        sums = row_block(p, turn, sums, side, member, published_visit(p, turn, member, j, 0), W, OUTSIDE)
    for j in range(published_count(p, turn, member, 1)):
        sums = row_block(p, turn, sums, side, member, j, W, PLAIN)
    return sums


@gluon.jit
def gradients(p, W: gl.constexpr):
    """64 of the keys of every tile."""
    BD: gl.constexpr = p.buffers.k.shape[2]
    BDV: gl.constexpr = p.buffers.v.shape[2]
    dtype: gl.constexpr = p.q_desc.dtype
    dk_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BD], dtype)
    dv_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype)
    count = p.sq * 0
    before = count
    turn = count
    published(p, turn, p.V.WARPS)
    # every CTA has a tile: a loop that might not be entered keeps registers for what follows it
    number = turn
    # there is no block before the first: its dq is made of anything and goes nowhere
    bar_arrive(NARROW_DS_FULL + W * 2 + 1, BOTH_GROUPS)
    while number >= 0:
        dk = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        dv = gl.zeros([WM, BDV], gl.float32, tile_layout(BDV))
        sums = Sums(dk=dk, dv=dv, count=count, before=before)
        visit = read_field(p, turn, VISIT, p.V.WARPS)
        side = visit & 1
        if read_field(p, turn, END, p.V.WARPS) > read_field(p, turn, BEGIN, p.V.WARPS):
            mbarrier.wait(p.buffers.kv_full.index(side), (visit >> 1) & 1)
        for member in range(p.group):
            if p.V.INTERVALS > 0:
                sums = listed_rows(p, turn, sums, side, member, W)
            else:
                if p.V.HAS_LEFT:
                    sums = row_loop(p, turn, sums, side, BEGIN, CAREFUL_END, W, BOTH_ENDS)
                sums = row_loop(p, turn, sums, side, CAREFUL_END, PLAIN_BEGIN, W, FIRST_ROWS)
                sums = row_loop(p, turn, sums, side, PLAIN_BEGIN, PLAIN_END, W, PLAIN)
                if p.V.HAS_LEFT:
                    sums = row_loop(p, turn, sums, side, PLAIN_END, END, W, LAST_ROWS)
        count = sums.count
        before = sums.before
        mbarrier.wait(p.buffers.out_empty.index(W), ((count + turn) & 1) ^ 1)
        out = dk_dv_memory(p, opaque(W))
        smem_reinterpret(out.index(0), dtype, [WM, BD], dk_l).store((sums.dk * p.units.scale).to(dtype))
        smem_reinterpret(out.index(1), dtype, [WM, BDV], dv_l).store(sums.dv.to(dtype))
        fence_async_shared()
        bar_arrive(NARROW_DQ_FULL + W, GROUP_AND_WARP)
        turn += 1
        number = published(p, turn, p.V.WARPS)
    leave_dq(p, warpgroup_mma_wait(0, deps=[dq_of_before(p, count, before, W)]), count + turn, W)
    fence_async_shared()
    bar_arrive(NARROW_DQ_FULL + W, GROUP_AND_WARP)
