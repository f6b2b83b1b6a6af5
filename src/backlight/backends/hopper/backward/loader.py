"""The loading partition of the main kernel (`kernel.py`): one warp that draws key tiles, publishes them and feeds the rings."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.backward.key_tiles import (
    key_tile,
    load_keys,
    meet_arrivals,
    publish,
    publish_end,
    side_by_side,
)
from backlight.backends.hopper.backward.order import drawn_in_turn, first_number, next_number
from backlight.backends.hopper.backward.visits import first_row_block, load_every_row
from backlight.backends.hopper.barriers import KV_EMPTY, kv_threads
from backlight.backends.hopper.primitives import bar_sync


@gluon.jit
def load_k_and_v(p, t, turn):
    """K and V of a tile, when those of the tile before are done with."""
    full = p.buffers.kv_full.index(0)
    if turn > 0:
        bar_sync(KV_EMPTY, kv_threads(p.V.EARLY))
    mbarrier.expect(full, p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes)
    load_keys(p, t, p.k_desc, 0, full, p.buffers.k)
    load_keys(p, t, p.v_desc, 0, full, p.buffers.v)


@gluon.jit
def loader(p):
    count = p.sq * 0
    turn = count
    number = first_number(p)
    together = side_by_side(p)
    going = turn == 0
    while going:
        t = key_tile(p, drawn_in_turn(p, number, together), together)
        publish(p, turn, number, turn, t)
        first = first_row_block(p, t)
        load_k_and_v(p, t, turn)
        count = load_every_row(p, t, count, first)
        turn += 1
        number = next_number(p)
        going = number < p.n_tiles
    publish_end(p, turn)
    bar_sync(KV_EMPTY, kv_threads(p.V.EARLY))
    meet_arrivals(p, count)
