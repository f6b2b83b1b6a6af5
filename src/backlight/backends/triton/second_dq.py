"""dq of second derivatives: one program owns BM rows of a query head and visits the keys they see (eq. 58, split form)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import at, key_tile, own_tile, row_state, store_tile
from backlight.backends.triton.moving import (
    add_pairs,
    add_product,
    below_cap,
    ds_of,
    product,
    score_gradient,
    scores_and_cap,
    sums_of,
    tangent_gradient,
)
from backlight.backends.triton.pair import block_place, store_pair
from backlight.backends.triton.primitives import Sight, keys_of, row_block, tile_weights
from backlight.backends.triton.second_rows import Prepared
from backlight.backends.triton.visits import visited


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _second_dq_kernel(
    q_rows, k_rows, v_rows, tq_rows, tk_rows, tv_rows, do_rows, dto_rows, dq_rows, k_desc, v_desc, tk_desc, tv_desc, sums,
    table_ptr, ttable_ptr, pairs, scale, pitch16, mask, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = row_block(packing, sq, sk, n_segments, geometry, V, BM)
    table_ptr = head_table(table_ptr, block.h, geometry, True)
    ttable_ptr = head_table(ttable_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(q_rows, block, BM, V.D, V.BD)
    tq, do, dto = q, q, q
    if T.Q:
        tq = own_tile(tq_rows, block, BM, V.D, V.BD)
    if T.DO:
        do = own_tile(do_rows, block, BM, V.DV, V.BDV)
    if T.DTO:
        dto = own_tile(dto_rows, block, BM, V.DV, V.BDV)
    offset = row_state(block.b, block.h, block.row, pitch16, geometry)
    minus_lse2, mu, eta, delta = sums_of(sums, offset, 0, block.n_rows, BM, True)
    BD: tl.constexpr = V.BD
    dq = tl.zeros([BM, BD], tl.float32)
    span, visits, intervals = keys_of(block, mask, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, block.segment, packing)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(k_rows, k_desc, block, j0, BN, V.D, V.BD, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            tx = product(tq, k, T.Q, V)
            if T.K:
                tk = key_tile(tk_rows, tk_desc, block, j0, BN, V.D, V.BD, TMA)
                tx = add_product(tx, q, tk, T.Q, V)
            s, tanh, slope = scores_and_cap(t, minus_lse2, geometry, V)
            tx = tx * scale
            place = block_place(block, j0, V)
            s, ts = add_pairs(s, below_cap(tx, slope, V), pairs, place, block.segment.sq, V, T, BM, BN, False)
            entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
            if V.BIAS:
                s = add_bias(s, geometry.unit, table_ptr, entry, j0, span, geometry, V, BM, BN)
            if T.BIAS:
                ts = add_bias(ts + tl.zeros([BM, BN], tl.float32), 1.0, ttable_ptr, entry, j0, span, geometry, V, BM, BN)
            # after the branches of the bias (dq.py)
            v = key_tile(v_rows, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            b = product(dto, v, T.DTO, V)
            c = product(do, v, T.DO, V)
            if T.DTO and T.V:
                tv = key_tile(tv_rows, tv_desc, block, j0, BN, V.DV, V.BDV, TMA)
                c = add_product(c, dto, tv, T.DO, V)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            p, _ = tile_weights(s, 0.0, 0.0, block.position, j0 + key_lanes, at_edge, sight, geometry, V, BN)
            ta = p * (ts - mu)
            if pairs.dpair is not None:
                store_pair(pairs.dpair, place, block.segment.sq, ds_of(p, ta, b, eta, c, delta), BM, BN)
            dtx, part = tangent_gradient(p, ta, tx, tanh, slope, b, eta, geometry, V, T)
            if T.K:
                dq = tl.dot(dtx.to(k.dtype), tk, dq, input_precision=V.PRECISION)
            dx = score_gradient(p, c, delta, part, slope, V)
            dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=V.PRECISION)
    store_tile(at(dq_rows, block.b, block.h, block.row), dq_rows.row, block.n_rows, dq * scale, BM, V.D, V.BD)


def second_dq_of(launch: Launch, given: Prepared, dpair: Tensor | None = None) -> Tensor:
    """Fills the tiles of dpair that it visits."""
    call = launch.call
    dq = torch.empty_like(call.q)
    config = launch.config("second_dq_of_both" if given.moving.DO and given.moving.DTO else "second_dq")
    grid = launch.row_grid(config.block_m)
    if grid[0] and grid[1]:
        tma, descriptors = launch.descriptors(config, config.block_n, launch.k, launch.v, given.tk, given.tv)
        launch.start(
            _second_dq_kernel,
            grid,
            *(rows_of(x) for x in (launch.q, launch.k, launch.v, given.tq, given.tk, given.tv, given.do, given.dto, dq)),
            *descriptors,
            given.sums,
            launch.table,
            given.ttable,
            given.pairs(launch, dpair=dpair),
            float(call.scale),
            given.pitch16,
            launch.mask(config, of_rows=True),
            *launch.shared(call.cu_seqlens_q, config.block_m),
            V=launch.variant,
            T=given.moving,
            TMA=tma,
            **config.launch,
        )
    return dq
