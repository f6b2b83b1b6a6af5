"""dq: one program owns BM rows of a query head and visits the keys they see (eq. 33, split form)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.primitives import (
    PHASES,
    at,
    bias_tile,
    head_table,
    key_phase,
    load_tile,
    load_vector,
    locate,
    row_state,
    store_tile,
    stream_tile,
    table_entry,
    tile_gradient,
    visible,
    visible_count,
)


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _dq_kernel(
    q_rows, k_rows, v_rows, k_desc, v_desc, do_rows, dq_rows, lse2_ptr, delta_ptr, share_ptr, table_ptr, tau_ptr, scale,
    pitch16, packing, geometry, sq, sk, n_segments, V: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
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
    do = load_tile(at(do_rows, b, h, q_start + i0), do_rows.row, 0, n_rows, BM, V.DV, V.BDV, True)
    offset = row_state(b, h, q_start + i0, pitch16, geometry)
    lse2 = load_vector(lse2_ptr + offset, 0, n_rows, float("inf"), BM, True)[:, None]
    delta = load_vector(delta_ptr + offset, 0, n_rows, 0.0, BM, True)[:, None]
    share = 0.0
    threshold = 0.0
    alone = position < 0
    if V.TAU:
        share = load_vector(share_ptr + offset, 0, n_rows, 0.0, BM, True)[:, None]
        threshold = tl.where(tl.load(tau_ptr + h).to(tl.float32) >= 0, float("-inf"), 0.0)
        alone = visible_count(position, q_start, sq, sk, packing, geometry, V) == 1
    BD: tl.constexpr = V.BD
    dq = tl.zeros([BM, BD], tl.float32)
    for PHASE in tl.static_range(PHASES):
        if (V.LEFT or PHASE != 0) and (V.BIAS or (PHASE != 2 and PHASE != 3)):
            start, stop = key_phase(PHASE, first_position, last_position, sk, geometry, V, BN)
            if start < stop:
                for j0 in range(start, stop, BN):
                    MASK: tl.constexpr = PHASE == 0 or PHASE == 4
                    BIAS: tl.constexpr = V.BIAS and PHASE != 1 and PHASE != 3
                    k = stream_tile(k_rows, k_desc, k_ptr, b, g, j0, sk, BN, V.D, V.BD, MASK, TMA)
                    v = stream_tile(v_rows, v_desc, v_ptr, b, g, j0, sk, BN, V.DV, V.BDV, MASK, TMA)
                    t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
                    dp = tl.dot(do, tl.trans(v), input_precision=V.PRECISION)
                    seen = alone
                    if MASK:
                        seen = visible(position, j0 + key_lanes, sk, geometry, V, LEFT=PHASE == 0, RIGHT=PHASE == 4)
                    bias = 0.0
                    if BIAS:
                        entry = table_entry(first_position - j0 + geometry.bias_origin, geometry, True)
                        bias = bias_tile(table_ptr, entry, geometry, V, BM, BN)
                    _, _, dx = tile_gradient(t, dp, lse2, delta, bias, share, threshold, alone, seen, geometry, V, MASK, BIAS)
                    dq = tl.dot(dx.to(k.dtype), k, dq, input_precision=V.PRECISION)
    store_tile(at(dq_rows, b, h, q_start + i0), dq_rows.row, n_rows, dq * scale, BM, V.D, V.BD)


def dq_of(launch: Launch, rows: RowState) -> Tensor:
    call = launch.call
    config = launch.config("dq")
    grid = launch.row_grid(config.block_m)
    dq = torch.empty_like(call.q, dtype=call.output_dtype)
    if grid[0] and grid[1]:
        tma, descriptors = launch.descriptors(config, config.block_n, launch.k, launch.v)
        _dq_kernel[grid](
            *(rows_of(x) for x in (launch.q, launch.k, launch.v)),
            *descriptors,
            *(rows_of(x) for x in (rows.do, dq)),
            rows.lse2,
            rows.delta,
            rows.share,
            launch.table,
            launch.tau,
            float(call.scale),
            rows.pitch16,
            *launch.shared(call.cu_seqlens_q, config.block_m),
            V=launch.variant,
            TMA=tma,
            **config.launch,
        )
    return dq
