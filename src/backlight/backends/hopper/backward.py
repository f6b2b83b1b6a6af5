"""Backward, main kernel (eq. 33): one CTA owns BN keys of one key head and visits the row blocks that see them.

Eight warps do all matmuls with S and dP transposed; one warp loads, one adds dq tiles to global memory:

  s^T  = k q^T     [BN, BM]  both operands in shared memory
  dp^T = v do^T    [BN, BM]  both operands in shared memory
  dv  += p^T do    [BN, Dv]  p^T from registers
  dq   = ds k      [BM, D]   ds^T through shared memory, read transposed
  dk  += ds^T q    [BN, D]   ds^T from registers

dq leaves in the order of its register fragments (16-byte stores without bank conflicts) and is added to an fp32 accumulator by
TMA; `dq.py` puts the permuted tiles back. dk and dv stay in registers over all query heads of the group, so only the order of
the dq additions is free. SPLIT leaves dq to a kernel of its own: bitwise repeatable, or D too wide for five products. With
heads wider than 128 (WIDE) the two warpgroups share 64 keys and split columns: p^T and ds^T both go through shared memory.
Parity contract: tests/hopper.
"""

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

from backlight.backends.hopper.compat import arguments, smem_reinterpret, tma_load, tma_reduce_add
from backlight.backends.hopper.config import backward_config
from backlight.backends.hopper.dq import convert_dq, dq_fragments, dq_tile_layout, split_dq
from backlight.backends.hopper.launch import Launch, start
from backlight.backends.hopper.prepass import Rows, prepass
from backlight.backends.hopper.primitives import (
    bar_arrive,
    bar_sync,
    barriers,
    between,
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
from backlight.call import Call
from backlight.spec import LOG2E

# named barriers, `gradients` and one warp each: Q_EMPTY + stage, then DO_EMPTY + stage, then DQ_FULL
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
    acc_desc: tma.tensor_descriptor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    q_s: gl.shared_memory_descriptor
    do_s: gl.shared_memory_descriptor
    lse_s: gl.shared_memory_descriptor
    delta_s: gl.shared_memory_descriptor
    p_s: gl.shared_memory_descriptor
    ds_s: gl.shared_memory_descriptor
    dq_s: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
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
    EARLY_WAIT: gl.constexpr
    REVERSED: gl.constexpr
    DO_EMPTY: gl.constexpr
    DQ_FULL: gl.constexpr


@gluon.jit
def tile_row(p, member, i):
    """First row of a row block in the padded fp32 tensors lse, delta and dq accumulator."""
    head = p.b * p.heads + p.kv_head * p.group + member
    return (head * p.row_tiles + p.first_tile + i) * p.BM


@gluon.jit
def visit(p, step):
    """The row block of a step: from the first, or from the last."""
    i = p.begin + step
    if p.REVERSED:
        i = p.end - 1 - step
    return i


@gluon.jit
def loader(p):
    ST: gl.constexpr = p.ST
    mbarrier.expect(p.kv_full.index(0), p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes)
    load_tile(p.k_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.kv_full.index(0), p.k_s, p.VARLEN)
    load_tile(p.v_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.kv_full.index(0), p.v_s, p.VARLEN)
    count = p.begin * 0
    for member in range(p.group):
        h = p.kv_head * p.group + member
        for step in range(p.end - p.begin):
            i = visit(p, step)
            stage = stage_of(count, ST)
            row = tile_row(p, member, i)
            if count >= ST:
                bar_sync(Q_EMPTY + stage, BOTH)
            mbarrier.expect(p.q_full.index(stage), p.q_desc.block_type.nbytes + p.BM * 4)
            load_tile(p.q_desc, p.b, h, p.q_start, p.sq, i * p.BM, p.q_full.index(stage), p.q_s.index(stage), p.VARLEN)
            tma_load(p.lse_desc, [row], p.q_full.index(stage), p.lse_s.index(stage))
            if count >= ST:
                bar_sync(p.DO_EMPTY + stage, BOTH)
            mbarrier.expect(p.do_full.index(stage), p.do_desc.block_type.nbytes + p.BM * 4)
            load_tile(p.do_desc, p.b, h, p.q_start, p.sq, i * p.BM, p.do_full.index(stage), p.do_s.index(stage), p.VARLEN)
            tma_load(p.delta_desc, [row], p.do_full.index(stage), p.delta_s.index(stage))
            count += 1
    # every arrival is met, those of the last round included
    for i in gl.static_range(ST):
        if count >= ST - i:
            bar_sync(Q_EMPTY + stage_of(count + i, ST), BOTH)
            bar_sync(p.DO_EMPTY + stage_of(count + i, ST), BOTH)


@gluon.jit
def dq_reducer(p):
    if not p.SPLIT:
        dq_tile = smem_reinterpret(p.dq_s, gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)
        count = p.begin * 0
        for member in range(p.group):
            for step in range(p.end - p.begin):
                bar_sync(p.DQ_FULL, BOTH)
                tma_reduce_add(p.acc_desc, [tile_row(p, member, visit(p, step)), 0], dq_tile)
                tma.store_wait(0)
                mbarrier.arrive(p.dq_empty.index(0), count=1)
                count += 1


@gluon.constexpr_function
def tile_layout(WIDE, N):
    """Accumulator of a [BN, N] product: 128 keys over both warpgroups, or 64 keys with columns split between them."""
    return gl.NVMMADistributedLayout([3, 0], [4, 2] if WIDE else [8, 1], [16, N // 2 if WIDE else N, 16])


@gluon.jit
def row_block(p, dk, dv, i, count, MASKED: gl.constexpr):
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
    key_l: gl.constexpr = gl.SliceLayout(1, s_l)
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[1]))
    zero = gl.zeros([BN, BM], gl.float32, s_l)
    stage = stage_of(count, ST)
    phase = phase_of(count, ST)
    q = p.q_s.index(stage)
    do = p.do_s.index(stage)

    mbarrier.wait(p.q_full.index(stage), phase)
    s_token = mma_over_columns(p.k_s, q, zero, p.D)
    lse = p.lse_s.index(stage).load(row_l)
    mbarrier.wait(p.do_full.index(stage), phase)
    dp_token = mma_over_columns(p.v_s, do, zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    pt = gl.exp2(s * p.scale_log2 - gl.expand_dims(lse, 0))
    if MASKED:
        key = p.j0 + gl.arange(0, BN, key_l)
        first, end = row_limits(key, p.sq, p.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        columns = gl.arange(0, BM, row_l)
        if p.HAS_LEFT:
            seen = between(first - i * BM, end - i * BM, columns)
        else:
            seen = from_on(first - i * BM, columns)
        pt = gl.where(seen, pt, 0.0)
    delta = p.delta_s.index(stage).load(row_l)
    if p.EARLY_WAIT and not p.SPLIT:
        # needed only before dq is stored, but a wait ends the basic block: without it ptxas hoists the next one above the exp2
        mbarrier.wait(p.dq_empty.index(0), (count & 1) ^ 1)
        dp, pt = warpgroup_mma_wait(0, deps=[dp_token, pt])
    else:
        dp = warpgroup_mma_wait(0, deps=[dp_token])
    ds = pt * (dp - gl.expand_dims(delta, 0))
    pt16 = pt.to(dtype)
    ds16 = ds.to(dtype)
    if p.WIDE:
        p.p_s.store(pt16)
        p.ds_s.store(ds16)
        fence_async_shared()
        dv_token = warpgroup_mma(p.p_s, do, dv, is_async=True)
        dk_token = warpgroup_mma(p.ds_s, q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH)
    elif p.SPLIT:
        dv_token = warpgroup_mma(gl.convert_layout(pt16, a_l, assert_trivial=True), do, dv, is_async=True)
        dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH)
    else:
        pt16 = gl.convert_layout(pt16, a_l, assert_trivial=True)
        p.ds_s.store(ds16)
        dv_token = warpgroup_mma(pt16, do, dv, is_async=True)
        fence_async_shared()
        dq_token = warpgroup_mma(
            p.ds_s.permute((1, 0)), p.k_s, gl.zeros([BM, BD], gl.float32, dq_l), use_acc=False, is_async=True
        )
        dv = warpgroup_mma_wait(1, deps=[dv_token])
        bar_arrive(p.DO_EMPTY + stage, BOTH)
        dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=[dq_token])
        if not p.EARLY_WAIT:
            mbarrier.wait(p.dq_empty.index(0), (count & 1) ^ 1)
        p.dq_s.store(dq)
        fence_async_shared()
        bar_arrive(p.DQ_FULL, BOTH)
        dk = warpgroup_mma_wait(0, deps=[dk_token])
        bar_arrive(Q_EMPTY + stage, BOTH)
    return dk, dv


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
    for _ in range(p.group):
        if p.WIDE:
            # few scores a thread: masking all of them costs less than a second loop
            for step in range(p.end - p.begin):
                dk, dv = row_block(p, dk, dv, visit(p, step), count, True)
                count += 1
        elif p.REVERSED:
            if p.HAS_LEFT:
                for i in range(p.end - p.plain_end):
                    dk, dv = row_block(p, dk, dv, p.end - 1 - i, count, True)
                    count += 1
            for i in range(p.plain_end - p.plain_begin):
                dk, dv = row_block(p, dk, dv, p.plain_end - 1 - i, count, False)
                count += 1
            for i in range(p.plain_begin - p.begin):
                dk, dv = row_block(p, dk, dv, p.plain_begin - 1 - i, count, True)
                count += 1
        else:
            for i in range(p.begin, p.plain_begin):
                dk, dv = row_block(p, dk, dv, i, count, True)
                count += 1
            for i in range(p.plain_begin, p.plain_end):
                dk, dv = row_block(p, dk, dv, i, count, False)
                count += 1
            if p.HAS_LEFT:
                for i in range(p.plain_end, p.end):
                    dk, dv = row_block(p, dk, dv, i, count, True)
                    count += 1
    # k and v have been read for the last time: their shared memory takes dk and dv
    p.v_s.store(dv.to(dtype))
    p.k_s.store((dk * p.scale).to(dtype))
    fence_async_shared()
    store_tile(p.dv_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.v_s, p.VARLEN)
    store_tile(p.dk_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0, p.k_s, p.VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_segments", "row_tiles", "heads", "group", "sq", "sk", "left", "right"])
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
    EARLY_WAIT: gl.constexpr,
    REVERSED: gl.constexpr,
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
    if not SPLIT:
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
        k_s=k_s,
        v_s=v_s,
        q_s=q_s,
        do_s=do_s,
        lse_s=lse_s,
        delta_s=delta_s,
        p_s=p_s,
        ds_s=ds_s,
        dq_s=dq_s,
        kv_full=barriers(1, 1),
        q_full=barriers(ST, 1),
        do_full=barriers(ST, 1),
        dq_empty=barriers(1, 1),
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
        EARLY_WAIT=EARLY_WAIT,
        REVERSED=REVERSED,
        DO_EMPTY=Q_EMPTY + ST,
        DQ_FULL=Q_EMPTY + 2 * ST,
    )
    fence_async_shared()
    gl.warp_specialize([(gradients, (args,)), (loader, (args,)), (dq_reducer, (args,))], [1, 1], [24, 24])


def backward(call: Call, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]) -> dict[str, Tensor]:
    """The gradients of a call that `why_not` accepts."""
    launch = Launch(call)
    dq, dk, dv = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)
    out = {"dq": dq, "dk": dk, "dv": dv}
    if launch.sq == 0 or launch.sk == 0 or launch.batch == 0:
        return {name: out[name].zero_() for name in needs}
    config = backward_config(call)
    split = config.split or call.deterministic or "dq" not in needs
    rows = prepass(launch, config, y, lse, dy, dlse, clear_dq=not split)
    if needs & {"dk", "dv"} or not split:
        _dk_dv(launch, rows, dk, dv, split)
    if "dq" in needs:
        split_dq(launch, rows, dq) if split else convert_dq(launch, rows, dq)
    return {name: out[name] for name in needs}


def _dk_dv(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor, split: bool) -> None:
    call, config = launch.call, rows.config
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, config.block_n)
    grid = (launch.key_tiles(config.block_n), launch.batch * launch.kv_heads)
    start(
        _bwd_kernel,
        grid,
        [
            launch.rows(call.q, config.block_m, launch.bd),
            launch.rows(rows.do, config.block_m, launch.bdv),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(dk, config.block_n, launch.bd),
            launch.rows(dv, config.block_n, launch.bdv),
            rows.vector(rows.lse2),
            rows.vector(rows.delta),
            rows.accumulator(launch.bd),
            cu_q,
            cu_k,
            cu_tiles,
            rows.first_tiles,
            n_segments,
            rows.tiles,
            *launch.geometry,
            call.scale,
            call.scale * LOG2E,
        ],
        {
            "D": launch.d,
            "DV": launch.dv,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BM": config.block_m,
            "BN": config.block_n,
            "ST": config.stages,
            "SPLIT": split,
            "WIDE": config.wide,
            "EARLY_WAIT": config.early_wait,
            "REVERSED": config.reverse,
            **launch.flags,
        },
        num_warps=8,
        maxnreg=168,
    )
