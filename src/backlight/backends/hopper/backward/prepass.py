"""Before the backward's matmuls: one pass over rows that is bound by memory (plain Triton).

Per row block of the main kernel it writes delta - dlse (eq. 20, 28) and the base-2 lse into padded vectors, +inf where a row
does not exist or sees nothing so that its p is 0, clears the fp32 dq accumulator, and copies do where TMA cannot read it in
place (`out.sum().backward()` hands one whose strides are all 0).

Of the learned terms, gate (do and dgate, eq. 18), sink (dsink, eq. 23) and most of tau end here: delta from u (eq. 28), dtau
(eq. 24), and tau / n per row, which is all that the tile kernels need to know of it. dsink and dtau leave as one sum per block.
"""

# device code: compiled by Triton from its own types, never run by Python

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.backward.arguments import RowState
from backlight.backends.hopper.config import BackwardConfig, exponent_of, rate_of
from backlight.backends.hopper.launch import Launch, descriptor, matrix_fields, readable, tma_reads, vector_fields
from backlight.spec import LOG2E

UNIT = tl.constexpr(8)
# a row that sees one key has p = 1 exactly (math.md section 5), but exp2 gives 1 + a few ulp: farther from the kink than that
NEAR_ONE = tl.constexpr(1.0 - 2.0**-16)
AXES = {"y": "bhs", "dy": "bhsd", "dlse": "bhs", "gate": "bhs", "dgate": "bhs", "u": "bhs"}
STRIDES = [f"{name}_stride_{axis}" for name, axes in AXES.items() for axis in axes]


@triton.jit
def share_of(tau, n, sees, SINK: tl.constexpr):
    """tau / n of rows that see n keys. A row with one key has p = 1: where that leaves nothing, its share is -inf."""
    share = tau / tl.maximum(n, 1).to(tl.float32)
    if not SINK:
        share = tl.where(n == 1, tl.where(tau > -1.0, tl.maximum(tau, -NEAR_ONE), float("-inf")), share)
    return tl.where(sees & (n > 0), share, 0.0)


class RowTerms(NamedTuple):
    """Sink and tau, sums of their gradients, tau / n, u of the forward, or the low half of y, and W of entmax."""

    sink_ptr: Any
    dsink_ptr: Any
    tau_ptr: Any
    dtau_ptr: Any
    share_ptr: Any
    u_ptr: Any
    slopes_ptr: Any = None


class Variant(NamedTuple):
    """What is compiled in."""

    DV: int
    BD: int
    BDV: int
    BM: int
    HAS_DLSE: bool
    COPY_DO: bool
    CLEAR_DQ: bool
    VARLEN: bool
    GATE: bool
    DGATE: bool
    SINK: bool
    TAU: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    # lists of row blocks to visit
    INTERVALS: bool
    # u is the low half of y (eq. 103)
    LOW: bool
    # entmax: its exponent e where that is compiled in, -1 where not, 0 without
    ENTMAX: int = 0


@triton.jit
def segment_of(tile, packing, cu_k_ptr, sq, sk, n_segments, V: tl.constexpr):
    """(row block of a sequence, first row, rows, keys where tau asks for them). Beyond the last sequence there are no rows."""
    start = 0
    n_rows = sq
    block = tile
    n_keys = 0
    if V.TAU:
        n_keys = sk
    if V.VARLEN:
        low = n_segments * 0
        high = n_segments
        while low < high:
            middle = (low + high) // 2
            if tl.load(packing.cu_row_tiles_ptr + middle + 1) <= tile:
                low = middle + 1
            else:
                high = middle
        block = tile - tl.load(packing.cu_row_tiles_ptr + low)
        last = tl.minimum(low, n_segments - 1)
        start = tl.load(packing.cu_q_ptr + last)
        n_rows = tl.where(low < n_segments, tl.load(packing.cu_q_ptr + last + 1) - start, 0)
        if V.TAU:
            n_keys = tl.load(cu_k_ptr + last + 1) - tl.load(cu_k_ptr + last)
    return block, start, n_rows, n_keys


@triton.jit
def rows_at(ptr, strides, b, h, row, columns):
    """Rows that TMA reads: strides come in units of 16 bytes, so that loads are as wide."""
    ptr += (b * strides[0] + h * strides[1]) * UNIT
    return ptr + row[:, None] * (strides[2] * UNIT) + columns[None, :]


