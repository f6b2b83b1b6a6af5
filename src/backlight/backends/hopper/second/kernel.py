"""dq, dk and dv of a loss on the tangent (eq. 58 without a gradient at y): the kernel.

As in the backward for narrow heads, a CTA owns 128 keys of one key head, 64 of them in each of two warpgroups (gradients.py),
and visits the row blocks that see them; one warp loads (loader.py), two take results away (reducer.py). Each warpgroup makes
the dq of its own keys, transposed, and adds it to an fp32 accumulator, by TMA or (DIRECT) from registers: neither ever waits
for the other. `dq.py` turns the sums into dq. Ten products with all three tangents (row_block.py). Parity: tests/hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backlight.backends.hopper.backward.key_tiles import published_memory
from backlight.backends.hopper.primitives import WM, barriers, tiles_of
from backlight.backends.hopper.second.arguments import NUMBERS, STATES, Buffers, Second
from backlight.backends.hopper.second.gradients import gradients
from backlight.backends.hopper.second.loader import loader
from backlight.backends.hopper.second.reducer import reducer


@gluon.jit
def memory_of(dtype: gl.constexpr, state_desc, V: gl.constexpr):
    k = tiles_of(dtype, 2, WM, V.BD)
    v = tiles_of(dtype, 2, WM, V.BDV)
    q = tiles_of(dtype, V.ST, V.BM, V.BD)
    dto = tiles_of(dtype, V.ST, V.BM, V.BDV)
    tk = None
    dr = None
    if V.TK:
        tk = tiles_of(dtype, 2, WM, V.BD)
        dr = tiles_of(dtype, 2, WM, V.BM)
    tv = None
    if V.TV:
        tv = tiles_of(dtype, 2, WM, V.BDV)
    tq = None
    if V.TQ:
        tq = tiles_of(dtype, V.ST, V.BM, V.BD)
    state = gl.allocate_shared_memory(gl.float32, [V.ST, STATES * V.BM], state_desc.layout)
    ds = tiles_of(dtype, 2, WM, V.BM)
    out = None
    out_empty = None
    if not V.DIRECT:
        out = tiles_of(gl.float32, 2, V.BM, V.BD)
        out_empty = barriers(2, 1)
    tile, tile_full, tile_empty = published_memory(2)
    keys_full = barriers(2, 1)
    keys_empty = barriers(2, 1)
    rows_full = barriers(V.ST, 1)
    return Buffers(
        k, v, tk, tv, q, tq, dto, state, ds, dr, out,
        tile, tile_full, tile_empty, keys_full, keys_empty, rows_full, out_empty,
    )  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def _second_kernel(
    q_desc, tq_desc, dto_desc, k_desc, v_desc, tk_desc, tv_desc, dk_desc, dv_desc, state_desc, acc_desc, acc_ptr, packing,
    counter_ptr, dynamic, counter, n_segments, n_tiles, key_tiles, row_tiles, together, heads, group, sq, sk, left, right,
    units, V: gl.constexpr,
):  # fmt: skip
    buffers = memory_of(q_desc.dtype, state_desc, V)
    p = Second(
        heads, group, sq, sk, left, right, q_desc, tq_desc, dto_desc, k_desc, v_desc, tk_desc, tv_desc, dk_desc, dv_desc,
        state_desc, acc_desc, acc_ptr, packing, counter_ptr, dynamic, counter, n_segments, n_tiles, key_tiles, row_tiles,
        together, units, V, buffers,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [(gradients, (p, 0)), (gradients, (p, 1)), (loader, (p,)), (reducer, (p, 0)), (reducer, (p, 1))],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
