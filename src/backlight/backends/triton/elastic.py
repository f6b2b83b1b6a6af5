"""Forward with tau, second sweep (eq. 32): weights need the lse of the whole row, which the first one stored.

Registers: q [BM, D], accumulators o and u [BM, Dv] in fp32. Parity contract: tests/conformance.
"""

import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.loads import at, key_tile, own_tile, store_tile
from backlight.backends.triton.primitives import (
    LOG2E,
    key_span,
    logits_of,
    own_counts,
    positive,
    row_block,
    tile_weights,
    visible_count,
)
from backlight.backends.triton.visits import intervals_of, tiles_of, visited, visits_of


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _elastic_kernel(
    q_rows, k_rows, v_rows, k_desc, v_desc, gate_rows, y_rows, u_rows, lse_ptr, table_ptr, tau_ptr, mask, packing, geometry,
    sq, sk, n_segments, V: tl.constexpr, SAVE_U: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = row_block(packing, sq, sk, n_segments, geometry, V, BM)
    packing = own_counts(packing, block.b, block.h, sq, geometry, V)
    table_ptr = head_table(table_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(q_rows, block, BM, V.D, V.BD)
    lse_ptr += tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row
    # the stored lse, as the backward reads it: both decide survivors alike
    lse2 = tl.load(lse_ptr + tl.arange(0, BM), mask=tl.arange(0, BM) < block.n_rows, other=0.0) * LOG2E
    lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)[:, None]
    n = visible_count(block.position, block.segment, packing, geometry, V)
    tau = tl.load(tau_ptr + block.h).to(tl.float32)
    share = tau / tl.maximum(n, 1)
    # with tau >= 0 every visible key survives, also where p underflowed
    floor = tl.where(tau >= 0, 1.1754944e-38, 0.0)
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    u = tl.zeros([BM, BDV], tl.float32)
    span = key_span(block, geometry, V, BN)
    key_tiles = tiles_of(sk, n_segments, V, BN)
    visits = visits_of(span, mask, block.b, block.h, block.tile, tl.num_programs(0), key_tiles, geometry, V, BN)
    intervals = intervals_of(mask, block.b, block.h, block.segment, sq, sk, n_segments, geometry, V, BN)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(k_rows, k_desc, block, j0, BN, V.D, V.BD, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            s, _ = logits_of(t, geometry.unit, -lse2, geometry, V, "none")
            if V.BIAS:
                entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
                s = add_bias(s, geometry.unit, table_ptr, entry, j0, span, geometry, V, BM, BN)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            keys = j0 + key_lanes
            _, a = tile_weights(
                s, share, floor, block.position, keys, at_edge, intervals, block.segment, packing, geometry, V, BN
            )
            v = key_tile(v_rows, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            weights = a.to(v.dtype)
            if SAVE_U:
                u = tl.dot(positive(a, weights, V), v, u, input_precision=V.PRECISION)
            o = tl.dot(weights, v, o, input_precision=V.PRECISION)
    if SAVE_U:
        store_tile(at(u_rows, block.b, block.h, block.row), u_rows.row, block.n_rows, u / tl.maximum(n, 1), BM, V.DV, V.BDV)
    if V.GATE:
        gate = own_tile(gate_rows, block, BM, V.DV, V.BDV)
        o = o * tl.sigmoid(gate.to(tl.float32))
    store_tile(at(y_rows, block.b, block.h, block.row), y_rows.row, block.n_rows, o, BM, V.DV, V.BDV)


def elastic_of(launch: Launch, lse: Tensor, y: Tensor, u: Tensor | None) -> None:
    """Fills y and, where it is wanted, u."""
    rows = (launch.gate, y, y if u is None else u)
    launch.start_rows(_elastic_kernel, "elastic", rows, (lse, launch.table, launch.tau), SAVE_U=u is not None)
