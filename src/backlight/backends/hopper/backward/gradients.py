"""The multiplying partition of the main kernel (`kernel.py`): two warpgroups, and their loops over row blocks.

Blocks with a mask have loops of their own, like those that meet the bias table.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from backlight.backends.hopper.backward.key_tiles import (
    BAND_BEGIN,
    BAND_END,
    BEGIN,
    BOTH_ENDS,
    CAREFUL_END,
    END,
    FIRST_ROWS,
    KV_HEAD,
    LAST_ROWS,
    OUTSIDE,
    PLAIN,
    PLAIN_BEGIN,
    PLAIN_END,
    published,
    read_field,
)
from backlight.backends.hopper.backward.row_block import Sums, row_block, tile_layout
from backlight.backends.hopper.backward.visits import published_count, published_visit
from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, KV_EMPTY, OUT_FULL, kv_threads
from backlight.backends.hopper.primitives import bar_arrive
from backlight.backends.hopper.terms import threshold


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
    for i in range(read_field(p, turn, FIRST, p.V.WARPS), read_field(p, turn, LAST, p.V.WARPS)):
        sums = row_block(p, turn, sums, member, limit, i, MASK, BIASED)
    return sums


@gluon.jit
def row_loops(p, turn, sums, member):
    """All row blocks of one query head."""
    limit = 0.0
    if p.V.TAU:
        limit = threshold(gl.load(p.terms.tau_ptr + read_field(p, turn, KV_HEAD, p.V.WARPS) * p.group + member).to(gl.float32))
    if p.V.INTERVALS > 0:
        for j in range(published_count(p, turn, member, 0)):
            sums = row_block(p, turn, sums, member, limit, published_visit(p, turn, member, j, 0), OUTSIDE, False)
        for j in range(published_count(p, turn, member, 1)):
            # where dq leaves by tiles, nothing here depends on which block it is
            i = published_visit(p, turn, member, j, 1) if p.V.WIDE else j
            sums = row_block(p, turn, sums, member, limit, i, PLAIN, False)
    elif p.V.WIDE:
        # few scores a thread: masking all of them costs less than a second loop
        EVERY: gl.constexpr = BOTH_ENDS if p.V.HAS_LEFT else FIRST_ROWS
        sums = row_loop(p, turn, sums, member, limit, BEGIN, END, EVERY, p.V.BIAS)
    else:
        if p.V.HAS_LEFT:
            sums = row_loop(p, turn, sums, member, limit, BEGIN, CAREFUL_END, BOTH_ENDS, p.V.BIAS)
        sums = row_loop(p, turn, sums, member, limit, CAREFUL_END, PLAIN_BEGIN, FIRST_ROWS, p.V.BIAS)
        if p.V.BIAS:
            # rows before the table, rows that meet it
            if not p.V.BAND_FIRST:
                sums = row_loop(p, turn, sums, member, limit, PLAIN_BEGIN, BAND_BEGIN)
            sums = row_loop(p, turn, sums, member, limit, BAND_BEGIN, BAND_END, PLAIN, True)
        sums = row_loop(p, turn, sums, member, limit, BAND_END, PLAIN_END)
        if p.V.HAS_LEFT:
            sums = row_loop(p, turn, sums, member, limit, PLAIN_END, END, LAST_ROWS, p.V.BIAS)
    return sums


@gluon.jit
def gradients(p):
    BN: gl.constexpr = p.V.BN
    BD: gl.constexpr = p.buffers.k.shape[1]
    BDV: gl.constexpr = p.buffers.v.shape[1]
    dtype: gl.constexpr = p.q_desc.dtype
    count = p.sq * 0
    flushes = count
    turn = count
    published(p, turn, p.V.WARPS)
    # every CTA has a tile: a loop that might not be entered keeps registers for what follows it
    number = turn
    while number >= 0:
        dk = gl.zeros([BN, BD], gl.float32, tile_layout(p.V.WIDE, BD))
        dv = gl.zeros([BN, BDV], gl.float32, tile_layout(p.V.WIDE, BDV))
        sums = Sums(dk=dk, dv=dv, count=count, flushes=flushes)
        mbarrier.wait(p.buffers.kv_full.index(0), turn & 1)
        for member in range(p.group):
            sums = row_loops(p, turn, sums, member)
        count = sums.count
        flushes = sums.flushes
        if p.V.EARLY:
            bar_arrive(KV_EMPTY, kv_threads(p.V.EARLY))
            mbarrier.wait(p.buffers.dq_empty.index(0), ((count + turn) & 1) ^ 1)
        p.buffers.dv.store(sums.dv.to(dtype))
        p.buffers.dk.store((sums.dk * p.units.scale).to(dtype))
        fence_async_shared()
        bar_arrive(OUT_FULL, BOTH_GROUPS_AND_WARP)
        turn += 1
        number = published(p, turn, p.V.WARPS)
