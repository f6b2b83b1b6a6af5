"""dq: one program owns BM rows of a query head and visits the keys they see (eq. 33, split form)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.loads import at, key_tile, load_vector, own_tile, row_state, store_tile
from backlight.backends.triton.pair import block_place, pair_tile, store_pair
from backlight.backends.triton.powers import alpha_of
from backlight.backends.triton.primitives import (
    LOG2E,
    Sight,
    keys_of,
    logits_of,
    own_counts,
    row_block,
    surviving,
    tile_gradient,
    tile_weights,
)
from backlight.backends.triton.visits import visited


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _dq_kernel(
    q_rows, k_rows, v_rows, k_desc, v_desc, do_rows, dq_rows, minus_lse2_ptr, delta_ptr, share_ptr, table_ptr, scale, pitch16,
    dpair, pair, pair_desc, mask, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, WANT_DPAIR: tl.constexpr, TMA: tl.constexpr, PAIR_TMA: tl.constexpr,
    WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = row_block(packing, sq, sk, n_segments, geometry, V, BM)
    packing = own_counts(packing, block.b, block.h, sq, geometry, V)
    table_ptr = head_table(table_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(q_rows, block, BM, V.D, V.BD)
    do = own_tile(do_rows, block, BM, V.DV, V.BDV)
    offset = row_state(block.b, block.h, block.row, pitch16, geometry)
    minus_lse2 = load_vector(minus_lse2_ptr + offset, 0, block.n_rows, float("-inf"), BM, True)[:, None]
    delta = load_vector(delta_ptr + offset, 0, block.n_rows, 0.0, BM, True)[:, None]
    share = alpha_of(block.h, geometry, V)
    if V.TAU:
        share = load_vector(share_ptr + offset, 0, block.n_rows, 0.0, BM, True)[:, None]
    BD: tl.constexpr = V.BD
    SLOPE: tl.constexpr = "apart" if V.TAU or WANT_DPAIR else "within"
    dq = tl.zeros([BM, BD], tl.float32)
    span, visits, intervals = keys_of(block, mask, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, block.segment, packing)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(k_rows, k_desc, block, j0, BN, V.D, V.BD, TMA)
            v = key_tile(v_rows, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            s, slope = logits_of(t, geometry.unit, minus_lse2, geometry, V, SLOPE)
            if V.PAIR > 0:
                place = block_place(block, j0, V)
                s += pair_tile(pair, pair_desc, place, block.segment.sq, V, PAIR_TMA, BM, BN, False) * LOG2E
            if V.BIAS:
                entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
                s = add_bias(s, geometry.unit, table_ptr, entry, j0, span, geometry, V, BM, BN)
            # after the branch of the bias: a product in flight would have to end before it, and this one runs beside exp2
            dp = tl.dot(do, tl.trans(v), input_precision=V.PRECISION)
            if V.INTERVALS == 0 and not WHOLE:
                at_edge = (j0 < span.low) | (j0 > span.high)
            keys = j0 + key_lanes
            p, _ = tile_weights(s, share, 0.0, block.position, keys, at_edge, sight, geometry, V, BN)
            ds, dx = tile_gradient(p, surviving(p, share, V), dp, delta, slope, V)
            if WANT_DPAIR:
                place = block_place(block, j0, V)
                store_pair(dpair, place, block.segment.sq, ds, BM, BN)
            dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=V.PRECISION)
    store_tile(at(dq_rows, block.b, block.h, block.row), dq_rows.row, block.n_rows, dq * scale, BM, V.D, V.BD)


def dq_of(launch: Launch, rows: RowState, dpair: Tensor | None = None) -> Tensor:
    """Fills the tiles of dpair that it visits."""
    call = launch.call
    dq = torch.empty_like(call.q, dtype=call.output_dtype)
    stored = launch.pair_of(dpair)
    values = (rows.minus_lse2, rows.delta, rows.share, launch.table, float(call.scale), rows.pitch16, stored)
    launch.start_rows(_dq_kernel, "dq", (rows.do, dq), values, WANT_DPAIR=dpair is not None)
    return dq
