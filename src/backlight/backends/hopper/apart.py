"""The main kernel of the backward for narrow heads without learned terms: a partition for each of the two warpgroups.

The same tile and the same five products as in `backward.py`, but a warpgroup owns 64 of the 128 keys and meets the other in ds
alone: dq of a block needs the ds of all keys, so it is made one block later (ds has two buffers), and neither waits for the
other unless it is a whole block ahead. Each leaves its half of the rows of dq to a warp of its own.
"""

# device code: compiled by Triton from its own types, never run by Python

from typing import Any

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
from backlight.backends.hopper.dq import dq_half_layout
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.prepass import Rows
from backlight.backends.hopper.primitives import (
    WM,
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
from backlight.spec import LOG2E

ROWS = gl.constexpr(128)
STAGES = gl.constexpr(2)
# named barriers; partitions take 2 to 5, of which only that of the second warpgroup has a barrier
Q_EMPTY = gl.constexpr(6)
DO_EMPTY = gl.constexpr(8)
DQ_FULL = gl.constexpr(10)
DS_FULL = gl.constexpr(12)
# who comes to them: both warpgroups and the loader, both warpgroups, a warpgroup and its reducer
EVERYBODY = gl.constexpr(256 + 32)
PAIR = gl.constexpr(256)
ONE = gl.constexpr(128 + 32)


@arguments
class Apart:
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
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    VARLEN: gl.constexpr


@gluon.jit
def tile_row(p, member, i):
    """First row of a row block in the padded fp32 tensors lse, delta and dq accumulator."""
    head = p.b * p.heads + p.kv_head * p.group + member
    return (head * p.row_tiles + p.first_tile + i) * ROWS


@gluon.jit
def loader(p):
    mbarrier.expect(p.kv_full.index(0), 2 * (p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes))
    for w in gl.static_range(2):
        load_tile(p.k_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0 + w * WM, p.kv_full.index(0), p.k_s.index(w), p.VARLEN)
        load_tile(p.v_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0 + w * WM, p.kv_full.index(0), p.v_s.index(w), p.VARLEN)
    count = p.begin * 0
    for member in range(p.group):
        h = p.kv_head * p.group + member
        for i in range(p.begin, p.end):
            stage = stage_of(count, STAGES)
            row = tile_row(p, member, i)
            if count >= STAGES:
                bar_sync(Q_EMPTY + stage, EVERYBODY)
            mbarrier.expect(p.q_full.index(stage), p.q_desc.block_type.nbytes + ROWS * 4)
            load_tile(p.q_desc, p.b, h, p.q_start, p.sq, i * ROWS, p.q_full.index(stage), p.q_s.index(stage), p.VARLEN)
            tma_load(p.lse_desc, [row], p.q_full.index(stage), p.lse_s.index(stage))
            if count >= STAGES:
                bar_sync(DO_EMPTY + stage, EVERYBODY)
            mbarrier.expect(p.do_full.index(stage), p.do_desc.block_type.nbytes + ROWS * 4)
            load_tile(p.do_desc, p.b, h, p.q_start, p.sq, i * ROWS, p.do_full.index(stage), p.do_s.index(stage), p.VARLEN)
            tma_load(p.delta_desc, [row], p.do_full.index(stage), p.delta_s.index(stage))
            count += 1
    # every arrival is met, those of the last round included
    for i in gl.static_range(STAGES):
        if count >= STAGES - i:
            bar_sync(Q_EMPTY + stage_of(count + i, STAGES), EVERYBODY)
            bar_sync(DO_EMPTY + stage_of(count + i, STAGES), EVERYBODY)


@gluon.jit
def reducer(p, W: gl.constexpr):
    """Adds a warpgroup's half of the dq tiles to global memory."""
    if p.end > p.begin:
        tile = smem_reinterpret(p.dq_s.index(W), gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)
        # that of the block before the first
        bar_sync(DQ_FULL + W, ONE)
        mbarrier.arrive(p.dq_empty.index(W), count=1)
        for member in range(p.group):
            for i in range(p.begin, p.end):
                bar_sync(DQ_FULL + W, ONE)
                tma_reduce_add(p.acc_desc, [tile_row(p, member, i) + W * WM, 0], tile)
                tma.store_wait(0)
                mbarrier.arrive(p.dq_empty.index(W), count=1)


@gluon.constexpr_function
def tile_layout(N):
    """Accumulator of a warpgroup's product [64, N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.jit
def dq_of_before(p, count, W: gl.constexpr):
    """This warpgroup's rows of dq = ds k of the block before, over the keys of both; in flight."""
    BD: gl.constexpr = p.k_s.shape[2]
    before = (count & 1) ^ 1
    dq = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
    bar_sync(DS_FULL + (1 - W) * 2 + before, PAIR)
    for w in gl.static_range(2):
        ds = p.ds_s.index(before * 2 + w).slice(W * WM, WM, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), p.k_s.index(w), dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def leave_dq(p, dq, count, W: gl.constexpr):
    """Put dq where `reducer` finds it."""
    mbarrier.wait(p.dq_empty.index(W), (count & 1) ^ 1)
    smem_reinterpret(p.dq_s.index(W), gl.float32, dq.shape, dq_half_layout(dq.shape[1])).store(dq)


@gluon.jit
def row_block(p, dk, dv, i, count, W: gl.constexpr, MASKED: gl.constexpr):
    """One row block: dq of the one before goes out, dk and dv grow."""
    dtype: gl.constexpr = p.q_desc.dtype
    s_l: gl.constexpr = tile_layout(ROWS)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[2]))
    zero = gl.zeros([WM, ROWS], gl.float32, s_l)
    stage = stage_of(count, STAGES)
    phase = phase_of(count, STAGES)
    q = p.q_s.index(stage)
    do = p.do_s.index(stage)
    mbarrier.wait(p.q_full.index(stage), phase)
    s_token = mma_over_columns(p.k_s.index(W), q, zero, p.D)
    mbarrier.wait(p.do_full.index(stage), phase)
    dp_token = mma_over_columns(p.v_s.index(W), do, zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    # row values are read late: registers are short
    pt = gl.exp2(s * p.scale_log2 - gl.expand_dims(p.lse_s.index(stage).load(row_l), 0))
    if MASKED:
        key = p.j0 + W * WM + gl.arange(0, WM, gl.SliceLayout(1, s_l))
        first, end = row_limits(key, p.sq, p.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        columns = gl.arange(0, ROWS, row_l)
        if p.HAS_LEFT:
            seen = between(first - i * ROWS, end - i * ROWS, columns)
        else:
            seen = from_on(first - i * ROWS, columns)
        pt = gl.where(seen, pt, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    p16 = gl.convert_layout(pt.to(dtype), a_l, assert_trivial=True)
    ds16 = (pt * (dp - gl.expand_dims(p.delta_s.index(stage).load(row_l), 0))).to(dtype)
    dq_token = dq_of_before(p, count, W)
    dv_token = warpgroup_mma(p16, do, dv, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
    # both stores run under the matmuls of dv and dk
    leave_dq(p, warpgroup_mma_wait(2, deps=[dq_token]), count, W)
    p.ds_s.index((count & 1) * 2 + W).store(ds16)
    fence_async_shared()
    bar_arrive(DQ_FULL + W, ONE)
    bar_arrive(DS_FULL + W * 2 + (count & 1), PAIR)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    bar_arrive(DO_EMPTY + stage, EVERYBODY)
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    bar_arrive(Q_EMPTY + stage, EVERYBODY)
    return dk, dv


@gluon.jit
def row_loop(p, dk, dv, count, first, last, W: gl.constexpr, MASKED: gl.constexpr):
    """Row blocks [first, last)."""
    for i in range(first, last):
        dk, dv = row_block(p, dk, dv, i, count, W, MASKED)
        count += 1
    return dk, dv, count


@gluon.jit
def gradients(p, W: gl.constexpr):
    """64 keys."""
    BD: gl.constexpr = p.k_s.shape[2]
    BDV: gl.constexpr = p.v_s.shape[2]
    dtype: gl.constexpr = p.q_desc.dtype
    dk = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
    dv = gl.zeros([WM, BDV], gl.float32, tile_layout(BDV))
    if p.end > p.begin:
        # there is no block before the first
        p.ds_s.index(2 + W).store(gl.zeros([WM, ROWS], dtype, tile_layout(ROWS)))
        fence_async_shared()
        bar_arrive(DS_FULL + W * 2 + 1, PAIR)
    mbarrier.wait(p.kv_full.index(0), 0)
    count = p.begin * 0
    for _member in range(p.group):
        dk, dv, count = row_loop(p, dk, dv, count, p.begin, p.plain_begin, W, True)
        dk, dv, count = row_loop(p, dk, dv, count, p.plain_begin, p.plain_end, W, False)
        if p.HAS_LEFT:
            dk, dv, count = row_loop(p, dk, dv, count, p.plain_end, p.end, W, True)
    p.v_s.index(W).store(dv.to(dtype))
    if p.end > p.begin:
        leave_dq(p, warpgroup_mma_wait(0, deps=[dq_of_before(p, count, W)]), count, W)
        fence_async_shared()
        bar_arrive(DQ_FULL + W, ONE)
        # both have read k for the last time: its shared memory takes dk
        bar_sync(DS_FULL + (count & 1), PAIR)
    p.k_s.index(W).store((dk * p.scale).to(dtype))
    fence_async_shared()
    store_tile(p.dv_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0 + W * WM, p.v_s.index(W), p.VARLEN)
    store_tile(p.dk_desc, p.b, p.kv_head, p.k_start, p.sk, p.j0 + W * WM, p.k_s.index(W), p.VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_segments", "row_tiles", "heads", "group", "sq", "sk", "left", "right"])
def _bwd_apart_kernel(
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
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    VARLEN: gl.constexpr,
):
    BN: gl.constexpr = 2 * WM
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
    begin, plain_begin, plain_end, end = row_blocks(j0, last, sq, sk, left, right, ROWS, HAS_LEFT, HAS_RIGHT)
    if j0 + BN > sk:
        plain_begin = end
        plain_end = end
    k_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BD], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype)
    q_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype)
    do_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BDV], dtype)
    ds_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, ROWS], dtype)
    args = Apart(
        q_desc=q_desc,
        do_desc=do_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        dk_desc=dk_desc,
        dv_desc=dv_desc,
        lse_desc=lse_desc,
        delta_desc=delta_desc,
        acc_desc=acc_desc,
        k_s=gl.allocate_shared_memory(dtype, [2, WM, BD], k_l),
        v_s=gl.allocate_shared_memory(dtype, [2, WM, BDV], v_l),
        q_s=gl.allocate_shared_memory(dtype, [STAGES, ROWS, BD], q_l),
        do_s=gl.allocate_shared_memory(dtype, [STAGES, ROWS, BDV], do_l),
        lse_s=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        delta_s=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout),
        ds_s=gl.allocate_shared_memory(dtype, [4, WM, ROWS], ds_l),
        dq_s=gl.allocate_shared_memory(gl.float32, [2, WM, BD], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])),
        kv_full=barriers(1, 1),
        q_full=barriers(STAGES, 1),
        do_full=barriers(STAGES, 1),
        dq_empty=barriers(2, 1),
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
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        VARLEN=VARLEN,
    )
    fence_async_shared()
    gl.warp_specialize(
        [(gradients, (args, 0)), (gradients, (args, 1)), (loader, (args,)), (reducer, (args, 0)), (reducer, (args, 1))],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )


