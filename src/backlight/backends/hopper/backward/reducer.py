"""The leaving partition of the main kernel (`kernel.py`): one warp that adds dq and diagonals, and stores dk and dv."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backlight.backends.hopper.backward.dbias import add_diagonals
from backlight.backends.hopper.backward.key_tiles import published, published_tile, store_keys, tile_row
from backlight.backends.hopper.backward.order import count_itself, counter_of, turn_of, wait_for_turn
from backlight.backends.hopper.backward.visits import visited, visits_of
from backlight.backends.hopper.barriers import (
    BOTH_GROUPS_AND_WARP,
    KV_EMPTY,
    OUT_FULL,
    diagonals_full,
    dq_full,
    kv_threads,
)
from backlight.backends.hopper.compat import smem_reinterpret, tma_reduce_add
from backlight.backends.hopper.primitives import bar_arrive, bar_sync


@gluon.jit
def in_band(p, t, i):
    """Whether `gradients` treats a row block as one that meets the bias table: masked blocks always do."""
    return (i < t.plain_begin) | (i >= t.plain_end) | ((i >= t.band_begin) & (i < t.band_end))


@gluon.jit
def add_dq(p, t, member, i, dq_tile):
    bar_sync(dq_full(p.V.ST), BOTH_GROUPS_AND_WARP)
    if p.V.ORDERED:
        wait_for_turn(counter_of(p, t, member, i), turn_of(p, t, i))
    tma_reduce_add(p.acc_desc, [tile_row(p, t, member, i), 0], dq_tile)
    tma.store_wait(0)
    mbarrier.arrive(p.buffers.dq_empty.index(0), count=1)
    if p.V.ORDERED:
        count_itself(counter_of(p, t, member, i))


@gluon.jit
def reducer(p):
    """Moves what `gradients` leaves in shared memory: adds dq tiles and diagonals of ds to global memory, stores dk and dv."""
    dq_tile = p.buffers.dq
    if p.V.DQ_TILES:
        dq_tile = smem_reinterpret(p.buffers.dq, gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)
    turn = p.sq * 0
    number = published(p, turn, 1)
    while number >= 0:
        t = published_tile(p, turn)
        if p.V.INTERVALS > 0 and p.V.DQ_TILES:
            for member in range(p.group):
                visits = visits_of(p, t, member)
                for j in range(visits.cut + visits.full):
                    add_dq(p, t, member, visited(p, visits, j), dq_tile)
        elif p.V.DBIAS or p.V.DQ_TILES:
            for member in range(p.group):
                for i in range(t.begin, t.end):
                    if p.V.DBIAS:  # noqa: SIM102 (known to the compiler)
                        if in_band(p, t, i):
                            bar_sync(diagonals_full(p.V.ST), BOTH_GROUPS_AND_WARP)
                            add_diagonals(p, t, t.kv_head * p.group + member, i)
                            tma.store_wait(0)
                            mbarrier.arrive(p.buffers.diagonals_empty.index(0), count=1)
                    if p.V.DQ_TILES:
                        add_dq(p, t, member, i, dq_tile)
        bar_sync(OUT_FULL, BOTH_GROUPS_AND_WARP)
        store_keys(p, t, p.dv_desc, 0, p.buffers.dv)
        store_keys(p, t, p.dk_desc, 0, p.buffers.dk)
        tma.store_wait(0)
        if p.V.EARLY:
            mbarrier.arrive(p.buffers.dq_empty.index(0), count=1)
        else:
            bar_arrive(KV_EMPTY, kv_threads(p.V.EARLY))
        mbarrier.arrive(p.buffers.tile_empty.index(turn & 1), count=1)
        turn += 1
        number = published(p, turn, 1)
