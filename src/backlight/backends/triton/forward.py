"""Forward: one program per BM rows of one query head (eq. 31; with tau the first sweep, for lse alone).

Registers: q [BM, D], running max and sum [BM], accumulator o [BM, Dv] in fp32. Tiles the spec excludes are not visited; only
edge tiles pay for the mask, only tiles within the table for the bias. Parity contract: tests/conformance.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.elastic import elastic_of
from backlight.backends.triton.entmax import entmax_of
from backlight.backends.triton.launch import Launch, compact
from backlight.backends.triton.loads import at, key_tile, own_tile, store_gated, store_tile
from backlight.backends.triton.pair import block_place, pair_tile
from backlight.backends.triton.primitives import LN2, LOG2E, keys_of, logits_of, row_block, visible
from backlight.backends.triton.visits import visited
from backlight.call import Call

# base-2 logits of a softcap that needs no running maximum, and the lowest reference of a row: 2^96, added up over 2^20 keys and
# multiplied by values of 2^10, does not overflow
LARGEST_LOGIT = 80.0
LOWEST_REFERENCE = tl.constexpr(-16.0)
LARGEST = tl.constexpr(3.0e38)


@triton.jit
def pair_of(block, j0, pair, pair_desc, unit, V: tl.constexpr, PAIR_TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """A tile of the pair bias in the units of `logits_of`, 0 where there is none."""
    addend = 0.0
    if V.PAIR > 0:
        place = block_place(block, j0, V)
        addend = pair_tile(pair, pair_desc, place, block.segment.sq, V, PAIR_TMA, BM, BN, False)
        if V.SOFTCAP:
            addend *= LOG2E / unit
    return addend


@triton.jit
def sums_with_sink(sink_ptr, unit, BM: tl.constexpr):
    """(sink of a head, the maximum and the sum of rows that have seen nothing else)."""
    sink = tl.load(sink_ptr).to(tl.float32)
    # kept finite, for what is subtracted from it; below it every other weight is 0
    row_max = tl.zeros([BM], tl.float32) + tl.minimum(sink * LOG2E / unit, LARGEST)
    return sink, row_max, tl.full([BM], 1.0, tl.float32)


@triton.jit
def store_numbers(ptr, numbers, block, sq, geometry, BM: tl.constexpr):
    """One for each row of a block, if somebody wants them."""
    if ptr is not None:
        ptr += tl.cast(block.b * geometry.heads + block.h, tl.int64) * sq + block.row
        tl.store(ptr + tl.arange(0, BM), numbers, mask=tl.arange(0, BM) < block.n_rows)


@triton.jit
def store_low(low_rows, block, o, dtype: tl.constexpr, V: tl.constexpr, BM: tl.constexpr):
    """What rounding takes from y (eq. 103), if somebody wants it."""
    if low_rows is not None:
        low = o - o.to(dtype).to(tl.float32)
        store_tile(at(low_rows, block.b, block.h, block.row), low_rows.row, block.n_rows, low, BM, V.DV, V.BDV)


@triton.jit
def larger(peak, t, x, peak_unit, unit, V: tl.constexpr):
    """The largest logits of rows after a tile (eq. 72), if somebody wants them: of x or, where x is more, of t."""
    if peak_unit is not None:
        if V.SOFTCAP or V.BIAS or V.PAIR > 0:
            largest = tl.max(tl.where(x == float("-inf"), x, t * peak_unit), 1)
        else:
            largest = tl.max(x, 1) * (unit * LN2)
        peak = tl.maximum(peak, largest)
    return peak


@triton.jit
def with_table(x, table_ptr, block, j0, span, geometry, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Logits with the learned bias by distance, where there is one."""
    if V.BIAS:
        entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
        x = add_bias(x, 1.0, table_ptr, entry, j0, span, geometry, V, BM, BN)
    return x


@triton.jit
def lowered(x, row_max, first):
    """Bounded logits of the first tile below their row's maximum in it, and the maximum."""
    # what weighs most in a short row should weigh 1, which p's dtype holds exactly
    reference = tl.maximum(tl.max(x, 1), LOWEST_REFERENCE) * first
    return x - reference[:, None], row_max + reference


