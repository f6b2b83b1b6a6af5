"""Forward with entmax: one program finds the thresholds of its BM rows in a few sweeps over the keys, then o and u (eq. 80-86).

The first sweep keeps a lower bound of the thresholds (eq. 84) and writes down which key tiles reach above it; no other is
visited again (eq. 85). The next ones step to the thresholds (eq. 83, above alpha 1.5 eq. 81) until all rows of the program are
there. The last multiplies v and makes one more step on the way (eq. 86). Packed sequences and masks visit all of their tiles.

Registers: q [BM, D], accumulators o and u [BM, Dv] in fp32, which the first sweeps do not have yet. Parity contract:
tests/conformance.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import at, key_tile, own_tile, store_tile
from backlight.backends.triton.pair import block_place, pair_tile
from backlight.backends.triton.powers import LN2, alpha_of, newton, raised, rooted
from backlight.backends.triton.primitives import LOG2E, Frame, key_span, logits_of, row_block, visible
from backlight.backends.triton.visits import intervals_of, tiles_of, visited, visits_of

# sweeps that step, at most: where eq. 83 holds, so many by the exponent leave o and u right to the digits of 16 bits (the table
# below eq. 86)
MOST, MOST_WIDE = 6, 12
ENOUGH = {4: 1, 2: 2}
# a step this small is followed by none. Where eq. 83 holds the last sweep squares what is left of it; nearer to alpha 2 a key
# may still enter
CLOSE = tl.constexpr(2.0**-20)
CLOSE_SMOOTH = tl.constexpr(2.0**-9)


class Tensors(NamedTuple):
    """Rows of q, k, v, gate, y, u, and the rest by pointers; u is None where it is not kept, live where no tile is left out:
    room for the numbers of the key tiles that a program visits."""

    q: Any
    k: Any
    v: Any
    gate: Any
    y: Any
    u: Any
    lse_ptr: Any
    table_ptr: Any
    sink_ptr: Any
    live_ptr: Any
    pair: Any


class Place(NamedTuple):
    """What scores of a program's tiles need besides q and k."""

    block: Any
    span: Any
    intervals: Any
    table_ptr: Any
    pair: Any
    pair_desc: Any


