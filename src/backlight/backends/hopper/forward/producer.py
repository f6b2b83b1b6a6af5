"""The producer partition of the forward: one warp that draws tiles, publishes them with Q, and feeds the rings of K and V.

With tau keys are visited twice (elastic.py): K of all blocks of a tile, then K and V of all blocks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.compat import arguments, tma_load
from backlight.backends.hopper.forward.overflow import first_overflows, next_overflows
from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.forward.tiles import (
    CUT,
    LIVE,
    dismiss_apart,
    draw,
    lengths,
    locate_tile,
    publish,
    q_buffer,
    q_phase,
    tile_blocks,
    write_field,
)
from backlight.backends.hopper.primitives import WM, load_tile, stage_of
from backlight.backends.intervals.kernels import KINDS


@gluon.jit
def feed(p, ring, desc, count, b, h, start, length, row):
    """Rows of a key head into the next stage of a ring, once it is free."""
    stage = ring_stage(ring, count)
    if count >= p.V.ST:
        wait_empty(ring, stage)
    mbarrier.expect(ring.full.index(stage), desc.block_type.nbytes)
    load_tile(desc, b, h, start, length, row, ring.full.index(stage), ring.tiles.index(stage), p.V.VARLEN)


@arguments
class Visits:
    """Key blocks that a tile visits under a mask by row intervals.

    live_ptr: their list (intervals/kernels.py); cut, full: how many have to be masked, and how many not; first: where the
    intervals of the sequence's first key block lie.
    """

    live_ptr: gl.tensor
    cut: gl.tensor
    full: gl.tensor
    first: gl.tensor


@gluon.jit
def visits_of(p, b, h, z, block):
    row_tile = block
    key_tile = block * 0
    if p.V.VARLEN:
        row_tile = block + gl.load(p.packing.cu_tiles_ptr + z)
        key_tile = gl.load(p.mask.cu_key_tiles_ptr + z)
    m = b * p.mask_batch + h * p.mask_head
    owner = m.to(gl.int64) * p.row_tiles + row_tile
    cut = gl.load(p.mask.counts_ptr + 2 * owner)
    full = gl.load(p.mask.counts_ptr + 2 * owner + 1)
    return Visits(p.mask.live_ptr + owner * p.most, cut, full, m * (p.key_tiles + 1) + key_tile)


@gluon.jit
def next_entry(p, visits, j):
    """Entry number j of a list; anything beyond its end."""
    if p.V.FULL_FIRST:
        at = gl.where(j < visits.full, p.most - 1 - j, gl.minimum(j - visits.full, p.most - 1))
    else:
        at = gl.where(j < visits.cut, j, p.most - 1 - (j - visits.cut))
    return gl.load(visits.live_ptr + gl.maximum(at, 0))


@gluon.jit
def take_place(p, entry, count):
    """(stage, its mbarrier, place for intervals) of tile number `count` of K, once free; what the list says is written."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    stage = ring_stage(p.k, count)
    full = p.k.full.index(stage)
    if count >= p.V.ST:
        wait_empty(p.k, stage)
    place = stage_of(count, p.V.PLACES)
    p.buffers.entry.index(place).store(gl.full([1], entry, gl.int32, one))
    return stage, full, place


