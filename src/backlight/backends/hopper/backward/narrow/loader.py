"""The loading partition of the kernel for narrow heads: K and V of the next tile come while this one is worked on."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.backward.key_tiles import (
    drawn,
    key_tile,
    load_keys,
    meet_arrivals,
    publish,
    publish_end,
    side_by_side,
)
from backlight.backends.hopper.backward.visits import first_row_block, load_every_row
from backlight.backends.hopper.primitives import WM


@gluon.jit
def loader(p):
    count = p.sq * 0
    visits = count
    turn = count
    number = gl.program_id(0)
    together = side_by_side(p)
    while number < p.n_tiles:
        t = key_tile(p, number, together)
        publish(p, turn, number, visits, t)
        first = first_row_block(p, t)
        if t.end > t.begin:
            side = visits & 1
            full = p.buffers.kv_full.index(side)
            # both reducers have seen that the tile before last is done with
            mbarrier.wait(p.buffers.kv_empty.index(side), ((visits - 1) >> 1) & 1)
            mbarrier.expect(full, 2 * (p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes))
            for w in gl.static_range(2):
                load_keys(p, t, p.k_desc, w * WM, full, p.buffers.k.index(side * 2 + w))
                load_keys(p, t, p.v_desc, w * WM, full, p.buffers.v.index(side * 2 + w))
            visits += 1
        count = load_every_row(p, t, count, first)
        turn += 1
        number = drawn(p)
    publish_end(p, turn)
    meet_arrivals(p, count)