@triton.jit
def floats_at(ptr, strides, b, h, row, columns, mask):
    return tl.load(rows_at(ptr, strides, b, h, row, columns), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def incoming_at(ptr, strides, b, h, row, columns, V: tl.constexpr):
    """Rows of dy, of any strides where it has to be copied."""
    if V.COPY_DO:
        ptr += b * strides[0] + h * strides[1]
        place = ptr + row[:, None] * strides[2] + columns[None, :] * strides[3]
    else:
        place = rows_at(ptr, strides, b, h, row, columns)
    return place


@triton.jit
def visible_count(position, sk, left, right, V: tl.constexpr):
    """Eq. 3, of rows that exist."""
    n = position * 0 + sk
    if V.HAS_RIGHT:
        n = tl.minimum(n, position + right + 1)
    if V.HAS_LEFT:
        n -= tl.maximum(position - left, 0)
    return n


@triton.jit
def slope_of(u, rate, V: tl.constexpr):
    """u ** (e - 1) of entmax; u is not negative."""
    if V.ENTMAX == 2:
        found = u
    elif V.ENTMAX == 4:
        found = u * u * u
    else:
        found = tl.where(u > 0, tl.exp2((1.0 / rate - 1.0) * tl.log2(tl.where(u > 0, u, 1.0))), 0.0)
    return found


@triton.jit
def weight_of(sink, lse, seen, log2e, rate, V: tl.constexpr):
    """p of a sink, w with entmax: one of +inf is all there is."""
    if V.ENTMAX != 0:
        u = tl.minimum(tl.maximum((sink - lse) * rate + 1.0, 0.0), 1.0)
        weight = slope_of(tl.where(lse == sink, 1.0, u), rate, V)
    else:
        weight = tl.where(lse == sink, 1.0, tl.exp2((sink - tl.where(seen, lse, 0.0)) * log2e))
    return weight


@triton.jit
def as_tiles_read_it(lse, log2e, rate, V: tl.constexpr):
    """lse in base 2; with entmax the threshold."""
    if V.ENTMAX != 0:
        found = lse * rate - 1.0
    else:
        found = lse * log2e
    return found


@triton.jit
def by_lse(dlse_ptr, terms, place, seen, V: tl.constexpr):
    """What a gradient at lse takes from delta: itself, with entmax divided by W."""
    dlse = tl.load(dlse_ptr, mask=seen, other=0.0).to(tl.float32)
    if V.ENTMAX != 0:
        dlse /= tl.load(terms.slopes_ptr + place, mask=seen, other=1.0)
    return dlse


@triton.jit
def leave_do(do_ptr, dy, row, columns, mask, V: tl.constexpr):
    tl.store(do_ptr + row[:, None] * V.DV + columns[None, :], dy.to(do_ptr.dtype.element_ty), mask=mask)


@triton.jit
def clear_rows(acc_ptr, first, lanes, V: tl.constexpr):
    BD: tl.constexpr = V.BD
    BM: tl.constexpr = V.BM
    zero = tl.zeros([BM, BD], tl.float32)
    tl.store(acc_ptr + first * BD + lanes[:, None] * BD + tl.arange(0, BD)[None, :], zero)


@triton.jit
def clear_counters(ptr, V: tl.constexpr):
    """From the first the next kernel's programs draw their tiles; the second is the number of those that live."""
    tl.store(ptr, 0.0)
    if V.INTERVALS:
        tl.store(ptr + 1, 0.0)


@triton.jit(do_not_specialize=[*STRIDES, "n_segments", "heads", "sq", "tiles", "sk", "left", "right"])
def _prepass_kernel(
    y_ptr, dy_ptr, lse_ptr, dlse_ptr, do_ptr, lse2_ptr, delta_ptr, acc_ptr, packing, n_segments, heads, sq, tiles,
    y_stride_b, y_stride_h, y_stride_s, dy_stride_b, dy_stride_h, dy_stride_s, dy_stride_d,
    dlse_stride_b, dlse_stride_h, dlse_stride_s, log2e,
    gate_ptr, gate_stride_b, gate_stride_h, gate_stride_s, dgate_ptr, dgate_stride_b, dgate_stride_h, dgate_stride_s,
    terms, u_stride_b, u_stride_h, u_stride_s, cu_k_ptr, sk, left, right, rate, V: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = V.BM
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    block, start, n_rows, n_keys = segment_of(tile, packing, cu_k_ptr, sq, sk, n_segments, V)
    lanes = tl.arange(0, BM)
    inside = block * BM + lanes < n_rows
    row = start + (block * BM + lanes).to(tl.int64)
    columns = tl.arange(0, V.BDV)
    mask = inside[:, None] & (columns < V.DV)[None, :]
    y = floats_at(y_ptr, (y_stride_b, y_stride_h, y_stride_s), b, h, row, columns, mask)
    dy_strides = (dy_stride_b, dy_stride_h, dy_stride_s, dy_stride_d)
    dy = tl.load(incoming_at(dy_ptr, dy_strides, b, h, row, columns, V), mask=mask, other=0.0)
    u_strides = (u_stride_b, u_stride_h, u_stride_s)
    if V.LOW:
        y += floats_at(terms.u_ptr, u_strides, b, h, row, columns, mask)
    product = y * dy.to(tl.float32)
    delta = tl.sum(product, 1)
    if V.GATE:
        gate = floats_at(gate_ptr, (gate_stride_b, gate_stride_h, gate_stride_s), b, h, row, columns, mask)
        weight = 1.0 / (1.0 + tl.exp2(-log2e * gate))
        if V.DGATE:
            place = rows_at(dgate_ptr, (dgate_stride_b, dgate_stride_h, dgate_stride_s), b, h, row, columns)
            tl.store(place, (product * (1.0 - weight)).to(dgate_ptr.dtype.element_ty), mask=mask)
        dy = dy.to(tl.float32) * weight
    lse = tl.load(lse_ptr + head.to(tl.int64) * sq + row, mask=inside, other=float("-inf"))
    seen = lse != float("-inf")
    if V.TAU or V.ENTMAX != 0:
        mean = tl.sum(dy.to(tl.float32) * floats_at(terms.u_ptr, u_strides, b, h, row, columns, mask), 1)
        delta = delta if V.TAU else mean
    if V.HAS_DLSE:
        dlse_ptr += b * dlse_stride_b + h * dlse_stride_h + row * dlse_stride_s
        delta -= by_lse(dlse_ptr, terms, head.to(tl.int64) * sq + row, inside & seen, V)
    padded = (head.to(tl.int64) * tiles + tile) * BM
    if V.TAU:
        n = visible_count(block * BM + lanes + n_keys - n_rows, n_keys, left, right, V)
        tau = tl.load(terms.tau_ptr + h).to(tl.float32)
        delta -= tau * mean
        tl.store(terms.share_ptr + padded + lanes, share_of(tau, n, inside, V.SINK))
        tl.store(terms.dtau_ptr + head * tiles + tile, tl.sum(mean, 0))
    if V.SINK:
        p_sink = weight_of(tl.load(terms.sink_ptr + h).to(tl.float32), lse, seen, log2e, rate, V)
        tl.store(terms.dsink_ptr + head * tiles + tile, tl.sum(tl.where(seen, -p_sink * delta, 0.0), 0))
    tl.store(lse2_ptr + padded + lanes, tl.where(seen, as_tiles_read_it(lse, log2e, rate, V), float("inf")))
    tl.store(delta_ptr + padded + lanes, delta)
    if (tile == tiles - 1) & (head == tl.num_programs(1) - 1):
        clear_counters(delta_ptr + padded + BM, V)
    if V.COPY_DO or V.GATE:
        leave_do(do_ptr, dy, head.to(tl.int64) * sq + row, columns, mask, V)
    if V.CLEAR_DQ:
        clear_rows(acc_ptr, padded, lanes, V)


@dataclass(frozen=True)
class Rows:
    """What the pre-pass leaves for the matmul kernels: do, lse2, delta, tau / n [B * Hq * tiles * BM], the dq accumulator."""

    config: BackwardConfig
    do: Tensor
    lse2: Tensor
    delta: Tensor
    share: Tensor | None
    acc: Tensor | None
    tiles: int
    cu_q: Any
    cu_k: Any
    first_tiles: Any
    n_segments: int

    def vector(self, values: Tensor) -> TensorDescriptor:
        return descriptor(values, vector_fields(values.numel(), self.config.block_m))

    @property
    def state(self) -> RowState:
        return RowState(self.lse2, self.delta, self.share)

    @property
    def counter(self) -> int:
        """The place behind delta of the counter of tiles; the next one is for how many a mask by row intervals leaves alive."""
        return self.delta.numel() - 64

    @property
    def accumulator(self) -> Tensor:
        # a split backward has none: any fp32 memory makes a valid descriptor that nobody uses
        return self.lse2 if self.acc is None else self.acc

    def tiles_of_dq(self, width: int, block: int) -> TensorDescriptor:
        rows = 1 if self.acc is None else self.lse2.numel() - 64
        return descriptor(self.accumulator, matrix_fields(rows, width, block))


def eighths(tensor: Tensor | None) -> tuple[int | None, ...]:
    """Strides in units of 16 bytes (`rows_at`)."""
    return (None,) * 3 if tensor is None else tuple(stride // 8 for stride in tensor.stride()[:3])


def prepass(
    launch: Launch,
    config: BackwardConfig,
    y: Tensor,
    lse: Tensor,
    u: Tensor | None,
    dy: Tensor,
    dlse: Tensor | None,
    clear_dq: bool,
    out: dict[str, Tensor],
    needs: frozenset[str],
) -> Rows:
    """Fills dgate, dsink and dtau of `out` where they are needed."""
    call = launch.call
    has_gate, has_sink, has_tau = call.gate is not None, call.sink is not None, call.tau is not None
    copy = launch.once("copy do", lambda: dy.dtype != y.dtype or not tma_reads(dy))
    do = torch.empty(dy.shape, dtype=y.dtype, device=dy.device) if copy or has_gate else dy
    rows = blank_rows(launch, config, do, clear_dq)
    gate = readable(call.gate) if call.gate is not None else None
    dgate = torch.empty_like(gate) if gate is not None and "dgate" in needs else None
    u = readable(u) if u is not None else None
    parts = partial(torch.empty, (launch.batch, launch.heads, rows.tiles), dtype=torch.float32, device=y.device)
    dtau, dsink = parts() if has_tau else None, parts() if has_sink else None
    last = lse if dlse is None else dlse

    packing = Packing(rows.cu_q, None, None, rows.first_tiles)
    slopes = None if launch.alive is None else launch.alive.slopes
    terms = RowTerms(launch.sink, dsink, launch.tau, dtau, rows.share, u, slopes)
    cu_k = rows.cu_k if has_tau else None

    def describe() -> dict[str, Any]:
        args = [
            *(y, dy, lse, last, do, rows.lse2, rows.delta, rows.accumulator, packing),
            *(rows.n_segments, launch.heads, launch.sq, rows.tiles),
            *eighths(y),
            *(dy.stride() if copy else (*eighths(dy), 0)),
            *last.stride(),
            LOG2E,
            *(gate, *eighths(gate)),
            *(dgate, *eighths(dgate)),
            *(terms, *eighths(u)),
            *((cu_k, launch.sk, call.spec.left or 0, call.spec.right or 0) if has_tau else (None,) * 4),
            None if call.entmax is None else rate_of(call),
        ]
        low = call.exact_delta and u is not None and call.entmax is None
        variant = variant_of(launch, rows, has_dlse=dlse is not None, copies=copy, dgate=dgate is not None, low=low)
        grid, warps = (rows.tiles, launch.batch * launch.heads), 8 if has_gate or has_tau or call.entmax is not None else 4
        return {"grid": grid, "args": args, "constants": {"V": variant}, "num_warps": warps}

    tensors = (y, dy, lse, last, do, rows.lse2, rows.delta, rows.accumulator, *packing, gate, dgate, *terms, cu_k)
    launch.start(_prepass_kernel, tensors, describe)

    if dgate is not None:
        out["dgate"] = dgate
    for name, sums, term in (("dsink", dsink, call.sink), ("dtau", dtau, call.tau)):
        if sums is not None and term is not None and name in needs:
            out[name] = launch.head_sums(sums, term.dtype, name)
    return rows


def blank_rows(launch: Launch, config: BackwardConfig, do: Tensor, clear_dq: bool) -> Rows:
    """Memory for what the pre-pass leaves."""
    call, tiles = launch.call, launch.row_tiles(config.block_m)
    length = launch.batch * launch.heads * tiles * config.block_m
    new = partial(torch.empty, dtype=torch.float32, device=do.device)
    # 64 more: the kernel that owns rows takes them 128 at a time
    lse2, delta = new(length + 64), new(length + 64)
    share, acc = new(length + 64) if call.tau is not None else None, new(length * launch.bd) if clear_dq else None
    return Rows(config, do, lse2, delta, share, acc, tiles, *launch.packing(call.cu_seqlens_q, config.block_m))


def variant_of(launch: Launch, rows: Rows, has_dlse: bool, copies: bool, dgate: bool, low: bool) -> Variant:
    call, has_tau = launch.call, launch.call.tau is not None
    return Variant(
        DV=launch.dv,
        BD=launch.bd,
        BDV=launch.bdv,
        BM=rows.config.block_m,
        HAS_DLSE=has_dlse,
        COPY_DO=copies,
        CLEAR_DQ=rows.acc is not None,
        VARLEN=call.varlen,
        GATE=call.gate is not None,
        DGATE=dgate,
        SINK=call.sink is not None,
        TAU=has_tau,
        HAS_LEFT=has_tau and call.spec.left is not None,
        HAS_RIGHT=has_tau and call.spec.right is not None,
        INTERVALS=call.rows is not None or call.entmax is not None,
        LOW=low,
        ENTMAX=exponent_of(call),
    )
