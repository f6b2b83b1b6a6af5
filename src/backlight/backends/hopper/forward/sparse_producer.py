"""The producer partition of the forward with entmax: K of a tile's blocks for each sweep (sparse.py), V for the last.

The first sweep visits all blocks, the others those that live (live_blocks.py). How many there are is known as they are made.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.compat import arguments
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
from backlight.backends.hopper.forward.tiles import (
    dismiss_apart,
    draw,
    lengths,
    locate_tile,
    publish,
    tile_blocks,
    write_field,
)
from backlight.backends.hopper.primitives import WM


@arguments
class Keys:
    """The key blocks [begin, end) of a tile, of a key head; at: where its bytes begin."""

    b: gl.tensor
    h: gl.tensor
    k_start: gl.tensor
    sk: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    at: gl.tensor


@gluon.jit
def send_key(p, ring, desc, keys, block, count):
    feed(p, ring, desc, count, keys.b, keys.h, keys.k_start, keys.sk, block * p.V.BN)
    return count + 1


@gluon.jit
def send_ahead(p, ring, desc, keys, count):
    """The first blocks, which every sweep visits: as many as there are stages, of which all are free before a meeting."""
    AHEAD: gl.constexpr = min(p.V.ST, ALWAYS)
    for j in range(gl.minimum(keys.end - keys.begin, AHEAD)):
        count = send_key(p, ring, desc, keys, keys.end - 1 - j, count)
    return count


@gluon.jit
def send_rest(p, ptr, keys, k_count, v_count, WITH_V: gl.constexpr):
    """K, and with V that, of the other blocks of a tile that live."""
    AHEAD: gl.constexpr = min(p.V.ST, ALWAYS)
    for chunk in range(chunks_of(keys.begin, keys.end)):
        bits = live_chunk(p, ptr, keys.at, keys.begin, keys.end, chunk, 1)
        bits = gl.where(chunk == 0, bits & -(1 << AHEAD), bits)
        while bits != 0:
            block = keys.end - 1 - chunk * CHUNK - lowest(bits)
            bits = bits & (bits - 1)
            k_count = send_key(p, p.k, p.k_desc, keys, block, k_count)
            if WITH_V:
                v_count = send_key(p, p.v, p.v_desc, keys, block, v_count)
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
    keys = Keys(b, h, k_start, sk, begin, end, at)
    for j in range(end - begin):
        k_count = send_key(p, p.k, p.k_desc, keys, end - 1 - j, k_count)
    if not p.V.KNOWN:
        k_count = send_ahead(p, p.k, p.k_desc, keys, k_count)
        meet(p)
        k_count, v_count = send_rest(p, p.entmax.bounded_ptr, keys, k_count, v_count, False)
        k_count = send_ahead(p, p.k, p.k_desc, keys, k_count)
        meet(p)
        step = at * 0
        while goes_on(p, at, step):
            k_count, v_count = send_rest(p, p.entmax.live_ptr, keys, k_count, v_count, False)
            k_count = send_ahead(p, p.k, p.k_desc, keys, k_count)
            meet(p)
            step += 1
        v_count = send_ahead(p, p.v, p.v_desc, keys, v_count)
        k_count, v_count = send_rest(p, p.entmax.live_ptr, keys, k_count, v_count, True)
    return k_count, v_count


@gluon.jit
def sparse_producer(p):
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
    dismiss_apart(p, k_count, v_count, turn)
