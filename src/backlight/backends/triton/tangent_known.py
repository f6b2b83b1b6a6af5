"""Forward mode without tau where y and lse are known, as under double backward: tangents in at most five products a tile.

The second sweep of eq. 53 without tau: weights are normalised from the start and nothing is rescaled. Registers: q and tq
[BM, D], the accumulator w [BM, Dv] in fp32, e and nu [BM], and the tiles p and ts. Parity contract: tests/interpreted.
"""

import triton
import triton.language as tl

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.loads import at, key_tile, own_tile, store_tile
from backlight.backends.triton.primitives import LOG2E, Sight, keys_of, logits_of, row_block, tile_weights
from backlight.backends.triton.tangent_steps import moved_scores, reference, sink_moves
from backlight.backends.triton.visits import visited


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _tangent_known_kernel(
    tensors, values, k_desc, v_desc, tk_desc, tv_desc, frame, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    table_ptr = head_table(values.table_ptr, block.h, geometry, True)
    ttable_ptr = head_table(values.ttable_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(tensors.q, block, BM, V.D, V.BD)
    tq = q
    if T.Q:
        tq = own_tile(tensors.tq, block, BM, V.D, V.BD)
    rows = tl.arange(0, BM)
    offset = tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row + rows
    lse = tl.load(values.lse_ptr + offset, mask=rows < block.n_rows, other=float("-inf"))
    sees_nothing = lse == float("-inf")
    minus_lse2 = tl.where(sees_nothing, float("-inf"), -lse * LOG2E)[:, None]
    e = tl.zeros([BM], tl.float32)
    # the sum of g as it is multiplied with v: what v has in common cancels exactly then
    e_cast = e
    nu = e
    # rows without a weight have no mean to wait for
    opened = tl.where(sees_nothing, 1.0, 0.0)
    waiting = 1
    BDV: tl.constexpr = V.BDV
    w = tl.zeros([BM, BDV], tl.float32)
    span, visits, intervals = keys_of(block, frame.mask, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, block.segment, frame.packing)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            tk = k
            if T.K:
                tk = key_tile(tensors.tk, tk_desc, block, j0, BN, V.D, V.BD, TMA)
            ts = moved_scores(q, tq, k, tk, values.scale, BM, BN, V, T)
            s, slope = logits_of(t, geometry.unit, minus_lse2, geometry, V, "apart" if T.SCORES else "none")
            if V.SOFTCAP and T.SCORES:
                ts = ts * slope
            entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
            if V.BIAS:
                s = add_bias(s, geometry.unit, table_ptr, entry, j0, span, geometry, V, BM, BN)
            if T.BIAS:
                ts = add_bias(ts, 1.0, ttable_ptr, entry, j0, span, geometry, V, BM, BN)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            keys = j0 + key_lanes
            p, _ = tile_weights(s, 0.0, 0.0, block.position, keys, at_edge, sight, geometry, V, BN)
            v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            if T.V:
                tv = key_tile(tensors.tv, tv_desc, block, j0, BN, V.DV, V.BDV, TMA)
                w = tl.dot(p.to(v.dtype), tv, w, input_precision=V.PRECISION)
            if T.SCORES:
                if waiting > 0:
                    nu, opened = reference(p, ts, nu, opened)
                    waiting = (tl.min(opened, 0) == 0).to(tl.int32)
                g = p * (ts - nu[:, None])
                e += tl.sum(g, 1)
                g_cast = g.to(v.dtype)
                e_cast += tl.sum(g_cast.to(tl.float32), 1)
                w = tl.dot(g_cast, v, w, input_precision=V.PRECISION)
    if V.SINK:
        moved = sink_moves(values, lse, nu, block.h, sees_nothing, T)
        e += moved
        e_cast += moved
    tl.store(values.tlse_ptr + offset, tl.where(sees_nothing, 0.0, nu + e), mask=rows < block.n_rows)
    y = own_tile(tensors.y, block, BM, V.DV, V.BDV).to(tl.float32)
    ty = w
    if V.GATE:
        weight = tl.sigmoid(own_tile(tensors.gate, block, BM, V.DV, V.BDV).to(tl.float32))
        ty = ty * weight
        if T.GATE:
            ty += y * (1.0 - weight) * own_tile(tensors.tgate, block, BM, V.DV, V.BDV).to(tl.float32)
    ty -= e_cast[:, None] * y
    store_tile(at(tensors.ty, block.b, block.h, block.row), tensors.ty.row, block.n_rows, ty, BM, V.DV, V.BDV)
