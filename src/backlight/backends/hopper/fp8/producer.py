"""The producer partition: one warp that draws tiles, publishes them with Q, and feeds the rings of K and of V transposed."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.compat import smem_reinterpret, tma_load
from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.forward.tiles import dismiss, draw, lengths, locate_tile, publish, tile_blocks
from backlight.backends.hopper.primitives import WM


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
def send(p, head, z, block, count, turn):
    """Q of a tile, then K and V of its blocks from right to left. Returns how many blocks so far."""
    NC: gl.constexpr = p.V.NC
    b = head // p.heads
    h = head % p.heads
    _, _, sq, sk = lengths(p, z)
    before, keys_before = first_tiles(p, z)
    begin, _, _, end = tile_blocks(p, block * (NC * WM), NC * WM, sq, sk)
    i0 = (before + block) * (NC * WM)
    publish(p, turn & 3, head, z, block, 0)
    for w in gl.static_range(NC):
        mbarrier.wait(p.buffers.q_empty.index(w), (turn & 1) ^ 1)
        mbarrier.expect(p.buffers.q_full.index(w), p.q_desc.block_type.nbytes)
        load_at(p.q_desc, b, h, i0 + w * WM, 0, p.buffers.q_full.index(w), p.buffers.q.index(w))
    for j in range(end - begin):
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
