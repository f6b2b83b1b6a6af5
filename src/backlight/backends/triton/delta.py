"""Backward pre-pass: everything that is known per row before any tile is visited."""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.config import padded
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.live import sweep
from backlight.backends.triton.loads import at, load_tile, row_state, store_tile
from backlight.backends.triton.powers import alpha_of, raised, sink_above
from backlight.backends.triton.primitives import LOG2E, own_counts, own_rows, visible_count
from backlight.call import Call

# no row tile of any kernel is higher
BLOCK = 128


class RowState(NamedTuple):
    """What the tile kernels read per row: the gradient at o, and fp32 [B,Hq,pitch].

    The pitch is a multiple of every row tile. Rows beyond Sq have -inf, delta 0 and share 0: they weigh nothing and a tile
    at the end needs no mask. Packed sequences have no such room between them.
    """

    do: Tensor
    minus_lse2: Tensor
    delta: Tensor
    share: Tensor

    @property
    def pitch16(self) -> int:
        return self.minus_lse2.shape[-1] // 16


class Given(NamedTuple):
    """What the pre-pass reads: rows of y, its low half, dy, u, gate, and the rest by pointers; low and dlse may be None.

    slopes: W of entmax, where there is a dlse.
    """

    y: Any
    low: Any
    dy: Any
    u: Any
    gate: Any
    lse_ptr: Any
    dlse_ptr: Any
    tau_ptr: Any
    sink_ptr: Any
    slopes_ptr: Any


class Made(NamedTuple):
    """What it makes: rows of do and dgate, `RowState` by pointers, and parts of dtau and dsink."""

    do: Any
    dgate: Any
    minus_lse2_ptr: Any
    delta_ptr: Any
    share_ptr: Any
    dtau_ptr: Any
    dsink_ptr: Any


@triton.jit(do_not_specialize=["pitch16", "sq", "sk", "n_segments"])
def _delta_kernel(given, made, pitch16, packing, geometry, sq, sk, n_segments, V: tl.constexpr, BM: tl.constexpr):
    """do and dgate (eq. 18), delta - dlse (eq. 20, 27, 28), tau / n, and the tile's part of dtau (eq. 24) and dsink (eq. 23).

    minus_lse2 is the base-2 lse, negated; -inf where a row sees nothing, so that its p is 0 (eq. 33).
    """
    own = own_rows(packing, sq, sk, n_segments, geometry, V, BM)
    b, h, segment, i0, row, n_rows = own.b, own.h, own.segment, own.i0, own.row, own.n_rows
    lanes, exists, in_buffer = own.lanes, own.exists, own.in_buffer
    y = load_tile(at(given.y, b, h, row), given.y.row, 0, n_rows, BM, V.DV, V.BDV).to(tl.float32)
    if given.low is not None:
        y += load_tile(at(given.low, b, h, row), given.low.row, 0, n_rows, BM, V.DV, V.BDV).to(tl.float32)
    do = load_tile(at(given.dy, b, h, row), given.dy.row, 0, n_rows, BM, V.DV, V.BDV).to(tl.float32)
    delta = tl.sum(do * y, 1)
    if V.GATE:
        weight = load_tile(at(given.gate, b, h, row), given.gate.row, 0, n_rows, BM, V.DV, V.BDV)
        weight = tl.sigmoid(weight.to(tl.float32))
        store_tile(at(made.dgate, b, h, row), made.dgate.row, n_rows, do * y * (1 - weight), BM, V.DV, V.BDV)
        do = do * weight
        store_tile(at(made.do, b, h, row), made.do.row, n_rows, do, BM, V.DV, V.BDV)
    from_first = tl.cast(b * geometry.heads + h, tl.int64) * sq + row
    offset = row_state(b, h, row, pitch16, geometry)
    if V.ENTMAX != 0:
        u = load_tile(at(given.u, b, h, row), given.u.row, 0, n_rows, BM, V.DV, V.BDV).to(tl.float32)
        delta = tl.sum(do * u, 1)
        alpha = alpha_of(h, geometry, V)
    if V.TAU:
        u = load_tile(at(given.u, b, h, row), given.u.row, 0, n_rows, BM, V.DV, V.BDV).to(tl.float32)
        packing = own_counts(packing, b, h, sq, geometry, V)
        n = tl.maximum(visible_count(i0 + lanes + segment.sk - segment.sq, segment, packing, geometry, V), 1)
        mean = tl.sum(do * u, 1)
        tau = tl.load(given.tau_ptr + h).to(tl.float32)
        delta -= tau * mean
        tl.store(
            made.dtau_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(tl.where(exists, mean, 0.0), 0)
        )
        tl.store(made.share_ptr + offset + lanes, tl.where(exists, tau / n, 0.0), mask=in_buffer)
    lse = tl.load(given.lse_ptr + from_first + lanes, mask=exists, other=float("inf"))
    sees_nothing = lse == float("-inf")
    if given.dlse_ptr is not None:
        dlse = tl.load(given.dlse_ptr + from_first + lanes, mask=exists, other=0.0).to(tl.float32)
        # of a part it is -delta of the whole row
        if V.ENTMAX != 0 and not V.PART:
            dlse = dlse / tl.load(given.slopes_ptr + from_first + lanes, mask=exists, other=1.0)
        delta -= tl.where(sees_nothing, 0.0, dlse)
    if V.SINK:
        sink = tl.load(given.sink_ptr + h).to(tl.float32)
        # an infinite sink is all there is, or nothing
        if V.ENTMAX != 0:
            p_sink = raised(sink_above(sink, lse, alpha), 1 / (alpha - 1), V, 1)
        else:
            p_sink = tl.where(lse == sink, 1.0, tl.exp2((sink - lse) * LOG2E))
        p_sink = tl.where(sees_nothing | ~exists, 0.0, p_sink)
        dsink = tl.sum(p_sink * -delta, 0)
        tl.store(made.dsink_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), dsink)
    tl.store(made.delta_ptr + offset + lanes, tl.where(exists, delta, 0.0), mask=in_buffer)
    minus_lse2 = tl.where(exists & (lse != float("-inf")), -lse * LOG2E, float("-inf"))
    tl.store(made.minus_lse2_ptr + offset + lanes, minus_lse2, mask=in_buffer)


