"""The main kernel of the backward for narrow heads without learned terms: a partition for each of the two warpgroups.

The same tile and the same five products as in `kernel.py`, but a warpgroup owns 64 of the 128 keys and meets the other in ds
alone: dq of a block needs the ds of all keys, so it is made one block later (ds has two buffers), and neither waits for the
other unless it is a whole block ahead. Each leaves its half of the rows of dq to a warp of its own.

A CTA works on one key tile after the other (`key_tiles.py`) and nothing stops between them: K and V have two buffers, the dq of
a tile's last block is made in the next tile's first, and dk and dv leave through the memory of dq tiles, by the same warp.
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
)

from backlight.backends.hopper.backward.dq_convert import dq_half_layout
from backlight.backends.hopper.backward.key_tiles import (
    BEGIN,
    BOTH_ENDS,
    CAREFUL_END,
    END,
    FIRST_ROWS,
    LAST_ROWS,
    PLAIN,
    PLAIN_BEGIN,
    PLAIN_END,
    SLOT,
    VISIT,
    drawn,
    key_tile,
    load_rows,
    meet_arrivals,
    programs_of,
    publish,
    publish_end,
    published,
    published_tile,
    read_field,
    seen_rows,
    tile_row,
)
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.barriers import (
    BOTH_GROUPS,
    BOTH_GROUPS_AND_WARP,
    GROUP_AND_WARP,
    NARROW_DO_EMPTY,
    NARROW_DQ_FULL,
    NARROW_DS_FULL,
    NARROW_Q_EMPTY,
)
from backlight.backends.hopper.compat import (
    LATE_ADDRESSES,
    OWN_REGISTERS,
    arguments,
    smem_reinterpret,
    tma_reduce_add,
    warpgroup_mma_wait,
)
from backlight.backends.hopper.config import keys_together
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import (
    WM,
    bar_arrive,
    bar_sync,
    barriers,
    load_tile,
    mma_over_columns,
    opaque,
    phase_of,
    pieces,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.scores import gradient, hidden_out, weights
from backlight.spec import LOG2E

ROWS = gl.constexpr(128)
STAGES = gl.constexpr(2)


@arguments
class Narrow:
    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    delta_desc: tma.tensor_descriptor
    acc_desc: tma.tensor_descriptor
    cu_q_ptr: gl.tensor
    cu_k_ptr: gl.tensor
    cu_key_tiles_ptr: gl.tensor
    cu_row_tiles_ptr: gl.tensor
    counter_ptr: gl.tensor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    q_s: gl.shared_memory_descriptor
    do_s: gl.shared_memory_descriptor
    lse_s: gl.shared_memory_descriptor
    delta_s: gl.shared_memory_descriptor
    ds_s: gl.shared_memory_descriptor
    out_s: gl.shared_memory_descriptor
    tile_s: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    out_empty: gl.shared_memory_descriptor
    dynamic: gl.tensor
    counter: gl.tensor
    n_segments: gl.tensor
    n_tiles: gl.tensor
    key_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    heads: gl.tensor
    group: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    left: gl.tensor
    right: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    D: gl.constexpr
    DV: gl.constexpr
    BM: gl.constexpr
    BN: gl.constexpr
    ST: gl.constexpr
    Q_EMPTY: gl.constexpr
    DO_EMPTY: gl.constexpr
    WARPS: gl.constexpr
    WIDE: gl.constexpr
    BIAS: gl.constexpr
    TAU: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    VARLEN: gl.constexpr


@arguments
class Sums:
    """What a warpgroup carries from block to block; `before`: where K of the block before lies."""

    dk: gl.tensor
    dv: gl.tensor
    count: gl.tensor
    before: gl.tensor


@gluon.jit
def loader(p):
    count = p.sq * 0
    visits = count
    turn = count
    number = gl.program_id(0)
    while number < p.n_tiles:
        t = key_tile(p, number)
        publish(p, turn, number, visits, t)
        if t.end > t.begin:
            side = visits & 1
            full = p.kv_full.index(side)
            # both reducers have seen that the tile before last is done with
            mbarrier.wait(p.kv_empty.index(side), ((visits - 1) >> 1) & 1)
            mbarrier.expect(full, 2 * (p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes))
            for w in gl.static_range(2):
                load_tile(p.k_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0 + w * WM, full, p.k_s.index(side * 2 + w), p.VARLEN)
                load_tile(p.v_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0 + w * WM, full, p.v_s.index(side * 2 + w), p.VARLEN)
            visits += 1
        for member in range(p.group):
            for i in range(t.begin, t.end):
                load_rows(p, t, member, i, count)
                count += 1
        turn += 1
        number = drawn(p)
    publish_end(p, turn)
    meet_arrivals(p, count)


@gluon.jit
def dq_memory(p, W: gl.constexpr):
    """Where a warpgroup leaves its rows of dq, as `reducer` reads it."""
    return smem_reinterpret(p.out_s.index(W), gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)


@gluon.jit
def dk_dv_memory(p, w):
    """The same memory as a warpgroup's rows of dk and dv: [2, 64, width]."""
    WIDTH: gl.constexpr = p.out_s.shape[2]
    dtype: gl.constexpr = p.q_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, WIDTH], dtype)
    return smem_reinterpret(p.out_s.index(w), dtype, [2, WM, WIDTH], layout)


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
            for i in range(t.begin, t.end):
                # dq of the block before: none before the first
                bar_sync(NARROW_DQ_FULL + W, GROUP_AND_WARP)
                if row >= 0:
                    tma_reduce_add(p.acc_desc, [row, 0], dq_memory(p, W))
                    tma.store_wait(0)
                mbarrier.arrive(p.out_empty.index(W), count=1)
                if fresh:
                    mbarrier.arrive(p.kv_empty.index((visits & 1) ^ 1), count=1)
                    visits += 1
                fresh = visits < 0
                row = tile_row(p, t, member, i) + W * WM
        bar_sync(NARROW_DQ_FULL + W, GROUP_AND_WARP)
        out = dk_dv_memory(p, W)
        store_tile(p.dk_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0 + W * WM, out.index(0), p.VARLEN)
        store_tile(p.dv_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0 + W * WM, out.index(1), p.VARLEN)
        tma.store_wait(0)
        mbarrier.arrive(p.out_empty.index(W), count=1)
        mbarrier.arrive(p.tile_empty.index(turn & 1), count=1)
        turn += 1
        number = published(p, turn, 1)
    bar_sync(NARROW_DQ_FULL + W, GROUP_AND_WARP)
    if row >= 0:
        tma_reduce_add(p.acc_desc, [row, 0], dq_memory(p, W))
        tma.store_wait(0)


