"""The multiplying partitions of second derivatives: a warpgroup each, which owns 64 keys of every tile."""

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
    PLAIN,
    PLAIN_BEGIN,
    PLAIN_END,
    published,
    read_field,
)
from backlight.backends.hopper.barriers import GROUP_AND_WARP, second_out_full
from backlight.backends.hopper.primitives import WM, bar_arrive
from backlight.backends.hopper.second.row_block import Sums, first_scores, row_block, tile_layout


@gluon.jit
def row_loop(p, turn, sums, member, FIRST: gl.constexpr, LAST: gl.constexpr, W: gl.constexpr, MASK: gl.constexpr):
    """Row blocks between two of the published borders."""
    for i in range(read_field(p, turn, FIRST, p.V.WARPS), read_field(p, turn, LAST, p.V.WARPS)):
        sums = row_block(p, turn, sums, member, i, W, MASK)
    return sums


@gluon.jit
def gradients(p, W: gl.constexpr):
    BD: gl.constexpr = p.V.BD
    BDV: gl.constexpr = p.V.BDV
    dtype: gl.constexpr = p.q_desc.dtype
    count = p.sq * 0
    turn = count
    published(p, turn, p.V.WARPS)
    # every CTA has a tile: a loop that might not be entered keeps registers for what follows it
    number = turn
    while number >= 0:
        dk = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        dv = gl.zeros([WM, BDV], gl.float32, tile_layout(BDV))
        mbarrier.wait(p.buffers.keys_full.index(W), turn & 1)
        left = (read_field(p, turn, END, p.V.WARPS) - read_field(p, turn, BEGIN, p.V.WARPS)) * p.group
        s = None
        ts = None
        if p.V.AHEAD:
            s, ts = first_scores(p, count, left, W)
        sums = Sums(dk=dk, dv=dv, s=s, ts=ts, count=count, left=left)
        for member in range(p.group):
            if p.V.HAS_LEFT:
                sums = row_loop(p, turn, sums, member, BEGIN, CAREFUL_END, W, BOTH_ENDS)
            sums = row_loop(p, turn, sums, member, CAREFUL_END, PLAIN_BEGIN, W, FIRST_ROWS)
            sums = row_loop(p, turn, sums, member, PLAIN_BEGIN, PLAIN_END, W, PLAIN)
            if p.V.HAS_LEFT:
                sums = row_loop(p, turn, sums, member, PLAIN_END, END, W, LAST_ROWS)
        count = sums.count
        p.buffers.v.index(W).store(sums.dv.to(dtype))
        p.buffers.k.index(W).store((sums.dk * p.units.scale).to(dtype))
        fence_async_shared()
        if not p.V.DIRECT:
            # the last dq has been taken: one arrival at a time
            mbarrier.wait(p.buffers.out_empty.index(W), (count & 1) ^ 1)
        bar_arrive(second_out_full(p.V.ST) + W, GROUP_AND_WARP)
        turn += 1
        number = published(p, turn, p.V.WARPS)
