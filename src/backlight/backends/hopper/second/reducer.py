"""The leaving partitions of second derivatives: a warp for each warpgroup adds its dq and stores its dk and dv."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backlight.backends.hopper.backward.key_tiles import published, published_tile, store_keys, tile_row
from backlight.backends.hopper.barriers import GROUP_AND_WARP, second_out_full
from backlight.backends.hopper.compat import smem_reinterpret, tma_reduce_add
from backlight.backends.hopper.primitives import WM, bar_sync


@gluon.jit
def reducer(p, W: gl.constexpr):
    turn = p.sq * 0
    number = published(p, turn, 1)
    while number >= 0:
        t = published_tile(p, turn)
        if not p.V.DIRECT:
            dq = smem_reinterpret(p.buffers.out.index(W), gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)
            for member in range(p.group):
                for i in range(t.begin, t.end):
                    bar_sync(second_out_full(p.V.ST) + W, GROUP_AND_WARP)
                    tma_reduce_add(p.acc_desc, [tile_row(p, t, member, i), 0], dq)
                    tma.store_wait(0)
                    mbarrier.arrive(p.buffers.out_empty.index(W), count=1)
        bar_sync(second_out_full(p.V.ST) + W, GROUP_AND_WARP)
        store_keys(p, t, p.dk_desc, W * WM, p.buffers.k.index(W))
        store_keys(p, t, p.dv_desc, W * WM, p.buffers.v.index(W))
        tma.store_wait(0)
        mbarrier.arrive(p.buffers.keys_empty.index(W), count=1)
        mbarrier.arrive(p.buffers.tile_empty.index(turn & 1), count=1)
        turn += 1
        number = published(p, turn, 1)
