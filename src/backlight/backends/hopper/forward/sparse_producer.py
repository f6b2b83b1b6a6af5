"""The producer partition of the forward with entmax: K of a tile's blocks for each sweep (sparse.py), V for the last.

The first sweep visits all blocks, the others those that live (live_blocks.py). How many there are is known as they are made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.forward.live_blocks import (
    ALWAYS,
    BYTES,
    CHUNK,
    bytes_at,
    chunks_of,
    goes_on,
    live_chunk,
    lowest,
    meet,
)
from backlight.backends.hopper.forward.producer import feed, send_q
from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.forward.tiles import (
    END,
    draw,
    lengths,
    locate_tile,
    publish,
    q_buffer,
    q_phase,
    tile_blocks,
    write_field,
)
from backlight.backends.hopper.primitives import WM


@gluon.jit
def send_ahead(p, ring, desc, begin, end, count, b, h, k_start, sk):
    """The first blocks, which every sweep visits: as many as there are stages, of which all are free before a meeting."""
    AHEAD: gl.constexpr = min(p.V.ST, ALWAYS)
    for j in range(gl.minimum(end - begin, AHEAD)):
        feed(p, ring, desc, count, b, h, k_start, sk, (end - 1 - j) * p.V.BN)
        count += 1
    return count


@gluon.jit
def send_rest(p, ptr, at, begin, end, k_count, v_count, b, h, k_start, sk, WITH_V: gl.constexpr):
    """K, and with V that, of the other blocks of a tile that live."""
    AHEAD: gl.constexpr = min(p.V.ST, ALWAYS)
    for chunk in range(chunks_of(begin, end)):
        bits = live_chunk(p, ptr, at, begin, end, chunk, 1)
        bits = gl.where(chunk == 0, bits & -(1 << AHEAD), bits)
        while bits != 0:
            key = (end - 1 - chunk * CHUNK - lowest(bits)) * p.V.BN
            bits = bits & (bits - 1)
            feed(p, p.k, p.k_desc, k_count, b, h, k_start, sk, key)
            k_count += 1
            if WITH_V:
                feed(p, p.v, p.v_desc, v_count, b, h, k_start, sk, key)
                v_count += 1
    return k_count, v_count


@gluon.jit
def send_tile(p, head, z, block, k_count, v_count, turn):
    """All that a tile needs; how many tiles of K and of V were sent so far."""
    b = head // p.heads
    h = head % p.heads // p.group
    q_start, k_start, sq, sk = lengths(p, z)
    begin, _, _, end = tile_blocks(p, block * (p.V.NC * WM), p.V.NC * WM, sq, sk)
    at = bytes_at(p, head, z, block)
    publish(p, turn & 3, head, z, block, 0)
    write_field(p, turn & 3, BYTES, at)
    send_q(p, b, head % p.heads, q_start, sq, block, turn)
    for j in range(end - begin):
        feed(p, p.k, p.k_desc, k_count, b, h, k_start, sk, (end - 1 - j) * p.V.BN)
        k_count += 1
    if not p.V.KNOWN:
        bounded, live = p.entmax.bounded_ptr, p.entmax.live_ptr
        k_count = send_ahead(p, p.k, p.k_desc, begin, end, k_count, b, h, k_start, sk)
        meet(p)
        k_count, v_count = send_rest(p, bounded, at, begin, end, k_count, v_count, b, h, k_start, sk, False)
        k_count = send_ahead(p, p.k, p.k_desc, begin, end, k_count, b, h, k_start, sk)
        meet(p)
        step = at * 0
        while goes_on(p, at, step):
            k_count, v_count = send_rest(p, live, at, begin, end, k_count, v_count, b, h, k_start, sk, False)
            k_count = send_ahead(p, p.k, p.k_desc, begin, end, k_count, b, h, k_start, sk)
            meet(p)
            step += 1
        v_count = send_ahead(p, p.v, p.v_desc, begin, end, v_count, b, h, k_start, sk)
        k_count, v_count = send_rest(p, live, at, begin, end, k_count, v_count, b, h, k_start, sk, True)
    return k_count, v_count


@gluon.jit
def sparse_producer(p):
    NC: gl.constexpr = p.V.NC
    ST: gl.constexpr = p.V.ST
    tile = gl.program_id(0)
    k_count = tile * 0
    v_count = tile * 0
    turn = tile * 0
    while tile < p.n_tiles:
        head, z, block, exists = locate_tile(p, tile)
        # asked while consumers have work on the tile before
        tile = draw(p, tile)
        if exists:
            k_count, v_count = send_tile(p, head, z, block, k_count, v_count, turn)
            turn += 1
    # every arrival of the consumers is met, those of the last round included
    for i in gl.static_range(ST):
        if k_count >= ST - i:
            wait_empty(p.k, ring_stage(p.k, k_count + i))
        if v_count >= ST - i:
            wait_empty(p.v, ring_stage(p.v, v_count + i))
    publish(p, turn & 3, END, 0, 0, 0)
    for w in gl.static_range(NC):
        mbarrier.wait(p.buffers.q_empty.index(q_buffer(p, turn, w)), q_phase(p, turn) ^ 1)
        mbarrier.arrive(p.buffers.q_full.index(q_buffer(p, turn, w)), count=1)
