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
from backlight.backends.hopper.primitives import bar_arrive, columns_beyond, first_columns
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
def no_sums(p, D: gl.constexpr, BD: gl.constexpr):
    """Accumulators of D columns: of the first, and of those beyond."""
    BN: gl.constexpr = p.V.BN
    BEYOND: gl.constexpr = columns_beyond(D, BD)
    FIRST: gl.constexpr = 2 * BEYOND if BEYOND > 0 else BD
    beyond = p.sq
    if BEYOND > 0:
        beyond = gl.zeros([BN, BEYOND], gl.float32, tile_layout(p.V.WIDE, BEYOND))
    return gl.zeros([BN, FIRST], gl.float32, tile_layout(p.V.WIDE, FIRST)), beyond


@gluon.jit
def leave(p, tile, first, beyond, factor, BEYOND: gl.constexpr):
    """Sums of a tile in the memory that they leave through."""
    first_columns(tile, BEYOND).store((first * factor).to(p.q_desc.dtype))
    if BEYOND > 0:
        tile.slice(2 * BEYOND, BEYOND, 1).store((beyond * factor).to(p.q_desc.dtype))


@gluon.jit
def gradients(p):
    BD: gl.constexpr = p.buffers.k.shape[1]
    BDV: gl.constexpr = p.buffers.v.shape[1]
    count = p.sq * 0
    flushes = count
    turn = count
    published(p, turn, p.V.WARPS)
    # every CTA has a tile: a loop that might not be entered keeps registers for what follows it
    number = turn
    while number >= 0:
        dk, dk_beyond = no_sums(p, p.V.D, BD)
        dv, dv_beyond = no_sums(p, p.V.DV, BDV)
        sums = Sums(dk=dk, dv=dv, dk_beyond=dk_beyond, dv_beyond=dv_beyond, count=count, flushes=flushes)
        mbarrier.wait(p.buffers.kv_full.index(0), turn & 1)
        for member in range(p.group):
            sums = row_loops(p, turn, sums, member)
        count = sums.count
        flushes = sums.flushes
        if p.V.EARLY:
            bar_arrive(KV_EMPTY, kv_threads(p.V.EARLY))
            mbarrier.wait(p.buffers.dq_empty.index(0), ((count + turn) & 1) ^ 1)
        leave(p, p.buffers.dv, sums.dv, sums.dv_beyond, 1.0, columns_beyond(p.V.DV, BDV))
        leave(p, p.buffers.dk, sums.dk, sums.dk_beyond, p.units.scale, columns_beyond(p.V.D, BD))
        fence_async_shared()
        bar_arrive(OUT_FULL, BOTH_GROUPS_AND_WARP)
        turn += 1
        number = published(p, turn, p.V.WARPS)
