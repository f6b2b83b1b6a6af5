"""Forward with tau, second sweep (eq. 32): weights need the lse of the whole row, which the first one stored.

Registers: q [BM, D], accumulators o and u [BM, Dv] in fp32. Parity contract: tests/conformance.
"""

import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.primitives import (
    LOG2E,
    PHASES,
    at,
    bias_tile,
    head_table,
    key_phase,
    load_tile,
    locate,
    store_tile,
    stream_tile,
    table_entry,
    tile_weights,
    visible,
    visible_count,
)


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _elastic_kernel(
    q_rows, k_rows, v_rows, k_desc, v_desc, gate_rows, y_rows, u_rows, lse_ptr, table_ptr, tau_ptr, packing, geometry,
    sq, sk, n_segments, V: tl.constexpr, SAVE_U: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    rows_total = sq
    q_start = 0
    k_start = 0
    if V.VARLEN:
        z, tile = locate(tile, packing.cu_tiles, n_segments)
        if z >= n_segments:
            return
        q_start = tl.load(packing.cu_q + z)
        k_start = tl.load(packing.cu_k + z)
        sq = tl.load(packing.cu_q + z + 1) - q_start
        sk = tl.load(packing.cu_k + z + 1) - k_start
    elif V.RIGHT:
        tile = tl.num_programs(0) - 1 - tile
    i0 = tile * BM
    n_rows = sq - i0
    g = h // geometry.group
    k_ptr = at(k_rows, b, g, k_start)
    v_ptr = at(v_rows, b, g, k_start)
    table_ptr = head_table(table_ptr, h, geometry, True)
    first_position = i0 + sk - sq
    last_position = tl.minimum(i0 + BM, sq) - 1 + sk - sq
    position = (first_position + tl.arange(0, BM))[:, None]
    key_lanes = tl.arange(0, BN)[None, :]
    q = load_tile(at(q_rows, b, h, q_start + i0), q_rows.row, 0, n_rows, BM, V.D, V.BD, True)
    lse_ptr += tl.cast(b * geometry.heads + h, tl.int64) * rows_total + q_start + i0
    # the stored lse, as the backward reads it: both decide survivors alike
    lse2 = tl.load(lse_ptr + tl.arange(0, BM), mask=tl.arange(0, BM) < n_rows, other=0.0) * LOG2E
    lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)[:, None]
    tau = tl.load(tau_ptr + h).to(tl.float32)
    n = visible_count(position, q_start, sq, sk, packing, geometry, V)
    share = tau / tl.maximum(n, 1)
    threshold = tl.where(tau >= 0, float("-inf"), 0.0)
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    u = tl.zeros([BM, BDV], tl.float32)
    for PHASE in tl.static_range(PHASES):
        if (V.LEFT or PHASE != 0) and (V.BIAS or (PHASE != 2 and PHASE != 3)):
            start, stop = key_phase(PHASE, first_position, last_position, sk, geometry, V, BN)
            if start < stop:
                for j0 in range(start, stop, BN):
                    MASK: tl.constexpr = PHASE == 0 or PHASE == 4
                    BIAS: tl.constexpr = V.BIAS and PHASE != 1 and PHASE != 3
                    k = stream_tile(k_rows, k_desc, k_ptr, b, g, j0, sk, BN, V.D, V.BD, MASK, TMA)
                    t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
                    bias = 0.0
                    if BIAS:
                        entry = table_entry(first_position - j0 + geometry.bias_origin, geometry, True)
                        bias = bias_tile(table_ptr, entry, geometry, V, BM, BN)
                    seen = n > 0
                    if MASK:
                        seen = visible(position, j0 + key_lanes, sk, geometry, V, LEFT=PHASE == 0, RIGHT=PHASE == 4)
                    _, a, m, _ = tile_weights(t, lse2, bias, share, threshold, n == 1, seen, geometry, V, MASK, BIAS)
                    v = stream_tile(v_rows, v_desc, v_ptr, b, g, j0, sk, BN, V.DV, V.BDV, MASK, TMA)
                    if SAVE_U:
                        # before the other product: numbers wait for it more cheaply than predicates
                        survivors = tl.where(m, 1.0, 0.0).to(v.dtype)
                        u = tl.dot(survivors, v, u, input_precision=V.PRECISION)
                    o = tl.dot(a.to(v.dtype), v, o, input_precision=V.PRECISION)
    if SAVE_U:
        store_tile(at(u_rows, b, h, q_start + i0), u_rows.row, n_rows, u / tl.maximum(n, 1), BM, V.DV, V.BDV)
    if V.GATE:
        gate = load_tile(at(gate_rows, b, h, q_start + i0), gate_rows.row, 0, n_rows, BM, V.DV, V.BDV, True)
        o = o * tl.sigmoid(gate.to(tl.float32))
    store_tile(at(y_rows, b, h, q_start + i0), y_rows.row, n_rows, o, BM, V.DV, V.BDV)


def elastic_of(launch: Launch, lse: Tensor, y: Tensor, u: Tensor | None) -> None:
    """Fills y and, where it is wanted, u."""
    call = launch.call
    config = launch.config("elastic")
    grid = launch.row_grid(config.block_m)
    if grid[0] and grid[1]:
        tma, descriptors = launch.descriptors(config, config.block_n, launch.k, launch.v)
        _elastic_kernel[grid](
            *(rows_of(x) for x in (launch.q, launch.k, launch.v)),
            *descriptors,
            *(rows_of(x) for x in (launch.gate, y, y if u is None else u)),
            lse,
            launch.table,
            launch.tau,
            *launch.shared(call.cu_seqlens_q, config.block_m),
            V=launch.variant,
            SAVE_U=u is not None,
            TMA=tma,
            **config.launch,
        )