def apart_dk_dv(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor) -> None:
    """dk, dv and the accumulated dq of a call without learned terms, heads up to 64."""
    call = launch.call
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, 2 * WM.value)
    do, lse2, delta, acc, first_tiles = rows.do, rows.lse2, rows.delta, rows.accumulator, rows.first_tiles

    def describe() -> dict[str, Any]:
        args = [
            launch.rows(call.q, ROWS.value, launch.bd),
            launch.rows(do, ROWS.value, launch.bdv),
            launch.rows(call.k, WM.value, launch.bd),
            launch.rows(call.v, WM.value, launch.bdv),
            launch.rows(dk, WM.value, launch.bd),
            launch.rows(dv, WM.value, launch.bdv),
            rows.vector(lse2),
            rows.vector(delta),
            rows.tiles_of_dq(launch.bd, WM.value),
            cu_q,
            cu_k,
            cu_tiles,
            first_tiles,
            n_segments,
            rows.tiles,
            *launch.geometry,
            call.scale,
            call.scale * LOG2E,
        ]
        constants = {"D": launch.d, "DV": launch.dv, "BD": launch.bd, "BDV": launch.bdv, **launch.flags}
        grid = (launch.key_tiles(2 * WM.value), launch.batch * launch.kv_heads)
        return {"grid": grid, "args": args, "constants": constants, "num_warps": 4, "maxnreg": 168}

    tensors = (call.q, do, call.k, call.v, dk, dv, lse2, delta, acc, cu_q, cu_k, cu_tiles, first_tiles)
    launch.start(_bwd_apart_kernel, tensors, describe)
