"""Pre-pass of second derivatives, eq. 56 and 57: what is known per row before any tile is visited."""

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.config import padded
from backlight.backends.triton.delta import BLOCK
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.loads import at, own_tile, row_state, store_tile
from backlight.backends.triton.moving import Moving, Pairs, RowSums
from backlight.backends.triton.primitives import LOG2E, own_rows, sink_weight
from backlight.backends.triton.table import table_of


class Given(NamedTuple):
    """Which gradients at y, lse, ty and tlse came in, and which tangents there are of terms that no tile meets."""

    DY: bool
    DLSE: bool
    DTY: bool
    DTLSE: bool
    SINK: bool
    GATE: bool


class Prepared(NamedTuple):
    """What tile kernels read beside the call: its tangents, the gradients at o and at its tangent, the row sums, and what of
    all this is there. Absent tensors still have a pointer; what is compiled in never reads it."""

    tq: Tensor
    tk: Tensor
    tv: Tensor
    do: Tensor
    dto: Tensor
    ttable: Tensor
    tpair: Tensor | None
    sums: RowSums
    moving: Moving

    @property
    def pitch16(self) -> int:
        return self.sums.mu.shape[-1] // 16

    def pairs(self, launch: Launch, dpair: Tensor | None = None, columns: Tensor | None = None) -> Pairs:
        made = None if dpair is None else launch.pair_of(dpair)
        return Pairs(launch.pair_of(launch.call.pair_bias), launch.pair_of(self.tpair), made, columns)


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _second_rows_kernel(
    y_rows, ty_rows, dy_rows, dty_rows, gate_rows, tgate_rows, do_rows, dto_rows, dgate_rows, lse_ptr, tlse_ptr, dlse_ptr,
    dtlse_ptr, sink_ptr, tsink_ptr, sums, dsink_ptr, pitch16, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, G: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    own = own_rows(packing, sq, sk, n_segments, geometry, V, BM)
    b, h, row, n_rows, lanes, exists = own.b, own.h, own.row, own.n_rows, own.lanes, own.exists
    eta, delta = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32)
    BDV: tl.constexpr = V.BDV
    do = tl.zeros([BM, BDV], tl.float32)
    dgate = tl.zeros([BM, BDV], tl.float32)
    y = own_tile(y_rows, own, BM, V.DV, V.BDV).to(tl.float32)
    if V.GATE:
        weight = tl.sigmoid(own_tile(gate_rows, own, BM, V.DV, V.BDV).to(tl.float32))
    if G.DY:
        dy = own_tile(dy_rows, own, BM, V.DV, V.BDV).to(tl.float32)
        delta += tl.sum(dy * y, 1)
        if V.GATE:
            dgate += dy * y
            do += dy * weight
    if G.DTY:
        dty = own_tile(dty_rows, own, BM, V.DV, V.BDV).to(tl.float32)
        ty = own_tile(ty_rows, own, BM, V.DV, V.BDV).to(tl.float32)
        eta += tl.sum(dty * y, 1)
        delta += tl.sum(dty * ty, 1)
        if V.GATE:
            dgate += dty * ty
            dto = dty * weight
            if G.GATE:
                tgate = own_tile(tgate_rows, own, BM, V.DV, V.BDV).to(tl.float32)
                dgate -= dto * y * tgate
                do += dto * (1.0 - weight) * tgate
            store_tile(at(dto_rows, b, h, row), dto_rows.row, n_rows, dto, BM, V.DV, V.BDV)
    if V.GATE:
        store_tile(at(dgate_rows, b, h, row), dgate_rows.row, n_rows, dgate * (1.0 - weight), BM, V.DV, V.BDV)
        if G.DY or (G.DTY and G.GATE):
            store_tile(at(do_rows, b, h, row), do_rows.row, n_rows, do, BM, V.DV, V.BDV)
    given = tl.cast(b * geometry.heads + h, tl.int64) * sq + row + lanes
    lse = tl.load(lse_ptr + given, mask=exists, other=float("inf"))
    mu = tl.load(tlse_ptr + given, mask=exists, other=0.0)
    # a row that sees nothing has no lse to differentiate, unless a sink gives it one
    sees_nothing = lse == float("-inf")
    if G.DLSE:
        delta -= tl.where(sees_nothing, 0.0, tl.load(dlse_ptr + given, mask=exists, other=0.0).to(tl.float32))
    if G.DTLSE:
        eta -= tl.where(sees_nothing, 0.0, tl.load(dtlse_ptr + given, mask=exists, other=0.0).to(tl.float32))
    if V.SINK:
        sink = tl.load(sink_ptr + h).to(tl.float32)
        p_sink = sink_weight(sink, lse, sees_nothing | ~exists)
        moved = -mu
        if G.SINK:
            moved += tl.load(tsink_ptr + h).to(tl.float32)
        dsink = tl.sum(p_sink * -(delta + eta * moved), 0)
        tl.store(dsink_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), dsink)
    offset = row_state(b, h, row, pitch16, geometry) + lanes
    minus_lse2 = tl.where(exists & (lse != float("-inf")), -lse * LOG2E, float("-inf"))
    tl.store(sums.minus_lse2 + offset, minus_lse2, mask=own.in_buffer)
    tl.store(sums.mu + offset, mu, mask=own.in_buffer)
    tl.store(sums.eta + offset, tl.where(exists, eta, 0.0), mask=own.in_buffer)
    tl.store(sums.delta + offset, tl.where(exists, delta, 0.0), mask=own.in_buffer)


