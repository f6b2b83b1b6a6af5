"""Forward with entmax: one program finds the thresholds of its BM rows in a few sweeps over the keys, then o and u (eq. 80-86).

The first sweep keeps a lower bound of the thresholds (eq. 84) and writes down which key tiles reach above it; no other is
visited again (eq. 85). The next ones step to the thresholds (eq. 83, above alpha 1.5 eq. 81) until all rows of the program are
there. The last multiplies v and makes one more step on the way (eq. 86). Packed sequences and masks visit all of their tiles.
A part of the keys, whose lse is known, has the last sweep alone (eq. 94).

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
from backlight.backends.triton.reach import TOGETHER, candidates_of, reach_of, reached
from backlight.backends.triton.visits import intervals_of, tiles_of, visited, visits_of

# sweeps that step, at most: where eq. 83 holds, so many by the exponent leave o and u right to the digits of 16 bits (the table
# below eq. 86)
MOST, MOST_WIDE = 6, 12
ENOUGH = {4: 1, 2: 2}
# a step this small is followed by none. Where eq. 83 holds the last sweep squares what is left of it; nearer to alpha 2 a key
# may still enter
CLOSE = tl.constexpr(2.0**-20)
CLOSE_SMOOTH = tl.constexpr(2.0**-9)
# tiles whose life rows note in the bits of a number before it is told to the whole program
CHUNK = tl.constexpr(32)
# in the place of -inf, from which it cannot be subtracted; thresholds that are no higher belong to rows without keys
LOWEST, NOTHING = tl.constexpr(-1.0e30), tl.constexpr(-1.0e29)


class Tensors(NamedTuple):
    """Rows of q, k, v, gate, y, u, and the rest by pointers; u is None where it is not kept, live where no tile is left out:
    room for the numbers of the key tiles that a program visits. reach: None where none is left out by norms."""

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
    reach: Any = None


class Place(NamedTuple):
    """What scores of a program's tiles need besides q and k."""

    block: Any
    span: Any
    intervals: Any
    table_ptr: Any
    pair: Any
    pair_desc: Any


class Work(NamedTuple):
    """What sweeps of a program need. gain: from logits to z; e: the exponent; sink_z: z of the sink, or as low as can be."""

    q: Any
    k: Any
    place: Any
    geometry: Any
    visits: Any
    live_ptr: Any
    gain: Any
    e: Any
    sink_z: Any


class Bound(NamedTuple):
    """A lower bound of thresholds, and a line below F ** (1 / e) from there on: where it starts, and how it falls (eq. 84)."""

    theta: Any
    line: Any
    slope: Any


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
def either(a, b):
    return a | b


@triton.jit
def appended(live_ptr, bits, tiles, count, CHUNK: tl.constexpr):
    """How many entries a list has, once those of CHUNK tiles of which a row's bit is set stand behind the first `count`."""
    lanes = tl.arange(0, CHUNK)
    alive = (tl.reduce(bits, 0, either) >> lanes) & 1
    # entries may move to the front, over some that other warps have not read yet
    tl.debug_barrier()
    tl.store(live_ptr + (count + tl.cumsum(alive, 0) - alive), tiles.to(tl.int16), mask=alive > 0)
    return count + tl.sum(alive, 0)


