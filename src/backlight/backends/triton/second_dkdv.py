"""dk, dv of second derivatives: one program owns BN keys of a key head and visits the rows that see them, in [keys, rows] tiles
(eq. 58, split form). Heads of a group are summed, and wide heads take two launches, as in `dkdv.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.config import second_key_kernels
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import at, load_tile, row_state, row_tile, store_tile, stream_tile
from backlight.backends.triton.moving import (
    add_pairs,
    below_cap,
    ds_of,
    score_gradient,
    scores_and_cap,
    tangent_gradient,
)
from backlight.backends.triton.pair import pair_place
from backlight.backends.triton.primitives import Sight, cut_rows, row_span, segment_of, tile_weights
from backlight.backends.triton.second_rows import Prepared
from backlight.backends.triton.visits import intervals_of, tiles_of, visited, visits_of


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _second_dkdv_kernel(
    q_rows, tq_rows, do_rows, dto_rows, q_desc, tq_desc, do_desc, dto_desc, k_rows, v_rows, tk_rows, tv_rows, dk_rows, dv_rows,
    sums, table_ptr, ttable_ptr, pairs, scale, pitch16, mask, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, TMA: tl.constexpr, DIRECT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    kv_heads = geometry.heads // geometry.group
    batch = tl.program_id(1) // kv_heads
    g = tl.program_id(1) % kv_heads
    segment, tile = segment_of(tl.program_id(0), packing, sq, sk, n_segments, V)
    whole_sq = sq
    row_tiles = tiles_of(sq, n_segments, V, BM)
    sq = segment.sq
    j0 = tile * BN
    n_keys = segment.sk - j0
    shift = segment.sk - sq
    span = row_span(j0, tl.minimum(j0 + BN, segment.sk) - 1, sq, segment.sk, geometry, V, BM)
    keys = (j0 + tl.arange(0, BN))[:, None]
    row_lanes = tl.arange(0, BM)[None, :]
    first = segment.k_start + j0
    # dv = p^T do + (p (ts - mu))^T dto: without a gradient at the tangent it needs no scores' tangent
    MOVES: tl.constexpr = WANT_DK or T.DTO
    k = load_tile(at(k_rows, batch, g, first), k_rows.row, 0, n_keys, BN, V.D, V.BD)
    if T.K and MOVES:
        tk = load_tile(at(tk_rows, batch, g, first), tk_rows.row, 0, n_keys, BN, V.D, V.BD)
    BD: tl.constexpr = V.BD
    BDV: tl.constexpr = V.BDV
    if WANT_DK:
        v = load_tile(at(v_rows, batch, g, first), v_rows.row, 0, n_keys, BN, V.DV, V.BDV)
        if T.V and T.DTO:
            tv = load_tile(at(tv_rows, batch, g, first), tv_rows.row, 0, n_keys, BN, V.DV, V.BDV)
        dk = tl.zeros([BN, BD], tl.float32)
    if WANT_DV:
        dv = tl.zeros([BN, BDV], tl.float32)
    for member in range(geometry.group):
        h = g * geometry.group + member
        offset = row_state(batch, h, segment.q_start, pitch16, geometry)
        own_table_ptr = head_table(table_ptr, h, geometry, False)
        own_ttable_ptr = head_table(ttable_ptr, h, geometry, False)
        visits = visits_of(span, mask, batch, h, tl.program_id(0), tl.num_programs(0) + 1, row_tiles, geometry, V, BM)
        intervals = intervals_of(mask, batch, h, segment, whole_sq, sk, n_segments, geometry, V, BN)
        sight = Sight(intervals, segment, packing)
        if pairs.columns_ptr is not None:
            column = tl.zeros([BN], tl.float32)
        if visits.start < visits.stop:
            for step in range(visits.start, visits.stop, BM):
                i0, at_edge = visited(step, visits, V, BM)
                i0 = tl.multiple_of(i0, BM)
                q = stream_tile(q_rows, q_desc, (batch, h, segment.q_start), i0, sq, BM, V.D, V.BD, TMA)
                minus_lse2 = row_tile(sums.minus_lse2 + offset, i0, sq, float("-inf"), V, DIRECT, BN, BM)
                t = tl.dot(k, tl.trans(q), input_precision=V.PRECISION)
                tx = 0.0
                if T.Q and MOVES:
                    tq = stream_tile(tq_rows, tq_desc, (batch, h, segment.q_start), i0, sq, BM, V.D, V.BD, TMA)
                    tx = tl.dot(k, tl.trans(tq), input_precision=V.PRECISION)
                if T.K and MOVES:
                    if T.Q:
                        tx = tl.dot(tk, tl.trans(q), tx, input_precision=V.PRECISION)
                    else:
                        tx = tl.dot(tk, tl.trans(q), input_precision=V.PRECISION)
                s, tanh, slope = scores_and_cap(t, minus_lse2, geometry, V)
                tx = tx * scale
                place = pair_place(batch, h, i0, j0, segment, V)
                s, ts = add_pairs(s, below_cap(tx, slope, V), pairs, place, sq, V, T, BM, BN, True)
                entry = table_entry(i0 + shift - j0 + geometry.bias_origin, geometry, False)
                if V.BIAS:
                    s = add_bias(s, geometry.unit, own_table_ptr, entry, i0, span, geometry, V, BN, BM)
                if T.BIAS and MOVES:
                    ts = add_bias(
                        ts + tl.zeros([BN, BM], tl.float32), 1.0, own_ttable_ptr, entry, i0, span, geometry, V, BN, BM
                    )
                if T.DTO:
                    dto = stream_tile(dto_rows, dto_desc, (batch, h, segment.q_start), i0, sq, BM, V.DV, V.BDV, TMA)
                if T.DO:
                    do = stream_tile(do_rows, do_desc, (batch, h, segment.q_start), i0, sq, BM, V.DV, V.BDV, TMA)
                # keys beyond the end are not stored, rows beyond theirs weigh nothing: neither needs a mask
                at_edge = cut_rows(i0, span, at_edge, V)
                position = i0 + shift + row_lanes
                p, _ = tile_weights(s, 0.0, 0.0, position, keys, at_edge, sight, geometry, V, BN)
                if MOVES:
                    ta = p * (ts - row_tile(sums.mu + offset, i0, sq, 0.0, V, DIRECT, BN, BM))
                if WANT_DV:
                    if T.DO:
                        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=V.PRECISION)
                    if T.DTO:
                        dv = tl.dot(ta.to(dto.dtype), dto, dv, input_precision=V.PRECISION)
                if WANT_DK:
                    # one product at a time: two accumulators leave no room for both tiles
                    b = 0.0
                    if T.DTO:
                        b = tl.dot(v, tl.trans(dto), input_precision=V.PRECISION)
                    eta = row_tile(sums.eta + offset, i0, sq, 0.0, V, DIRECT, BN, BM)
                    dtx, part = tangent_gradient(p, ta, tx, tanh, slope, b, eta, geometry, V, T)
                    if T.Q:
                        dk = tl.dot(dtx.to(q.dtype), tq, dk, input_precision=V.PRECISION)
                    c = 0.0
                    if T.DO:
                        c = tl.dot(v, tl.trans(do), input_precision=V.PRECISION)
                    if T.DTO and T.V:
                        if T.DO:
                            c = tl.dot(tv, tl.trans(dto), c, input_precision=V.PRECISION)
                        else:
                            c = tl.dot(tv, tl.trans(dto), input_precision=V.PRECISION)
                    delta = row_tile(sums.delta + offset, i0, sq, 0.0, V, DIRECT, BN, BM)
                    if pairs.columns_ptr is not None:
                        column += tl.sum(ds_of(p, ta, b, eta, c, delta), 1)
                    dx = score_gradient(p, c, delta, part, slope, V)
                    dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=V.PRECISION)
        if pairs.columns_ptr is not None:
            at_key = tl.cast(batch * geometry.heads + h, tl.int64) * sk + first + tl.arange(0, BN)
            tl.store(pairs.columns_ptr + at_key, column, mask=tl.arange(0, BN) < n_keys)
    if WANT_DK:
        store_tile(at(dk_rows, batch, g, first), dk_rows.row, n_keys, dk * scale, BN, V.D, V.BD)
    if WANT_DV:
        store_tile(at(dv_rows, batch, g, first), dv_rows.row, n_keys, dv, BN, V.DV, V.BDV)


def second_dkdv_of(launch: Launch, given: Prepared, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """columns [B,Hq,Sk] is filled with the column sums of ds."""
    call = launch.call
    dk, dv = torch.empty_like(call.k), torch.empty_like(call.v)
    for kernel in second_key_kernels(call):
        _start(kernel, launch, given, dk, dv, columns if "dk" in kernel else None)
    return dk, dv


def _start(kernel: str, launch: Launch, given: Prepared, dk: Tensor, dv: Tensor, columns: Tensor | None) -> None:
    call = launch.call
    config = launch.config(kernel)
    grid = launch.key_grid(config.block_n)
    if grid[0] and grid[1]:
        streamed = (launch.q, given.tq, given.do, given.dto)
        tma, descriptors = launch.descriptors(config, config.block_m, *streamed)
        launch.start(
            _second_dkdv_kernel,
            grid,
            *(rows_of(x) for x in streamed),
            *descriptors,
            *(rows_of(x) for x in (launch.k, launch.v, given.tk, given.tv, dk, dv)),
            given.sums,
            launch.table,
            given.ttable,
            given.pairs(launch, columns=columns),
            float(call.scale),
            given.pitch16,
            launch.mask(config, of_rows=False),
            *launch.shared(call.cu_seqlens_k, config.block_n),
            V=launch.variant,
            T=given.moving,
            WANT_DK="dk" in kernel,
            WANT_DV="dv" in kernel,
            TMA=tma,
            DIRECT=config.direct and launch.nvidia and not call.varlen,
            **config.launch,
        )
