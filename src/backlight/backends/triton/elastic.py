"""Forward with tau, second sweep (eq. 32): weights need the lse of the whole row, which the first one stored.

Registers: q [BM, D], accumulators o and u [BM, Dv] in fp32. Parity contract: tests/conformance.
"""

from collections import namedtuple

import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import at, key_tile, own_tile, store_gated, store_tile
from backlight.backends.triton.primitives import (
    LOG2E,
    Frame,
    Sight,
    keys_of,
    logits_of,
    own_counts,
    positive,
    row_block,
    tile_weights,
    visible_count,
)
from backlight.backends.triton.visits import visited

# rows of q, k, v, gate, y, u, and the rest by pointers; u is None where it is not kept
Tensors = namedtuple("Tensors", ("q", "k", "v", "gate", "y", "u", "lse_ptr", "table_ptr", "tau_ptr"))


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _elastic_kernel(
    tensors, k_desc, v_desc, frame, sq, sk, n_segments, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    packing = own_counts(frame.packing, block.b, block.h, sq, geometry, V)
    table_ptr = head_table(tensors.table_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(tensors.q, block, BM, V.D, V.BD)
    lse_ptr = tensors.lse_ptr + (tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row)
    # the stored lse, as the backward reads it: both decide survivors alike
    lse2 = tl.load(lse_ptr + tl.arange(0, BM), mask=tl.arange(0, BM) < block.n_rows, other=0.0) * LOG2E
    lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)[:, None]
    n = visible_count(block.position, block.segment, packing, geometry, V)
    tau = tl.load(tensors.tau_ptr + block.h).to(tl.float32)
    share = tau / tl.maximum(n, 1)
    # with tau >= 0 every visible key survives, also where p underflowed
    floor = tl.where(tau >= 0, 1.1754944e-38, 0.0)
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    u = tl.zeros([BM, BDV], tl.float32)
    span, visits, intervals = keys_of(block, frame.mask, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, block.segment, packing)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            s, _ = logits_of(t, geometry.unit, -lse2, geometry, V, "none")
            if V.BIAS:
                entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
                s = add_bias(s, geometry.unit, table_ptr, entry, j0, span, geometry, V, BM, BN)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            keys = j0 + key_lanes
            _, a = tile_weights(s, share, floor, block.position, keys, at_edge, sight, geometry, V, BN)
            v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            weights = a.to(v.dtype)
            if tensors.u is not None:
                u = tl.dot(positive(a, weights, V), v, u, input_precision=V.PRECISION)
            o = tl.dot(weights, v, o, input_precision=V.PRECISION)
    if tensors.u is not None:
        u_ptr = at(tensors.u, block.b, block.h, block.row)
        store_tile(u_ptr, tensors.u.row, block.n_rows, u / tl.maximum(n, 1), BM, V.DV, V.BDV)
    store_gated(tensors.y, tensors.gate, block, o, V, BM)


def elastic_of(launch: Launch, lse: Tensor, y: Tensor, u: Tensor | None) -> None:
    """Fills y and, where it is wanted, u."""
    config = launch.config("elastic")
    grid = launch.row_grid(config.block_m)
    if grid[0] and grid[1]:
        rows = (rows_of(x) for x in (launch.q, launch.k, launch.v, launch.gate, y))
        packing, geometry, *lengths = launch.shared(launch.call.cu_seqlens_q, config.block_m)
        launch.start(
            _elastic_kernel,
            grid,
            Tensors(*rows, None if u is None else rows_of(u), lse, launch.table, launch.tau),
            *launch.all_described(config, (), (launch.k, launch.v)),
            Frame(launch.mask(config, of_rows=True), packing, geometry),
            *lengths,
            V=launch.variant,
            **config.launch,
        )
