"""Forward mode without tau: y, lse and their tangents in one sweep of at most six products a tile (eq. 47-52).

One program per BM rows of one query head. Registers: q and tq [BM, D], accumulators o and w [BM, Dv] in fp32, running max and
sum, e and nu [BM], and the tiles s and ts. A tangent that is not given leaves no trace. Parity contract: tests/interpreted.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.config import LARGE, MIDDLE, KernelConfig, heuristic, width_of
from backlight.backends.triton.device import device_of
from backlight.backends.triton.forward import LARGEST
from backlight.backends.triton.launch import Launch, compact
from backlight.backends.triton.loads import at, key_tile, own_tile, store_tile
from backlight.backends.triton.pair import block_place, pair_tile
from backlight.backends.triton.primitives import LN2, LOG2E, keys_of, logits_of, row_block, visible
from backlight.backends.triton.tangent_known import _tangent_known_kernel
from backlight.backends.triton.tangent_steps import moved_scores, start_tangent
from backlight.backends.triton.visits import visited
from backlight.call import Call
from backlight.config import resolve


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _tangent_kernel(
    tensors, values, k_desc, v_desc, tk_desc, tv_desc, pair, tpair, frame, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    table_ptr = head_table(values.table_ptr, block.h, geometry, True)
    ttable_ptr = head_table(values.ttable_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(tensors.q, block, BM, V.D, V.BD)
    tq = q
    if T.Q:
        tq = own_tile(tensors.tq, block, BM, V.D, V.BD)

    # maxima are kept in units of x, the base-2 logit before its positive factor
    unit = geometry.unit
    row_max = tl.full([BM], float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    if V.SINK:
        sink = tl.load(values.sink_ptr + block.h).to(tl.float32)
        row_max = tl.zeros([BM], tl.float32) + tl.minimum(sink * LOG2E / unit, LARGEST)
        row_sum = tl.full([BM], 1.0, tl.float32)
        if T.SINK:
            e += tl.load(values.tsink_ptr + block.h).to(tl.float32)
    # the sum of g as it is multiplied with v: what v has in common cancels exactly then
    e_cast = e
    nu = tl.zeros([BM], tl.float32)
    opened = tl.zeros([BM], tl.float32)
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    w = tl.zeros([BM, BDV], tl.float32)
    span, visits, intervals = keys_of(block, frame.mask, sq, sk, n_segments, geometry, V, BN)
    # a row meets its first key in the first tile, or after a tile that an edge cuts; a pair bias may hide any
    cut_before = 1
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
            v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            tk = k
            if T.K:
                tk = key_tile(tensors.tk, tk_desc, block, j0, BN, V.D, V.BD, TMA)
            ts = moved_scores(q, tq, k, tk, values.scale, BM, BN, V, T)
            addend = 0.0
            if V.PAIR > 0:
                place = block_place(block, j0, V)
                addend = pair_tile(pair, pair.ptr, place, block.segment.sq, V, False, BM, BN, False)
                if V.SOFTCAP:
                    addend *= LOG2E / unit
            x, slope = logits_of(t, 1.0, addend, geometry, V, "apart" if T.SCORES else "none")
            if V.SOFTCAP and T.SCORES:
                ts = ts * slope
            entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
            if V.BIAS:
                x = add_bias(x, 1.0, table_ptr, entry, j0, span, geometry, V, BM, BN)
            if T.BIAS:
                ts = add_bias(ts, 1.0, ttable_ptr, entry, j0, span, geometry, V, BM, BN)
            if T.PAIR:
                place = block_place(block, j0, V)
                ts += pair_tile(tpair, tpair.ptr, place, block.segment.sq, V, False, BM, BN, False)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            if at_edge:
                seen = visible(block.position, j0 + key_lanes, intervals, block.segment, geometry, V, BN)
                x = tl.where(seen, x, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(x, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            # the difference first: an unchanged maximum must rescale by exactly 1
            rescale = tl.exp2((row_max - safe_max) * unit)
            p = tl.exp2(x * unit - (safe_max * unit)[:, None])
            row_max = new_max
            total = tl.sum(p, 1)
            row_sum *= rescale
            o = o * rescale[:, None]
            w = w * rescale[:, None]
            weights = p.to(v.dtype)
            if T.SCORES:
                e *= rescale
                e_cast *= rescale
                if cut_before > 0:
                    # what is in the sum already is the sink's
                    mean = tl.sum(p * ts, 1) / tl.where(total > 0, total, 1.0)
                    moved = tl.where((opened == 0) & (total > 0), mean, 0.0)
                    nu += moved
                    e -= moved * row_sum
                    e_cast -= moved * row_sum
                    opened = tl.where(total > 0, 1.0, opened)
                if V.PAIR == 0:
                    cut_before = at_edge.to(tl.int32)
                g = p * (ts - nu[:, None])
                e += tl.sum(g, 1)
                g_cast = g.to(v.dtype)
                e_cast += tl.sum(g_cast.to(tl.float32), 1)
                w = tl.dot(g_cast, v, w, input_precision=V.PRECISION)
            elif T.SINK:
                e *= rescale
                e_cast *= rescale
            row_sum += total
            o = tl.dot(weights, v, o, input_precision=V.PRECISION)
            if T.V:
                tv = key_tile(tensors.tv, tv_desc, block, j0, BN, V.DV, V.BDV, TMA)
                w = tl.dot(weights, tv, w, input_precision=V.PRECISION)
    lse2 = row_max * unit + tl.log2(row_sum)
    if V.SINK:
        lse2 = tl.where(sink == float("inf"), sink, lse2)
    inverse = 1.0 / tl.where(row_sum == 0, 1.0, row_sum)
    tlse = tl.where(lse2 == float("-inf"), 0.0, nu + e * inverse)
    offset = tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row
    rows = tl.arange(0, BM)
    tl.store(values.lse_ptr + offset + rows, lse2 * LN2, mask=rows < block.n_rows)
    tl.store(values.tlse_ptr + offset + rows, tlse, mask=rows < block.n_rows)
    y = o * inverse[:, None]
    ty = w * inverse[:, None]
    if V.GATE:
        weight = tl.sigmoid(own_tile(tensors.gate, block, BM, V.DV, V.BDV).to(tl.float32))
        y = y * weight
        ty = ty * weight
        if T.GATE:
            ty += y * (1.0 - weight) * own_tile(tensors.tgate, block, BM, V.DV, V.BDV).to(tl.float32)
    ty -= (e_cast * inverse)[:, None] * y
    store_tile(at(tensors.y, block.b, block.h, block.row), tensors.y.row, block.n_rows, y, BM, V.DV, V.BDV)
    store_tile(at(tensors.ty, block.b, block.h, block.row), tensors.ty.row, block.n_rows, ty, BM, V.DV, V.BDV)


def config_of(call: Call, known: bool = False) -> KernelConfig:
    return resolve("triton.tangent_known" if known else "triton.tangent", lambda: _chosen(call, known))


def _chosen(call: Call, known: bool) -> KernelConfig:
    """Two accumulators, one where y is known, and two tiles of scores, four tensors of keys: tiles that neither spill nor
    exceed shared memory."""
    device = device_of(call.q.device)
    if call.q.dtype == torch.float32 or width_of(call) > 128:
        found = heuristic("dq", call, device)
        return found if device.shared >= LARGE or call.q.dtype == torch.float32 else replace(found, block_n=32)
    narrow = width_of(call) <= 64
    if device.shared >= LARGE:
        alone = known and call.bias is None and call.spec.softcap is None
        if alone and narrow:
            return KernelConfig(64, 64, 4, 3, tma=True)
        return KernelConfig(128, 64 if narrow or alone else 32, 8, 2, tma=True)
    if device.shared >= MIDDLE:
        return KernelConfig(64, 64, 4, 2, tma=True) if narrow else KernelConfig(64, 32, 4, 1)
    return KernelConfig(64 if narrow else 32, 32, 4, 1)


def tangent(call: Call, tangents: dict[str, Tensor], known: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """(y, lse, None, ty, tlse, None); known: y, lse and u of the forward, of which y and lse are returned as they came."""
    launch = Launch(call)
    ty = launch.empty_rows(call.v.shape[-1], call.output_dtype)
    tlse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    # a pair bias may hide any key, and parts have another lse than their rows: both compute again what they know
    reads = known is not None and call.pair_bias is None and call.part is None
    y, lse = known[:2] if known is not None and reads else (torch.empty_like(ty), torch.empty_like(tlse))
    kernel = _tangent_known_kernel if reads else _tangent_kernel
    pairs = () if reads else tuple(launch.pair_of(x) for x in (call.pair_bias, tangents.get("pair_bias")))
    given = launch.readable(y)
    results = (given, given, ty, ty, compact(lse), tlse)
    start_tangent(kernel, launch, config_of(call, reads), tangents, results, pairs, not reads)
    if known is not None:
        y, lse, _ = known
    return y, lse, None, ty, tlse, None
