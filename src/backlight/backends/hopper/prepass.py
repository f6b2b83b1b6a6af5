"""Before the backward's matmuls: one pass over rows that is bound by memory (plain Triton).

Per row block of the main kernel it writes delta - dlse (eq. 20, 28) and the base-2 lse into padded vectors, +inf where a row
does not exist or sees nothing so that its p is 0, clears the fp32 dq accumulator, and copies do where TMA cannot read it in
place (`out.sum().backward()` hands one whose strides are all 0).
"""

# device code: compiled by Triton from its own types, never run by Python

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.config import BackwardConfig
from backlight.backends.hopper.launch import Launch, descriptor, matrix_fields, start, tma_reads, vector_fields
from backlight.spec import LOG2E

UNIT = tl.constexpr(8)
STRIDES = [f"{name}_stride_{axis}" for name, axes in (("y", "bhs"), ("dy", "bhsd"), ("dlse", "bhs")) for axis in axes]


@triton.jit(do_not_specialize=[*STRIDES, "n_segments", "heads", "sq", "tiles"])
def _prepass_kernel(
    y_ptr,
    dy_ptr,
    lse_ptr,
    dlse_ptr,
    do_ptr,
    lse2_ptr,
    delta_ptr,
    acc_ptr,
    cu_q_ptr,
    cu_tiles_ptr,
    n_segments,
    heads,
    sq,
    tiles,
    y_stride_b,
    y_stride_h,
    y_stride_s,
    dy_stride_b,
    dy_stride_h,
    dy_stride_s,
    dy_stride_d,
    dlse_stride_b,
    dlse_stride_h,
    dlse_stride_s,
    log2e,
    DV: tl.constexpr,
    BD: tl.constexpr,
    BDV: tl.constexpr,
    BM: tl.constexpr,
    HAS_DLSE: tl.constexpr,
    COPY_DO: tl.constexpr,
    CLEAR_DQ: tl.constexpr,
    VARLEN: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1)
    b = (head // heads).to(tl.int64)
    h = (head % heads).to(tl.int64)
    start = 0
    n_rows = sq
    block = tile
    if VARLEN:
        low = n_segments * 0
        high = n_segments
        while low < high:
            middle = (low + high) // 2
            if tl.load(cu_tiles_ptr + middle + 1) <= tile:
                low = middle + 1
            else:
                high = middle
        block = tile - tl.load(cu_tiles_ptr + low)
        # tiles beyond the last sequence are padding: they have no rows
        last = tl.minimum(low, n_segments - 1)
        start = tl.load(cu_q_ptr + last)
        n_rows = tl.where(low < n_segments, tl.load(cu_q_ptr + last + 1) - start, 0)
    lanes = tl.arange(0, BM)
    inside = block * BM + lanes < n_rows
    row = start + (block * BM + lanes).to(tl.int64)
    columns = tl.arange(0, BDV)
    mask = inside[:, None] & (columns < DV)[None, :]
    # TMA reads y, and dy where it is not copied: strides come in units of 16 bytes, so that loads are as wide
    y_ptr += (b * y_stride_b + h * y_stride_h) * UNIT
    y = tl.load(y_ptr + row[:, None] * (y_stride_s * UNIT) + columns[None, :], mask=mask, other=0.0)
    if COPY_DO:
        dy_ptr += b * dy_stride_b + h * dy_stride_h
        dy = tl.load(dy_ptr + row[:, None] * dy_stride_s + columns[None, :] * dy_stride_d, mask=mask, other=0.0)
    else:
        dy_ptr += (b * dy_stride_b + h * dy_stride_h) * UNIT
        dy = tl.load(dy_ptr + row[:, None] * (dy_stride_s * UNIT) + columns[None, :], mask=mask, other=0.0)
    delta = tl.sum(y.to(tl.float32) * dy.to(tl.float32), 1)
    lse = tl.load(lse_ptr + head.to(tl.int64) * sq + row, mask=inside, other=float("-inf"))
    seen = lse != float("-inf")
    if HAS_DLSE:
        dlse_ptr += b * dlse_stride_b + h * dlse_stride_h
        delta -= tl.load(dlse_ptr + row * dlse_stride_s, mask=inside & seen, other=0.0).to(tl.float32)
    padded = (head.to(tl.int64) * tiles + tile) * BM
    tl.store(lse2_ptr + padded + lanes, tl.where(seen, lse * log2e, float("inf")))
    tl.store(delta_ptr + padded + lanes, delta)
    if COPY_DO:
        do_row = head.to(tl.int64) * sq + row
        tl.store(do_ptr + do_row[:, None] * DV + columns[None, :], dy, mask=mask)
    if CLEAR_DQ:
        flat = tl.arange(0, BD)
        zero = tl.zeros([BM, BD], tl.float32)
        tl.store(acc_ptr + padded * BD + lanes[:, None] * BD + flat[None, :], zero)


@dataclass(frozen=True)
class Rows:
    """What the pre-pass leaves for the matmul kernels: lse2 and delta [B * Hq * tiles * BM], the dq accumulator, do."""

    config: BackwardConfig
    do: Tensor
    lse2: Tensor
    delta: Tensor
    acc: Tensor | None
    tiles: int
    cu_q: Any
    cu_k: Any
    first_tiles: Any
    n_segments: int

    def vector(self, values: Tensor) -> TensorDescriptor:
        return descriptor(values, vector_fields(values.numel(), self.config.block_m))

    def accumulator(self, width: int) -> TensorDescriptor:
        # a split backward has no accumulator: any fp32 memory makes a valid descriptor that nobody uses
        acc, rows = (self.lse2, 1) if self.acc is None else (self.acc, self.lse2.numel() - 64)
        return descriptor(acc, matrix_fields(rows, width, self.config.block_m))


def prepass(
    launch: Launch, config: BackwardConfig, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor | None, clear_dq: bool
) -> Rows:
    call = launch.call
    tiles = launch.row_tiles(config.block_m)
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, config.block_m)
    heads = launch.batch * launch.heads
    length = heads * tiles * config.block_m
    # 64 more: the kernel that owns rows takes them 128 at a time
    vectors = torch.empty(2, length + 64, dtype=torch.float32, device=y.device)
    lse2, delta = vectors[0], vectors[1]
    acc = torch.empty(length * launch.bd, dtype=torch.float32, device=y.device) if clear_dq else None
    copy = dy.dtype != y.dtype or not tma_reads(dy)
    do = torch.empty(dy.shape, dtype=y.dtype, device=dy.device) if copy else dy
    start(
        _prepass_kernel,
        (tiles, heads),
        [
            y,
            dy,
            lse,
            lse if dlse is None else dlse,
            do,
            lse2,
            delta,
            lse2 if acc is None else acc,
            cu_q,
            first_tiles,
            n_segments,
            launch.heads,
            launch.sq,
            tiles,
            *(stride // 8 for stride in y.stride()[:3]),
            *(stride if copy else stride // 8 for stride in dy.stride()),
            *(lse if dlse is None else dlse).stride(),
            LOG2E,
        ],
        {
            "DV": launch.dv,
            "BD": launch.bd,
            "BDV": launch.bdv,
            "BM": config.block_m,
            "HAS_DLSE": dlse is not None,
            "COPY_DO": copy,
            "CLEAR_DQ": acc is not None,
            "VARLEN": call.varlen,
        },
        num_warps=4,
    )
    return Rows(config, do, lse2, delta, acc, tiles, cu_q, cu_k, first_tiles, n_segments)