@gluon.jit
def load_intervals(p, visits, entry, place, full):
    """The row intervals of a block's keys to their place, one vector after the other."""
    N: gl.constexpr = 2 * p.V.INTERVALS
    at = (visits.first + entry // KINDS) * N
    for i in gl.static_range(N):
        tma_load(p.folded_desc, [(at + i) * p.V.BN], full, p.buffers.intervals.index(place * N + i))


@gluon.jit
def feed_cut(p, visits, entry, count, b, h, start, length, row):
    """A tile of K with what the list says of it, and the row intervals of its keys."""
    stage, full, place = take_place(p, entry, count)
    mbarrier.expect(full, p.k_desc.block_type.nbytes + 2 * p.V.INTERVALS * p.V.BN * 4)
    load_intervals(p, visits, entry, place, full)
    load_tile(p.k_desc, b, h, start, length, row, full, p.k.tiles.index(stage), p.V.VARLEN)


@gluon.jit
def send_q(p, b, h, q_start, sq, block, turn):
    """Q of a tile, a part for each warpgroup."""
    NC: gl.constexpr = p.V.NC
    for w in gl.static_range(NC):
        at = q_buffer(p, turn, w)
        row = block * (p.V.NC * WM) + w * WM
        mbarrier.wait(p.buffers.q_empty.index(at), q_phase(p, turn) ^ 1)
        mbarrier.expect(p.buffers.q_full.index(at), p.q_desc.block_type.nbytes)
        load_tile(p.q_desc, b, h, q_start, sq, row, p.buffers.q_full.index(at), p.buffers.q.index(at), p.V.VARLEN)


@gluon.jit
def send(p, tile, head, z, block, ticket, count, turn):
    """Q of a tile, then K and V of its blocks from right to left.

    Returns which tile comes next, if that was still to be drawn (`producer`), and how many tiles of V were sent so far.
    """
    NC: gl.constexpr = p.V.NC
    BM: gl.constexpr = NC * WM
    b = head // p.heads
    h = head % p.heads
    q_start, k_start, sq, sk = lengths(p, z)
    i0 = block * BM
    if p.V.INTERVALS > 0:
        visits = visits_of(p, b, h, z, block)
        begin, end = block * 0, visits.cut + visits.full
        write_field(p, turn & 3, LIVE, end)
        write_field(p, turn & 3, CUT, visits.cut)
        entry = next_entry(p, visits, begin)
    else:
        begin, _, _, end = tile_blocks(p, i0, BM, sq, sk)
    publish(p, turn & 3, head, z, block, ticket)
    send_q(p, b, h, q_start, sq, block, turn)
    # tiles of K that were sent beyond those of V
    ahead = 0
    if p.V.TAU:
        for j in range(end - begin):
            feed(p, p.k, p.k_desc, 2 * count + j, b, h // p.group, k_start, sk, (end - 1 - j) * p.V.BN)
        ahead = count + end - begin
    for j in range(end - begin):
        key = (end - 1 - j) * p.V.BN
        if p.V.INTERVALS > 0:
            visited = entry
            key = visited // KINDS * p.V.BN
            # asked for while this block waits for its stages
            entry = next_entry(p, visits, j + 1)
            cut = j >= visits.full if p.V.FULL_FIRST else j < visits.cut
            if cut:
                feed_cut(p, visits, visited, count, b, h // p.group, k_start, sk, key)
            else:
                feed(p, p.k, p.k_desc, count, b, h // p.group, k_start, sk, key)
            feed(p, p.v, p.v_desc, count, b, h // p.group, k_start, sk, key)
        else:
            feed(p, p.k, p.k_desc, count + ahead, b, h // p.group, k_start, sk, key)
            feed(p, p.v, p.v_desc, count, b, h // p.group, k_start, sk, key)
        count += 1
        if p.V.QB > 1:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
            if (j == 0) & (ticket >= 0):
                tile = draw(p, tile)
    return tile, count


@gluon.jit
def producer(p):
    NC: gl.constexpr = p.V.NC
    QB: gl.constexpr = p.V.QB
    tile = gl.program_id(0)
    count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        ticket = tile
        head, z, block, exists = locate_tile(p, tile)
        # the counter takes as long to answer as a load. It is asked while consumers have work: on the tile before, as long as Q
        # has one buffer, or on the first block of this one
        if QB == 1:
            tile = draw(p, tile)
        if exists:
            tile, count = send(p, tile, head, z, block, ticket, count, turn)
            turn += 1
        elif QB > 1:
            tile = draw(p, tile)
    if p.V.KEEP_FIRST_MAX:
        for i in gl.static_range(QB):
            for w in gl.static_range(NC):
                mbarrier.wait(p.buffers.q_empty.index(q_buffer(p, turn + i, w)), q_phase(p, turn + i) ^ 1)
        # numbers of tiles fall in each warpgroup's list: what several have in common is done once
        tiles = first_overflows(p)
        tile = gl.maximum(gl.maximum(tiles[0], tiles[1]), tiles[2])
        while tile >= 0:
            head, z, block, _ = locate_tile(p, tile)
            tiles, owners = next_overflows(p, tiles, tile, head, z, block)
            _, count = send(p, tile, head, z, block, -1 - (8 * tile + owners), count, turn)
            turn += 1
            tile = gl.maximum(gl.maximum(tiles[0], tiles[1]), tiles[2])
    dismiss_apart(p, count * 2 if p.V.TAU else count, count, turn)