@triton.jit
def scores(
    q, k, j0, at_edge, place, geometry, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Logits [BM, BN] of a key tile before their positive factor `geometry.unit`; -inf where nothing is seen."""
    block = place.block
    t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
    addend = 0.0
    if V.PAIR > 0:
        where = block_place(block, j0, V)
        addend = pair_tile(place.pair, place.pair_desc, where, block.segment.sq, V, PAIR_TMA, BM, BN, False)
        if V.SOFTCAP:
            addend *= LOG2E / geometry.unit
    x, _ = logits_of(t, 1.0, addend, geometry, V, "none")
    if V.BIAS:
        entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
        x = add_bias(x, 1.0, place.table_ptr, entry, j0, place.span, geometry, V, BM, BN)
    if V.INTERVALS == 0:
        at_edge = (j0 < place.span.low) | (j0 > place.span.high)
    if at_edge:
        keys = j0 + tl.arange(0, BN)[None, :]
        x = tl.where(visible(block.position, keys, place.intervals, block.segment, geometry, V, BN), x, float("-inf"))
    return x


@triton.jit
def tile_at(step, visits, live_ptr, V: tl.constexpr, LIVE: tl.constexpr, BN: tl.constexpr):
    """(where the tile of a step begins, whether a mask cuts it) after the first sweep."""
    if LIVE:
        begin = tl.load(live_ptr + step // BN).to(tl.int32) * BN
        is_cut = False
    else:
        begin, is_cut = visited(step, visits, V, BN)
    return begin, is_cut


@triton.jit
def lines_of(had, b, h, s, t, e, V: tl.constexpr):
    """F and W at t of two lines that fall from had and h by b and s, held at 0."""
    left = tl.maximum(had - b * t, 0.0)
    right = tl.maximum(h - s * t, 0.0)
    left_w = raised(left, e, V, 1)
    right_w = raised(right, e, V, 1)
    return left_w * left + right_w * right, left_w * b + right_w * s


@triton.jit
def bounded(z, theta, line, slope, e, V: tl.constexpr):
    """(theta, line, slope, largest z) of rows after one more tile of z: eq. 84."""
    top = tl.max(z, 1)
    new = tl.maximum(theta, top - 1)
    seen = new > float("-inf")
    known = theta > float("-inf")
    base = tl.where(seen, new, 0.0)
    had = tl.maximum(line - slope * tl.where(known, base - tl.where(known, theta, 0.0), 0.0), 0.0)
    u = tl.maximum(z - base[:, None], 0.0)
    w = raised(u, e, V, 1)
    f = tl.sum(w * u, 1)
    h = rooted(f, e, V)
    # h ** (e - 1) is f / h
    s = tl.where(f > 0, tl.sum(w, 1) * h / tl.where(f > 0, f, 1.0), 0.0)
    t = h * 0.0
    for _ in tl.static_range(2):
        both, fall = lines_of(had, slope, h, s, t, e, V)
        t += tl.maximum(newton(both, fall, rooted(both, e, V)), 0.0)
    both, fall = lines_of(had, slope, h, s, t, e, V)
    line = rooted(both, e, V)
    slope = tl.where(both > 0, fall * line / tl.where(both > 0, both, 1.0), 0.0)
    return tl.where(seen, base + t, float("-inf")), line, slope, top


@triton.jit
def stepped(f, w, w2, room, e, V: tl.constexpr):
    """The step of thresholds: eq. 83 within its bounds where W2 has one, else eq. 81. room: from theta to the largest z."""
    root = rooted(f, e, V)
    step = newton(f, w, root)
    if V.ENTMAX != 1:
        safe_f = tl.where(f > 0, f, 1.0)
        down = w * root / safe_f
        bend = (e - 1) * (w2 - w * w / safe_f) * root / safe_f
        halley = 2 * (root - 1) * down / (2 * down * down - (root - 1) * bend)
        halley = tl.minimum(tl.maximum(halley, step), room * (1 - 1 / tl.where(root > 0, root, 1.0)))
        usable = root > 1
        if V.ENTMAX < 0:
            usable = usable & (root * 0.0 + e >= 2.0)
        step = tl.where(usable, halley, step)
    return step


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _entmax_kernel(
    tensors, k_desc, v_desc, pair_desc, frame, sq, sk, n_segments, V: tl.constexpr, MOST_STEPS: tl.constexpr,
    PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    TMA: tl.constexpr = k_desc is not None
    LIVE: tl.constexpr = tensors.live_ptr is not None
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    table_ptr = head_table(tensors.table_ptr, block.h, geometry, True)
    q = own_tile(tensors.q, block, BM, V.D, V.BD)
    alpha = alpha_of(block.h, geometry, V)
    e = 1 / (alpha - 1)
    gain = (alpha - 1) * LN2 * geometry.unit
    span = key_span(block, geometry, V, BN)
    key_tiles = tiles_of(sk, n_segments, V, BN)
    visits = visits_of(span, frame.mask, block.b, block.h, block.tile, tl.num_programs(0), key_tiles, geometry, V, BN)
    intervals = intervals_of(frame.mask, block.b, block.h, block.segment, sq, sk, n_segments, geometry, V, BN)
    place = Place(block, span, intervals, table_ptr, tensors.pair, pair_desc)
    live_ptr = tensors.live_ptr
    if LIVE:
        live_ptr += (tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + block.tile) * key_tiles

    theta = tl.full([BM], float("-inf"), tl.float32)
    largest = theta
    line = tl.zeros([BM], tl.float32)
    slope = line
    sink_z = float("-inf")
    if V.SINK:
        # the first group of keys is the sink alone; an infinite one is all there is and takes no part here
        sink = tl.load(tensors.sink_ptr + block.h).to(tl.float32)
        sink_z = tl.where(sink == float("inf"), float("-inf"), sink * (alpha - 1))
        theta = line + (sink_z - 1)
        largest = line + sink_z
        line += tl.where(sink_z > float("-inf"), 1.0, 0.0)
        slope = line
    found = 0
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
            z = scores(q, k, j0, at_edge, place, geometry, V, PAIR_TMA, BM, BN) * gain
            theta, line, slope, top = bounded(z, theta, line, slope, e, V)
            largest = tl.maximum(largest, top)
            if LIVE:
                alive = tl.max((top > theta).to(tl.int32), 0)
                tl.store(live_ptr + found, (j0 // BN).to(tl.int16), mask=alive > 0)
                found += alive
    first = visits.start
    stop = visits.stop
    if LIVE:
        tl.debug_barrier()
        first = 0
        stop = found * BN

    steps = 0
    going = 1
    while (going > 0) & (steps < MOST_STEPS):
        base = tl.where(theta > float("-inf"), theta, 0.0)
        u0 = tl.maximum(sink_z - base, 0.0)
        f = raised(u0, e, V, 0)
        w = raised(u0, e, V, 1)
        w2 = raised(u0, e, V, 2)
        kept = 0
        for step in range(first, stop, BN):
            j0, at_edge = tile_at(step, visits, live_ptr, V, LIVE, BN)
            k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
            z = scores(q, k, j0, at_edge, place, geometry, V, PAIR_TMA, BM, BN) * gain
            u = tl.maximum(z - base[:, None], 0.0)
            # one power, the others are its products with u
            if V.ENTMAX != 1:
                bends = raised(u, e, V, 2)
                slopes = bends * u
                w2 += tl.sum(bends, 1)
            else:
                slopes = raised(u, e, V, 1)
            f += tl.sum(slopes * u, 1)
            w += tl.sum(slopes, 1)
            if LIVE:
                # never ahead of what is read: entries move to the front
                alive = tl.max((tl.max(u, 1) > 0).to(tl.int32), 0)
                tl.store(live_ptr + kept, (j0 // BN).to(tl.int16), mask=alive > 0)
                kept += alive
        if LIVE:
            tl.debug_barrier()
            stop = kept * BN
        moved = stepped(f, w, w2, largest - base, e, V)
        theta += moved
        if V.FP32 or V.ENTMAX == 1:
            close = tl.maximum(tl.abs(base), 1.0) * CLOSE
        else:
            close = tl.where(base * 0.0 + e >= 2.0, CLOSE_SMOOTH, tl.maximum(tl.abs(base), 1.0) * CLOSE)
        far = tl.abs(moved) > close
        going = tl.max(far.to(tl.int32), 0)
        steps += 1

    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    u2 = tl.zeros([BM, BDV], tl.float32)
    base = tl.where(theta > float("-inf"), theta, 0.0)
    u0 = tl.maximum(sink_z - base, 0.0)
    f = raised(u0, e, V, 0)
    w = raised(u0, e, V, 1)
    for step in range(first, stop, BN):
        j0, at_edge = tile_at(step, visits, live_ptr, V, LIVE, BN)
        k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
        z = scores(q, k, j0, at_edge, place, geometry, V, PAIR_TMA, BM, BN) * gain
        u = tl.maximum(z - base[:, None], 0.0)
        slopes = raised(u, e, V, 1)
        p = slopes * u
        f += tl.sum(p, 1)
        w += tl.sum(slopes, 1)
        v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
        o = tl.dot(p.to(v.dtype), v, o, input_precision=V.PRECISION)
        u2 = tl.dot(slopes.to(v.dtype), v, u2, input_precision=V.PRECISION)
    weighs = w > 0
    u2 = u2 / tl.where(weighs, w, 1.0)[:, None]
    o -= u2 * tl.where(weighs, f - 1, 0.0)[:, None]
    lse = (theta + newton(f, w, rooted(f, e, V)) + 1) * e
    if V.SINK:
        endless = sink == float("inf")
        lse = tl.where(endless, sink, lse)
        o = tl.where(endless, 0.0, o)
        u2 = tl.where(endless, 0.0, u2)
    lse_ptr = tensors.lse_ptr + tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row
    tl.store(lse_ptr + tl.arange(0, BM), lse, mask=tl.arange(0, BM) < block.n_rows)
    if tensors.u is not None:
        store_tile(at(tensors.u, block.b, block.h, block.row), tensors.u.row, block.n_rows, u2, BM, V.DV, V.BDV)
    if V.GATE:
        gate = own_tile(tensors.gate, block, BM, V.DV, V.BDV)
        o = o * tl.sigmoid(gate.to(tl.float32))
    store_tile(at(tensors.y, block.b, block.h, block.row), tensors.y.row, block.n_rows, o, BM, V.DV, V.BDV)


def entmax_of(launch: Launch, y: Tensor, lse: Tensor, u: Tensor | None) -> None:
    """Fills y, lse and, where it is wanted, u."""
    call, config = launch.call, launch.config("entmax")
    grid = launch.row_grid(config.block_m)
    if not (grid[0] and grid[1]):
        return
    live = None
    if launch.skips:
        key_tiles = max(1, -(-call.k.shape[2] // config.block_n))
        live = torch.empty(grid[1] * grid[0] * key_tiles, dtype=torch.int16, device=y.device)
    rows = (rows_of(x) for x in (launch.q, launch.k, launch.v, launch.gate, y))
    packing, geometry, *lengths = launch.shared(call.cu_seqlens_q, config.block_m)
    pair_tma, (pair, pair_desc) = launch.pair(config)
    kept = None if u is None else rows_of(u)
    launch.start(
        _entmax_kernel,
        grid,
        Tensors(*rows, kept, lse, launch.table, launch.sink, live, pair),
        *launch.all_described(config, (), (launch.k, launch.v)),
        pair_desc,
        Frame(launch.mask(config, of_rows=True), packing, geometry),
        *lengths,
        V=launch.variant._replace(LIVE=False),
        MOST_STEPS=MOST_WIDE if call.q.dtype == torch.float32 else ENOUGH.get(launch.exponent, MOST),
        PAIR_TMA=pair_tma,
        **config.launch,
    )
