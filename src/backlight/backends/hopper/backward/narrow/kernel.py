"""The main kernel of the backward for narrow heads without learned terms: a partition for each of the two warpgroups.

The same tile and the same five products as in `backward/kernel.py`, but a warpgroup owns 64 of the 128 keys and meets the other
in ds alone: dq of a block needs the ds of all keys, so it is made one block later (ds has two buffers), and neither waits for
the other unless it is a whole block ahead. Each leaves its half of the rows of dq to a warp of its own.

A CTA works on one key tile after the other (`key_tiles.py`) and nothing stops between them: K and V have two buffers, the dq of
a tile's last block is made in the next tile's first, and dk and dv leave through the memory of dq tiles, by the same warp.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backlight.backends.hopper.backward.arguments import NUMBERS, Backward
from backlight.backends.hopper.backward.key_tiles import published_memory
from backlight.backends.hopper.backward.narrow.gradients import gradients
from backlight.backends.hopper.backward.narrow.loader import loader
from backlight.backends.hopper.backward.narrow.reducer import reducer
from backlight.backends.hopper.barriers import NARROW_DO_EMPTY, NARROW_Q_EMPTY
from backlight.backends.hopper.compat import arguments
from backlight.backends.hopper.primitives import WM, barriers, tiles_of

# rows of a block; stages of the rings of q and do
ROWS = 128
STAGES = 2


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers: K, V and ds have two buffers with a half for each warpgroup."""

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    out: gl.shared_memory_descriptor
    tile: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    out_empty: gl.shared_memory_descriptor


@gluon.jit
def memory_of(q_desc, lse_desc, V: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    vector_l: gl.constexpr = lse_desc.layout
    k = tiles_of(dtype, 4, WM, V.BD)
    v = tiles_of(dtype, 4, WM, V.BDV)
    q = tiles_of(dtype, V.ST, V.BM, V.BD)
    do = tiles_of(dtype, V.ST, V.BM, V.BDV)
    lse = gl.allocate_shared_memory(gl.float32, [V.ST, V.BM], vector_l)
    delta = gl.allocate_shared_memory(gl.float32, [V.ST, V.BM], vector_l)
    ds = tiles_of(dtype, 4, WM, V.BM)
    out = tiles_of(gl.float32, 2, WM, max(V.BD, V.BDV))
    tile, tile_full, tile_empty = published_memory(2)
    kv_full = barriers(2, 1)
    kv_empty = barriers(2, 2)
    q_full = barriers(V.ST, 1)
    do_full = barriers(V.ST, 1)
    out_empty = barriers(2, 1)
    return Buffers(
        k, v, q, do, lse, delta, ds, out,
        tile, tile_full, tile_empty, kv_full, kv_empty, q_full, do_full, out_empty,
    )  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def _bwd_narrow_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc, acc_desc, packing, counter_ptr,
    dynamic, counter, n_segments, n_tiles, key_tiles, row_tiles, together, heads, group, sq, sk, left, right,
    units, mask, mask_batch, mask_head, most, few, together_if_few, V: gl.constexpr,
):  # fmt: skip
    buffers = memory_of(q_desc, lse_desc, V)
    p = Backward(
        heads, group, sq, sk, left, right, q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc,
        acc_desc, None, None, None, None, packing, counter_ptr,
        dynamic, counter, n_segments, n_tiles, key_tiles, row_tiles, together,
        units, None, None, mask, mask_batch, mask_head, most, few, together_if_few, None,
        V, buffers, NARROW_Q_EMPTY, NARROW_DO_EMPTY,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [(gradients, (p, 0)), (gradients, (p, 1)), (loader, (p,)), (reducer, (p, 0)), (reducer, (p, 1))],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
