"""dq, in the two ways the backward makes it: converting the accumulated tiles, or a kernel that owns rows (SPLIT).

The main kernel adds dq tiles in the order of its register fragments; `_dq_convert_kernel` reads them through the same layout,
scales and converts. `_dq_kernel` needs neither accumulator nor order of additions: NC consumer warpgroups own 64 rows each and
visit their key blocks, s and dp recomputed, ds going from registers straight into ds k. Seven products instead of five.
"""

# device code: compiled by Triton from its own types, never run by Python

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

from backlight.backends.hopper.compat import arguments, smem_reinterpret, tma_load
from backlight.backends.hopper.config import dq_config
from backlight.backends.hopper.launch import Launch, start
from backlight.backends.hopper.prepass import Rows
from backlight.backends.hopper.primitives import (
    WM,
    barriers,
    before,
    between,
    key_blocks,
    key_limits,
    load_tile,
    locate,
    mma_over_columns,
    phase_of,
    pieces,
    stage_of,
    store_tile,
)
from backlight.spec import LOG2E

# --- from the accumulator ----------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def dq_fragments(BM, BD):
    """Accumulator of the main kernel's dq [BM, BD]: eight warps."""
    along = 4 if BM == 64 else 8
    return gl.NVMMADistributedLayout([3, 0], [along, 8 // along], [16, BD * along // 8, 16])


@gluon.constexpr_function
def dq_tile_layout(BM, BD):
    """Shared memory in the order of those fragments: two registers of two rows make 16 bytes, then lanes, registers, warps."""
    along = 4 if BM == 64 else 8
    columns = BD * along // 8
    bases = [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    column = 8
    while column < columns:
        bases.append([0, column])
        column *= 2
    row = 16
    while row < BM:
        bases.append([row, 0])
        row *= 2
    while column < BD:
        bases.append([0, column])
        column *= 2
    return gl.SharedLinearLayout(offset_bases=bases, block_bases=[], alignment=1024)


@gluon.jit(do_not_specialize=["n_segments", "heads", "sq", "tiles"])
def _dq_convert_kernel(
    acc_desc,
    dq_desc,
    cu_q_ptr,
    cu_tiles_ptr,
    n_segments,
    heads,
    sq,
    tiles,
    scale,
    BM: gl.constexpr,
    BD: gl.constexpr,
    VARLEN: gl.constexpr,
):
    tile = gl.program_id(0)
    head = gl.program_id(1)
    row = (head * tiles + tile) * BM
    start = tile * 0
    if VARLEN:
        z, first = locate(tile, cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        tile -= first
        start = gl.load(cu_q_ptr + z)
        sq = gl.load(cu_q_ptr + z + 1) - start
    dtype: gl.constexpr = dq_desc.dtype
    acc_s = gl.allocate_shared_memory(gl.float32, [BM, BD], acc_desc.layout)
    out_s = gl.allocate_shared_memory(dtype, [BM, BD], gl.NVMMASharedLayout.get_default_for([BM, BD], dtype))
    full = barriers(1, 1)
    fence_async_shared()
    mbarrier.expect(full.index(0), BM * BD * 4)
    tma_load(acc_desc, [row, 0], full.index(0), acc_s)
    mbarrier.wait(full.index(0), 0)
    fragments = smem_reinterpret(acc_s, gl.float32, [BM, BD], dq_tile_layout(BM, BD)).load(dq_fragments(BM, BD))
    out_s.store((fragments * scale).to(dtype))
    fence_async_shared()
    store_tile(dq_desc, head // heads, head % heads, start, sq, tile * BM, out_s, VARLEN)
    tma.store_wait(0)


def convert_dq(launch: Launch, rows: Rows, dq: Tensor) -> None:
    block = rows.config.block_m
    start(
        _dq_convert_kernel,
        (rows.tiles, launch.batch * launch.heads),
        [
            rows.accumulator(launch.bd),
            launch.rows(dq, block, launch.bd),
            rows.cu_q,
            rows.first_tiles,
            rows.n_segments,
            launch.heads,
            launch.sq,
            rows.tiles,
            launch.call.scale,
        ],
        {
            "BM": block,
            "BD": launch.bd,
            "VARLEN": launch.call.varlen,
        },
        num_warps=8,
    )


# --- by a kernel that owns rows ----------------------------------------------------------------------------------------------


@arguments
class RowOwner:
    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dq_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    delta_ptr: gl.tensor
    q_s: gl.shared_memory_descriptor
    do_s: gl.shared_memory_descriptor
    k_s: gl.shared_memory_descriptor
    v_s: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
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
        mbarrier.wait(p.k_empty.index(k_stage), phase_of(j - p.begin, p.ST) ^ 1)
        mbarrier.expect(p.k_full.index(k_stage), p.k_desc.block_type.nbytes)
        load_tile(p.k_desc, p.b, p.kv_head, p.k_start, p.sk, j * p.BN, p.k_full.index(k_stage), p.k_s.index(k_stage), p.VARLEN)
        mbarrier.wait(p.v_empty.index(v_stage), phase_of(j - p.begin, p.VST) ^ 1)
        mbarrier.expect(p.v_full.index(v_stage), p.v_desc.block_type.nbytes)
        load_tile(p.v_desc, p.b, p.kv_head, p.k_start, p.sk, j * p.BN, p.v_full.index(v_stage), p.v_s.index(v_stage), p.VARLEN)


@gluon.jit
def key_block(p, q, do, dq, lse, delta, j, W: gl.constexpr):
    BN: gl.constexpr = p.BN
    PIECES: gl.constexpr = len(pieces(p.DV, p.v_s.shape[2]))
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    zero = gl.zeros([WM, BN], gl.float32, s_l)
    k_stage = stage_of(j - p.begin, p.ST)
    v_stage = stage_of(j - p.begin, p.VST)
    mbarrier.wait(p.k_full.index(k_stage), phase_of(j - p.begin, p.ST))
    s_token = mma_over_columns(q, p.k_s.index(k_stage), zero, p.D)
    mbarrier.wait(p.v_full.index(v_stage), phase_of(j - p.begin, p.VST))
    dp_token = mma_over_columns(do, p.v_s.index(v_stage), zero, p.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    pr = gl.exp2(s * p.scale_log2 - gl.expand_dims(lse, 1))
    if (j < p.plain_begin) | (j >= p.plain_end):
        position = p.i0 + W * WM + p.sk - p.sq + gl.arange(0, WM, row_l)
        first, end = key_limits(position, p.sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
        columns = gl.arange(0, BN, gl.SliceLayout(0, s_l))
        if p.HAS_LEFT:
            seen = between(first - j * BN, end - j * BN, columns)
        else:
            seen = before(end - j * BN, columns)
        pr = gl.where(seen, pr, 0.0)
    dp = warpgroup_mma_wait(0, deps=[dp_token])
    mbarrier.arrive(p.v_empty.index(v_stage), count=1)
    ds = pr * (dp - gl.expand_dims(delta, 1))
    ds16 = gl.convert_layout(ds.to(p.q_desc.dtype), a_l, assert_trivial=True)
    dq_token = warpgroup_mma(ds16, p.k_s.index(k_stage), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    mbarrier.arrive(p.k_empty.index(k_stage), count=1)
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
    dq = gl.zeros([WM, BD], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16]))
    mbarrier.wait(p.rows_full.index(W), 0)
    for j in range(p.begin, p.end):
        dq = key_block(p, q, do, dq, lse, delta, j, W)
    q.store((dq * p.scale).to(p.q_desc.dtype))
    fence_async_shared()
    store_tile(p.dq_desc, p.b, p.h, p.q_start, p.sq, p.i0 + W * WM, q, p.VARLEN)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_segments", "padded_rows", "heads", "group", "sq", "sk", "left", "right"])
def _dq_kernel(
    q_desc,
    do_desc,
    k_desc,
    v_desc,
    dq_desc,
    lse_ptr,
    delta_ptr,
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
        q_s=q_s,
        do_s=do_s,
        k_s=k_s,
        v_s=v_s,
        rows_full=barriers(NC, 1),
        k_full=barriers(ST, 1),
        k_empty=barriers(ST, NC),
        v_full=barriers(VST, 1),
        v_empty=barriers(VST, NC),
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
    call, config = launch.call, dq_config(launch.call)
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, 128)
    start(
        _dq_kernel,
        (launch.row_tiles(128), launch.batch * launch.heads),
        [
            launch.rows(call.q, 64, launch.bd),
            launch.rows(rows.do, 64, launch.bdv),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(dq, 64, launch.bd),
            rows.lse2,
            rows.delta,
            cu_q,
            cu_k,
            first_tiles,
            rows.first_tiles,
            n_segments,
            rows.tiles * rows.config.block_m,
            *launch.geometry,
            call.scale,
            call.scale * LOG2E,
        ],
        {
            "D": launch.d,
            "DV": launch.dv,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BN": config.block_n,
            "PAD": rows.config.block_m,
            "ST": config.stages,
            "VST": config.v_stages,
            **launch.flags,
        },
        num_warps=4,
        maxnreg=168,
    )
