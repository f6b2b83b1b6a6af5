"""Forward mode without tau where y and lse are known, as under double backward: tangents in at most five products a tile.

The second sweep of eq. 53 without tau: weights are normalised from the start and nothing is rescaled. Registers: q and tq
[BM, D], the accumulator w [BM, Dv] in fp32, e and nu [BM], and the tiles p and ts. Parity contract: tests/interpreted.
"""

import triton
import triton.language as tl

from backlight.backends.triton.loads import at, key_tile, own_tile, store_tile
from backlight.backends.triton.primitives import LOG2E, Sight, keys_of, row_block, tile_weights
from backlight.backends.triton.tangent_steps import Own, both_scores, moves, own_lse, own_queries, own_tables, sink_moves
from backlight.backends.triton.visits import visited


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _tangent_known_kernel(
    tensors, values, k_desc, v_desc, tk_desc, tv_desc, frame, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    table_ptr, ttable_ptr = own_tables(values, block, geometry)
    key_lanes = tl.arange(0, BN)[None, :]
    q, tq = own_queries(tensors, block, V, T, BM)
    rows = tl.arange(0, BM)
    offset, lse, sees_nothing = own_lse(values, block, sq, geometry, BM)
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
    own = Own(block, q, tq, minus_lse2, table_ptr, ttable_ptr, span)
    sight = Sight(intervals, block.segment, frame.packing)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            s, ts = both_scores(own, tensors, k_desc, tk_desc, values.scale, j0, geometry, V, T, BN)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            keys = j0 + key_lanes
            p, _ = tile_weights(s, 0.0, 0.0, block.position, keys, at_edge, sight, geometry, V, BN)
            v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            if T.V:
                tv = key_tile(tensors.tv, tv_desc, block, j0, BN, V.DV, V.BDV, TMA)
                w = tl.dot(p.to(v.dtype), tv, w, input_precision=V.PRECISION)
            if T.SCORES:
                g, nu, opened, waiting, e = moves(p, ts, nu, opened, waiting, e)
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
