"""The producer partition: one warp that draws tiles, publishes them with Q, and feeds the rings of K and of V transposed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.compat import smem_reinterpret, tma_load
from backlight.backends.hopper.forward.producer import Visits, load_intervals, take_place, visits_of
from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.forward.tiles import (
    CUT,
    LIVE,
    dismiss,
    draw,
    lengths,
    locate_tile,
    publish,
    tile_blocks,
    write_field,
)
from backlight.backends.hopper.primitives import WM
from backlight.backends.intervals.kernels import KINDS


@gluon.jit
def load_at(desc, b, h, row, column, bar, dst):
    tma_load(desc, [b, h, row, column], bar, smem_reinterpret(dst, desc.dtype, desc.block_type.shape, desc.layout))


@gluon.jit
def feed(p, ring, desc, count, b, h, row, column):
    """A tile into the next stage of a ring, once it is free."""
    stage = ring_stage(ring, count)
    full = ring.full.index(stage)
    if count >= p.V.ST:
        wait_empty(ring, stage)
    mbarrier.expect(full, desc.block_type.nbytes)
    load_at(desc, b, h, row, column, full, ring.tiles.index(stage))


@gluon.jit
def first_tiles(p, z):
    """Tiles of rows and of keys before a packed sequence: there the quantisation has put its rows and keys."""
    rows = p.sq * 0
    keys = rows
    if p.V.VARLEN:
        rows = gl.load(p.packing.cu_tiles_ptr + z)
        keys = gl.load(p.packing.cu_key_tiles_ptr + z)
    return rows, keys


@gluon.jit
def rightmost(p, visits):
    """(the entry of the rightmost of the key blocks still to be visited, anything where there is none; the others).

    Both lists of a tile go from left to right, and entries compare as their blocks do.
    """
    cut = gl.load(visits.live_ptr + (visits.cut - 1), mask=visits.cut > 0, other=-1)
    full = gl.load(visits.live_ptr + (p.most - visits.full), mask=visits.full > 0, other=-1)
    of_cut = (cut > full).to(gl.int32)
    return gl.maximum(cut, full), Visits(visits.live_ptr, visits.cut - of_cut, visits.full - 1 + of_cut, visits.first)


@gluon.jit
def feed_entry(p, visits, entry, count, b, h, row):
    """A tile of K with what the list says of it and, where it is to be masked, the row intervals of its keys."""
    stage, full, place = take_place(p, entry, count)
    if entry % KINDS != 0:
        mbarrier.expect(full, p.k_desc.block_type.nbytes + 2 * p.V.INTERVALS * p.V.BN * 4)
        load_intervals(p, visits, entry, place, full)
    else:
        mbarrier.expect(full, p.k_desc.block_type.nbytes)
    load_at(p.k_desc, b, h, row, 0, full, p.k.tiles.index(stage))


@gluon.jit
def send(p, head, z, block, count, turn):
    """Q of a tile, then K and V of its blocks from right to left. Returns how many blocks so far."""
    NC: gl.constexpr = p.V.NC
    b = head // p.heads
    h = head % p.heads
    _, _, sq, sk = lengths(p, z)
    before, keys_before = first_tiles(p, z)
    if p.V.INTERVALS > 0:
        visits = visits_of(p, b, h, z, block)
        begin, end = block * 0, visits.cut + visits.full
        write_field(p, turn & 3, LIVE, end)
        # any of them: from right to left, cut and whole blocks alternate
        write_field(p, turn & 3, CUT, end)
        entry, visits = rightmost(p, visits)
    else:
        begin, _, _, end = tile_blocks(p, block * (NC * WM), NC * WM, sq, sk)
    i0 = (before + block) * (NC * WM)
    publish(p, turn & 3, head, z, block, 0)
    for w in gl.static_range(NC):
        mbarrier.wait(p.buffers.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.expect(p.buffers.q_full.index(w), p.q_desc.block_type.nbytes)
        load_at(p.q_desc, b, h, i0 + w * WM, 0, p.buffers.q_full.index(w), p.buffers.q.index(w))
    for j in range(end - begin):
        if p.V.INTERVALS > 0:
            visited = entry
            key = (keys_before + visited // KINDS) * p.V.BN
            # asked for while this block waits for its stages
            entry, visits = rightmost(p, visits)
            feed_entry(p, visits, visited, count, b, h // p.group, key)
        else:
            key = (keys_before + end - 1 - j) * p.V.BN
            feed(p, p.k, p.k_desc, count, b, h // p.group, key, 0)
        feed(p, p.v, p.v_desc, count, b, h // p.group, 0, key)
        count += 1
    return count


@gluon.jit
def producer(p):
    tile = gl.program_id(0)
    turn = tile * 0
    count = tile * 0
    while tile < p.n_tiles:
        head, z, block, exists = locate_tile(p, tile)
        # asked while consumers are at work on the tile before: the counter takes as long to answer as a load
        tile = draw(p, tile)
        if exists:
            count = send(p, head, z, block, count, turn)
            turn += 1
    dismiss(p, count, turn)
