"""Backward, main kernel (eq. 33): one CTA owns BN keys of one key head and visits the row blocks that see them.

Eight warps do all matmuls with S and dP transposed; one warp loads, one adds dq tiles to global memory:

  s^T  = k q^T     [BN, BM]  both operands in shared memory
  dp^T = v do^T    [BN, BM]  both operands in shared memory
  dv  += p^T do    [BN, Dv]  p^T from registers
  dq   = ds k      [BM, D]   ds^T through shared memory, read transposed
  dk  += ds^T q    [BN, D]   ds^T from registers

dq leaves in the order of its register fragments (16-byte stores without bank conflicts) and is added to an fp32 accumulator by
TMA; `dq.py` puts the permuted tiles back. dk and dv stay in registers over all query heads of the group, so only the order of
the dq additions is free. SPLIT leaves dq to a kernel of its own: bitwise repeatable. With heads wider than 128 (WIDE) the two
warpgroups share 64 keys and split columns: p^T and ds^T both go through shared memory, and dq leaves from the registers.

Learned terms change the arithmetic between the matmuls only; what a call does not have is not compiled in. Row blocks that meet
the bias table have loops of their own, and leave their ds for dbias (`dbias.py`). Parity contract: tests/hopper.
"""

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backlight.backends.hopper.apart import apart_dk_dv
from backlight.backends.hopper.band import band_dbias
from backlight.backends.hopper.compat import Maybe, arguments, smem_reinterpret, tma_load, tma_reduce_add
from backlight.backends.hopper.config import backward_config
from backlight.backends.hopper.dbias import CELLS, GROUPS, Diagonals, add_diagonals, leave_diagonals
from backlight.backends.hopper.dq import above, add_fragments, convert_dq, dq_fragments, dq_tile_layout, split_dq
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.prepass import Rows, prepass
from backlight.backends.hopper.primitives import (
    INF,
    bar_arrive,
    bar_sync,
    barriers,
    between,
    clamp,
    end_block,
    from_on,
    load_tile,
    locate,
    mma_over_columns,
    phase_of,
    pieces,
    row_blocks,
    row_limits,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.terms import (
    TABLE_PAD,
    bias_tile,
    cap_factor,
    cap_slope,
    capped,
    row_band,
    table_of,
    threshold,
    unit_of,
    weights16,
)
from backlight.call import Call
from backlight.spec import LOG2E

# named barriers, `gradients` and one warp each: Q_EMPTY + stage, then DO_EMPTY + stage, then DQ_FULL, then DIAGONALS_FULL
Q_EMPTY = gl.constexpr(8)
BOTH = gl.constexpr(256 + 32)


@arguments
class Backward:
    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    delta_desc: tma.tensor_descriptor
    acc_desc: Maybe
    acc_ptr: Maybe
    share_desc: Maybe
    diagonals_desc: Maybe
    table_ptr: Maybe
    tau_ptr: Maybe
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    q_s: gl.shared_memory_descriptor
    do_s: gl.shared_memory_descriptor
    lse_s: gl.shared_memory_descriptor
    delta_s: gl.shared_memory_descriptor
    p_s: gl.shared_memory_descriptor
    ds_s: gl.shared_memory_descriptor
    dq_s: gl.shared_memory_descriptor
    share_s: Maybe
    diagonals_s: Maybe
    edge_s: Maybe
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    diagonals_empty: Maybe
    b: gl.tensor
    kv_head: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    j0: gl.tensor
    row_tiles: gl.tensor
    first_tile: gl.tensor
    begin: gl.tensor
    plain_begin: gl.tensor
    plain_end: gl.tensor
    end: gl.tensor
    band_begin: Maybe
    band_end: Maybe
    origin: Maybe
    n_bias: Maybe
    cap: Maybe
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    D: gl.constexpr
    DV: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    ST: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    VARLEN: gl.constexpr
    SPLIT: gl.constexpr
    WIDE: gl.constexpr
    DQ_TILES: gl.constexpr
    OVERLAP: gl.constexpr
    BAND_FIRST: gl.constexpr
    SLOTS: gl.constexpr
    DO_EMPTY: gl.constexpr
    DQ_FULL: gl.constexpr
    BIAS: gl.constexpr
    DBIAS: gl.constexpr
    SOFTCAP: gl.constexpr
    TAU: gl.constexpr


@gluon.jit
def tile_row(p, member, i):
    """First row of a row block in the padded fp32 tensors lse, delta and dq accumulator."""
    head = p.b * p.heads + p.kv_head * p.group + member
    return (head * p.row_tiles + p.first_tile + i) * p.BM


@gluon.jit
def loader(p):
    ST: gl.constexpr = p.ST
    mbarrier.expect(p.kv_full.index(0), p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes)
    load_tile(p.k_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.kv_full.index(0), p.k_s, p.VARLEN)
    load_tile(p.v_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.kv_full.index(0), p.v_s, p.VARLEN)
    count = p.begin * 0
    for member in range(p.group):
        h = p.kv_head * p.group + member
        for i in range(p.begin, p.end):
            stage = stage_of(count, ST)
            row = tile_row(p, member, i)
            if count >= ST:
                bar_sync(Q_EMPTY + stage, BOTH)
            mbarrier.expect(p.q_full.index(stage), p.q_desc.block_type.nbytes + p.BM * 4)
            load_tile(p.q_desc, p.b, h, p.q_start, p.sq, i * p.BM, p.q_full.index(stage), p.q_s.index(stage), p.VARLEN)
            tma_load(p.lse_desc, [row], p.q_full.index(stage), p.lse_s.index(stage))
            if count >= ST:
                bar_sync(p.DO_EMPTY + stage, BOTH)
            mbarrier.expect(p.do_full.index(stage), p.do_desc.block_type.nbytes + (p.BM * 8 if p.TAU else p.BM * 4))
            load_tile(p.do_desc, p.b, h, p.q_start, p.sq, i * p.BM, p.do_full.index(stage), p.do_s.index(stage), p.VARLEN)
            tma_load(p.delta_desc, [row], p.do_full.index(stage), p.delta_s.index(stage))
            if p.TAU:
                tma_load(p.share_desc, [row], p.do_full.index(stage), p.share_s.index(stage))
            count += 1
    # every arrival is met, those of the last round included
    for i in gl.static_range(ST):
        if count >= ST - i:
            bar_sync(Q_EMPTY + stage_of(count + i, ST), BOTH)
            bar_sync(p.DO_EMPTY + stage_of(count + i, ST), BOTH)


@gluon.jit
def in_band(p, i):
    """Whether `gradients` treats a row block as one that meets the bias table: masked blocks always do."""
    return (i < p.plain_begin) | (i >= p.plain_end) | ((i >= p.band_begin) & (i < p.band_end))


@gluon.jit
def reducer(p):
    """Adds what `gradients` leaves in shared memory to global memory: dq tiles, and diagonals of ds."""
    if p.DBIAS or p.DQ_TILES:
        dq_tile = p.dq_s
        if p.DQ_TILES:
            dq_tile = smem_reinterpret(p.dq_s, gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)
        for member in range(p.group):
            for i in range(p.begin, p.end):
                if p.DBIAS:  # noqa: SIM102 (known to the compiler)
                    if in_band(p, i):
                        bar_sync(p.DQ_FULL + 1, BOTH)
                        add_diagonals(p, p.kv_head * p.group + member, i)
                        tma.store_wait(0)
                        mbarrier.arrive(p.diagonals_empty.index(0), count=1)
                if p.DQ_TILES:
                    bar_sync(p.DQ_FULL, BOTH)
                    tma_reduce_add(p.acc_desc, [tile_row(p, member, i), 0], dq_tile)
                    tma.store_wait(0)
                    mbarrier.arrive(p.dq_empty.index(0), count=1)


@gluon.constexpr_function
def tile_layout(WIDE, N):
    """Accumulator of a [BN, N] product: 128 keys over both warpgroups, or 64 keys with columns split between them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2] if WIDE else [8, 1], [16, N // 2 if WIDE else N, 16])


@gluon.jit
def block_bias(p, tile, member, i):
    """The bias of a row block, like `tile`."""
    table_ptr = p.table_ptr + (p.kv_head * p.group + member).to(gl.int64) * (p.n_bias + 2 * TABLE_PAD)
    return bias_tile(table_ptr, i * p.BM + p.sk - p.sq - p.j0 + p.origin, p.n_bias, tile, True)


@gluon.jit
def weights(p, s, lse, i, MASKED: gl.constexpr):
    """p of a tile of scores. With tau it is -inf where a key is hidden, so that its weight is 0 whatever is added."""
    pt = gl.exp2(s * p.scale_log2 - gl.expand_dims(lse, 0))
    if MASKED:
        BM: gl.constexpr = s.shape[1]
        key = p.j0 + gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        first, end = row_limits(key, p.sq, p.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        columns = gl.arange(0, BM, gl.SliceLayout(0, s.type.layout))
        if p.HAS_LEFT:
            seen = between(first - i * BM, end - i * BM, columns)
        else:
            seen = from_on(first - i * BM, columns)
        pt = gl.where(seen, pt, -INF if p.TAU else 0.0)
    return pt


@gluon.jit
def row_block(p, dk, dv, member, limit, i, count, flushes, MASKED: gl.constexpr, BIASED: gl.constexpr):
    """One row block: its dq goes out, dk and dv grow."""
    BM: gl.constexpr = p.BM
    BN: gl.constexpr = p.BN
    BD: gl.constexpr = p.k_s.shape[1]
    ST: gl.constexpr = p.ST
    dtype: gl.constexpr = p.q_desc.dtype
    dq_l: gl.constexpr = dq_fragments(BM, BD)
    s_l: gl.constexpr = tile_layout(p.WIDE, BM)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[1]))
    zero = gl.zeros([BN, BM], gl.float32, s_l)
    stage = stage_of(count, ST)
    phase = phase_of(count, ST)
    q = p.q_s.index(stage)
    do = p.do_s.index(stage)

    bias = zero
    if BIASED and not p.SOFTCAP:
        # scores grow on top of the bias: no registers and no additions of its own
        bias = block_bias(p, zero, member, i)
    mbarrier.wait(p.q_full.index(stage), phase)
    s_token = mma_over_columns(p.k_s, q, bias, p.D, BIASED and not p.SOFTCAP)
    # row values are read late where registers are short
    if p.OVERLAP:
        lse = p.lse_s.index(stage).load(row_l)
    mbarrier.wait(p.do_full.index(stage), phase)
    dp_token = mma_over_columns(p.v_s, do, zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    if not p.OVERLAP:
        lse = p.lse_s.index(stage).load(row_l)
    if p.SOFTCAP:
        # its slope is needed later: the capped score stays in registers, p comes after dp
        pt = capped(s, p.cap)
    else:
        pt = weights(p, s, lse, i, MASKED)
    if p.OVERLAP:
        if not p.TAU:
            delta = p.delta_s.index(stage).load(row_l)
        end_block(count)
        dp, pt = warpgroup_mma_wait(0, deps=[dp_token, pt])
    else:
        dp = warpgroup_mma_wait(0, deps=[dp_token])
    if p.TAU or not p.OVERLAP:
        delta = p.delta_s.index(stage).load(row_l)
    if p.SOFTCAP:
        s = pt
        if BIASED:
            pt = s + block_bias(p, zero, member, i)
        pt = weights(p, pt, lse, i, MASKED)
    if p.TAU:
        # eq. 10, 11: the gradient of a key that did not survive stops at its weight, not at its p
        at = pt + gl.expand_dims(p.share_s.index(stage).load(row_l), 0)
        at16 = weights16(at, dtype)
        dp = dp * above(at, limit)
        if MASKED:
            pt = gl.maximum(pt, 0.0)
    else:
        at16 = pt.to(dtype)
    ds = pt * (dp - gl.expand_dims(delta, 0))
    if p.DBIAS and BIASED:
        leave_diagonals(p, ds, flushes, BOTH)
    if p.SOFTCAP:
        ds = ds * cap_slope(s)
    ds16 = ds.to(dtype)
    if p.WIDE:
        p.p_s.store(at16)
        p.ds_s.store(ds16)
        fence_async_shared()
        dq_token = gl.zeros([BM, BD], gl.float32, dq_l)
        if not p.SPLIT:
            dq_token = warpgroup_mma(p.ds_s.permute((1, 0)), p.k_s, dq_token, use_acc=False, is_async=True)
        dv_token = warpgroup_mma(p.p_s, do, dv, is_async=True)
        dk_token = warpgroup_mma(p.ds_s, q, dk, is_async=True)
        if not p.SPLIT:
            # no room for a tile in shared memory; the additions run under the matmuls of dv and dk
            add_fragments(p.acc_ptr, tile_row(p, member, i), warpgroup_mma_wait(2, deps=[dq_token]))
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH)
    elif p.SPLIT:
        dv_token = warpgroup_mma(gl.convert_layout(at16, a_l, assert_trivial=True), do, dv, is_async=True)
        dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH)
    else:
        at16 = gl.convert_layout(at16, a_l, assert_trivial=True)
        p.ds_s.store(ds16)
        dv_token = warpgroup_mma(at16, do, dv, is_async=True)
        fence_async_shared()
        dq_token = warpgroup_mma(
            p.ds_s.permute((1, 0)), p.k_s, gl.zeros([BM, BD], gl.float32, dq_l), use_acc=False, is_async=True
        )
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH)
        dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq_token])
        mbarrier.wait(p.dq_empty.index(0), (count & 1) ^ 1)
        p.dq_s.store(dq)
        fence_async_shared()
        bar_arrive(p.DQ_FULL, BOTH)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH)
    return dk, dv


@gluon.jit
def row_loop(p, dk, dv, member, limit, count, flushes, first, last, MASKED: gl.constexpr, BIASED: gl.constexpr):
    """Row blocks [first, last)."""
    for i in range(first, last):
        dk, dv = row_block(p, dk, dv, member, limit, i, count, flushes, MASKED, BIASED)
        count += 1
        if p.DBIAS and BIASED:
            flushes += 1
    return dk, dv, count, flushes


@gluon.jit
def gradients(p):
    BN: gl.constexpr = p.BN
    BD: gl.constexpr = p.k_s.shape[1]
    BDV: gl.constexpr = p.v_s.shape[1]
    dtype: gl.constexpr = p.q_desc.dtype
    dk = gl.zeros([BN, BD], gl.float32, tile_layout(p.WIDE, BD))
    dv = gl.zeros([BN, BDV], gl.float32, tile_layout(p.WIDE, BDV))
    mbarrier.wait(p.kv_full.index(0), 0)
    count = p.begin * 0
    flushes = p.begin * 0
    for member in range(p.group):
        limit = 0.0
        if p.TAU:
            limit = threshold(gl.load(p.tau_ptr + p.kv_head * p.group + member).to(gl.float32))
        if p.WIDE:
            # few scores a thread: masking all of them costs less than a second loop
            dk, dv, count, flushes = row_loop(p, dk, dv, member, limit, count, flushes, p.begin, p.end, True, p.BIAS)
        else:
            dk, dv, count, flushes = row_loop(p, dk, dv, member, limit, count, flushes, p.begin, p.plain_begin, True, p.BIAS)
            plain_begin = p.plain_begin
            if p.BIAS:
                # rows before the table, rows that meet it
                if not p.BAND_FIRST:
                    dk, dv, count, flushes = row_loop(
                        p, dk, dv, member, limit, count, flushes, plain_begin, p.band_begin, False, False
                    )
                dk, dv, count, flushes = row_loop(
                    p, dk, dv, member, limit, count, flushes, p.band_begin, p.band_end, False, True
                )
                plain_begin = p.band_end
            dk, dv, count, flushes = row_loop(p, dk, dv, member, limit, count, flushes, plain_begin, p.plain_end, False, False)
            if p.HAS_LEFT:
                dk, dv, count, flushes = row_loop(p, dk, dv, member, limit, count, flushes, p.plain_end, p.end, True, p.BIAS)
    # k and v have been read for the last time: their shared memory takes dk and dv
    p.v_s.store(dv.to(dtype))
    p.k_s.store((dk * p.scale).to(dtype))
    fence_async_shared()
    store_tile(p.dv_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.v_s, p.VARLEN)
    store_tile(p.dk_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.k_s, p.VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_segments", "row_tiles", "heads", "group", "sq", "sk", "left", "right", "n_bias", "origin"])
def _bwd_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    acc_desc,
    acc_ptr,
    share_desc,
    diagonals_desc,
    table_ptr,
    tau_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_key_tiles_ptr,
    cu_row_tiles_ptr,
    n_segments,
    row_tiles,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    scale,
    scale_log2,
    cap,
    n_bias,
    origin,
    D: gl.constexpr,
    DV: gl.constexpr,
    BD: gl.constexpr,
    BDV: gl.constexpr,
    BM: gl.constexpr,
    BN: gl.constexpr,
    ST: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    VARLEN: gl.constexpr,
    SPLIT: gl.constexpr,
    WIDE: gl.constexpr,
    OVERLAP: gl.constexpr,
    BAND_FIRST: gl.constexpr,
    SLOTS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile = gl.program_id(0)
    kv_heads = heads // group
    b = gl.program_id(1) // kv_heads
    kv_head = gl.program_id(1) % kv_heads
    q_start = tile * 0
    k_start = tile * 0
    first_tile = tile * 0
    if VARLEN:
        z, before = locate(tile, cu_key_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        tile -= before
        q_start = gl.load(cu_q_ptr + z)
        k_start = gl.load(cu_k_ptr + z)
        sq = gl.load(cu_q_ptr + z + 1) - q_start
        sk = gl.load(cu_k_ptr + z + 1) - k_start
        first_tile = gl.load(cu_row_tiles_ptr + z)
    j0 = tile * BN
    last = gl.minimum(j0 + BN, sk) - 1
    begin, plain_begin, plain_end, end = row_blocks(j0, last, sq, sk, left, right, BM, HAS_LEFT, HAS_RIGHT)
    if j0 + BN > sk:
        plain_begin = end
        plain_end = end
    TAU: gl.constexpr = tau_ptr is not None
    BIAS: gl.constexpr = table_ptr is not None
    DBIAS: gl.constexpr = diagonals_desc is not None
    band_begin = None
    band_end = None
    if BIAS:
        band_begin, band_end = row_band(j0, last, sk - sq, origin, n_bias, BM)
        band_begin = clamp(band_begin, plain_begin, plain_end)
        band_end = clamp(band_end, band_begin, plain_end)

    k_s = gl.allocate_shared_memory(dtype, [BN, BD], gl.NVMMASharedLayout.get_default_for([BN, BD], dtype))
    v_s = gl.allocate_shared_memory(dtype, [BN, BDV], gl.NVMMASharedLayout.get_default_for([BN, BDV], dtype))
    q_s = gl.allocate_shared_memory(dtype, [ST, BM, BD], gl.NVMMASharedLayout.get_default_for([BM, BD], dtype))
    do_s = gl.allocate_shared_memory(dtype, [ST, BM, BDV], gl.NVMMASharedLayout.get_default_for([BM, BDV], dtype))
    lse_s = gl.allocate_shared_memory(gl.float32, [ST, BM], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [ST, BM], delta_desc.layout)
    t_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BM], dtype)
    # what a variant does not use is an alias, not an allocation
    ds_s = lse_s
    p_s = lse_s
    dq_s = lse_s
    if WIDE:
        p_s = gl.allocate_shared_memory(dtype, [BN, BM], t_layout)
    if WIDE or not SPLIT:
        ds_s = gl.allocate_shared_memory(dtype, [BN, BM], t_layout)
    share_s = None
    if TAU:
        share_s = gl.allocate_shared_memory(gl.float32, [ST, BM], share_desc.layout)
    diagonals_s = None
    edge_s = None
    diagonals_empty = None
    if DBIAS:
        rows_l: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        diagonals_s = gl.allocate_shared_memory(gl.float32, [BM // 8, GROUPS, CELLS], rows_l)
        edge_s = gl.allocate_shared_memory(gl.float32, [GROUPS, CELLS], rows_l)
        diagonals_empty = barriers(1, 1)
    DQ_TILES: gl.constexpr = not (SPLIT or WIDE)
    if DQ_TILES:
        dq_s = gl.allocate_shared_memory(gl.float32, [BM, BD], dq_tile_layout(BM, BD))
    args = Backward(
        q_desc=q_desc,
        do_desc=do_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        dk_desc=dk_desc,
        dv_desc=dv_desc,
        lse_desc=lse_desc,
        delta_desc=delta_desc,
        acc_desc=acc_desc,
        acc_ptr=acc_ptr,
        share_desc=share_desc,
        diagonals_desc=diagonals_desc,
        table_ptr=table_ptr,
        tau_ptr=tau_ptr,
        k_s=k_s,
        v_s=v_s,
        q_s=q_s,
        do_s=do_s,
        lse_s=lse_s,
        delta_s=delta_s,
        p_s=p_s,
        ds_s=ds_s,
        dq_s=dq_s,
        share_s=share_s,
        diagonals_s=diagonals_s,
        edge_s=edge_s,
        kv_full=barriers(1, 1),
        q_full=barriers(ST, 1),
        do_full=barriers(ST, 1),
        dq_empty=barriers(1, 1),
        diagonals_empty=diagonals_empty,
        b=b,
        kv_head=kv_head,
        heads=heads,
        group=group,
        q_start=q_start,
        k_start=k_start,
        sq=sq,
        sk=sk,
        j0=j0,
        row_tiles=row_tiles,
        first_tile=first_tile,
        begin=begin,
        plain_begin=plain_begin,
        plain_end=plain_end,
        end=end,
        band_begin=band_begin,
        band_end=band_end,
        origin=origin,
        n_bias=n_bias,
        cap=cap,
        left=left,
        right=right,
        scale=scale,
        scale_log2=scale_log2,
        D=D,
        DV=DV,
        BM=BM,
        BN=BN,
        ST=ST,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        VARLEN=VARLEN,
        SPLIT=SPLIT,
        WIDE=WIDE,
        DQ_TILES=DQ_TILES,
        OVERLAP=OVERLAP,
        BAND_FIRST=BAND_FIRST,
        SLOTS=SLOTS,
        DO_EMPTY=Q_EMPTY + ST,
        DQ_FULL=Q_EMPTY + 2 * ST,
        BIAS=BIAS,
        DBIAS=DBIAS,
        SOFTCAP=cap is not None,
        TAU=TAU,
    )
    fence_async_shared()
    gl.warp_specialize([(gradients, (args,)), (loader, (args,)), (reducer, (args,))], [1, 1], [24, 24])


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients of a call that `why_not` accepts."""
    launch = Launch(call, y, lse, u, dy, dlse, choices=needs)
    dq, dk, dv = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)
    out = {"dq": dq, "dk": dk, "dv": dv}
    if launch.sq == 0 or launch.sk == 0 or launch.batch == 0:
        return {name: _without_pairs(call, name, lse, dlse) for name in needs}
    config = launch.once("backward", lambda: backward_config(call))
    split = config.split or call.deterministic or "dq" not in needs
    rows = prepass(launch, config, y, lse, u, dy, dlse, not split, out, needs)
    # diagonals are added in the order in which CTAs come, and need the fragments of 128 keys
    fused = "dbias" in needs and not (call.deterministic or config.wide)
    diagonals = Diagonals.of(launch) if fused else None
    if config.apart and not split:
        apart_dk_dv(launch, rows, dk, dv)
    elif needs & {"dk", "dv"} or fused or not split:
        _dk_dv(launch, rows, dk, dv, diagonals, split)
    if "dq" in needs:
        split_dq(launch, rows, dq) if split else convert_dq(launch, rows, dq)
    if "dbias" in needs:
        out["dbias"] = band_dbias(launch, rows) if diagonals is None else diagonals.dbias()
    return {name: out[name] for name in needs}


