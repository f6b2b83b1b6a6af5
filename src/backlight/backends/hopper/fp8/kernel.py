"""y and lse of e4m3 tensors (eq. 96-99): the kernel.

As the forward: one producer warp (producer.py) feeds two consumer warpgroups of 64 rows each (consumer.py) through ST-stage
rings of K [ST, BN, D] and of V transposed [ST, D, BN]; CTAs are persistent, key blocks run from right to left, so that a key
which all rows attend to at the beginning comes last and flushes nothing to zero. So do those that a mask by row intervals
leaves, of which some are to be compared: each comes with its entry of the list of tiles to visit (intervals/kernels.py).
Shared memory besides: Q [2, 64, D], O, and those entries and intervals.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backlight.backends.hopper.barriers import FORWARD_EMPTY
from backlight.backends.hopper.forward.ring import Ring
from backlight.backends.hopper.forward.tiles import memory_of_intervals, slot_size
from backlight.backends.hopper.fp8.arguments import Buffers, Quantised
from backlight.backends.hopper.fp8.consumer import consumer
from backlight.backends.hopper.fp8.producer import producer
from backlight.backends.hopper.primitives import WM, barriers, tiles_of


@gluon.jit
def memory_of(o_dtype: gl.constexpr, V: gl.constexpr):
    q = tiles_of(gl.float8e4nv, V.NC, WM, V.D)
    o = tiles_of(o_dtype, V.NC, WM, V.D)
    tile = gl.allocate_shared_memory(gl.int32, [4 * slot_size(V.INTERVALS), 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    gate_full: gl.constexpr = None
    if V.GATE:
        gate_full = barriers(V.NC, 1)
    intervals = None
    entry = None
    if V.INTERVALS > 0:
        intervals, entry = memory_of_intervals(V)
    return Buffers(q, o, gate_full, tile, intervals, entry, barriers(V.NC, 1), barriers(V.NC, 1))


NUMBERS = [
    "dynamic",
    "n_segments",
    "n_tiles",
    "row_tiles",
    "together",
    "key_tiles",
    "heads",
    "group",
    "sq",
    "sk",
    "left",
    "right",
    "mask_batch",
    "mask_head",
    "most",
]


@gluon.jit(do_not_specialize=NUMBERS)
def _fp8_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, scales, counter_ptr, dynamic, n_tiles, row_tiles, together, key_tiles,
    heads, group, sq, sk, left, right, unit_log2, gate_desc, terms, n_bias, bias_origin, packing, n_segments,
    folded_desc, mask, mask_batch, mask_head, most, V: gl.constexpr,
):  # fmt: skip
    buffers = memory_of(o_desc.dtype, V)
    k = Ring(tiles_of(gl.float8e4nv, V.ST, V.BN, V.D), barriers(V.ST, 1), FORWARD_EMPTY, V.NC * 128 + 32)
    v = Ring(tiles_of(gl.float8e4nv, V.ST, V.D, V.BN), barriers(V.ST, 1), FORWARD_EMPTY + V.ST, V.NC * 128 + 32)
    p = Quantised(
        heads, group, sq, sk, left, right, q_desc, k_desc, v_desc, o_desc, lse_ptr, scales, counter_ptr, dynamic,
        n_tiles, row_tiles, together, key_tiles, unit_log2, gate_desc, terms, n_bias, bias_origin, packing, n_segments,
        folded_desc, mask, mask_batch, mask_head, most, V, buffers, k, v,
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([(consumer, (p, 0)), (consumer, (p, 1)), (producer, (p,))], [4, 1], [240, 24])
