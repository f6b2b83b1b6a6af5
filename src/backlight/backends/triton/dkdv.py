"""dk, dv: one program owns BN keys of a key head and visits the rows that see them, in [keys, rows] tiles (eq. 33, split form).

The query heads of a group are visited one after the other, in ascending order: their sum needs no second pass. Wide heads take
two launches, dv then dk: one more product per tile, but either accumulator alone leaves room for twice the keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.config import key_kernels
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.primitives import (
    PHASES,
    at,
    bias_tile,
    head_table,
    load_tile,
    load_vector,
    locate,
    row_phase,
    row_state,
    store_tile,
    stream_tile,
    table_entry,
    tile_gradient,
    tile_weights,
    visible,
    visible_count,
)


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _dkdv_kernel(
    q_rows, do_rows, q_desc, do_desc, k_rows, v_rows, dk_rows, dv_rows, lse2_ptr, delta_ptr, share_ptr, table_ptr, tau_ptr,
    scale, pitch16, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    kv_heads = geometry.heads // geometry.group
    b = tl.program_id(1) // kv_heads
    g = tl.program_id(1) % kv_heads
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
    j0 = tile * BN
    n_keys = sk - j0
    last_key = tl.minimum(j0 + BN, sk) - 1
    shift = sk - sq
    keys = (j0 + tl.arange(0, BN))[:, None]
    row_lanes = tl.arange(0, BM)[None, :]
    k = load_tile(at(k_rows, b, g, k_start + j0), k_rows.row, 0, n_keys, BN, V.D, V.BD, True)
    BD: tl.constexpr = V.BD
    BDV: tl.constexpr = V.BDV
    if WANT_DK:
        v = load_tile(at(v_rows, b, g, k_start + j0), v_rows.row, 0, n_keys, BN, V.DV, V.BDV, True)
        dk = tl.zeros([BN, BD], tl.float32)
    if WANT_DV:
        dv = tl.zeros([BN, BDV], tl.float32)
    for member in range(geometry.group):
        h = g * geometry.group + member
        q_ptr = at(q_rows, b, h, q_start)
        do_ptr = at(do_rows, b, h, q_start)
        offset = row_state(b, h, q_start, pitch16, geometry)
        own_table_ptr = head_table(table_ptr, h, geometry, False)
        threshold = 0.0
        if V.TAU:
            threshold = tl.where(tl.load(tau_ptr + h).to(tl.float32) >= 0, float("-inf"), 0.0)
        for PHASE in tl.static_range(PHASES):
            if (V.RIGHT or PHASE != 0) and (V.BIAS or (PHASE != 2 and PHASE != 3)):
                start, stop = row_phase(PHASE, j0, last_key, sq, sk, geometry, V, BM)
                if start < stop:
                    for i0 in range(start, stop, BM):
                        i0 = tl.multiple_of(i0, BM)
                        MASK: tl.constexpr = PHASE == 0 or PHASE == 4
                        EDGE: tl.constexpr = MASK and V.VARLEN
                        BIAS: tl.constexpr = V.BIAS and PHASE != 1 and PHASE != 3
                        q = stream_tile(q_rows, q_desc, q_ptr, b, h, i0, sq, BM, V.D, V.BD, MASK, TMA)
                        do = stream_tile(do_rows, do_desc, do_ptr, b, h, i0, sq, BM, V.DV, V.BDV, MASK, TMA)
                        lse2 = load_vector(lse2_ptr + offset, i0, sq, float("inf"), BM, EDGE)[None, :]
                        t = tl.dot(k, tl.trans(q), input_precision=V.PRECISION)
                        if WANT_DK:
                            dp = tl.dot(v, tl.trans(do), input_precision=V.PRECISION)
                            delta = load_vector(delta_ptr + offset, i0, sq, 0.0, BM, EDGE)[None, :]
                        share = 0.0
                        position = i0 + shift + row_lanes
                        alone = position < 0
                        seen = alone
                        if V.TAU:
                            share = load_vector(share_ptr + offset, i0, sq, 0.0, BM, EDGE)[None, :]
                            alone = visible_count(position, q_start, sq, sk, packing, geometry, V) == 1
                        if MASK:
                            seen = visible(position, keys, sk, geometry, V, LEFT=PHASE == 4, RIGHT=PHASE == 0)
                        bias = 0.0
                        if BIAS:
                            entry = table_entry(i0 + shift - j0 + geometry.bias_origin, geometry, False)
                            bias = bias_tile(own_table_ptr, entry, geometry, V, BN, BM)
                        if WANT_DK:
                            a, _, dx = tile_gradient(
                                t, dp, lse2, delta, bias, share, threshold, alone, seen, geometry, V, MASK, BIAS
                            )
                        else:
                            _, a, _, _ = tile_weights(t, lse2, bias, share, threshold, alone, seen, geometry, V, MASK, BIAS)
                        if WANT_DV:
                            dv = tl.dot(a.to(do.dtype), do, dv, input_precision=V.PRECISION)
                        if WANT_DK:
                            dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=V.PRECISION)
    if WANT_DK:
        store_tile(at(dk_rows, b, g, k_start + j0), dk_rows.row, n_keys, dk * scale, BN, V.D, V.BD)
    if WANT_DV:
        store_tile(at(dv_rows, b, g, k_start + j0), dv_rows.row, n_keys, dv, BN, V.DV, V.BDV)


def dkdv_of(launch: Launch, rows: RowState) -> tuple[Tensor, Tensor]:
    call = launch.call
    dk, dv = (torch.empty_like(x, dtype=call.output_dtype) for x in (call.k, call.v))
    for kernel in key_kernels(call):
        launch_keys(kernel, launch, rows, dk, dv)
    return dk, dv


def launch_keys(kernel: str, launch: Launch, rows: RowState, dk: Tensor, dv: Tensor) -> None:
    """One of `key_kernels`: fills what its name says of dk and dv."""
    call = launch.call
    config = launch.config(kernel)
    grid = launch.key_grid(config.block_n)
    if grid[0] and grid[1]:
        tma, descriptors = launch.descriptors(config, config.block_m, launch.q, rows.do)
        _dkdv_kernel[grid](
            *(rows_of(x) for x in (launch.q, rows.do)),
            *descriptors,
            *(rows_of(x) for x in (launch.k, launch.v, dk, dv)),
            rows.lse2,
            rows.delta,
            rows.share,
            launch.table,
            launch.tau,
            float(call.scale),
            rows.pitch16,
            *launch.shared(call.cu_seqlens_k, config.block_n),
            V=launch.variant,
            WANT_DK="dk" in kernel,
            WANT_DV="dv" in kernel,
            TMA=tma,
            **config.launch,
        )