@triton.jit
def online_step(x, row_max, row_sum, unit):
    """(p of a tile, the factor of what came before, the new maximum, the new sum)."""
    new_max = tl.maximum(row_max, tl.max(x, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    # the difference first: an unchanged maximum must rescale by exactly 1
    rescale = tl.exp2((row_max - safe_max) * unit)
    p = tl.exp2(x * unit - (safe_max * unit)[:, None])
    return p, rescale, new_max, row_sum * rescale + tl.sum(p, 1)


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _fwd_kernel(
    q_rows, k_rows, v_rows, k_desc, v_desc, gate_rows, y_rows, low_rows, lse_ptr, table_ptr, sink_ptr, peaks_ptr, peak_unit,
    pair, pair_desc, mask, packing, geometry, sq, sk, n_segments, V: tl.constexpr, LSE_ONLY: tl.constexpr,
    BOUNDED: tl.constexpr, TMA: tl.constexpr, PAIR_TMA: tl.constexpr, WHOLE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    block = row_block(packing, sq, sk, n_segments, geometry, V, BM)
    table_ptr = head_table(table_ptr, block.h, geometry, True)
    key_lanes = tl.arange(0, BN)[None, :]
    q = own_tile(q_rows, block, BM, V.D, V.BD)
    # maxima are kept in units of x, the base-2 logit before its positive factor; BOUNDED: what is subtracted from base-2 logits
    unit = geometry.unit
    row_max = tl.full([BM], 0.0 if BOUNDED else float("-inf"), tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    if V.SINK:
        sink, row_max, row_sum = sums_with_sink(sink_ptr + block.h, unit, BM)
    BDV: tl.constexpr = V.BDV
    o = tl.zeros([BM, BDV], tl.float32)
    peak = tl.full([BM], float("-inf"), tl.float32)
    span, visits, intervals = keys_of(block, mask, sq, sk, n_segments, geometry, V, BN)
    if visits.start < visits.stop:
        for step in range(visits.start, visits.stop, BN):
            j0, at_edge = visited(step, visits, V, BN)
            k = key_tile(k_rows, k_desc, block, j0, BN, V.D, V.BD, TMA)
            t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
            if BOUNDED:
                x, _ = logits_of(t, unit, -row_max[:, None], geometry, V, "none")
            else:
                addend = pair_of(block, j0, pair, pair_desc, unit, V, PAIR_TMA, BM, BN)
                x, _ = logits_of(t, 1.0, addend, geometry, V, "none")
            x = with_table(x, table_ptr, block, j0, span, geometry, V, BM, BN)
            if V.INTERVALS == 0 and not WHOLE:
                at_edge = (j0 < span.low) | (j0 > span.high)
            if BOUNDED:
                at_edge = at_edge | (j0 == span.start)
            if at_edge:
                seen = visible(block.position, j0 + key_lanes, intervals, block.segment, geometry, V, BN)
                x = tl.where(seen, x, float("-inf"))
                if BOUNDED:
                    x, row_max = lowered(x, row_max, j0 == span.start)
            peak = larger(peak, t, x, peak_unit, unit, V)
            if BOUNDED:
                p = tl.exp2(x)
                row_sum += tl.sum(p, 1)
            else:
                p, rescale, row_max, row_sum = online_step(x, row_max, row_sum, unit)
                if not LSE_ONLY:
                    o = o * rescale[:, None]
            if not LSE_ONLY:
                v = key_tile(v_rows, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
                o = tl.dot(p.to(v.dtype), v, o, input_precision=V.PRECISION)
    lse2 = row_max * (1.0 if BOUNDED else unit) + tl.log2(row_sum)
    if V.SINK:
        lse2 = tl.where(sink == float("inf"), sink, lse2)
    store_numbers(lse_ptr, lse2 * LN2, block, sq, geometry, BM)
    store_numbers(peaks_ptr, peak, block, sq, geometry, BM)
    if not LSE_ONLY:
        o = o / tl.where(row_sum == 0, 1.0, row_sum)[:, None]
        o = store_gated(y_rows, gate_rows, block, o, V, BM)
        store_low(low_rows, block, o, q.dtype, V, BM)


def bounded(call: Call) -> bool:
    """Whether a softcap keeps exp2 of all logits within the range of fp32 and bf16, with room for sums: a row's maximum over
    its first tile will do then. fp16 has no such range, biases and sink know no bound, and under a mask a row may see
    nothing of the first tile."""
    spec = call.spec
    within = spec.softcap is not None and spec.softcap * LOG2E.value <= LARGEST_LOGIT
    unbounded = spec.bias or spec.pair_bias or spec.sink
    return within and not unbounded and not spec.rows and call.q.dtype != torch.float16


def forward(call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    launch = Launch(call)
    y = launch.empty_rows(call.v.shape[-1], call.output_dtype)
    kept = torch.empty_strided(y.shape, y.stride(), dtype=y.dtype, device=y.device) if save_u and call.keeps else None
    if call.entmax is not None:
        known = launch.known_part
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device) if known is None else compact(known.lse)
        entmax_of(launch, y, lse, kept)
        return y, lse, kept, None
    peaks = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device) if call.max_logit else None
    if call.part is not None and call.part.lse is not None:
        lse = compact(call.part.lse)
    else:
        lse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
        softmax_of(launch, y, lse, None if call.tau is not None else kept, peaks)
    if call.tau is not None:
        elastic_of(launch, lse, y, kept)
    return y, lse, kept, peaks


def softmax_of(launch: Launch, y: Tensor, lse: Tensor, low: Tensor | None = None, peaks: Tensor | None = None) -> None:
    """Fills lse and, where it is there, peaks; and y and its low half where tau does not ask for a second sweep."""
    call = launch.call
    lse_only = call.tau is not None
    unit = None if peaks is None else float(call.scale)
    name, values = "lse" if lse_only else "forward", (lse, launch.table, launch.sink, peaks, unit)
    launch.start_rows(_fwd_kernel, name, (launch.gate, y, low), values, LSE_ONLY=lse_only, BOUNDED=bounded(call))