def block_of(call: Call) -> int:
    """Rows of one program. Four tensors of wide rows at a time would not fit into its registers."""
    width = padded(call.v.shape[-1])
    crowded = width > 128 and (call.gate is not None or call.keeps)
    return BLOCK if not crowded else BLOCK // 2 if width <= 256 else BLOCK // 4


def prepare_rows(
    launch: Launch, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, out: dict[str, Tensor]
) -> RowState:
    """Fills dgate, dtau and dsink of `out` where the spec has them."""
    call = launch.call
    divided = call.entmax is not None and dlse is not None and launch.known_part is None
    slopes = sweep(launch, lse, None, None, wants_slopes=True)[0] if divided else None
    y, dy = launch.readable(y), launch.readable(dy)
    low = rows_of(launch.readable(u)) if call.exact_delta and u is not None else None
    u = y if u is None else launch.readable(u)
    dlse = None if dlse is None else compact(dlse)
    do = dgate = dy
    if call.gate is not None:
        do = launch.empty_rows(dy.shape[-1], call.q.dtype)
        dgate = out["dgate"] = torch.empty_like(call.gate)
    batch, heads, sq = lse.shape
    pitch = -(-sq // BLOCK) * BLOCK
    block = block_of(call)
    # rows beyond the last are filled up to the pitch
    grid = (launch.tiles(sq, call.cu_seqlens_q, block) if call.varlen else pitch // block, batch * heads)
    values = partial(torch.empty, (batch, heads, pitch), dtype=torch.float32, device=lse.device)
    parts = partial(torch.empty, (batch, heads, grid[0]), dtype=torch.float32, device=lse.device)
    minus_lse2, delta = values(), values()
    rows = RowState(do, minus_lse2, delta, delta if call.tau is None else values())
    dtau, dsink = (delta if x is None else parts() for x in (call.tau, call.sink))
    if grid[0] and grid[1]:
        launch.start(
            _delta_kernel,
            grid,
            Given(rows_of(y), low, *(rows_of(x) for x in (dy, u, launch.gate)), lse, dlse, launch.tau, launch.sink, slopes),
            Made(*map(rows_of, (do, dgate)), rows.minus_lse2, rows.delta, rows.share, dtau, dsink),
            rows.pitch16,
            *launch.shared(call.cu_seqlens_q, block),
            V=launch.variant,
            BM=block,
            num_warps=8,
            enable_fp_fusion=True,
        )
    if call.tau is not None:
        out["dtau"] = launch.head_sums(dtau, call.tau.dtype, "dtau")
    if call.sink is not None:
        out["dsink"] = launch.head_sums(dsink, call.sink.dtype, "dsink")
    return rows