@triton.jit
def tile_scores(work, k_desc, j0, at_edge, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """`scores` of the key tile that begins at j0."""
    k = key_tile(work.k, k_desc, work.place.block, j0, BN, V.D, V.BD, k_desc is not None)
    return scores(work.q, k, j0, at_edge, work.place, work.geometry, V, PAIR_TMA, BM, BN)


@triton.jit
def tile_at(step, work, V: tl.constexpr, BN: tl.constexpr):
    """(where the tile of a step begins, whether a mask cuts it) after the first sweep."""
    if work.live_ptr is not None:
        begin = tl.load(work.live_ptr + step // BN).to(tl.int32) * BN
        is_cut = False
    else:
        begin, is_cut = visited(step, work.visits, V, BN)
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
def bounded(x, gain, bound, e, V: tl.constexpr):
    """(the bound of rows after one more tile of logits, its largest z): eq. 84. After what is not a number it is none."""
    top = tl.max(x, 1) * gain
    base = tl.maximum(bound.theta, top - 1, propagate_nan=tl.PropagateNan.ALL)
    had = tl.maximum(bound.line - bound.slope * (base - bound.theta), 0.0)
    u = tl.maximum(x * gain - base[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    w = raised(u, e, V, 1)
    f = tl.sum(w * u, 1)
    h, over, _ = rooted(f, e, V)
    # h ** (e - 1) is f / h
    s = tl.sum(w, 1) * over
    t = h * 0.0
    for _ in tl.static_range(2):
        both, fall = lines_of(had, bound.slope, h, s, t, e, V)
        t += tl.maximum(newton(both, fall, rooted(both, e, V)[2]), 0.0)
    both, fall = lines_of(had, bound.slope, h, s, t, e, V)
    line, over, _ = rooted(both, e, V)
    return Bound(base + t, line, fall * over), top


@triton.jit
def stepped(f, w, w2, room, e, V: tl.constexpr):
    """The step of thresholds: eq. 83 within its bounds where W2 has one, else eq. 81. room: from theta to the largest z."""
    root, over, rest = rooted(f, e, V)
    step = newton(f, w, rest)
    if V.ENTMAX != 1:
        safe_f = tl.where(f > 0, f, 1.0)
        down = w * over
        bend = (e - 1) * (w2 - w * w / safe_f) * over
        halley = 2 * (root - 1) * down / (2 * down * down - (root - 1) * bend)
        halley = tl.minimum(tl.maximum(halley, step), room * (1 - 1 / tl.where(root > 0, root, 1.0)))
        usable = root > 1
        if V.ENTMAX < 0:
            usable = usable & (root * 0.0 + e >= 2.0)
        step = tl.where(usable, halley, step)
    return step


@triton.jit
def bounds(work, k_desc, bound, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(lower bounds of thresholds, the largest z of rows, tiles that reach above the bounds): the first sweep."""
    LIVE: tl.constexpr = work.live_ptr is not None
    visits = work.visits
    largest = bound.theta + 1
    found = 0
    if visits.start < visits.stop:
        for chunk in range(visits.start, visits.stop, CHUNK * BN):
            bits = tl.zeros([BM], tl.int32)
            for step in range(chunk, tl.minimum(chunk + CHUNK * BN, visits.stop), BN):
                j0, at_edge = visited(step, visits, V, BN)
                x = tile_scores(work, k_desc, j0, at_edge, V, PAIR_TMA, BM, BN)
                bound, top = bounded(x, work.gain, bound, work.e, V)
                largest = tl.maximum(largest, top)
                if LIVE:
                    bits |= (top > bound.theta).to(tl.int32) << ((step - chunk) // BN)
            if LIVE:
                found = appended(work.live_ptr, bits, chunk // BN + tl.arange(0, CHUNK), found, CHUNK)
    return bound.theta, largest, found


@triton.jit
def near_bounds(
    work, k_desc, bound, candidates, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """`bounds` from the last tile to the first, of those alone that norms let reach above the bounds so far."""
    visits = work.visits
    largest = bound.theta + 1
    found = 0
    for chunk in range(visits.start, visits.stop, TOGETHER * BN):
        bits = tl.zeros([BM], tl.int32)
        asked = reached(work.live_ptr + found, candidates, chunk, tl.min(bound.theta, 0), work, BM, BN)
        for step in range(asked):
            j0 = tl.load(work.live_ptr + found + step).to(tl.int32) * BN
            x = tile_scores(work, k_desc, j0, False, V, PAIR_TMA, BM, BN)
            bound, top = bounded(x, work.gain, bound, work.e, V)
            largest = tl.maximum(largest, top)
            bits |= (top > bound.theta).to(tl.int32) << step
        lanes = tl.arange(0, TOGETHER)
        tiles = tl.load(work.live_ptr + found + lanes, mask=lanes < asked, other=0)
        found = appended(work.live_ptr, bits, tiles, found, TOGETHER)
    return bound.theta, largest, found


@triton.jit
def sums(work, k_desc, theta, steps, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(F, W, W2 at thresholds, tiles that reach above them), of which `steps` has the first and the end."""
    LIVE: tl.constexpr = work.live_ptr is not None
    first, stop = steps
    f, w, w2 = sink_sums(work, theta, V)
    kept = 0
    for chunk in range(first, stop, CHUNK * BN):
        bits = tl.zeros([BM], tl.int32)
        for step in range(chunk, tl.minimum(chunk + CHUNK * BN, stop), BN):
            j0, at_edge = tile_at(step, work, V, BN)
            x = tile_scores(work, k_desc, j0, at_edge, V, PAIR_TMA, BM, BN)
            above = x * work.gain - theta[:, None]
            u = tl.maximum(above, 0.0)
            # one power, the others are its products with u
            if V.ENTMAX == 1 or V.ENTMAX == 2:
                slopes = raised(u, work.e, V, 1)
            else:
                bends = raised(u, work.e, V, 2)
                slopes = bends * u
            of_tile = tl.sum(slopes, 1)
            f += tl.sum(slopes * u, 1)
            w += of_tile
            if V.ENTMAX == 2:
                # the number of keys above, by signs: a comparison takes three times as many instructions
                w2 += (BN + tl.sum(above.to(tl.int32, bitcast=True) >> 31, 1)).to(tl.float32)
            elif V.ENTMAX != 1:
                w2 += tl.sum(bends, 1)
            if LIVE:
                bits |= (of_tile > 0).to(tl.int32) << ((step - chunk) // BN)
        if LIVE:
            entries = chunk // BN + tl.arange(0, CHUNK)
            tiles = tl.load(work.live_ptr + entries, mask=entries < stop // BN, other=0)
            kept = appended(work.live_ptr, bits, tiles, kept, CHUNK)
    return f, w, w2, kept


@triton.jit
def sink_sums(work, theta, V: tl.constexpr):
    """F, W and W2 of the sink alone."""
    u = tl.maximum(work.sink_z - theta, 0.0)
    return raised(u, work.e, V, 0), raised(u, work.e, V, 1), raised(u, work.e, V, 2)


@triton.jit
def outputs(
    work, k_desc, v, v_desc, theta, steps, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """(p v, w v, F, W) at thresholds: the last sweep; v: its rows."""
    BDV: tl.constexpr = V.BDV
    first, stop = steps
    o = tl.zeros([BM, BDV], tl.float32)
    u2 = tl.zeros([BM, BDV], tl.float32)
    f, w, _ = sink_sums(work, theta, V)
    for step in range(first, stop, BN):
        j0, at_edge = tile_at(step, work, V, BN)
        x = tile_scores(work, k_desc, j0, at_edge, V, PAIR_TMA, BM, BN)
        u = tl.maximum(x * work.gain - theta[:, None], 0.0)
        slopes = raised(u, work.e, V, 1)
        p = slopes * u
        f += tl.sum(p, 1)
        w += tl.sum(slopes, 1)
        keys = key_tile(v, v_desc, work.place.block, j0, BN, V.DV, V.BDV, v_desc is not None)
        o = tl.dot(p.to(keys.dtype), keys, o, input_precision=V.PRECISION)
        u2 = tl.dot(slopes.to(keys.dtype), keys, u2, input_precision=V.PRECISION)
    return o, u2, f, w


@triton.jit
def is_far(moved, theta, e, V: tl.constexpr):
    """Whether a step of any row asks for another."""
    close = tl.maximum(tl.abs(theta), 1.0) * CLOSE
    if not V.FP32 and V.ENTMAX != 1:
        close = tl.where(theta * 0.0 + e >= 2.0, CLOSE_SMOOTH, close)
    return tl.max((tl.abs(moved) > close).to(tl.int32), 0)


@triton.jit
def thresholds(
    work, k_desc, reach, alpha, key_tiles, MOST_STEPS: tl.constexpr, V: tl.constexpr, PAIR_TMA: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(theta, the first step and the end of those that tiles above it take): all sweeps but the last."""
    LIVE: tl.constexpr = work.live_ptr is not None
    # the first group of keys is the sink alone
    theta = tl.zeros([BM], tl.float32) + tl.maximum(work.sink_z - 1, LOWEST)
    line = tl.where(theta > NOTHING, 1.0, 0.0)
    bound = Bound(theta, line, line)
    if reach is not None:
        candidates = candidates_of(reach, work.q, work.place.block, alpha, key_tiles, work.geometry, BN)
        theta, largest, found = near_bounds(work, k_desc, bound, candidates, V, PAIR_TMA, BM, BN)
    else:
        theta, largest, found = bounds(work, k_desc, bound, V, PAIR_TMA, BM, BN)
    first = work.visits.start
    stop = work.visits.stop
    if LIVE:
        tl.debug_barrier()
        first = 0
        stop = found * BN
    made = 0
    going = 1
    while (going > 0) & (made < MOST_STEPS):
        f, w, w2, kept = sums(work, k_desc, theta, (first, stop), V, PAIR_TMA, BM, BN)
        if LIVE:
            tl.debug_barrier()
            stop = kept * BN
        moved = stepped(f, w, w2, largest - theta, work.e, V)
        going = is_far(moved, theta, work.e, V)
        theta += moved
        made += 1
    return theta, (first, stop)


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _entmax_kernel(
    tensors, k_desc, v_desc, pair_desc, frame, sq, sk, n_segments, V: tl.constexpr, MOST_STEPS: tl.constexpr,
    PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of a part whose lse is known (V.PART), p v and w v as they are, to be summed."""
    geometry = frame.geometry
    LIVE: tl.constexpr = tensors.live_ptr is not None
    lanes = tl.arange(0, BM)
    block = row_block(frame.packing, sq, sk, n_segments, geometry, V, BM)
    alpha = alpha_of(block.h, geometry, V)
    e = 1 / (alpha - 1)
    span = key_span(block, geometry, V, BN)
    key_tiles = tiles_of(sk, n_segments, V, BN)
    visits = visits_of(span, frame.mask, block.b, block.h, block.tile, tl.num_programs(0), key_tiles, geometry, V, BN)
    intervals = intervals_of(frame.mask, block.b, block.h, block.segment, sq, sk, n_segments, geometry, V, BN)
    place = Place(block, span, intervals, head_table(tensors.table_ptr, block.h, geometry, True), tensors.pair, pair_desc)
    live_ptr = tensors.live_ptr
    if LIVE:
        live_ptr += (tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + block.tile) * key_tiles
    sink_z = LOWEST
    if V.SINK:
        # an infinite one is all there is and takes no part here
        sink = tl.load(tensors.sink_ptr + block.h).to(tl.float32)
        sink_z = tl.maximum(tl.where(sink == float("inf"), LOWEST, sink * (alpha - 1)), LOWEST)
    q = own_tile(tensors.q, block, BM, V.D, V.BD)
    gain = (alpha - 1) * LN2 * geometry.unit
    work = Work(q, tensors.k, place, geometry, visits, live_ptr, gain, e, sink_z)
    lse_ptr = tensors.lse_ptr + tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row

    steps = (visits.start, visits.stop)
    if V.PART:
        theta = tl.load(lse_ptr + lanes, mask=lanes < block.n_rows, other=0.0) * (alpha - 1) - 1
        theta = tl.maximum(theta, LOWEST)
    else:
        theta, steps = thresholds(work, k_desc, tensors.reach, alpha, key_tiles, MOST_STEPS, V, PAIR_TMA, BM, BN)

    o, u2, f, w = outputs(work, k_desc, tensors.v, v_desc, theta, steps, V, PAIR_TMA, BM, BN)
    if not V.PART:
        weighs = w > 0
        u2 = u2 / tl.where(weighs, w, 1.0)[:, None]
        o -= u2 * tl.where(weighs, f - 1, 0.0)[:, None]
        lse = (theta + newton(f, w, rooted(f, e, V)[2]) + 1) * e
        lse = tl.where(theta > NOTHING, lse, float("-inf"))
        # what is not a number lies above no threshold, and would weigh nothing
        spoilt = theta != theta
        lse = tl.where(spoilt, float("nan"), lse)
        o = tl.where(spoilt[:, None], float("nan"), o)
        u2 = tl.where(spoilt[:, None], float("nan"), u2)
        if V.SINK:
            endless = sink == float("inf")
            lse = tl.where(endless, sink, lse)
            o = tl.where(endless, 0.0, o)
            u2 = tl.where(endless, 0.0, u2)
        tl.store(lse_ptr + lanes, lse, mask=lanes < block.n_rows)
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
    if launch.skips and launch.known_part is None:
        key_tiles = max(1, -(-call.k.shape[2] // config.block_n))
        live = torch.empty(grid[1] * grid[0] * key_tiles, dtype=torch.int16, device=y.device)
    rows = (rows_of(x) for x in (launch.q, launch.k, launch.v, launch.gate, y))
    packing, geometry, *lengths = launch.shared(call.cu_seqlens_q, config.block_m)
    pair_tma, (pair, pair_desc) = launch.pair(config)
    kept = None if u is None else rows_of(u)
    launch.start(
        _entmax_kernel,
        grid,
        Tensors(*rows, kept, lse, launch.table, launch.sink, live, pair, None if live is None else reach_of(launch, config)),
        *launch.all_described(config, (), (launch.k, launch.v)),
        pair_desc,
        Frame(launch.mask(config, of_rows=True), packing, geometry),
        *lengths,
        V=launch.variant._replace(LIVE=False),
        MOST_STEPS=MOST_WIDE if call.q.dtype == torch.float32 else ENOUGH.get(launch.exponent, MOST),
        PAIR_TMA=pair_tma,
        **config.launch,
    )
