"""Before the products of second derivatives: one pass over rows that is bound by memory (plain Triton).

Per row block of the kernel it writes base-2 lse (+inf where a row does not exist or sees nothing, so that its p is 0), mu, eta
and delta (eq. 57 without a gradient at y), and clears the fp32 accumulator of dq.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.backward.prepass import clear_rows, eighths, rows_at, segment_of
from backlight.backends.hopper.config import SecondConfig
from backlight.backends.hopper.launch import Launch, descriptor, matrix_fields, vector_fields
from backlight.backends.hopper.second.arguments import STATES
from backlight.spec import LOG2E


class Variant(NamedTuple):
    """What is compiled in."""

    DV: int
    BD: int
    BDV: int
    BM: int
    HAS_DTLSE: bool
    VARLEN: bool
    # keys are not counted
    TAU: bool = False


class Given(NamedTuple):
    """y, its tangent and the gradient there."""

    y_ptr: Any
    ty_ptr: Any
    dty_ptr: Any


class Values(NamedTuple):
    """lse, its tangent and the gradient there."""

    lse_ptr: Any
    tlse_ptr: Any
    dtlse_ptr: Any


AXES = [f"{name}_stride_{axis}" for name in ("y", "ty", "dty") for axis in "bhs"]


@triton.jit(do_not_specialize=[*AXES, "n_segments", "heads", "sq", "tiles"])
def _second_prepass_kernel(
    state_ptr, acc_ptr, given, values, packing, n_segments, heads, sq, tiles,
    y_stride_b, y_stride_h, y_stride_s, ty_stride_b, ty_stride_h, ty_stride_s, dty_stride_b, dty_stride_h, dty_stride_s,
    log2e, V: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = V.BM
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    block, start, n_rows, _ = segment_of(tile, packing, None, sq, sq, n_segments, V)
    lanes = tl.arange(0, BM)
    inside = block * BM + lanes < n_rows
    row = start + (block * BM + lanes).to(tl.int64)
    columns = tl.arange(0, V.BDV)
    mask = inside[:, None] & (columns < V.DV)[None, :]
    y = tl.load(rows_at(given.y_ptr, (y_stride_b, y_stride_h, y_stride_s), b, h, row, columns), mask=mask, other=0.0)
    ty = tl.load(rows_at(given.ty_ptr, (ty_stride_b, ty_stride_h, ty_stride_s), b, h, row, columns), mask=mask, other=0.0)
    place = rows_at(given.dty_ptr, (dty_stride_b, dty_stride_h, dty_stride_s), b, h, row, columns)
    dty = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    eta = tl.sum(y.to(tl.float32) * dty, 1)
    delta = tl.sum(ty.to(tl.float32) * dty, 1)
    at = head.to(tl.int64) * sq + row
    lse = tl.load(values.lse_ptr + at, mask=inside, other=float("-inf"))
    mu = tl.load(values.tlse_ptr + at, mask=inside, other=0.0)
    seen = lse != float("-inf")
    if V.HAS_DTLSE:
        eta -= tl.load(values.dtlse_ptr + at, mask=inside & seen, other=0.0).to(tl.float32)
    padded = (head.to(tl.int64) * tiles + tile) * BM
    state_ptr += padded * 4 + lanes
    tl.store(state_ptr, tl.where(seen, lse * log2e, float("inf")))
    tl.store(state_ptr + BM, mu)
    tl.store(state_ptr + 2 * BM, eta)
    tl.store(state_ptr + 3 * BM, delta)
    clear_rows(acc_ptr, padded, lanes, V)
    if (tile == tiles - 1) & (head == tl.num_programs(1) - 1):
        # from it the next kernel's programs draw their tiles
        tl.store(state_ptr + 4 * BM, 0.0)


@dataclass(frozen=True)
class Rows:
    """What the pre-pass leaves: the state of row blocks with a counter behind it, the accumulator of dq."""

    config: SecondConfig
    state: Tensor
    accumulator: Tensor
    bd: int
    bdv: int
    tiles: int
    cu_q: Any
    cu_k: Any
    first_tiles: Any
    n_segments: int

    @property
    def counter(self) -> int:
        """The place behind the state of the counter of tiles."""
        return self.state.numel() - self.config.block_m

    @property
    def states(self) -> TensorDescriptor:
        return descriptor(self.state, vector_fields(self.state.numel(), STATES.value * self.config.block_m))

    def tiles_of_dq(self, width: int, block: int) -> TensorDescriptor:
        return descriptor(self.accumulator, matrix_fields(self.accumulator.numel() // width, width, block))


def prepass(launch: Launch, config: SecondConfig, given: Given, values: Values) -> Rows:
    call, block = launch.call, config.block_m
    tiles = launch.row_tiles(block)
    length = launch.batch * launch.heads * tiles * block
    # products have 64 rows at least, and those of dq have them along D
    bd, bdv = max(64, launch.bd), max(64, launch.bdv)
    state = torch.empty(STATES.value * length + block, dtype=torch.float32, device=call.q.device)
    acc = torch.empty(length * bd, dtype=torch.float32, device=call.q.device)
    rows = Rows(config, state, acc, bd, bdv, tiles, *launch.packing(call.cu_seqlens_q, block))
    packing = Packing(rows.cu_q, None, None, rows.first_tiles)

    def describe() -> dict[str, Any]:
        args = [
            *(state, acc, given, values, packing),
            *(rows.n_segments, launch.heads, launch.sq, tiles),
            *(stride for x in given for stride in eighths(x)),
            LOG2E,
        ]
        variant = Variant(launch.dv, bd, bdv, block, values.dtlse_ptr is not None, call.varlen)
        return {"grid": (tiles, launch.batch * launch.heads), "args": args, "constants": {"V": variant}, "num_warps": 4}

    launch.start(_second_prepass_kernel, (state, acc, *given, *values, *packing), describe)
    return rows
