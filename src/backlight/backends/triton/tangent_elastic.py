"""Forward mode with tau (eq. 53): the sweep after the one that makes lse. y and u, where they are not known, come beside it.

Weights are normalised from the start and nothing is rescaled; scores of keys that do not survive still move the normaliser.
Registers: q and tq [BM, D], accumulators w and tu [BM, Dv] in fp32, of fresh rows o and u as well, e and nu [BM], and the tiles
p and ts. Parity contract: tests/interpreted.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.config import LARGE, MIDDLE, KernelConfig, width_of
from backlight.backends.triton.device import device_of
from backlight.backends.triton.forward import softmax_of
from backlight.backends.triton.launch import Launch, compact
from backlight.backends.triton.loads import at, key_tile, own_tile, store_tile
from backlight.backends.triton.primitives import (
    LOG2E,
    Sight,
    keys_of,
    own_counts,
    positive,
    row_block,
    tile_weights,
    visible_count,
)
from backlight.backends.triton.tangent_steps import (
    Own,
    both_scores,
    moves,
    own_lse,
    own_queries,
    own_tables,
    sink_moves,
    start_tangent,
)
from backlight.backends.triton.visits import visited
from backlight.call import Call
from backlight.config import resolve


@triton.jit
def put_rows(tensors, values, block, o, u, w, e, BM: tl.constexpr, V: tl.constexpr, T: tl.constexpr):
    """ty (eq. 51, 53; sigma o is y), and y and u where they are new."""
    tau = tl.load(values.tau_ptr + block.h).to(tl.float32)
    y = o
    if T.FRESH:
        store_tile(at(tensors.u, block.b, block.h, block.row), tensors.u.row, block.n_rows, u, BM, V.DV, V.BDV)
    else:
        y = own_tile(tensors.y, block, BM, V.DV, V.BDV).to(tl.float32)
        u = own_tile(tensors.u, block, BM, V.DV, V.BDV).to(tl.float32)
    along = e * tau
    if T.TAU:
        along += tl.load(values.ttau_ptr + block.h).to(tl.float32)
    ty = w + along[:, None] * u
    if V.GATE:
        weight = tl.sigmoid(own_tile(tensors.gate, block, BM, V.DV, V.BDV).to(tl.float32))
        ty = ty * weight
        if T.FRESH:
            y = y * weight
        if T.GATE:
            ty += y * (1.0 - weight) * own_tile(tensors.tgate, block, BM, V.DV, V.BDV).to(tl.float32)
    if T.FRESH:
        store_tile(at(tensors.y, block.b, block.h, block.row), tensors.y.row, block.n_rows, y, BM, V.DV, V.BDV)
    ty -= e[:, None] * y
    store_tile(at(tensors.ty, block.b, block.h, block.row), tensors.ty.row, block.n_rows, ty, BM, V.DV, V.BDV)


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _tangent_elastic_kernel(
    tensors, values, k_desc, v_desc, tk_desc, tv_desc, frame, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    packing = own_counts(frame.packing, block.b, block.h, sq, geometry, V)
    table_ptr, ttable_ptr = own_tables(values, block, geometry)
    key_lanes = tl.arange(0, BN)[None, :]
    rows = tl.arange(0, BM)
    q, tq = own_queries(tensors, block, V, T, BM)
    offset, lse, sees_nothing = own_lse(values, block, sq, geometry, BM)
    lse2 = tl.where(sees_nothing, 0.0, lse * LOG2E)[:, None]
    n = visible_count(block.position, block.segment, packing, geometry, V)
    tau = tl.load(values.tau_ptr + block.h).to(tl.float32)
    share = tau / tl.maximum(n, 1)
    # with tau >= 0 every visible key survives, also where p underflowed
    floor = tl.where(tau >= 0, 1.1754944e-38, 0.0)
    e = tl.zeros([BM], tl.float32)
    nu = e
    # rows without a weight have no mean to wait for
    opened = tl.where(sees_nothing, 1.0, 0.0)
    waiting = 1
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    u = tl.zeros([BM, BDV], tl.float32)
    w = tl.zeros([BM, BDV], tl.float32)
    tu = tl.zeros([BM, BDV], tl.float32)
    span, visits, intervals = keys_of(block, frame.mask, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, block.segment, packing)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            own = Own(block, q, tq, -lse2, table_ptr, ttable_ptr, span)
            s, ts = both_scores(own, tensors, k_desc, tk_desc, values.scale, j0, geometry, V, T, BN)
            if V.INTERVALS == 0:
                at_edge = (j0 < span.low) | (j0 > span.high)
            keys = j0 + key_lanes
            p, a = tile_weights(s, share, floor, block.position, keys, at_edge, sight, geometry, V, BN)
            v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
            weights = a.to(v.dtype)
            alive = positive(a, weights, V)
            if T.FRESH:
                u = tl.dot(alive, v, u, input_precision=V.PRECISION)
                o = tl.dot(weights, v, o, input_precision=V.PRECISION)
            if T.V:
                tv = key_tile(tensors.tv, tv_desc, block, j0, BN, V.DV, V.BDV, TMA)
                tu = tl.dot(alive, tv, tu, input_precision=V.PRECISION)
                w = tl.dot(weights, tv, w, input_precision=V.PRECISION)
            if T.SCORES:
                g, nu, opened, waiting, e = moves(p, ts, nu, opened, waiting, e)
                w = tl.dot(tl.where(a > 0, g, 0.0).to(v.dtype), v, w, input_precision=V.PRECISION)
    if V.SINK:
        e += sink_moves(values, lse, nu, block.h, sees_nothing, T)
    tl.store(values.tlse_ptr + offset, tl.where(sees_nothing, 0.0, nu + e), mask=rows < block.n_rows)
    count = tl.maximum(n, 1)
    if T.V:
        store_tile(at(tensors.tu, block.b, block.h, block.row), tensors.tu.row, block.n_rows, tu / count, BM, V.DV, V.BDV)
    put_rows(tensors, values, block, o, u / count, w, e, BM, V, T)


def config_of(call: Call) -> KernelConfig:
    return resolve("triton.tangent_elastic", lambda: _chosen(call))


def _chosen(call: Call) -> KernelConfig:
    """Up to four accumulators and two tiles of scores, four tensors of keys."""
    width, shared = width_of(call), device_of(call.q.device).shared
    if call.q.dtype == torch.float32:
        return KernelConfig(16, 16, 8 if width > 64 else 4, 1)
    if width > 128:
        return KernelConfig(32, 32 if shared >= LARGE else 16, 8, 1)
    if shared >= LARGE:
        return KernelConfig(64, 32, 4 if width <= 64 else 8, 2, tma=True)
    return KernelConfig(32, 32, 4, 2 if shared >= MIDDLE else 1)


def tangent_elastic(call: Call, tangents: dict[str, Tensor], known: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """(y, lse, u, ty, tlse, tu); known: y, lse and u of the forward. tu is there with a tangent of v."""
    launch = Launch(call)
    rows = (call.v.shape[-1], call.output_dtype)
    ty, tu = launch.empty_rows(*rows), launch.empty_rows(*rows) if "v" in tangents else None
    tlse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    fresh = known is None or known[2] is None
    if known is None:
        y, lse, u = launch.empty_rows(*rows), torch.empty_like(tlse), launch.empty_rows(*rows)
        softmax_of(launch, y, lse)
    else:
        y, lse, u = known
        y, u = (launch.empty_rows(*rows) for _ in range(2)) if fresh else (launch.readable(x) for x in (y, u))
    results = (y, u, ty, ty if tu is None else tu, compact(lse), tlse)
    start_tangent(_tangent_elastic_kernel, launch, config_of(call), tangents, results, (), fresh)
    return (y, lse, u, ty, tlse, tu) if known is None else (*known, ty, tlse, tu)
