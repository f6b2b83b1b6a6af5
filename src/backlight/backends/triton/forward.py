"""Forward: one program per BM rows of one query head (eq. 31; two sweeps with tau, eq. 32).

Registers: q [BM, D], running max and sum [BM], accumulators o (and u) [BM, Dv] in fp32. Tiles the spec excludes are not
visited; only edge tiles pay for the mask, only tiles within the table for the bias. Parity contract: tests/conformance.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.launch import Launch
from backlight.backends.triton.primitives import (
    LN2,
    LOG2E,
    PHASES,
    elastic,
    key_phase,
    load_rows,
    locate,
    logits,
    store_rows,
    visible,
    visible_count,
)
from backlight.call import Call


@triton.jit
def _fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    sink_ptr,
    tau_ptr,
    gate_ptr,
    y_ptr,
    lse_ptr,
    u_ptr,
    cu_q_ptr,
    cu_k_ptr,
    cu_tiles_ptr,
    n_segments,
    q_strides,
    k_strides,
    v_strides,
    gate_strides,
    y_strides,
    heads,
    group,
    sq,
    sk,
    left,
    right,
    factor,
    cap2,
    n_bias,
    bias_origin,
    D: tl.constexpr,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_TAU: tl.constexpr,
    HAS_GATE: tl.constexpr,
    SAVE_U: tl.constexpr,
    VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    q_start = 0
    k_start = 0
    rows_total = sq
    if VARLEN:
        z, tile = locate(tile, cu_tiles_ptr, n_segments)
        if z >= n_segments:
            return
        q_start = tl.load(cu_q_ptr + z)
        k_start = tl.load(cu_k_ptr + z)
        sq = tl.load(cu_q_ptr + z + 1) - q_start
        sk = tl.load(cu_k_ptr + z + 1) - k_start
    elif HAS_RIGHT:
        # causal: the longest rows first, so that the last wave is short
        tile = tl.num_programs(0) - 1 - tile
    i0 = tile * BM
    b = b.to(tl.int64)
    h = h.to(tl.int64)
    row_base = (i0 + q_start).to(tl.int64)
    key_base = (tile * 0 + k_start).to(tl.int64)
    q_ptr += b * q_strides[0] + h * q_strides[1] + row_base * q_strides[2]
    y_offset = b * y_strides[0] + h * y_strides[1] + row_base * y_strides[2]
    k_ptr += b * k_strides[0] + (h // group) * k_strides[1] + key_base * k_strides[2]
    v_ptr += b * v_strides[0] + (h // group) * v_strides[1] + key_base * v_strides[2]
    bias_ptr += h * n_bias

    rows = tl.arange(0, BM)
    n_rows = sq - i0
    first_position = i0 + sk - sq
    last_position = tl.minimum(i0 + BM, sq) - 1 + sk - sq
    position = (first_position + rows)[:, None]
    q = load_rows(q_ptr, q_strides[2], rows, n_rows, D, BD)

    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    if HAS_SINK:
        row_max = tl.zeros([BM], tl.float32) + tl.load(sink_ptr + h).to(tl.float32) * LOG2E
        row_sum = tl.full([BM], 1.0, tl.float32)
    o = tl.zeros([BM, BDV], tl.float32)
    for PHASE in tl.static_range(PHASES):
        if (HAS_LEFT or PHASE != 0) and (HAS_BIAS or (PHASE != 2 and PHASE != 3)):
            start, stop = key_phase(
                PHASE, first_position, last_position, sk, left, right, n_bias, bias_origin, BN, HAS_LEFT, HAS_RIGHT, HAS_BIAS
            )
            for j0 in range(start, stop, BN):
                keys = j0 + tl.arange(0, BN)
                k = load_rows(k_ptr, k_strides[2], keys, sk, D, BD)
                t = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                BIAS: tl.constexpr = HAS_BIAS and PHASE != 1 and PHASE != 3
                s2, _ = logits(t, position, keys[None, :], bias_ptr, factor, cap2, n_bias, bias_origin, HAS_SOFTCAP, BIAS)
                if PHASE == 0 or PHASE == 4:
                    seen = visible(position, keys[None, :], sk, left, right, HAS_LEFT, HAS_RIGHT)
                    s2 = tl.where(seen, s2, float("-inf"))
                new_max = tl.maximum(row_max, tl.max(s2, 1))
                safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                rescale = tl.exp2(row_max - safe_max)
                p = tl.exp2(s2 - safe_max[:, None])
                row_sum = row_sum * rescale + tl.sum(p, 1)
                row_max = new_max
                if not HAS_TAU:
                    v = load_rows(v_ptr, v_strides[2], keys, sk, DV, BDV)
                    o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision=PRECISION)
    lse2 = row_max + tl.log2(row_sum)
    if HAS_TAU:
        tau = tl.load(tau_ptr + h).to(tl.float32)
        n = visible_count(position, sk, left, right, HAS_LEFT, HAS_RIGHT)
        # through the stored natural-log lse, so that forward and backward decide survivors alike
        lse2_stored = (lse2 * LN2) * LOG2E
        safe_lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2_stored)[:, None]
        u = tl.zeros([BM, BDV], tl.float32)
        for PHASE in tl.static_range(PHASES):
            if (HAS_LEFT or PHASE != 0) and (HAS_BIAS or (PHASE != 2 and PHASE != 3)):
                start, stop = key_phase(
                    PHASE,
                    first_position,
                    last_position,
                    sk,
                    left,
                    right,
                    n_bias,
                    bias_origin,
                    BN,
                    HAS_LEFT,
                    HAS_RIGHT,
                    HAS_BIAS,
                )
                for j0 in range(start, stop, BN):
                    keys = j0 + tl.arange(0, BN)
                    k = load_rows(k_ptr, k_strides[2], keys, sk, D, BD)
                    t = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    BIAS: tl.constexpr = HAS_BIAS and PHASE != 1 and PHASE != 3
                    s2, _ = logits(t, position, keys[None, :], bias_ptr, factor, cap2, n_bias, bias_origin, HAS_SOFTCAP, BIAS)
                    seen = visible(position, keys[None, :], sk, left, right, HAS_LEFT, HAS_RIGHT)
                    p = tl.where(seen, tl.exp2(s2 - safe_lse2), 0.0)
                    p, a, m = elastic(p, seen, n, tau, HAS_SINK)
                    v = load_rows(v_ptr, v_strides[2], keys, sk, DV, BDV)
                    o = tl.dot(a.to(v.dtype), v, o, input_precision=PRECISION)
                    if SAVE_U:
                        u = tl.dot(m.to(v.dtype), v, u, input_precision=PRECISION)
        if SAVE_U:
            store_rows(u_ptr + y_offset, y_strides[2], rows, n_rows, u, DV, BDV)
    else:
        o = o / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
    if HAS_GATE:
        gate_ptr += b * gate_strides[0] + h * gate_strides[1] + row_base * gate_strides[2]
        gate = load_rows(gate_ptr, gate_strides[2], rows, n_rows, DV, BDV).to(tl.float32)
        o = o * tl.sigmoid(gate)
    store_rows(y_ptr + y_offset, y_strides[2], rows, n_rows, o, DV, BDV)
    lse_ptr += (b * heads + h) * rows_total + row_base
    tl.store(lse_ptr + rows, lse2 * LN2, mask=rows < n_rows)


def forward(call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    launch = Launch(call)
    y = launch.empty_rows(call.v.shape[-1])
    lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    u = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) if save_u and call.tau is not None else None
    config = launch.config("forward")
    grid = launch.row_grid(config.block_m)
    if not (grid[0] and grid[1]):
        return y, lse, u
    _fwd_kernel[grid](
        launch.q,
        launch.k,
        launch.v,
        launch.bias,
        launch.sink,
        launch.tau,
        launch.gate,
        y,
        lse,
        y if u is None else u,
        *launch.packing_rows(config.block_m),
        launch.strides("q"),
        launch.strides("k"),
        launch.strides("v"),
        launch.strides("gate"),
        y.stride()[:3],
        *launch.geometry,
        BM=config.block_m,
        BN=config.block_n,
        SAVE_U=u is not None,
        **launch.flags(),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return y, lse, u