def _without_pairs(call: Call, name: str, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """A gradient where no row meets a key: 0, except that a sink alone is the whole lse (math.md section 2)."""
    given = getattr(call, name[1:])
    if name == "dsink" and dlse is not None:
        return dlse.float().sum(dim=(0, 2)).to(given.dtype)
    return torch.zeros_like(given)


def _dk_dv(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor, diagonals: Diagonals | None, split: bool) -> None:
    call, config, spec = launch.call, rows.config, launch.call.spec
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, config.block_n)
    do, lse2, delta, acc, first_tiles = rows.do, rows.lse2, rows.delta, rows.accumulator, rows.first_tiles
    share, table = rows.share, table_of(call)
    tau = None if call.tau is None else call.tau.contiguous()

    def describe() -> dict[str, Any]:
        args = [
            launch.rows(call.q, config.block_m, launch.bd),
            launch.rows(do, config.block_m, launch.bdv),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(dk, config.block_n, launch.bd),
            launch.rows(dv, config.block_n, launch.bdv),
            rows.vector(lse2),
            rows.vector(delta),
            None if config.wide else rows.tiles_of_dq(launch.bd, config.block_m),
            acc if config.wide and not split else None,
            None if share is None else rows.vector(share),
            None if diagonals is None else diagonals.boxes,
            table,
            tau,
            cu_q,
            cu_k,
            cu_tiles,
            first_tiles,
            n_segments,
            rows.tiles,
            *launch.geometry,
            call.scale,
            unit_of(call) * LOG2E,
            None if spec.softcap is None else cap_factor(call),
            None if call.bias is None else call.bias.shape[1],
            None if call.bias is None else spec.bias_origin,
        ]
        constants = {
            "D": launch.d,
            "DV": launch.dv,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BM": config.block_m,
            "BN": config.block_n,
            "ST": config.stages,
            "SPLIT": split,
            "WIDE": config.wide,
            "OVERLAP": config.overlap,
            "BAND_FIRST": call.bias is not None and spec.right is not None and spec.bias_origin >= spec.right,
            "SLOTS": 1 if diagonals is None else diagonals.acc.shape[0],
            **launch.flags,
        }
        grid = (launch.key_tiles(config.block_n), launch.batch * launch.kv_heads)
        return {"grid": grid, "args": args, "constants": constants, "num_warps": 8, "maxnreg": 168}

    acc = None if config.wide and split else acc
    terms = (share, None if diagonals is None else diagonals.acc, table, tau)
    tensors = (call.q, do, call.k, call.v, dk, dv, lse2, delta, acc, *terms, cu_q, cu_k, cu_tiles, first_tiles)
    launch.start(_bwd_kernel, tensors, describe)