@gluon.constexpr_function
def tile_layout(N):
    """Accumulator of a warpgroup's product [64, N]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])


@gluon.jit
def dq_of_before(p, count, side, W: gl.constexpr):
    """This warpgroup's rows of dq = ds k of the block before, over the keys of both; in flight."""
    BD: gl.constexpr = p.k_s.shape[2]
    before = (count & 1) ^ 1
    dq = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
    bar_sync(NARROW_DS_FULL + (1 - W) * 2 + before, BOTH_GROUPS)
    for w in gl.static_range(2):
        ds = p.ds_s.index(before * 2 + w).slice(W * WM, WM, 1)
        dq = warpgroup_mma(ds.permute((1, 0)), p.k_s.index(side * 2 + w), dq, use_acc=w > 0, is_async=True)
    return dq


@gluon.jit
def leave_dq(p, dq, uses, W: gl.constexpr):
    """Put dq where `reducer` finds it."""
    mbarrier.wait(p.out_empty.index(W), (uses & 1) ^ 1)
    smem_reinterpret(p.out_s.index(W), gl.float32, dq.shape, dq_half_layout(dq.shape[1])).store(dq)


@gluon.jit
def row_block(p, turn, sums, side, i, W: gl.constexpr, MASK: gl.constexpr):
    """One row block: dq of the one before goes out, dk and dv grow."""
    dk = sums.dk
    dv = sums.dv
    count = sums.count
    BM: gl.constexpr = p.BM
    dtype: gl.constexpr = p.q_desc.dtype
    s_l: gl.constexpr = tile_layout(BM)
    row_l: gl.constexpr = gl.SliceLayout(0, s_l)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[2]))
    zero = gl.zeros([WM, BM], gl.float32, s_l)
    stage = stage_of(count, STAGES)
    phase = phase_of(count, STAGES)
    q = p.q_s.index(stage)
    do = p.do_s.index(stage)
    mbarrier.wait(p.q_full.index(stage), phase)
    # 1: s^T = k q^T
    s_token = mma_over_columns(p.k_s.index(side * 2 + W), q, zero, p.D)
    mbarrier.wait(p.do_full.index(stage), phase)
    # 2: dp^T = v do^T
    dp_token = mma_over_columns(p.v_s.index(side * 2 + W), do, zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    # row values are read late: registers are short
    pt = weights(s, p.lse_s.index(stage).load(row_l), p.scale_log2, True)
    if MASK != PLAIN:
        pt = hidden_out(pt, seen_rows(p, turn, s, W * WM, i, MASK), False)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    p16 = gl.convert_layout(pt.to(dtype), a_l, assert_trivial=True)
    ds16 = gradient(pt, dp, p.delta_s.index(stage).load(row_l), True).to(dtype)
    # 4, of the block before: dq += ds k
    dq_token = dq_of_before(p, count, sums.before, W)
    # 3: dv += p^T do
    dv_token = warpgroup_mma(p16, do, dv, is_async=True)
    # 5: dk += ds^T q
    dk_token = warpgroup_mma(gl.convert_layout(ds16, a_l, assert_trivial=True), q, dk, is_async=True)
    # both stores run under the matmuls of dv and dk
    leave_dq(p, warpgroup_mma_wait(2, deps=[dq_token]), count + turn, W)
    p.ds_s.index((count & 1) * 2 + W).store(ds16)
    fence_async_shared()
    bar_arrive(NARROW_DQ_FULL + W, GROUP_AND_WARP)
    bar_arrive(NARROW_DS_FULL + W * 2 + (count & 1), BOTH_GROUPS)
    dv = warpgroup_mma_wait(1, deps=[dv_token])
    bar_arrive(NARROW_DO_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    dk = warpgroup_mma_wait(0, deps=[dk_token])
    bar_arrive(NARROW_Q_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    return Sums(dk=dk, dv=dv, count=count + 1, before=side)


@gluon.jit
def row_loop(p, turn, sums, side, FIRST: gl.constexpr, LAST: gl.constexpr, W: gl.constexpr, MASK: gl.constexpr):
    """Row blocks between two of the published borders."""
    for i in range(read_field(p, turn, FIRST, p.WARPS), read_field(p, turn, LAST, p.WARPS)):
        sums = row_block(p, turn, sums, side, i, W, MASK)
    return sums


@gluon.jit
def gradients(p, W: gl.constexpr):
    """64 of the keys of every tile."""
    BD: gl.constexpr = p.k_s.shape[2]
    BDV: gl.constexpr = p.v_s.shape[2]
    dtype: gl.constexpr = p.q_desc.dtype
    dk_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BD], dtype)
    dv_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype)
    count = p.sq * 0
    before = count
    turn = count
    published(p, turn, p.WARPS)
    # every CTA has a tile: a loop that might not be entered keeps registers for what follows it
    number = turn
    # there is no block before the first: its dq is made of anything and goes nowhere
    bar_arrive(NARROW_DS_FULL + W * 2 + 1, BOTH_GROUPS)
    while number >= 0:
        dk = gl.zeros([WM, BD], gl.float32, tile_layout(BD))
        dv = gl.zeros([WM, BDV], gl.float32, tile_layout(BDV))
        sums = Sums(dk=dk, dv=dv, count=count, before=before)
        visit = read_field(p, turn, VISIT, p.WARPS)
        side = visit & 1
        if read_field(p, turn, END, p.WARPS) > read_field(p, turn, BEGIN, p.WARPS):
            mbarrier.wait(p.kv_full.index(side), (visit >> 1) & 1)
        for _member in range(p.group):
            if p.HAS_LEFT:
                sums = row_loop(p, turn, sums, side, BEGIN, CAREFUL_END, W, BOTH_ENDS)
            sums = row_loop(p, turn, sums, side, CAREFUL_END, PLAIN_BEGIN, W, FIRST_ROWS)
            sums = row_loop(p, turn, sums, side, PLAIN_BEGIN, PLAIN_END, W, PLAIN)
            if p.HAS_LEFT:
                sums = row_loop(p, turn, sums, side, PLAIN_END, END, W, LAST_ROWS)
        count = sums.count
        before = sums.before
        mbarrier.wait(p.out_empty.index(W), ((count + turn) & 1) ^ 1)
        out = dk_dv_memory(p, opaque(W))
        smem_reinterpret(out.index(0), dtype, [WM, BD], dk_l).store((sums.dk * p.scale).to(dtype))
        smem_reinterpret(out.index(1), dtype, [WM, BDV], dv_l).store(sums.dv.to(dtype))
        fence_async_shared()
        bar_arrive(NARROW_DQ_FULL + W, GROUP_AND_WARP)
        turn += 1
        number = published(p, turn, p.WARPS)
    leave_dq(p, warpgroup_mma_wait(0, deps=[dq_of_before(p, count, before, W)]), count + turn, W)
    fence_async_shared()
    bar_arrive(NARROW_DQ_FULL + W, GROUP_AND_WARP)


