"""The producer partition of the tangent: one warp that draws tiles, publishes them with Q and tQ, and feeds the two rings."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.forward.tiles import END, draw, lengths, locate_tile, publish, tile_blocks
from backlight.backends.hopper.primitives import WM, load_tile


@gluon.jit
def feed(p, ring, desc, tdesc, ttiles, GIVEN: gl.constexpr, count, b, h, start, length, row):
    """Rows of a key head, and of its tangent, into the next stage of a ring, once it is free."""
    stage = ring_stage(ring, count)
    full = ring.full.index(stage)
    if count >= p.V.ST:
        wait_empty(ring, stage)
    mbarrier.expect(full, desc.block_type.nbytes * 2 if GIVEN else desc.block_type.nbytes)
    load_tile(desc, b, h, start, length, row, full, ring.tiles.index(stage), p.V.VARLEN)
    if GIVEN:
        load_tile(tdesc, b, h, start, length, row, full, ttiles.index(stage), p.V.VARLEN)


@gluon.jit
def send_rows(p, b, h, start, length, row, turn, W: gl.constexpr):
    """Q and tQ of a warpgroup, once it has done with those of the tile before."""
    full = p.buffers.q_full.index(W)
    mbarrier.wait(p.buffers.q_empty.index(W), (turn & 1) ^ 1)
    mbarrier.expect(full, p.q_desc.block_type.nbytes * 2 if p.V.TQ else p.q_desc.block_type.nbytes)
    load_tile(p.q_desc, b, h, start, length, row, full, p.buffers.q.index(W), p.V.VARLEN)
    if p.V.TQ:
        load_tile(p.tq_desc, b, h, start, length, row, full, p.buffers.tq.index(W), p.V.VARLEN)


@gluon.jit
def send(p, head, z, block, ticket, count, turn):
    """Q of a tile, then K and V of its blocks from right to left, all with their tangents. Returns how many blocks so far."""
    NC: gl.constexpr = p.V.NC
    BM: gl.constexpr = NC * WM
    b = head // p.heads
    h = head % p.heads
    q_start, k_start, sq, sk = lengths(p, z)
    i0 = block * BM
    begin, _, _, end = tile_blocks(p, i0, BM, sq, sk)
    publish(p, turn & 3, head, z, block, ticket)
    for w in gl.static_range(NC):
        send_rows(p, b, h, q_start, sq, i0 + w * WM, turn, w)
    for j in range(end - begin):
        key = (end - 1 - j) * p.V.BN
        feed(p, p.k, p.k_desc, p.tk_desc, p.buffers.tk, p.V.TK, count, b, h // p.group, k_start, sk, key)
        feed(p, p.v, p.v_desc, p.tv_desc, p.buffers.tv, p.V.TV, count, b, h // p.group, k_start, sk, key)
        count += 1
    return count


@gluon.jit
def producer(p):
    NC: gl.constexpr = p.V.NC
    ST: gl.constexpr = p.V.ST
    tile = gl.program_id(0)
    count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        ticket = tile
        head, z, block, exists = locate_tile(p, tile)
        # asked while consumers are at work on the tile before: the counter takes as long to answer as a load
        tile = draw(p, tile)
        if exists:
            count = send(p, head, z, block, ticket, count, turn)
            turn += 1
    # every arrival of the consumers is met, those of the last round included
    for i in gl.static_range(ST):
        if count >= ST - i:
            wait_empty(p.k, ring_stage(p.k, count + i))
            wait_empty(p.v, ring_stage(p.v, count + i))
    publish(p, turn & 3, END, 0, 0, 0)
    for w in gl.static_range(NC):
        mbarrier.wait(p.buffers.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.arrive(p.buffers.q_full.index(w), count=1)
