"""y, lse and their tangents in one sweep (eq. 47-52): the kernel.

As the forward: one producer warp (producer.py) feeds NC consumer warpgroups of 64 rows each (consumer.py) through ST-stage
rings, here of K and tK, and of V and tV; CTAs are persistent, key blocks run from right to left.

Where y and lse are known (KNOWN), as under double backward, weights are normalised from the start, and y costs no product.

Shared memory: Q and tQ [NC, 64, D], which y and ty leave through; K, tK, V and tV [ST, BN, D]. Parity: tests/hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backlight.backends.hopper.barriers import FORWARD_EMPTY
from backlight.backends.hopper.forward.ring import Ring
from backlight.backends.hopper.forward.tiles import slot_size
from backlight.backends.hopper.primitives import WM, barriers, tiles_of
from backlight.backends.hopper.tangent.arguments import Buffers, Tangent
from backlight.backends.hopper.tangent.consumer import consumer
from backlight.backends.hopper.tangent.producer import producer


@gluon.jit
def memory_of(dtype: gl.constexpr, V: gl.constexpr):
    """(`Buffers`, tiles of K, tiles of V)."""
    NC: gl.constexpr = V.NC
    SLOTS: gl.constexpr = 4 if NC == 3 else NC
    q = tiles_of(dtype, SLOTS, WM, V.BD)
    tq = tiles_of(dtype, SLOTS, WM, V.BD)
    k = tiles_of(dtype, V.ST, V.BN, V.BD)
    v = tiles_of(dtype, V.ST, V.BN, V.BDV)
    tk = None
    if V.TK:
        tk = tiles_of(dtype, V.ST, V.BN, V.BD)
    tv = None
    if V.TV:
        tv = tiles_of(dtype, V.ST, V.BN, V.BDV)
    tile = gl.allocate_shared_memory(gl.int32, [4 * slot_size(V.INTERVALS), 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = barriers(NC, 1)
    q_empty = barriers(NC, 1)
    y_full = None
    if V.KNOWN:
        y_full = barriers(NC, 1)
    return Buffers(q, tq, tk, tv, tile, q_full, q_empty, y_full), k, v


NUMBERS = ["dynamic", "n_segments", "n_tiles", "row_tiles", "together", "heads", "group", "sq", "sk", "left", "right"]


@gluon.jit(do_not_specialize=NUMBERS)
def _tangent_kernel(
    q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, y_desc, ty_desc, lse_ptr, tlse_ptr, packing, counter_ptr,
    dynamic, n_segments, n_tiles, row_tiles, together, heads, group, sq, sk, left, right, scale, terms, V: gl.constexpr,
):  # fmt: skip
    buffers, k_tiles, v_tiles = memory_of(q_desc.dtype, V)
    k = Ring(k_tiles, barriers(V.ST, 1), FORWARD_EMPTY, V.NC * 128 + 32)
    v = Ring(v_tiles, barriers(V.ST, 1), FORWARD_EMPTY + V.ST, V.NC * 128 + 32)
    p = Tangent(
        heads, group, sq, sk, left, right, q_desc, k_desc, v_desc, tq_desc, tk_desc, tv_desc, y_desc, ty_desc,
        lse_ptr, tlse_ptr, packing, counter_ptr, dynamic, n_segments, n_tiles, row_tiles, together, scale, terms,
        V, buffers, k, v,
    )  # fmt: skip
    fence_async_shared()
    if V.NC == 2:
        gl.warp_specialize([(consumer, (p, 0)), (consumer, (p, 1)), (producer, (p,))], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(consumer, (p, 0)), (consumer, (p, 1)), (consumer, (p, 2)), (producer, (p,))], [4, 4, 1], [160, 160, 24]
        )
