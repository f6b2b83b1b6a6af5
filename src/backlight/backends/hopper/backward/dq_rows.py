"""dq from a kernel that owns rows (SPLIT): bitwise repeatable, for seven products instead of five.

It needs neither an accumulator nor an order of additions: two consumer warpgroups own 64 rows each and visit their key blocks;
s and dp are computed again, and ds goes from registers straight into ds k.
"""

# device code: compiled by Triton from its own types, never run by Python

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, ROWS_K_EMPTY, ROWS_V_EMPTY
from backlight.backends.hopper.compat import Maybe, arguments, warpgroup_mma_wait
from backlight.backends.hopper.config import dq_config
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import (
    WM,
    bar_arrive,
    bar_sync,
    barriers,
    key_blocks,
    load_tile,
    locate,
    mma_over_columns,
    phase_of,
    pieces,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.scores import gradient, hidden_out, of_rows, seen_keys, surviving, weights
from backlight.backends.hopper.terms import (
    TABLE_PAD,
    bias_tile,
    cap_factor,
    cap_slope,
    capped,
    key_band,
    table_of,
    threshold,
    unit_of,
)
from backlight.spec import LOG2E


@arguments
class RowOwner:
    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dq_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    share_ptr: Maybe
    table_ptr: Maybe
    tau_ptr: Maybe
    q_s: gl.shared_memory_descriptor
    do_s: gl.shared_memory_descriptor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    b: gl.tensor
    h: gl.tensor
    kv_head: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    i0: gl.tensor
    padded_row: gl.tensor
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
    BN: gl.constexpr
    NC: gl.constexpr
    ST: gl.constexpr
    VST: gl.constexpr
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    VARLEN: gl.constexpr


@gluon.jit
def producer(p):
    for w in gl.static_range(p.NC):
        bar = p.rows_full.index(w)
        mbarrier.expect(bar, p.q_desc.block_type.nbytes + p.do_desc.block_type.nbytes)
        load_tile(p.q_desc, p.b, p.h, p.q_start, p.sq, p.i0 + w * WM, bar, p.q_s.index(w), p.VARLEN)
        load_tile(p.do_desc, p.b, p.h, p.q_start, p.sq, p.i0 + w * WM, bar, p.do_s.index(w), p.VARLEN)
    for j in range(p.begin, p.end):
        k_stage = stage_of(j - p.begin, p.ST)
        v_stage = stage_of(j - p.begin, p.VST)
        if j - p.begin >= p.ST:
            bar_sync(ROWS_K_EMPTY + k_stage, BOTH_GROUPS_AND_WARP)
        mbarrier.expect(p.k_full.index(k_stage), p.k_desc.block_type.nbytes)
        load_tile(p.k_desc, p.b, p.kv_head, p.k_start, p.sk, j * p.BN, p.k_full.index(k_stage), p.k_s.index(k_stage), p.VARLEN)
        if j - p.begin >= p.VST:
            bar_sync(ROWS_V_EMPTY + v_stage, BOTH_GROUPS_AND_WARP)
        mbarrier.expect(p.v_full.index(v_stage), p.v_desc.block_type.nbytes)
        load_tile(p.v_desc, p.b, p.kv_head, p.k_start, p.sk, j * p.BN, p.v_full.index(v_stage), p.v_s.index(v_stage), p.VARLEN)
    # every arrival is met, those of the last round included
    count = p.end - p.begin
    for i in gl.static_range(p.ST):
        if count >= p.ST - i:
            bar_sync(ROWS_K_EMPTY + stage_of(count + i, p.ST), BOTH_GROUPS_AND_WARP)
    for i in gl.static_range(p.VST):
        if count >= p.VST - i:
            bar_sync(ROWS_V_EMPTY + stage_of(count + i, p.VST), BOTH_GROUPS_AND_WARP)


@gluon.jit
def key_block(p, q, do, dq, lse, delta, share, limit, j, W: gl.constexpr):
    BN: gl.constexpr = p.BN
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[2]))
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    zero = gl.zeros([WM, BN], gl.float32, s_l)
    k_stage = stage_of(j - p.begin, p.ST)
    v_stage = stage_of(j - p.begin, p.VST)
    mbarrier.wait(p.k_full.index(k_stage), phase_of(j - p.begin, p.ST))
    # 1: s = q k^T
    s_token = mma_over_columns(q, p.k_s.index(k_stage), zero, p.D)
    mbarrier.wait(p.v_full.index(v_stage), phase_of(j - p.begin, p.VST))
    # 2: dp = do v^T
    dp_token = mma_over_columns(do, p.v_s.index(v_stage), zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    if p.cap is not None:
        s = capped(s, p.cap)
    x = s
    if p.table_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if (j >= p.band_begin) & (j < p.band_end):
            column = p.i0 + W * WM + p.sk - p.sq - j * BN + p.origin
            x = s + bias_tile(p.table_ptr, column, p.n_bias, zero, False)
    pr = weights(x, lse, p.scale_log2, False)
    if (j < p.plain_begin) | (j >= p.plain_end):
        position = p.i0 + W * WM + p.sk - p.sq + gl.arange(0, WM, row_l)
        seen = seen_keys(s, position, j * BN, p.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        pr = hidden_out(pr, seen, p.share_ptr is not None)
    dp, pr = warpgroup_mma_wait(0, deps=[dp_token, pr])
    bar_arrive(ROWS_V_EMPTY + v_stage, BOTH_GROUPS_AND_WARP)
    if p.share_ptr is not None:
        dp = surviving(dp, pr + of_rows(share, False), limit)
        pr = gl.maximum(pr, 0.0)
    ds = gradient(pr, dp, delta, False)
    if p.cap is not None:
        ds = ds * cap_slope(s)
    ds16 = gl.convert_layout(ds.to(p.q_desc.dtype), a_l, assert_trivial=True)
    # 4: dq += ds k
    dq_token = warpgroup_mma(ds16, p.k_s.index(k_stage), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    bar_arrive(ROWS_K_EMPTY + k_stage, BOTH_GROUPS_AND_WARP)
    return dq


@gluon.jit
def consumer(p, W: gl.constexpr):
    BD: gl.constexpr = p.q_s.shape[2]
    row_l: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, p.BN, 16]))
    q = p.q_s.index(W)
    do = p.do_s.index(W)
    row = p.padded_row + W * WM + gl.arange(0, WM, row_l)
    # rows beyond those of the sequence belong to others or to nobody: their results are not stored
    lse = gl.load(p.lse_ptr + row)
    delta = gl.load(p.delta_ptr + row)
    share = delta
    limit = 0.0
    if p.share_ptr is not None:
        share = gl.load(p.share_ptr + row)
        limit = threshold(gl.load(p.tau_ptr + p.h).to(gl.float32))
    dq = gl.zeros([WM, BD], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16]))
    mbarrier.wait(p.rows_full.index(W), 0)
    for j in range(p.begin, p.end):
        dq = key_block(p, q, do, dq, lse, delta, share, limit, j, W)
    q.store((dq * p.scale).to(p.q_desc.dtype))
    fence_async_shared()
    store_tile(p.dq_desc, p.b, p.h, p.q_start, p.sq, p.i0 + W * WM, q, p.VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_segments", "padded_rows", "heads", "group", "sq", "sk", "left", "right", "n_bias", "origin"])
def _dq_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    lse_ptr,
    delta_ptr,
    share_ptr,
    table_ptr,
    tau_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    cu_padded_ptr,
    n_segments,
    padded_rows,
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
    BN: gl.constexpr,
    PAD: gl.constexpr,
    ST: gl.constexpr,
    VST: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    VARLEN: gl.constexpr,
):
    NC: gl.constexpr = 2
    BM: gl.constexpr = NC * WM
    dtype: gl.constexpr = q_desc.dtype
    tile = gl.program_id(0)
    if HAS_RIGHT and not VARLEN:
        # causal: the longest rows first
        tile = gl.num_programs(0) - 1 - tile
    head = gl.program_id(1)
    h = head % heads
    # first row of this head, or of its sequence, in the padded vectors
    padded_row = head * padded_rows
    q_start = tile * 0
    k_start = tile * 0
    if VARLEN:
        z, first = locate(tile, cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        tile -= first
        padded_row += gl.load(cu_padded_ptr + z) * PAD
        q_start = gl.load(cu_q_ptr + z)
        k_start = gl.load(cu_k_ptr + z)
        sq = gl.load(cu_q_ptr + z + 1) - q_start
        sk = gl.load(cu_k_ptr + z + 1) - k_start
    i0 = tile * BM
    shift = sk - sq
    last_position = gl.minimum(i0 + BM, sq) - 1 + shift
    begin, plain_begin, plain_end, end = key_blocks(i0 + shift, last_position, sk, left, right, BN, HAS_LEFT, HAS_RIGHT)
    band_begin = None
    band_end = None
    if table_ptr is not None:
        table_ptr += h.to(gl.int64) * (n_bias + 2 * TABLE_PAD)
        band_begin, band_end = key_band(i0 + shift, last_position, origin, n_bias, BN)

    q_s = gl.allocate_shared_memory(dtype, [NC, WM, BD], gl.NVMMASharedLayout.get_default_for([WM, BD], dtype))
    do_s = gl.allocate_shared_memory(dtype, [NC, WM, BDV], gl.NVMMASharedLayout.get_default_for([WM, BDV], dtype))
    k_s = gl.allocate_shared_memory(dtype, [ST, BN, BD], gl.NVMMASharedLayout.get_default_for([BN, BD], dtype))
    v_s = gl.allocate_shared_memory(dtype, [VST, BN, BDV], gl.NVMMASharedLayout.get_default_for([BN, BDV], dtype))
    args = RowOwner(
        q_desc=q_desc,
        do_desc=do_desc,
        k_desc=k_desc,
        v_desc=v_desc,
        dq_desc=dq_desc,
        lse_ptr=lse_ptr,
        delta_ptr=delta_ptr,
        share_ptr=share_ptr,
        table_ptr=table_ptr,
        tau_ptr=tau_ptr,
        q_s=q_s,
        do_s=do_s,
        k_s=k_s,
        v_s=v_s,
        rows_full=barriers(NC, 1),
        k_full=barriers(ST, 1),
        v_full=barriers(VST, 1),
        b=head // heads,
        h=h,
        kv_head=h // group,
        q_start=q_start,
        k_start=k_start,
        sq=sq,
        sk=sk,
        i0=i0,
        padded_row=padded_row + i0,
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
        BN=BN,
        NC=NC,
        ST=ST,
        VST=VST,
        HAS_LEFT=HAS_LEFT,
        HAS_RIGHT=HAS_RIGHT,
        VARLEN=VARLEN,
    )
    fence_async_shared()
    gl.warp_specialize([(consumer, (args, 0)), (consumer, (args, 1)), (producer, (args,))], [4, 1], [240, 24])


def split_dq(launch: Launch, rows: Rows, dq: Tensor) -> None:
    call = launch.call
    config = launch.once("dq", lambda: dq_config(call))
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, 128)
    table = table_of(call)
    tau = None if call.tau is None else call.tau.contiguous()

    def describe() -> dict[str, Any]:
        args = [
            launch.rows(call.q, 64, launch.bd),
            launch.rows(rows.do, 64, launch.bdv),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(dq, 64, launch.bd),
            rows.lse2,
            rows.delta,
            rows.share,
            table,
            tau,
            cu_q,
            cu_k,
            first_tiles,
            rows.first_tiles,
            n_segments,
            rows.tiles * rows.config.block_m,
            *launch.geometry,
            call.scale,
            unit_of(call) * LOG2E,
            None if call.spec.softcap is None else cap_factor(call),
            None if call.bias is None else call.bias.shape[1],
            None if call.bias is None else call.spec.bias_origin,
        ]
        constants = {
            "D": launch.d,
            "DV": launch.dv,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BN": config.block_n,
            "PAD": rows.config.block_m,
            "ST": config.stages,
            "VST": config.v_stages,
            **launch.flags,
        }
        grid = (launch.row_tiles(128), launch.batch * launch.heads)
        return {"grid": grid, "args": args, "constants": constants, "num_warps": 4, "maxnreg": 168}

    row_state = (rows.lse2, rows.delta, rows.share, table, tau)
    tensors = (call.q, rows.do, call.k, call.v, dq, *row_state, cu_q, cu_k, first_tiles, rows.first_tiles)
    launch.start(_dq_kernel, tensors, describe)
