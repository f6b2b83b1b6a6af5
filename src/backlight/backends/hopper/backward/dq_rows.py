"""dq from a kernel that owns rows (SPLIT): bitwise repeatable, for seven products instead of five.

It needs neither an accumulator nor an order of additions: two consumer warpgroups own 64 rows each and visit their key blocks;
s and dp are computed again, and ds goes from registers straight into ds k.
"""

# device code: compiled by Triton from its own types, never run by Python

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from backlight.backends.hopper.arguments import Head, Packing, Sizes
from backlight.backends.hopper.backward.arguments import Terms, table_numbers, units_of
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
    tiles_of,
)
from backlight.backends.hopper.scores import gradient, hidden_out, of_rows, seen_keys, surviving, weights
from backlight.backends.hopper.terms import TABLE_PAD, bias_tile, cap_slope, capped, key_band, threshold

# consumer warpgroups
NC = gl.constexpr(2)
BM = gl.constexpr(2 * 64)


class Variant(NamedTuple):
    """What is compiled in. PAD: rows of a block of the padded vectors; ST, VST: stages of the rings of K and V."""

    D: int
    DV: int
    BD: int
    BDV: int
    BN: int
    PAD: int
    ST: int
    VST: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    VARLEN: bool


@arguments
class RowOwner(Sizes):
    """Sizes, and the kernel's other arguments in their order."""

    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dq_desc: tma.tensor_descriptor
    rows: Maybe
    terms: Maybe
    packing: Maybe
    n_segments: gl.tensor
    padded_rows: gl.tensor
    units: Maybe
    n_bias: Maybe
    origin: Maybe
    V: gl.constexpr


@arguments
class RowTile(Head):
    """128 rows of a query head from i0 on, and the key blocks that they see; the band meets the head's bias table."""

    i0: gl.tensor
    padded_row: gl.tensor
    begin: gl.tensor
    plain_begin: gl.tensor
    plain_end: gl.tensor
    end: gl.tensor
    table_ptr: Maybe
    band_begin: Maybe
    band_end: Maybe


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor


