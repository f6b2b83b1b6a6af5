"""Backward, main kernel (eq. 33): a CTA owns BN keys of one key head and visits the row blocks that see them.

Eight warps do all matmuls with S and dP transposed (gradients.py, row_block.py); one warp loads (loader.py), one adds dq tiles
to global memory (reducer.py). The five products, by the numbers that the loops of all kernels use:

  1  s^T  = k q^T     [BN, BM]  both operands in shared memory
  2  dp^T = v do^T    [BN, BM]  both operands in shared memory
  3  dv  += p^T do    [BN, Dv]  p^T from registers
  4  dq  += ds k      [BM, D]   ds^T through shared memory, read transposed
  5  dk  += ds^T q    [BN, D]   ds^T from registers

dq leaves in the order of its register fragments (16-byte stores without bank conflicts) and is added to an fp32 accumulator by
TMA; `dq_convert.py` puts the permuted tiles back. dk and dv stay in registers over all query heads of the group: only the order
of the dq additions is free. A CTA may work on several key tiles (`key_tiles.py`). SPLIT leaves dq to a kernel of its own
(`dq_rows.py`): bitwise repeatable. With heads wider than 128 (WIDE) the two warpgroups share 64 keys and split columns: p^T and
ds^T both go through shared memory, and dq leaves from the registers.

Learned terms change the arithmetic between the matmuls only; what a call does not have is not compiled in. Row blocks that meet
the bias table have loops of their own, and leave their ds for dbias (`dbias.py`). Parity contract: tests/hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from backlight.backends.hopper.backward.arguments import NUMBERS, Backward
from backlight.backends.hopper.backward.dbias import CELLS, GROUPS
from backlight.backends.hopper.backward.dq_convert import dq_tile_layout
from backlight.backends.hopper.backward.gradients import gradients
from backlight.backends.hopper.backward.key_tiles import published_memory
from backlight.backends.hopper.backward.loader import loader
from backlight.backends.hopper.backward.reducer import reducer
from backlight.backends.hopper.barriers import Q_EMPTY, do_empty
from backlight.backends.hopper.compat import Maybe, arguments, smem_reinterpret
from backlight.backends.hopper.primitives import barriers, tiles_of


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers. What a variant does not use is an alias, or None.

    dk and dv leave through memory that is free by then: of K and V, or (EARLY) of a dq tile and some of its own.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    p: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    dk: gl.shared_memory_descriptor
    dv: gl.shared_memory_descriptor
    share: Maybe
    diagonals: Maybe
    edge: Maybe
    tile: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    diagonals_empty: Maybe


@gluon.jit
def diagonals_memory(V: gl.constexpr):
    """(sums of ds along diagonals, those of the first row group, their barrier)."""
    rows_l: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    diagonals = gl.allocate_shared_memory(gl.float32, [V.BM // 8, GROUPS, CELLS], rows_l)
    edge = gl.allocate_shared_memory(gl.float32, [GROUPS, CELLS], rows_l)
    return diagonals, edge, barriers(1, 1)


@gluon.jit
def memory_of(q_desc, lse_desc, V: gl.constexpr):
    dtype: gl.constexpr = q_desc.dtype
    vector_l: gl.constexpr = lse_desc.layout
    k_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([V.BN, V.BD], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([V.BN, V.BDV], dtype)
    t_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([V.BN, V.BM], dtype)
    k = gl.allocate_shared_memory(dtype, [V.BN, V.BD], k_l)
    v = gl.allocate_shared_memory(dtype, [V.BN, V.BDV], v_l)
    q = tiles_of(dtype, V.ST, V.BM, V.BD)
    do = tiles_of(dtype, V.ST, V.BM, V.BDV)
    lse = gl.allocate_shared_memory(gl.float32, [V.ST, V.BM], vector_l)
    delta = gl.allocate_shared_memory(gl.float32, [V.ST, V.BM], vector_l)
    p = lse
    ds = lse
    dq = lse
    if V.WIDE:
        p = gl.allocate_shared_memory(dtype, [V.BN, V.BM], t_l)
    if V.WIDE or not V.SPLIT:
        ds = gl.allocate_shared_memory(dtype, [V.BN, V.BM], t_l)
    share = None
    if V.TAU:
        share = gl.allocate_shared_memory(gl.float32, [V.ST, V.BM], vector_l)
    diagonals = None
    edge = None
    diagonals_empty = None
    if V.DBIAS:
        diagonals, edge, diagonals_empty = diagonals_memory(V)
    if V.DQ_TILES:
        dq = gl.allocate_shared_memory(gl.float32, [V.BM, V.BD], dq_tile_layout(V.BM, V.BD))
    dk = k
    dv = v
    if V.EARLY:
        # Triton 3.8 wants as many bytes as there are
        SLOTS: gl.constexpr = 2 * V.BM // V.BN
        dk = smem_reinterpret(dq, dtype, [SLOTS, V.BN, V.BD], k_l).index(0)
        dv = gl.allocate_shared_memory(dtype, [V.BN, V.BDV], v_l)
    tile, tile_full, tile_empty = published_memory(1)
    kv_full = barriers(1, 1)
    q_full = barriers(V.ST, 1)
    do_full = barriers(V.ST, 1)
    dq_empty = barriers(1, 1)
    return Buffers(
        k, v, q, do, lse, delta, p, ds, dq, dk, dv, share, diagonals, edge,
        tile, tile_full, tile_empty, kv_full, q_full, do_full, dq_empty, diagonals_empty,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NUMBERS, "n_bias", "origin"])
def _bwd_kernel(
    q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc,
    acc_desc, acc_ptr, share_desc, diagonals_desc, terms, packing, counter_ptr,
    dynamic, counter, n_segments, n_tiles, key_tiles, row_tiles, together, heads, group, sq, sk, left, right,
    units, n_bias, origin, mask, mask_batch, mask_head, most, few, together_if_few, order_ptr, V: gl.constexpr,
):  # fmt: skip
    buffers = memory_of(q_desc, lse_desc, V)
    p = Backward(
        heads, group, sq, sk, left, right, q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc, lse_desc, delta_desc,
        acc_desc, acc_ptr, share_desc, diagonals_desc, terms, packing, counter_ptr,
        dynamic, counter, n_segments, n_tiles, key_tiles, row_tiles, together,
        units, n_bias, origin, mask, mask_batch, mask_head, most, few, together_if_few, order_ptr,
        V, buffers, Q_EMPTY, do_empty(V.ST),
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize([(gradients, (p,)), (loader, (p,)), (reducer, (p,))], [1, 1], [24, 24])
