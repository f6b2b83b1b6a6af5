"""dbias of second derivatives: one program owns one offset between row tile and key tile and adds up the ds of eq. 58 there,
as `dbias.py` does with that of eq. 33."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import bias_tile, head_table, table_entry
from backlight.backends.triton.dbias import of_keys, parts_of, reaching_bias, store_diagonals, sum_of, tiles_at
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import row_state, stream_tile
from backlight.backends.triton.moving import below_cap, scores_and_cap, sums_of
from backlight.backends.triton.primitives import one_segment
from backlight.backends.triton.second_rows import Prepared
from backlight.backends.triton.visits import intervals_of


@triton.jit(do_not_specialize=["splits", "pitch16", "sq", "sk", "n_segments"])
def _second_dbias_kernel(
    q_rows, tq_rows, do_rows, dto_rows, k_rows, v_rows, tk_rows, tv_rows, sums, table_ptr, ttable_ptr, partial_ptr, scale,
    splits, pitch16, mask, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) % splits
    batch = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    g = h // geometry.group
    column = tl.program_id(0) // splits * BN
    row_lanes = tl.arange(0, BM)
    key_lanes = tl.arange(0, BN)
    bias, _cut = reaching_bias(table_ptr, h, column, geometry, V, BM, BN)
    tbias = 0.0
    if T.BIAS:
        tbias = bias_tile(head_table(ttable_ptr, h, geometry, True), table_entry(column, geometry, True), geometry, V, BM, BN)
    total = tl.zeros([BM, BN], tl.float32)
    segments = 1
    if V.VARLEN:
        segments = n_segments
    for z in range(segments):
        segment = one_segment(z, packing, sq, sk, V)
        q_start, k_start = segment.q_start, segment.k_start
        intervals = intervals_of(mask, batch, h, segment, sq, sk, n_segments, geometry, V, BN)
        ahead, first_tile, last_tile = tiles_at(segment, column, geometry, BM, BN)
        offset = row_state(batch, h, q_start, pitch16, geometry)
        # this split's tiles are first_tile + split, and every splits-th after it
        if first_tile + split < last_tile:
            for tile in range(first_tile + split, last_tile, splits):
                i0 = tl.multiple_of(tile * BM, BM)
                j0 = i0 + ahead
                keys = (j0 + key_lanes)[None, :]
                q = stream_tile(q_rows, 0, (batch, h, q_start), i0, segment.sq, BM, V.D, V.BD, False)
                k = stream_tile(k_rows, 0, (batch, g, k_start), j0, segment.sk, BN, V.D, V.BD, False)
                v = stream_tile(v_rows, 0, (batch, g, k_start), j0, segment.sk, BN, V.DV, V.BDV, False)
                minus_lse2, mu, eta, delta = sums_of(sums, offset, i0, segment.sq, BM, V.VARLEN)
                t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
                s, _, slope = scores_and_cap(t, bias + minus_lse2, geometry, V)
                tx = tl.zeros([BM, BN], tl.float32)
                if T.Q:
                    tq = stream_tile(tq_rows, 0, (batch, h, q_start), i0, segment.sq, BM, V.D, V.BD, False)
                    tx = tl.dot(tq, tl.trans(k), tx, input_precision=V.PRECISION)
                if T.K:
                    tk = stream_tile(tk_rows, 0, (batch, g, k_start), j0, segment.sk, BN, V.D, V.BD, False)
                    tx = tl.dot(q, tl.trans(tk), tx, input_precision=V.PRECISION)
                ts = below_cap(tx * scale, slope, V)
                b = tl.zeros([BM, BN], tl.float32)
                c = tl.zeros([BM, BN], tl.float32)
                if T.DO:
                    do = stream_tile(do_rows, 0, (batch, h, q_start), i0, segment.sq, BM, V.DV, V.BDV, False)
                    c = tl.dot(do, tl.trans(v), c, input_precision=V.PRECISION)
                if T.DTO:
                    dto = stream_tile(dto_rows, 0, (batch, h, q_start), i0, segment.sq, BM, V.DV, V.BDV, False)
                    b = tl.dot(dto, tl.trans(v), b, input_precision=V.PRECISION)
                    if T.V:
                        tv = stream_tile(tv_rows, 0, (batch, g, k_start), j0, segment.sk, BN, V.DV, V.BDV, False)
                        c = tl.dot(dto, tl.trans(tv), c, input_precision=V.PRECISION)
                p = of_keys(tl.exp2(s), (i0 + row_lanes)[:, None], keys, j0, intervals, segment, V, BN)
                total += p * ((c - delta) + (ts + tbias - mu) * (b - eta))
    store_diagonals(partial_ptr, total, splits, BM, BN)


def second_dbias_of(launch: Launch, given: Prepared) -> Tensor:
    """[Hq, n] in the dtype of bias."""
    call = launch.call
    config = launch.config("second_dbias")
    parts = parts_of(launch, config)
    if parts is None:
        return torch.zeros_like(call.bias)
    tensors = (launch.q, given.tq, given.do, given.dto, launch.k, launch.v, given.tk, given.tv)
    launch.start(
        _second_dbias_kernel,
        parts.grid,
        *(rows_of(x) for x in tensors),
        given.sums,
        launch.table,
        given.ttable,
        parts.partial,
        float(call.scale),
        parts.splits,
        given.pitch16,
        launch.mask(config, of_rows=True),
        *launch.shared(call.cu_seqlens_q, config.block_m),
        V=launch.variant,
        T=given.moving,
        **config.launch,
    )
    return sum_of(launch, parts, config)