@arguments
class OwnRows:
    """What a warpgroup knows of its rows; with tau also tau / n and the `threshold` of survivors."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.tensor
    delta: gl.tensor
    share: Maybe
    limit: Maybe


@gluon.jit
def load_own(p, t, desc, w, bar, dst):
    load_tile(desc, t.b, t.h, t.q_start, t.sq, t.i0 + w * WM, bar, dst, p.V.VARLEN)


@gluon.jit
def load_keys(p, t, desc, j, bar, dst):
    mbarrier.expect(bar, desc.block_type.nbytes)
    load_tile(desc, t.b, t.kv_head, t.k_start, t.sk, j * p.V.BN, bar, dst, p.V.VARLEN)


@gluon.jit
def producer(p, t, buffers):
    ST: gl.constexpr = p.V.ST
    VST: gl.constexpr = p.V.VST
    for w in gl.static_range(NC):
        bar = buffers.rows_full.index(w)
        mbarrier.expect(bar, p.q_desc.block_type.nbytes + p.do_desc.block_type.nbytes)
        load_own(p, t, p.q_desc, w, bar, buffers.q.index(w))
        load_own(p, t, p.do_desc, w, bar, buffers.do.index(w))
    for j in range(t.begin, t.end):
        k_stage = stage_of(j - t.begin, ST)
        v_stage = stage_of(j - t.begin, VST)
        if j - t.begin >= ST:
            bar_sync(ROWS_K_EMPTY + k_stage, BOTH_GROUPS_AND_WARP)
        load_keys(p, t, p.k_desc, j, buffers.k_full.index(k_stage), buffers.k.index(k_stage))
        if j - t.begin >= VST:
            bar_sync(ROWS_V_EMPTY + v_stage, BOTH_GROUPS_AND_WARP)
        load_keys(p, t, p.v_desc, j, buffers.v_full.index(v_stage), buffers.v.index(v_stage))
    # every arrival is met, those of the last round included
    count = t.end - t.begin
    for i in gl.static_range(ST):
        if count >= ST - i:
            bar_sync(ROWS_K_EMPTY + stage_of(count + i, ST), BOTH_GROUPS_AND_WARP)
    for i in gl.static_range(VST):
        if count >= VST - i:
            bar_sync(ROWS_V_EMPTY + stage_of(count + i, VST), BOTH_GROUPS_AND_WARP)


@gluon.jit
def key_block(p, t, buffers, rows, dq, j, W: gl.constexpr):
    BN: gl.constexpr = p.V.BN
    PIECES: gl.constexpr = len(pieces(p.V.DV, buffers.v.shape[2]))
    s_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)
    a_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    zero = gl.zeros([WM, BN], gl.float32, s_l)
    k_stage = stage_of(j - t.begin, p.V.ST)
    v_stage = stage_of(j - t.begin, p.V.VST)
    mbarrier.wait(buffers.k_full.index(k_stage), phase_of(j - t.begin, p.V.ST))
    # 1: s = q k^T
    s_token = mma_over_columns(rows.q, buffers.k.index(k_stage), zero, p.V.D)
    mbarrier.wait(buffers.v_full.index(v_stage), phase_of(j - t.begin, p.V.VST))
    # 2: dp = do v^T
    dp_token = mma_over_columns(rows.do, buffers.v.index(v_stage), zero, p.V.DV)
    s = warpgroup_mma_wait(PIECES, deps=[s_token])
    if p.units.cap is not None:
        s = capped(s, p.units.cap)
    x = s
    if t.table_ptr is not None:  # noqa: SIM102 (known to the compiler)
        if (j >= t.band_begin) & (j < t.band_end):
            column = t.i0 + W * WM + t.sk - t.sq - j * BN + p.origin
            x = s + bias_tile(t.table_ptr, column, p.n_bias, zero, False)
    pr = weights(x, rows.lse, p.units.scale_log2, False)
    if (j < t.plain_begin) | (j >= t.plain_end):
        position = t.i0 + W * WM + t.sk - t.sq + gl.arange(0, WM, row_l)
        seen = seen_keys(s, position, j * BN, t.sk, p.left, p.right, p.V.HAS_LEFT, p.V.HAS_RIGHT)
        pr = hidden_out(pr, seen, rows.share is not None)
    dp, pr = warpgroup_mma_wait(0, deps=[dp_token, pr])
    bar_arrive(ROWS_V_EMPTY + v_stage, BOTH_GROUPS_AND_WARP)
    if rows.share is not None:
        dp = surviving(dp, pr + of_rows(rows.share, False), rows.limit)
        pr = gl.maximum(pr, 0.0)
    ds = gradient(pr, dp, rows.delta, False)
    if p.units.cap is not None:
        ds = ds * cap_slope(s)
    ds16 = gl.convert_layout(ds.to(p.q_desc.dtype), a_l, assert_trivial=True)
    # 4: dq += ds k
    dq_token = warpgroup_mma(ds16, buffers.k.index(k_stage), dq, is_async=True)
    dq = warpgroup_mma_wait(0, deps=[dq_token])
    bar_arrive(ROWS_K_EMPTY + k_stage, BOTH_GROUPS_AND_WARP)
    return dq


@gluon.jit
def own_rows(p, t, buffers, W: gl.constexpr):
    BN: gl.constexpr = p.V.BN
    row_l: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    row = t.padded_row + W * WM + gl.arange(0, WM, row_l)
    # rows beyond those of the sequence belong to others or to nobody: their results are not stored
    lse = gl.load(p.rows.lse_ptr + row)
    delta = gl.load(p.rows.delta_ptr + row)
    share = None
    limit = None
    if p.rows.share_ptr is not None:
        share = gl.load(p.rows.share_ptr + row)
        limit = threshold(gl.load(p.terms.tau_ptr + t.h).to(gl.float32))
    return OwnRows(buffers.q.index(W), buffers.do.index(W), lse, delta, share, limit)


@gluon.jit
def consumer(p, t, buffers, W: gl.constexpr):
    BD: gl.constexpr = p.V.BD
    rows = own_rows(p, t, buffers, W)
    dq = gl.zeros([WM, BD], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BD, 16]))
    mbarrier.wait(buffers.rows_full.index(W), 0)
    for j in range(t.begin, t.end):
        dq = key_block(p, t, buffers, rows, dq, j, W)
    rows.q.store((dq * p.units.scale).to(p.q_desc.dtype))
    fence_async_shared()
    store_tile(p.dq_desc, t.b, t.h, t.q_start, t.sq, t.i0 + W * WM, rows.q, p.V.VARLEN)
    tma.store_wait(0)


@gluon.jit
def row_tile(p, tile, z):
    """Rows [i0, i0 + 128) of packed sequence z, or of the whole batch entry."""
    head = gl.program_id(1)
    h = head % p.heads
    # first row of this head, or of its sequence, in the padded vectors
    padded_row = head * p.padded_rows
    q_start = tile * 0
    k_start = tile * 0
    sq = p.sq
    sk = p.sk
    if p.V.VARLEN:
        padded_row += gl.load(p.packing.cu_row_tiles_ptr + z) * p.V.PAD
        q_start = gl.load(p.packing.cu_q_ptr + z)
        k_start = gl.load(p.packing.cu_k_ptr + z)
        sq = gl.load(p.packing.cu_q_ptr + z + 1) - q_start
        sk = gl.load(p.packing.cu_k_ptr + z + 1) - k_start
    i0 = tile * BM
    first = i0 + (sk - sq)
    last = gl.minimum(i0 + BM, sq) - 1 + (sk - sq)
    begin, plain_begin, plain_end, end = key_blocks(first, last, sk, p.left, p.right, p.V.BN, p.V.HAS_LEFT, p.V.HAS_RIGHT)
    table_ptr = None
    band_begin = None
    band_end = None
    if p.terms.table_ptr is not None:
        table_ptr = p.terms.table_ptr + h.to(gl.int64) * (p.n_bias + 2 * TABLE_PAD)
        band_begin, band_end = key_band(first, last, p.origin, p.n_bias, p.V.BN)
    return RowTile(
        head // p.heads, h, h // p.group, q_start, k_start, sq, sk, i0, padded_row + i0,
        begin, plain_begin, plain_end, end, table_ptr, band_begin, band_end,
    )  # fmt: skip


@gluon.jit
def memory_of(q_desc, V: gl.constexpr):
    q = tiles_of(q_desc.dtype, NC, WM, V.BD)
    do = tiles_of(q_desc.dtype, NC, WM, V.BDV)
    k = tiles_of(q_desc.dtype, V.ST, V.BN, V.BD)
    v = tiles_of(q_desc.dtype, V.VST, V.BN, V.BDV)
    return Buffers(q, do, k, v, barriers(NC, 1), barriers(V.ST, 1), barriers(V.VST, 1))


@gluon.jit(do_not_specialize=["n_segments", "padded_rows", "heads", "group", "sq", "sk", "left", "right", "n_bias", "origin"])
def _dq_kernel(
    q_desc, do_desc, k_desc, v_desc, dq_desc, rows, terms, packing,
    n_segments, padded_rows, heads, group, sq, sk, left, right, units, n_bias, origin, V: gl.constexpr,
):  # fmt: skip
    p = RowOwner(
        heads, group, sq, sk, left, right, q_desc, do_desc, k_desc, v_desc, dq_desc, rows, terms, packing,
        n_segments, padded_rows, units, n_bias, origin, V,
    )  # fmt: skip
    tile = gl.program_id(0)
    if V.HAS_RIGHT and not V.VARLEN:
        # causal: the longest rows first
        tile = gl.num_programs(0) - 1 - tile
    z = tile * 0
    if V.VARLEN:
        z, first = locate(tile, packing.cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        tile -= first
    t = row_tile(p, tile, z)
    buffers = memory_of(q_desc, V)
    fence_async_shared()
    gl.warp_specialize(
        [(consumer, (p, t, buffers, 0)), (consumer, (p, t, buffers, 1)), (producer, (p, t, buffers))], [4, 1], [240, 24]
    )


def split_dq(launch: Launch, rows: Rows, dq: Tensor) -> None:
    call, block = launch.call, BM.value
    assert call.rows is call.entmax is None, "the kernel that owns rows knows no lists of blocks to visit"
    config = launch.once("dq", lambda: dq_config(call))
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, block)
    packing, terms = Packing(cu_q, cu_k, first_tiles, rows.first_tiles), Terms(launch.table, launch.tau)

    def describe() -> dict[str, Any]:
        args = [
            launch.rows(call.q, 64, launch.bd),
            launch.rows(rows.do, 64, launch.bdv),
            launch.rows(call.k, config.block_n, launch.bd),
            launch.rows(call.v, config.block_n, launch.bdv),
            launch.rows(dq, 64, launch.bd),
            rows.state,
            terms,
            packing,
            n_segments,
            rows.tiles * rows.config.block_m,
            *launch.geometry,
            units_of(call),
            *table_numbers(call),
        ]
        variant = Variant(
            **launch.widths,
            BN=config.block_n,
            PAD=rows.config.block_m,
            ST=config.stages,
            VST=config.v_stages,
            **launch.flags,
        )
        grid = (launch.row_tiles(block), launch.batch * launch.heads)
        return {"grid": grid, "args": args, "constants": {"V": variant}, "num_warps": 4, "maxnreg": 168}

    launch.start(_dq_kernel, (call.q, rows.do, call.k, call.v, dq, *rows.state, *terms, *packing), describe)
