"""The leaving partitions of the kernel for narrow heads: a warp for each warpgroup adds its dq and stores its dk and dv."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backlight.backends.hopper.backward.key_tiles import published, published_tile, store_keys, tile_row
from backlight.backends.hopper.backward.visits import visited, visits_of
from backlight.backends.hopper.barriers import GROUP_AND_WARP, NARROW_DQ_FULL
from backlight.backends.hopper.compat import smem_reinterpret, tma_reduce_add
from backlight.backends.hopper.primitives import WM, bar_sync


@gluon.jit
def dq_memory(p, W: gl.constexpr):
    """Where a warpgroup leaves its rows of dq, as `reducer` reads it."""
    return smem_reinterpret(p.buffers.out.index(W), gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)


@gluon.jit
def dk_dv_memory(p, w):
    """The same memory as a warpgroup's rows of dk and dv: [2, 64, width]."""
    WIDTH: gl.constexpr = p.buffers.out.shape[2]
    dtype: gl.constexpr = p.q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, WIDTH], dtype)
    return smem_reinterpret(p.buffers.out.index(w), dtype, [2, WM, WIDTH], layout)


@gluon.jit
def add_dq_of_before(p, row, fresh, visits, W: gl.constexpr):
    """Adds the dq that was left last to the rows from `row` on (none before the first block); counts tiles that were begun."""
    bar_sync(NARROW_DQ_FULL + W, GROUP_AND_WARP)
    if row >= 0:
        tma_reduce_add(p.acc_desc, [row, 0], dq_memory(p, W))
        tma.store_wait(0)
    mbarrier.arrive(p.buffers.out_empty.index(W), count=1)
    if fresh:
        mbarrier.arrive(p.buffers.kv_empty.index((visits & 1) ^ 1), count=1)
        visits += 1
    return visits


@gluon.jit
def reducer(p, W: gl.constexpr):
    """Adds a warpgroup's half of the dq tiles to global memory, stores its dk and dv, and tells when K and V are done with."""
    visits = p.sq * 0
    row = visits - 1
    turn = visits
    number = published(p, turn, 1)
    while number >= 0:
        t = published_tile(p, turn)
        fresh = t.end > t.begin
        for member in range(p.group):
            if p.V.INTERVALS > 0:
                blocks = visits_of(p, t, member)
                for j in range(blocks.cut + blocks.full):
                    following = tile_row(p, t, member, visited(p, blocks, j)) + W * WM
                    visits = add_dq_of_before(p, row, fresh, visits, W)
                    fresh = visits < 0
                    row = following
            else:
                for i in range(t.begin, t.end):
                    visits = add_dq_of_before(p, row, fresh, visits, W)
                    fresh = visits < 0
                    row = tile_row(p, t, member, i) + W * WM
        bar_sync(NARROW_DQ_FULL + W, GROUP_AND_WARP)
        out = dk_dv_memory(p, W)
        store_keys(p, t, p.dk_desc, W * WM, out.index(0))
        store_keys(p, t, p.dv_desc, W * WM, out.index(1))
        tma.store_wait(0)
        mbarrier.arrive(p.buffers.out_empty.index(W), count=1)
        mbarrier.arrive(p.buffers.tile_empty.index(turn & 1), count=1)
        turn += 1
        number = published(p, turn, 1)
    bar_sync(NARROW_DQ_FULL + W, GROUP_AND_WARP)
    if row >= 0:
        tma_reduce_add(p.acc_desc, [row, 0], dq_memory(p, W))
        tma.store_wait(0)
