"""Forward (eq. 31, eq. 32): the kernel.

One producer warp (producer.py) feeds NC consumer warpgroups of 64 rows each (consumer.py, with tau elastic.py, with entmax
sparse.py) through ST-stage rings of K and V. Key blocks run from right to left, so that a causal mask touches the first one
only. CTAs are persistent: the producer draws tiles (longest first under a mask) and publishes them with Q, so the next tile's
loads and the last tile's store run under the softmax.

Learned terms (terms.py) are compiled in: the cap and the bias change scores, a row's sum starts with the sink, the gate waits
in the buffer that O leaves through.

Shared memory: Q and O [NC, 64, D], K and V [ST, BN, D]. Parity: tests/hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backlight.backends.hopper.barriers import FORWARD_EMPTY
from backlight.backends.hopper.compat import smem_reinterpret
from backlight.backends.hopper.forward.arguments import Buffers, Forward
from backlight.backends.hopper.forward.consumer import plain_consumer
from backlight.backends.hopper.forward.elastic import elastic_consumer
from backlight.backends.hopper.forward.looking import looking_consumer
from backlight.backends.hopper.forward.producer import producer
from backlight.backends.hopper.forward.ring import Ring
from backlight.backends.hopper.forward.sparse import sparse_consumer
from backlight.backends.hopper.forward.sparse_producer import sparse_producer
from backlight.backends.hopper.forward.tiles import memory_of_intervals, slot_size
from backlight.backends.hopper.primitives import WM, barriers, tiles_of


@gluon.jit
def consumer(p, W: gl.constexpr):
    if p.V.TAU:
        elastic_consumer(p, W)
    elif p.V.KNOWN:
        looking_consumer(p, W)
    elif p.V.ENTMAX != 0:
        sparse_consumer(p, W)
    else:
        plain_consumer(p, W)


@gluon.jit
def loader(p):
    if p.V.ENTMAX != 0:
        sparse_producer(p)
    else:
        producer(p)


@gluon.jit
def memory_of(dtype: gl.constexpr, V: gl.constexpr):
    """(`Buffers`, tiles of K, tiles of V)."""
    NC: gl.constexpr = V.NC
    SLOTS: gl.constexpr = 4 if NC == 3 else NC
    number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q = tiles_of(dtype, V.QB * SLOTS, WM, V.BD)
    k = tiles_of(dtype, V.ST, V.BN, V.BD)
    v = tiles_of(dtype, V.ST, V.BN, V.BDV)
    if V.SHARE_QO:
        o = smem_reinterpret(q, dtype, [SLOTS, WM, V.BDV], gl.NVMMASharedLayout.get_default_for([WM, V.BDV], dtype))
    else:
        o = tiles_of(dtype, SLOTS, WM, V.BDV)
    u = None
    if V.SAVE_U:
        u = tiles_of(dtype, SLOTS, WM, V.BDV)
    low = None
    if V.LOW_SHARED:
        low = tiles_of(dtype, SLOTS, WM, V.BDV)
    gate_full = None
    if V.GATE:
        gate_full = barriers(NC, 1)
    tile = gl.allocate_shared_memory(gl.int32, [4 * slot_size(V.INTERVALS), 1], number)
    intervals = None
    entry = None
    if V.INTERVALS > 0:
        intervals, entry = memory_of_intervals(V)
    overflow = None
    if V.KEEP_FIRST_MAX:
        overflow = gl.allocate_shared_memory(gl.int32, [4, 1], number)
        for w in gl.static_range(NC):
            overflow.index(w).store(gl.full([1], -1, gl.int32, gl.BlockedLayout([1], [32], [4], [0])))
    q_full = barriers(NC if V.QB == 1 else V.QB * SLOTS, 1)
    q_empty = barriers(NC if V.QB == 1 else V.QB * SLOTS, 1)
    return Buffers(q, o, u, low, tile, overflow, intervals, entry, q_full, q_empty, gate_full), k, v


LOW = ["low_stride_b", "low_stride_h", "low_stride_s"]
NUMBERS = ["dynamic", "n_segments", "n_tiles", "row_tiles", "together", "heads", "group", "sq", "sk", "left", "right"]


@gluon.jit(do_not_specialize=[*NUMBERS, "n_bias", "bias_origin", "mask_batch", "mask_head", "key_tiles", "most", *LOW])
def _fwd_kernel(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, packing, counter_ptr,
    dynamic, n_segments, n_tiles, row_tiles, together, heads, group, sq, sk, left, right,
    scale, gate_desc, u_desc, terms, n_bias, bias_origin,
    folded_desc, mask, mask_batch, mask_head, key_tiles, most, entmax,
    extras, low_desc, low_stride_b, low_stride_h, low_stride_s, V: gl.constexpr,
):  # fmt: skip
    buffers, k_tiles, v_tiles = memory_of(q_desc.dtype, V)
    k = Ring(k_tiles, barriers(V.ST, 1), FORWARD_EMPTY, V.NC * 128 + 32)
    v = Ring(v_tiles, barriers(V.ST, 1), FORWARD_EMPTY + V.ST, V.NC * 128 + 32)
    p = Forward(
        heads, group, sq, sk, left, right, q_desc, k_desc, v_desc, o_desc, lse_ptr, packing, counter_ptr,
        dynamic, n_segments, n_tiles, row_tiles, together,
        scale, gate_desc, u_desc, terms, n_bias, bias_origin,
        folded_desc, mask, mask_batch, mask_head, key_tiles, most, entmax,
        extras, low_desc, low_stride_b, low_stride_h, low_stride_s, V, buffers, k, v,
    )  # fmt: skip
    fence_async_shared()
    if V.NC == 2 and V.ENTMAX != 0:
        gl.warp_specialize([(consumer, (p, 0)), (consumer, (p, 1)), (loader, (p,))], [4, 1], [232, 40])
    elif V.NC == 2:
        gl.warp_specialize([(consumer, (p, 0)), (consumer, (p, 1)), (loader, (p,))], [4, 1], [240, 24])
    else:
        gl.warp_specialize(
            [(consumer, (p, 0)), (consumer, (p, 1)), (consumer, (p, 2)), (loader, (p,))],
            [4, 4, 1],
            [160, 160, 32 if V.ENTMAX != 0 else 24],
        )
