"""Forward: one program per BM rows of one query head (eq. 31; with tau the first sweep, for lse alone).

Registers: q [BM, D], running max and sum [BM], accumulator o [BM, Dv] in fp32. Tiles the spec excludes are not visited; only
edge tiles pay for the mask, only tiles within the table for the bias. Parity contract: tests/conformance.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.elastic import elastic_of
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.primitives import (
    LN2,
    LOG2E,
    PHASES,
    at,
    bias_tile,
    capped_product,
    head_table,
    key_phase,
    load_tile,
    locate,
    store_tile,
    stream_tile,
    table_entry,
    visible,
)
from backlight.call import Call


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _fwd_kernel(
    q_rows, k_rows, v_rows, k_desc, v_desc, gate_rows, y_rows, lse_ptr, table_ptr, sink_ptr, packing, geometry,
    sq, sk, n_segments, V: tl.constexpr, LSE_ONLY: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
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
        # causal: the longest rows first, so that the last wave is short
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

    # maxima are kept in units of x, the base-2 logit before its positive factor
    unit = geometry.unit
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    if V.SINK:
        row_max = tl.zeros([BM], tl.float32) + tl.load(sink_ptr + h).to(tl.float32) * LOG2E / unit
        row_sum = tl.full([BM], 1.0, tl.float32)
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
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
                    x = capped_product(t, geometry, V)
                    if BIAS:
                        x += bias
                    if MASK:
                        seen = visible(position, j0 + key_lanes, sk, geometry, V, LEFT=PHASE == 0, RIGHT=PHASE == 4)
                        x = tl.where(seen, x, float("-inf"))
                    new_max = tl.maximum(row_max, tl.max(x, 1))
                    safe_max = new_max
                    if MASK:
                        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
                    # the difference first: an unchanged maximum must rescale by exactly 1
                    rescale = tl.exp2((row_max - safe_max) * unit)
                    p = tl.exp2(x * unit - (safe_max * unit)[:, None])
                    row_sum = row_sum * rescale + tl.sum(p, 1)
                    row_max = new_max
                    if not LSE_ONLY:
                        v = stream_tile(v_rows, v_desc, v_ptr, b, g, j0, sk, BN, V.DV, V.BDV, MASK, TMA)
                        o = tl.dot(p.to(v.dtype), v, o * rescale[:, None], input_precision=V.PRECISION)
    lse2 = row_max * unit + tl.log2(row_sum)
    lse_ptr += tl.cast(b * geometry.heads + h, tl.int64) * rows_total + q_start + i0
    tl.store(lse_ptr + tl.arange(0, BM), lse2 * LN2, mask=tl.arange(0, BM) < n_rows)
    if not LSE_ONLY:
        o = o / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        if V.GATE:
            gate = load_tile(at(gate_rows, b, h, q_start + i0), gate_rows.row, 0, n_rows, BM, V.DV, V.BDV, True)
            o = o * tl.sigmoid(gate.to(tl.float32))
        store_tile(at(y_rows, b, h, q_start + i0), y_rows.row, n_rows, o, BM, V.DV, V.BDV)


def forward(call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    launch = Launch(call)
    y = launch.empty_rows(call.v.shape[-1], call.output_dtype)
    if call.part is not None and call.part.lse is not None:
        lse = call.part.lse.contiguous()
    else:
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        softmax_of(launch, y, lse)
    if call.tau is None:
        return y, lse, None
    u = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) if save_u else None
    elastic_of(launch, lse, y, u)
    return y, lse, u


def softmax_of(launch: Launch, y: Tensor, lse: Tensor) -> None:
    """Fills lse, and y where tau does not ask for a second sweep."""
    call = launch.call
    lse_only = call.tau is not None
    config = launch.config("lse" if lse_only else "forward")
    grid = launch.row_grid(config.block_m)
    if grid[0] and grid[1]:
        tma, descriptors = launch.descriptors(config, config.block_n, launch.k, launch.v)
        _fwd_kernel[grid](
            *(rows_of(x) for x in (launch.q, launch.k, launch.v)),
            *descriptors,
            *(rows_of(x) for x in (launch.gate, y)),
            lse,
            launch.table,
            launch.sink,
            *launch.shared(call.cu_seqlens_q, config.block_m),
            V=launch.variant,
            LSE_ONLY=lse_only,
            TMA=tma,
            **config.launch,
        )
