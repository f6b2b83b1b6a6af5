"""The producer partition of the tangent: one warp that draws tiles, publishes them with Q and tQ, and feeds the two rings."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.compat import arguments
from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.forward.tiles import dismiss, draw, lengths, locate_tile, publish, tile_blocks
from backlight.backends.hopper.primitives import WM, load_tile


@arguments
class Keys:
    """Of a head: the sequence's first key and how many it has, the first key of a block."""

    b: gl.tensor
    h: gl.tensor
    start: gl.tensor
    length: gl.tensor
    first: gl.tensor


@gluon.jit
def feed(p, ring, desc, tdesc, ttiles, GIVEN: gl.constexpr, count, keys):
    """Keys, or their values, and the tangents into the next stage of a ring, once it is free."""
    stage = ring_stage(ring, count)
    full = ring.full.index(stage)
    if count >= p.V.ST:
        wait_empty(ring, stage)
    mbarrier.expect(full, desc.block_type.nbytes * 2 if GIVEN else desc.block_type.nbytes)
    load_tile(desc, keys.b, keys.h, keys.start, keys.length, keys.first, full, ring.tiles.index(stage), p.V.VARLEN)
    if GIVEN:
        load_tile(tdesc, keys.b, keys.h, keys.start, keys.length, keys.first, full, ttiles.index(stage), p.V.VARLEN)


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
    BM: gl.constexpr = p.V.NC * WM
    b = head // p.heads
    h = head % p.heads
    q_start, k_start, sq, sk = lengths(p, z)
    i0 = block * BM
    begin, _, _, end = tile_blocks(p, i0, BM, sq, sk)
    publish(p, turn & 3, head, z, block, ticket)
    NC: gl.constexpr = p.V.NC
    for w in gl.static_range(NC):
        send_rows(p, b, h, q_start, sq, i0 + w * WM, turn, w)
    for j in range(end - begin):
        keys = Keys(b, h // p.group, k_start, sk, (end - 1 - j) * p.V.BN)
        feed(p, p.k, p.k_desc, p.tk_desc, p.buffers.tk, p.V.TK, count, keys)
        feed(p, p.v, p.v_desc, p.tv_desc, p.buffers.tv, p.V.TV, count, keys)
        count += 1
    return count


@gluon.jit
def producer(p):
    tile = gl.program_id(0)
    count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        head, z, block, exists = locate_tile(p, tile)
        # asked while consumers are at work on the tile before: the counter takes as long to answer as a load
        following = draw(p, tile)
        if exists:
            count = send(p, head, z, block, tile, count, turn)
            turn += 1
        tile = following
    dismiss(p, count, turn)