@gluon.jit(
    do_not_specialize=[
        *("dynamic", "counter", "n_segments", "n_tiles", "key_tiles", "row_tiles", "together"),
        *("heads", "group", "sq", "sk", "left", "right"),
    ]
)
def _bwd_narrow_kernel(
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
    counter_ptr,
    dynamic,
    counter,
    n_segments,
    n_tiles,
    key_tiles,
    row_tiles,
    together,
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
    dtype: gl.constexpr = q_desc.dtype
    WIDTH: gl.constexpr = max(BD, BDV)
    k_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BD], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype)
    q_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BD], dtype)
    do_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BDV], dtype)
    ds_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, ROWS], dtype)
    out_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WM, WIDTH], gl.float32)
    args = Narrow(
        q_desc=q_desc,
        do_desc=do_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        dk_desc=dk_desc,
        dv_desc=dv_desc,
        lse_desc=lse_desc,
        delta_desc=delta_desc,
        acc_desc=acc_desc,
        cu_q_ptr=cu_q_ptr,
        cu_k_ptr=cu_k_ptr,
        cu_key_tiles_ptr=cu_key_tiles_ptr,
        cu_row_tiles_ptr=cu_row_tiles_ptr,
        counter_ptr=counter_ptr,
        k_s=gl.allocate_shared_memory(dtype, [4, WM, BD], k_l),
        v_s=gl.allocate_shared_memory(dtype, [4, WM, BDV], v_l),
        q_s=gl.allocate_shared_memory(dtype, [STAGES, ROWS, BD], q_l),
        do_s=gl.allocate_shared_memory(dtype, [STAGES, ROWS, BDV], do_l),
        lse_s=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        delta_s=gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout),
        ds_s=gl.allocate_shared_memory(dtype, [4, WM, ROWS], ds_l),
        out_s=gl.allocate_shared_memory(gl.float32, [2, WM, WIDTH], out_l),
        tile_s=gl.allocate_shared_memory(gl.int32, [2 * SLOT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        tile_full=barriers(2, 1),
        tile_empty=barriers(2, 2),
        kv_full=barriers(2, 1),
        kv_empty=barriers(2, 2),
        q_full=barriers(STAGES, 1),
        do_full=barriers(STAGES, 1),
        out_empty=barriers(2, 1),
        dynamic=dynamic,
        counter=counter,
        n_segments=n_segments,
        n_tiles=n_tiles,
        key_tiles=key_tiles,
        row_tiles=row_tiles,
        together=together,
        heads=heads,
        group=group,
        sq=sq,
        sk=sk,
        left=left,
        right=right,
        scale=scale,
        scale_log2=scale_log2,
        D=D,
        DV=DV,
        BM=ROWS,
        BN=2 * WM,
        ST=STAGES,
        Q_EMPTY=NARROW_Q_EMPTY,
        DO_EMPTY=NARROW_DO_EMPTY,
        WARPS=4,
        WIDE=False,
        BIAS=False,
        TAU=False,
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


def narrow_dk_dv(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor) -> None:
    """dk, dv and the accumulated dq of a call without learned terms, heads up to 64."""
    call = launch.call
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, 2 * WM.value)
    do, lse2, delta, acc, first_tiles = rows.do, rows.lse2, rows.delta, rows.accumulator, rows.first_tiles

    def describe() -> dict[str, Any]:
        config = rows.config
        key_tiles = launch.key_tiles(2 * WM.value)
        n_tiles = key_tiles * launch.batch * launch.kv_heads
        programs = programs_of(call, config, n_tiles)
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
            delta,
            programs if programs < n_tiles else 0,
            delta.numel() - 64,
            n_segments,
            n_tiles,
            key_tiles,
            rows.tiles,
            keys_together(call, config),
            *launch.geometry,
            call.scale,
            call.scale * LOG2E,
        ]
        constants = {"D": launch.d, "DV": launch.dv, "BD": launch.bd, "BDV": launch.bdv, **launch.flags}
        options = {"num_warps": 4, "maxnreg": 168, **LATE_ADDRESSES, **OWN_REGISTERS}
        return {"grid": (programs,), "args": args, "constants": constants, **options}

    tensors = (call.q, do, call.k, call.v, dk, dv, lse2, delta, acc, cu_q, cu_k, cu_tiles, first_tiles, delta)
    launch.start(_bwd_narrow_kernel, tensors, describe)
