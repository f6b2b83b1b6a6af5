"""Backward, main kernel (eq. 33): a CTA owns BN keys of one key head and visits the row blocks that see them.

Eight warps do all matmuls with S and dP transposed; one warp loads, one adds dq tiles to global memory. The five products, by
the numbers that the loops of all kernels use:

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

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from backlight.backends.hopper.backward.dbias import CELLS, GROUPS, Diagonals, add_diagonals
from backlight.backends.hopper.backward.dq_convert import dq_tile_layout
from backlight.backends.hopper.backward.key_tiles import (
    SLOT,
    drawn,
    key_tile,
    load_rows,
    meet_arrivals,
    programs_of,
    publish,
    publish_end,
    published,
    published_tile,
    tile_row,
)
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.backward.row_block import Sums, row_loops, tile_layout
from backlight.backends.hopper.barriers import (
    BOTH_GROUPS_AND_WARP,
    KV_EMPTY,
    OUT_FULL,
    Q_EMPTY,
    TWO_WARPS,
    diagonals_full,
    do_empty,
    dq_full,
)
from backlight.backends.hopper.compat import LATE_ADDRESSES, Maybe, arguments, smem_reinterpret, tma_reduce_add
from backlight.backends.hopper.config import keys_together, room_for_dv
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import (
    bar_arrive,
    bar_sync,
    barriers,
    load_tile,
    store_tile,
)
from backlight.backends.hopper.terms import (
    cap_factor,
    table_of,
    unit_of,
)
from backlight.spec import LOG2E


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
    p_s: gl.shared_memory_descriptor
    ds_s: gl.shared_memory_descriptor
    dq_s: gl.shared_memory_descriptor
    dk_s: gl.shared_memory_descriptor
    dv_s: gl.shared_memory_descriptor
    share_s: Maybe
    diagonals_s: Maybe
    edge_s: Maybe
    tile_s: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    dq_empty: gl.shared_memory_descriptor
    diagonals_empty: Maybe
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
    WARPS: gl.constexpr
    ST: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    VARLEN: gl.constexpr
    SPLIT: gl.constexpr
    WIDE: gl.constexpr
    DQ_TILES: gl.constexpr
    EARLY: gl.constexpr
    KV_THREADS: gl.constexpr
    OVERLAP: gl.constexpr
    BAND_FIRST: gl.constexpr
    SLOTS: gl.constexpr
    Q_EMPTY: gl.constexpr
    DO_EMPTY: gl.constexpr
    DQ_FULL: gl.constexpr
    DIAGONALS_FULL: gl.constexpr
    BIAS: gl.constexpr
    DBIAS: gl.constexpr
    SOFTCAP: gl.constexpr
    TAU: gl.constexpr


@gluon.jit
def load_keys(p, t, turn):
    """K and V of a tile, when those of the tile before are done with."""
    full = p.kv_full.index(0)
    if turn > 0:
        bar_sync(KV_EMPTY, p.KV_THREADS)
    mbarrier.expect(full, p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes)
    load_tile(p.k_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0, full, p.k_s, p.VARLEN)
    load_tile(p.v_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0, full, p.v_s, p.VARLEN)


@gluon.jit
def loader(p):
    count = p.sq * 0
    turn = count
    number = gl.program_id(0)
    going = turn == 0
    while going:
        t = key_tile(p, number)
        publish(p, turn, number, turn, t)
        load_keys(p, t, turn)
        for member in range(p.group):
            for i in range(t.begin, t.end):
                load_rows(p, t, member, i, count)
                count += 1
        turn += 1
        number = drawn(p)
        going = number < p.n_tiles
    publish_end(p, turn)
    bar_sync(KV_EMPTY, p.KV_THREADS)
    meet_arrivals(p, count)


@gluon.jit
def in_band(p, t, i):
    """Whether `gradients` treats a row block as one that meets the bias table: masked blocks always do."""
    return (i < t.plain_begin) | (i >= t.plain_end) | ((i >= t.band_begin) & (i < t.band_end))


@gluon.jit
def reducer(p):
    """Moves what `gradients` leaves in shared memory: adds dq tiles and diagonals of ds to global memory, stores dk and dv."""
    dq_tile = p.dq_s
    if p.DQ_TILES:
        dq_tile = smem_reinterpret(p.dq_s, gl.float32, p.acc_desc.block_type.shape, p.acc_desc.layout)
    turn = p.sq * 0
    number = published(p, turn, 1)
    while number >= 0:
        t = published_tile(p, turn)
        if p.DBIAS or p.DQ_TILES:
            for member in range(p.group):
                for i in range(t.begin, t.end):
                    if p.DBIAS:  # noqa: SIM102 (known to the compiler)
                        if in_band(p, t, i):
                            bar_sync(p.DIAGONALS_FULL, BOTH_GROUPS_AND_WARP)
                            add_diagonals(p, t, t.kv_head * p.group + member, i)
                            tma.store_wait(0)
                            mbarrier.arrive(p.diagonals_empty.index(0), count=1)
                    if p.DQ_TILES:
                        bar_sync(p.DQ_FULL, BOTH_GROUPS_AND_WARP)
                        tma_reduce_add(p.acc_desc, [tile_row(p, t, member, i), 0], dq_tile)
                        tma.store_wait(0)
                        mbarrier.arrive(p.dq_empty.index(0), count=1)
        bar_sync(OUT_FULL, BOTH_GROUPS_AND_WARP)
        store_tile(p.dv_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0, p.dv_s, p.VARLEN)
        store_tile(p.dk_desc, t.b, t.kv_head, t.k_start, t.sk, t.j0, p.dk_s, p.VARLEN)
        tma.store_wait(0)
        if p.EARLY:
            mbarrier.arrive(p.dq_empty.index(0), count=1)
        else:
            bar_arrive(KV_EMPTY, p.KV_THREADS)
        mbarrier.arrive(p.tile_empty.index(turn & 1), count=1)
        turn += 1
        number = published(p, turn, 1)


@gluon.jit
def gradients(p):
    BN: gl.constexpr = p.BN
    BD: gl.constexpr = p.k_s.shape[1]
    BDV: gl.constexpr = p.v_s.shape[1]
    dtype: gl.constexpr = p.q_desc.dtype
    count = p.sq * 0
    flushes = count
    turn = count
    published(p, turn, p.WARPS)
    # every CTA has a tile: a loop that might not be entered keeps registers for what follows it
    number = turn
    while number >= 0:
        dk = gl.zeros([BN, BD], gl.float32, tile_layout(p.WIDE, BD))
        dv = gl.zeros([BN, BDV], gl.float32, tile_layout(p.WIDE, BDV))
        sums = Sums(dk=dk, dv=dv, count=count, flushes=flushes)
        mbarrier.wait(p.kv_full.index(0), turn & 1)
        for member in range(p.group):
            sums = row_loops(p, turn, sums, member)
        count = sums.count
        flushes = sums.flushes
        if p.EARLY:
            bar_arrive(KV_EMPTY, p.KV_THREADS)
            mbarrier.wait(p.dq_empty.index(0), ((count + turn) & 1) ^ 1)
        p.dv_s.store(sums.dv.to(dtype))
        p.dk_s.store((sums.dk * p.scale).to(dtype))
        fence_async_shared()
        bar_arrive(OUT_FULL, BOTH_GROUPS_AND_WARP)
        turn += 1
        number = published(p, turn, p.WARPS)


@gluon.jit(
    do_not_specialize=[
        *("dynamic", "counter", "n_segments", "n_tiles", "key_tiles", "row_tiles", "together"),
        *("heads", "group", "sq", "sk", "left", "right", "n_bias", "origin"),
    ]
)
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
    EARLY: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    TAU: gl.constexpr = tau_ptr is not None
    BIAS: gl.constexpr = table_ptr is not None
    DBIAS: gl.constexpr = diagonals_desc is not None
    k_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BD], dtype)
    v_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, BDV], dtype)
    k_s = gl.allocate_shared_memory(dtype, [BN, BD], k_l)
    v_s = gl.allocate_shared_memory(dtype, [BN, BDV], v_l)
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
    # dk and dv leave through memory that is free by then: of K and V, or of a dq tile and some of its own
    dk_s = k_s
    dv_s = v_s
    if EARLY:
        dk_s = smem_reinterpret(dq_s, dtype, [BN, BD], k_l)
        dv_s = gl.allocate_shared_memory(dtype, [BN, BDV], v_l)
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
        cu_q_ptr=cu_q_ptr,
        cu_k_ptr=cu_k_ptr,
        cu_key_tiles_ptr=cu_key_tiles_ptr,
        cu_row_tiles_ptr=cu_row_tiles_ptr,
        counter_ptr=counter_ptr,
        k_s=k_s,
        v_s=v_s,
        q_s=q_s,
        do_s=do_s,
        lse_s=lse_s,
        delta_s=delta_s,
        p_s=p_s,
        ds_s=ds_s,
        dq_s=dq_s,
        dk_s=dk_s,
        dv_s=dv_s,
        share_s=share_s,
        diagonals_s=diagonals_s,
        edge_s=edge_s,
        tile_s=gl.allocate_shared_memory(gl.int32, [2 * SLOT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        tile_full=barriers(2, 1),
        tile_empty=barriers(2, 1),
        kv_full=barriers(1, 1),
        q_full=barriers(ST, 1),
        do_full=barriers(ST, 1),
        dq_empty=barriers(1, 1),
        diagonals_empty=diagonals_empty,
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
        WARPS=8,
        ST=ST,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        VARLEN=VARLEN,
        SPLIT=SPLIT,
        WIDE=WIDE,
        DQ_TILES=DQ_TILES,
        EARLY=EARLY,
        # who releases K and V: `gradients`, or `reducer` when dk and dv have left through their memory
        KV_THREADS=BOTH_GROUPS_AND_WARP if EARLY else TWO_WARPS,
        OVERLAP=OVERLAP,
        BAND_FIRST=BAND_FIRST,
        SLOTS=SLOTS,
        Q_EMPTY=Q_EMPTY,
        DO_EMPTY=do_empty(ST),
        DQ_FULL=dq_full(ST),
        DIAGONALS_FULL=diagonals_full(ST),
        BIAS=BIAS,
        DBIAS=DBIAS,
        SOFTCAP=cap is not None,
        TAU=TAU,
    )
    fence_async_shared()
    gl.warp_specialize([(gradients, (args,)), (loader, (args,)), (reducer, (args,))], [1, 1], [24, 24])


def main_dk_dv(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor, diagonals: Diagonals | None, split: bool) -> None:
    """dk and dv, and unless `split` the accumulated dq; sums of ds where there are `diagonals`."""
    call, config, spec = launch.call, rows.config, launch.call.spec
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, config.block_n)
    do, lse2, delta, acc, first_tiles = rows.do, rows.lse2, rows.delta, rows.accumulator, rows.first_tiles
    share, table = rows.share, table_of(call)
    tau = None if call.tau is None else call.tau.contiguous()

    def describe() -> dict[str, Any]:
        key_tiles = launch.key_tiles(config.block_n)
        n_tiles = key_tiles * launch.batch * launch.kv_heads
        programs = programs_of(call, config, n_tiles)
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
            "EARLY": not split and room_for_dv(config, launch.bd, launch.bdv, diagonals is not None),
            **launch.flags,
        }
        return {"grid": (programs,), "args": args, "constants": constants, "num_warps": 8, "maxnreg": 168, **LATE_ADDRESSES}

    acc = None if config.wide and split else acc
    terms = (share, None if diagonals is None else diagonals.acc, table, tau)
    tensors = (call.q, do, call.k, call.v, dk, dv, lse2, delta, acc, *terms, cu_q, cu_k, cu_tiles, first_tiles, delta)
    launch.start(_bwd_kernel, tensors, describe)
