"""dk, dv: one program owns BN keys of a key head and visits the rows that see them, in [keys, rows] tiles (eq. 33, split form).

The query heads of a group are visited one after the other, in ascending order: their sum needs no second pass. Wide heads take
two launches, dv then dk: one more product per tile, but either accumulator alone leaves room for twice the keys.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.config import key_kernels
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import at, load_tile, row_state, row_tile, store_tile, stream_tile
from backlight.backends.triton.pair import pair_place, pair_tile
from backlight.backends.triton.powers import alpha_of
from backlight.backends.triton.primitives import (
    LOG2E,
    Sight,
    cut_rows,
    logits_of,
    own_counts,
    row_span,
    segment_of,
    surviving,
    tile_gradient,
    tile_weights,
)
from backlight.backends.triton.visits import intervals_of, tiles_of, visited, visits_of


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _dkdv_kernel(
    q_rows, do_rows, q_desc, do_desc, k_rows, v_rows, dk_rows, dv_rows, minus_lse2_ptr, delta_ptr, share_ptr, table_ptr,
    columns_ptr, scale, pitch16, pair, pair_desc, mask, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, WANT_DK: tl.constexpr, WANT_DV: tl.constexpr, WANT_COLUMNS: tl.constexpr, TMA: tl.constexpr,
    PAIR_TMA: tl.constexpr, DIRECT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    kv_heads = geometry.heads // geometry.group
    b = tl.program_id(1) // kv_heads
    g = tl.program_id(1) % kv_heads
    segment, tile = segment_of(tl.program_id(0), packing, sq, sk, n_segments, V)
    whole_sq = sq
    row_tiles = tiles_of(sq, n_segments, V, BM)
    sq = segment.sq
    j0 = tile * BN
    n_keys = segment.sk - j0
    shift = segment.sk - sq
    span = row_span(j0, tl.minimum(j0 + BN, segment.sk) - 1, sq, segment.sk, geometry, V, BM)
    keys = (j0 + tl.arange(0, BN))[:, None]
    row_lanes = tl.arange(0, BM)[None, :]
    k = load_tile(at(k_rows, b, g, segment.k_start + j0), k_rows.row, 0, n_keys, BN, V.D, V.BD)
    BD: tl.constexpr = V.BD
    BDV: tl.constexpr = V.BDV
    SLOPE: tl.constexpr = "none" if not WANT_DK else "apart" if WANT_DV or V.TAU or WANT_COLUMNS else "within"
    if WANT_DK:
        v = load_tile(at(v_rows, b, g, segment.k_start + j0), v_rows.row, 0, n_keys, BN, V.DV, V.BDV)
        dk = tl.zeros([BN, BD], tl.float32)
    if WANT_DV:
        dv = tl.zeros([BN, BDV], tl.float32)
    for member in range(geometry.group):
        h = g * geometry.group + member
        offset = row_state(b, h, segment.q_start, pitch16, geometry)
        own_table_ptr = head_table(table_ptr, h, geometry, False)
        alpha = alpha_of(h, geometry, V)
        own_packing = own_counts(packing, b, h, whole_sq, geometry, V)
        visits = visits_of(span, mask, b, h, tl.program_id(0), tl.num_programs(0) + 1, row_tiles, geometry, V, BM)
        intervals = intervals_of(mask, b, h, segment, whole_sq, sk, n_segments, geometry, V, BN)
        sight = Sight(intervals, segment, own_packing)
        if WANT_COLUMNS:
            column = tl.zeros([BN], tl.float32)
        if visits.start < visits.stop:
            for step in range(visits.start, visits.stop, BM):
                i0, at_edge = visited(step, visits, V, BM)
                i0 = tl.multiple_of(i0, BM)
                q = stream_tile(q_rows, q_desc, (b, h, segment.q_start), i0, sq, BM, V.D, V.BD, TMA)
                do = stream_tile(do_rows, do_desc, (b, h, segment.q_start), i0, sq, BM, V.DV, V.BDV, TMA)
                minus_lse2 = row_tile(minus_lse2_ptr + offset, i0, sq, float("-inf"), V, DIRECT, BN, BM)
                t = tl.dot(k, tl.trans(q), input_precision=V.PRECISION)
                if WANT_DK:
                    delta = row_tile(delta_ptr + offset, i0, sq, 0.0, V, DIRECT, BN, BM)
                share = alpha
                if V.TAU:
                    share = row_tile(share_ptr + offset, i0, sq, 0.0, V, DIRECT, BN, BM)
                s, slope = logits_of(t, geometry.unit, minus_lse2, geometry, V, SLOPE)
                if V.PAIR > 0:
                    place = pair_place(b, h, i0, j0, segment, V)
                    s += pair_tile(pair, pair_desc, place, sq, V, PAIR_TMA, BM, BN, True) * LOG2E
                if V.BIAS:
                    entry = table_entry(i0 + shift - j0 + geometry.bias_origin, geometry, False)
                    s = add_bias(s, geometry.unit, own_table_ptr, entry, i0, span, geometry, V, BN, BM)
                if WANT_DK:
                    # after the branch of the bias (dq.py)
                    dp = tl.dot(v, tl.trans(do), input_precision=V.PRECISION)
                # keys beyond the end are not stored, rows beyond theirs weigh nothing: neither needs a mask
                at_edge = cut_rows(i0, span, at_edge, V)
                if V.TAU:
                    # a row may see this key alone
                    at_edge = (n_keys == 1) | at_edge
                position = i0 + shift + row_lanes
                p, a = tile_weights(s, share, 0.0, position, keys, at_edge, sight, geometry, V, BN)
                if WANT_DV:
                    dv = tl.dot(a.to(do.dtype), do, dv, input_precision=V.PRECISION)
                if WANT_DK:
                    ds, dx = tile_gradient(p, surviving(a, 0.0, V), dp, delta, slope, V)
                    if WANT_COLUMNS:
                        column += tl.sum(ds, 1)
                    dk = tl.dot(dx.to(q.dtype), q, dk, input_precision=V.PRECISION)
        if WANT_COLUMNS:
            at_key = tl.cast(b * geometry.heads + h, tl.int64) * sk + segment.k_start + j0 + tl.arange(0, BN)
            tl.store(columns_ptr + at_key, column, mask=tl.arange(0, BN) < n_keys)
    if WANT_DK:
        store_tile(at(dk_rows, b, g, segment.k_start + j0), dk_rows.row, n_keys, dk * scale, BN, V.D, V.BD)
    if WANT_DV:
        store_tile(at(dv_rows, b, g, segment.k_start + j0), dv_rows.row, n_keys, dv, BN, V.DV, V.BDV)


def dkdv_of(launch: Launch, rows: RowState, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """columns [B,Hq,Sk] is filled with the column sums of ds."""
    call = launch.call
    dk, dv = (torch.empty_like(x, dtype=call.output_dtype) for x in (call.k, call.v))
    for kernel in key_kernels(call):
        launch_keys(kernel, launch, rows, dk, dv, columns if "dk" in kernel else None)
    return dk, dv


def launch_keys(kernel: str, launch: Launch, rows: RowState, dk: Tensor, dv: Tensor, columns: Tensor | None) -> None:
    """One of `key_kernels`: fills what its name says of dk and dv."""
    call = launch.call
    config = launch.config(kernel)
    grid = launch.key_grid(config.block_n)
    if grid[0] and grid[1]:
        tma, descriptors = launch.descriptors(config, config.block_m, launch.q, rows.do)
        pair_tma, pair = launch.pair(config)
        launch.start(
            _dkdv_kernel,
            grid,
            *(rows_of(x) for x in (launch.q, rows.do)),
            *descriptors,
            *(rows_of(x) for x in (launch.k, launch.v, dk, dv)),
            rows.minus_lse2,
            rows.delta,
            rows.share,
            launch.table,
            rows.delta if columns is None else columns,
            float(call.scale),
            rows.pitch16,
            *pair,
            launch.mask(config, of_rows=False),
            *launch.shared(call.cu_seqlens_k, config.block_n),
            V=launch.variant,
            WANT_DK="dk" in kernel,
            WANT_DV="dv" in kernel,
            WANT_COLUMNS=columns is not None,
            TMA=tma,
            PAIR_TMA=pair_tma,
            DIRECT=config.direct and launch.nvidia and not call.varlen,
            **config.launch,
        )
