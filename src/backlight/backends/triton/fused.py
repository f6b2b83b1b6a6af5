"""dq, dk, dv in one kernel, for many short sequences without a mask: a program owns all keys of a key head and all rows that
see them, a tile of keys after the other, in [keys, rows] tiles as `dkdv`.

dk and dv of the tile stay in registers. dq comes back for every tile of keys: it is kept in fp32 in memory that belongs to the
program alone, and goes from one head to the next, so that it stays in cache. Five products a pair instead of seven, one
exponential instead of two, and every sum in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.config import width_of
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import at, load_tile, row_state, row_tile, store_tile, stream_tile
from backlight.backends.triton.pair import pair_tile
from backlight.backends.triton.primitives import (
    LOG2E,
    Segment,
    logits_of,
    row_span,
    tile_gradient,
    tile_weights,
)
from backlight.backends.triton.visits import Intervals
from backlight.call import Call

# heads that fill a large card, and programs of it that run side by side
FEWEST_HEADS = 256
SLOTS = 396
WIDEST = 32


@triton.jit(do_not_specialize=["items", "pitch16", "sq", "sk"])
def _fused_kernel(
    q_rows, do_rows, q_desc, do_desc, k_rows, v_rows, dq_rows, dk_rows, dv_rows, kept_ptr, minus_lse2_ptr, delta_ptr, table_ptr,
    scale, items, pitch16, pair, pair_desc, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, TMA: tl.constexpr, PAIR_TMA: tl.constexpr, DIRECT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    kv_heads = geometry.heads // geometry.group
    segment = Segment(0, 0, sq, sk, 0)
    row_lanes = tl.arange(0, BM)[None, :]
    BD: tl.constexpr = V.BD
    BDV: tl.constexpr = V.BDV
    kept_ptr += tl.cast(tl.program_id(0), tl.int64) * (geometry.group * pitch16 * 16 * BD)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        b = item // kv_heads
        g = item % kv_heads
        for j0 in range(0, sk, BN):
            n_keys = sk - j0
            keys = (j0 + tl.arange(0, BN))[:, None]
            span = row_span(j0, tl.minimum(j0 + BN, sk) - 1, sq, sk, geometry, V, BM)
            k = load_tile(at(k_rows, b, g, j0), k_rows.row, 0, n_keys, BN, V.D, V.BD)
            v = load_tile(at(v_rows, b, g, j0), v_rows.row, 0, n_keys, BN, V.DV, V.BDV)
            dk = tl.zeros([BN, BD], tl.float32)
            dv = tl.zeros([BN, BDV], tl.float32)
            for member in range(geometry.group):
                h = g * geometry.group + member
                offset = row_state(b, h, 0, pitch16, geometry)
                own_table_ptr = head_table(table_ptr, h, geometry, False)
                own_kept_ptr = kept_ptr + member * (pitch16 * 16 * BD)
                for i0 in range(0, sq, BM):
                    q = stream_tile(q_rows, q_desc, b, h, 0, i0, sq, BM, V.D, V.BD, TMA)
                    do = stream_tile(do_rows, do_desc, b, h, 0, i0, sq, BM, V.DV, V.BDV, TMA)
                    minus_lse2 = row_tile(minus_lse2_ptr + offset, i0, sq, float("-inf"), V, DIRECT, BN, BM)
                    t = tl.dot(k, tl.trans(q), input_precision=V.PRECISION)
                    delta = row_tile(delta_ptr + offset, i0, sq, 0.0, V, DIRECT, BN, BM)
                    s, slope = logits_of(t, geometry.unit, minus_lse2, geometry, V, "apart")
                    if V.PAIR > 0:
                        s += pair_tile(pair, pair_desc, b, h, i0, j0, sq, V, PAIR_TMA, BM, BN, True) * LOG2E
                    if V.BIAS:
                        entry = table_entry(i0 + sk - sq - j0 + geometry.bias_origin, geometry, False)
                        s = add_bias(s, geometry.unit, own_table_ptr, entry, i0, span, geometry, V, BN, BM)
                    dp = tl.dot(v, tl.trans(do), input_precision=V.PRECISION)
                    position = i0 + sk - sq + row_lanes
                    p, _ = tile_weights(
                        s, 0.0, 0.0, position, keys, n_keys < BN, Intervals(0, 0), segment, packing, geometry, V, BN
                    )
                    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=V.PRECISION)
                    _, dx = tile_gradient(p, p, dp, delta, slope, V)
                    dx = dx.to(q.dtype)
                    dk = tl.dot(dx, q, dk, input_precision=V.PRECISION)
                    # its rows have room for whole tiles
                    kept = own_kept_ptr + (i0 + tl.arange(0, BM))[:, None] * BD + tl.arange(0, BD)[None, :]
                    before = tl.load(kept, mask=j0 > 0, other=0.0)
                    dq = tl.dot(tl.trans(dx), k, input_precision=V.PRECISION) * scale + before
                    tl.store(kept, dq, mask=n_keys > BN)
                    # no rows before the last tile of keys
                    n_rows = tl.where(n_keys > BN, 0, sq - i0)
                    store_tile(at(dq_rows, b, h, i0), dq_rows.row, n_rows, dq, BM, V.D, V.BD)
            store_tile(at(dk_rows, b, g, j0), dk_rows.row, n_keys, dk * scale, BN, V.D, V.BD)
            store_tile(at(dv_rows, b, g, j0), dv_rows.row, n_keys, dv, BN, V.DV, V.BDV)
            # what other threads have kept of dq is read next
            tl.debug_barrier()


def fits(call: Call) -> bool:
    """Whether a call has so many heads that a program each fills a card, and nothing that leaves tiles out."""
    spec = call.spec
    masked = spec.masked or spec.rows or call.varlen or spec.tau or call.part is not None
    heads = call.q.shape[0] * call.k.shape[1]
    narrow = width_of(call) <= WIDEST and call.q.dtype != torch.float32
    return spec.pair_bias and not masked and narrow and heads >= FEWEST_HEADS and call.q.numel() > 0 and call.k.numel() > 0


def fused_of(launch: Launch, rows: RowState) -> tuple[Tensor, Tensor, Tensor]:
    call = launch.call
    config = launch.config("fused")
    dq, dk, dv = (torch.empty_like(x) for x in (call.q, call.k, call.v))
    items = call.q.shape[0] * call.k.shape[1]
    programs = min(items, SLOTS)
    width, pitch = launch.variant.BD, rows.pitch16 * 16
    kept = torch.empty(programs, call.group, pitch, width, dtype=torch.float32, device=call.q.device)
    tma, descriptors = launch.descriptors(config, config.block_m, launch.q, rows.do)
    pair_tma, pair = launch.pair(config)
    launch.start(
        _fused_kernel,
        (programs,),
        *(rows_of(x) for x in (launch.q, rows.do)),
        *descriptors,
        *(rows_of(x) for x in (launch.k, launch.v, dq, dk, dv)),
        kept,
        rows.minus_lse2,
        rows.delta,
        launch.table,
        float(call.scale),
        items,
        rows.pitch16,
        *pair,
        *launch.shared(None, config.block_n),
        V=launch.variant,
        TMA=tma,
        PAIR_TMA=pair_tma,
        DIRECT=config.direct and launch.nvidia,
        **config.launch,
    )
    return dq, dk, dv