def prepare_second_rows(
    launch: Launch,
    tangents: dict[str, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    incoming: tuple[Tensor | None, ...],
    out: dict[str, Tensor],
) -> Prepared:
    """results: y, lse, ty, tlse. Fills dgate and dsink of `out` where the spec has them."""
    call = launch.call
    y, ty = (launch.readable(x) for x in results[::2])
    lse, tlse = (compact(x) for x in results[1::2])
    dy, dlse, dty, dtlse = incoming
    do, dto = (None if x is None else launch.readable(x) for x in (dy, dty))
    given = Given(*(x is not None for x in incoming), SINK="sink" in tangents, GATE="gate" in tangents)
    read = [y if x is None else x for x in (do, dto)]
    dgate = y
    if call.gate is not None:
        dgate = out["dgate"] = torch.empty_like(call.gate)
        new = partial(launch.empty_rows, y.shape[-1], call.q.dtype)
        do, dto = new() if dy is not None or (dty is not None and given.GATE) else None, None if dty is None else new()
    tgate = launch.readable(tangents["gate"]) if given.GATE else launch.gate
    tsink = compact(tangents["sink"]) if given.SINK else launch.sink
    batch, heads, sq = lse.shape
    pitch = -(-sq // BLOCK) * BLOCK
    # six tensors of rows at most, each of which is to take no more than 32 registers of a thread
    block = 64 if padded(y.shape[-1]) <= 128 else 32
    grid = (launch.tiles(sq, call.cu_seqlens_q, block) if call.varlen else pitch // block, batch * heads)
    values = partial(torch.empty, (batch, heads, pitch), dtype=torch.float32, device=lse.device)
    sums = RowSums(*(values() for _ in RowSums._fields))
    dsink = lse if call.sink is None else torch.empty((batch, heads, grid[0]), dtype=torch.float32, device=lse.device)
    if grid[0] and grid[1]:
        launch.start(
            _second_rows_kernel,
            grid,
            *(rows_of(x) for x in (y, ty, *read, launch.gate, tgate)),
            *(rows_of(y if x is None else x) for x in (do, dto, dgate)),
            lse,
            tlse,
            *(lse if x is None else compact(x) for x in (dlse, dtlse)),
            launch.sink,
            tsink,
            sums,
            dsink,
            sums.mu.shape[-1] // 16,
            *launch.shared(call.cu_seqlens_q, block),
            V=launch.variant,
            G=given,
            BM=block,
            num_warps=8,
            enable_fp_fusion=True,
        )
    if call.sink is not None:
        out["dsink"] = launch.head_sums(dsink, call.sink.dtype, "dsink")
    return _prepared(launch, tangents, y, (do, dto), sums)


def _prepared(
    launch: Launch, tangents: dict[str, Tensor], y: Tensor, gradients: tuple[Tensor | None, Tensor | None], sums: RowSums
) -> Prepared:
    """y: what stands where a gradient is absent."""
    tq, tk, tv = (
        launch.readable(tangents[name]) if name in tangents else own
        for name, own in (("q", launch.q), ("k", launch.k), ("v", launch.v))
    )
    ttable = table_of(launch.start, tangents["bias"], 1.0) if "bias" in tangents else launch.table
    present = [name in tangents for name in ("q", "k", "v", "bias", "pair_bias")]
    moving = Moving(*present, *(x is not None for x in gradients))
    given = (y if x is None else x for x in gradients)
    return Prepared(tq, tk, tv, *given, ttable, tangents.get("pair_bias"), sums, moving)
