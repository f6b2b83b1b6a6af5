"""dbias: the sums of ds along diagonals (eq. 22), taken from the main kernel's registers.

A thread of the backward holds keys 16 w + 8 g + b and rows 8 c + x of a [keys, rows] tile, g in {0, 1}, b and x < 8. What has
the same c - g has the same distance for one thread, so it adds that up (half of the values remain) and leaves it, one row of
[b, x] per key group w and c - g, in shared memory. From there TMA adds it to an fp32 accumulator in global memory that keeps b
and x apart: what belongs together over key groups, row blocks, CTAs and batches meets by its address. `_diagonals_kernel` adds
up the eight cells of a distance. Neither scores nor dp are computed twice, and ds is summed before it is rounded.

The accumulator is [slots, Hq, 2, height / 2, 64]: 64 cells [b, x] for each eight distances, from far to near, even ones first
(key groups lie two apart, so that a box of TMA is contiguous), with MARGIN more at both ends: a box that leaves its tensor is
no legal reduction. Distances count from a multiple of 16; what is left of sk - sq + origin is the slot, of which packed
sequences with keys of their own have sixteen.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP, diagonals_full
from backlight.backends.hopper.compat import smem_reinterpret, tma_reduce_add
from backlight.backends.hopper.launch import Launch, descriptor, fields, linear
from backlight.backends.hopper.primitives import bar_arrive, clamp, log2_of

# key groups of a tile, cells of eight distances, distances a slot stands for
GROUPS = gl.constexpr(8)
CELLS = gl.constexpr(64)
SLOTS = 16
# even, and wide enough for a tile that just does not meet the table: 15 groups of eight distances on each side of its first
FAR = gl.constexpr(18)
MARGIN = gl.constexpr(34)
BLOCK = 128


@gluon.jit
def parts_of(x, C: gl.constexpr):
    """The C tensors that x [w, b, x, C] holds along its last dimension, which lies in registers."""
    parts = (x,)
    for level in gl.static_range(log2_of(C)):
        finer = ()
        for i in gl.static_range(1 << level):
            halves = gl.reshape(parts[i], [GROUPS, 8, 8, 2, C >> (level + 1)])
            first, second = gl.split(gl.permute(halves, (0, 1, 2, 4, 3)))
            finer = finer + (first, second)  # noqa: RUF005 (unpacking is no syntax of the kernel language)
        parts = finer
    return parts


@gluon.jit
def whole_of(parts, C: gl.constexpr):
    """The inverse of `parts_of`."""
    for level in gl.static_range(log2_of(C)):
        coarser = ()
        for i in gl.static_range(C >> (level + 1)):
            both = gl.permute(gl.join(parts[2 * i], parts[2 * i + 1]), (0, 1, 2, 4, 3))
            coarser = coarser + (gl.reshape(both, [GROUPS, 8, 8, 2 << level]),)  # noqa: RUF005
        parts = coarser
    return parts[0]


@gluon.jit
def sum_of(a, b):
    """a + b, not fused with the product that made b: its factors would have to wait in registers as long as it does."""
    return gl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def leave_diagonals(p, ds, flushes):
    """Put the sums of a tile ds [128 keys, BM rows] where `add_diagonals` finds them."""
    C: gl.constexpr = ds.shape[1] // 8
    tile = gl.permute(gl.reshape(ds, [GROUPS, 2, 8, C, 8]), (0, 2, 4, 3, 1))
    near, far = gl.split(tile)
    near = parts_of(near, C)
    far = parts_of(far, C)
    mbarrier.wait(p.buffers.diagonals_empty.index(0), (flushes & 1) ^ 1)
    totals = ()
    for c in gl.static_range(C):
        total = near[c]
        if c + 1 < C:
            total = sum_of(total, far[c + 1])
        totals = totals + (total,)  # noqa: RUF005 (unpacking is no syntax of the kernel language)
    # one store: between two of them the compiler puts a barrier of all warps
    rows_l: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = smem_reinterpret(p.buffers.diagonals, gl.float32, [C * GROUPS, CELLS], rows_l)
    rows.store(gl.reshape(gl.permute(whole_of(totals, C), (3, 0, 1, 2)), [C * GROUPS, CELLS]))
    p.buffers.edge.store(gl.reshape(far[0], [GROUPS, CELLS]))
    fence_async_shared()
    bar_arrive(diagonals_full(p.V.ST), BOTH_GROUPS_AND_WARP)


@gluon.jit
def add_diagonals(p, t, h, i):
    """Add what `leave_diagonals` left of row block i to the accumulator of query head h; beyond the table lies the margin."""
    C: gl.constexpr = p.buffers.diagonals.shape[0]
    offset = t.sk - t.sq + p.origin
    slot = offset & (p.V.SLOTS - 1)
    # even, as distances in units of eight between tiles are
    top = (p.n_bias + 14) // 16 * 2
    row = clamp(top - ((i * p.V.BM - t.j0) // 16 + (offset >> 4)) * 2, -FAR, top + FAR) + MARGIN
    plane = (slot * p.heads + h) * 2
    shape: gl.constexpr = p.diagonals_desc.block_type.shape
    for c in gl.static_range(C):
        box = smem_reinterpret(p.buffers.diagonals.index(c), gl.float32, shape, p.diagonals_desc.layout)
        tma_reduce_add(p.diagonals_desc, [plane + c % 2, (row - c) >> 1, 0], box)
    box = smem_reinterpret(p.buffers.edge, gl.float32, shape, p.diagonals_desc.layout)
    tma_reduce_add(p.diagonals_desc, [plane + 1, row >> 1, 0], box)


@triton.jit(do_not_specialize=["heads", "n", "height", "first_slot", "slots"])
def _diagonals_kernel(acc_ptr, dbias_ptr, heads, n, height, first_slot, slots, BLOCK: tl.constexpr):
    """dbias [Hq, n] from the accumulator: distance = 8 block + x - b + slot."""
    h = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(slots):
        for b in range(8):
            distance = column + 16 - (first_slot + slot) + b
            # from far to near, even ones first
            row = height - MARGIN + 2 - distance // 8
            plane = ((slot * heads + h) * 2 + row % 2).to(tl.int64)
            cell = (plane * (height // 2) + row // 2) * 64 + b * 8 + distance % 8
            total += tl.load(acc_ptr + cell, mask=column < n, other=0.0)
    tl.store(dbias_ptr + h * n + column, total.to(dbias_ptr.dtype.element_ty), mask=column < n)


@lru_cache(maxsize=1024)
def diagonals_fields(planes: int, rows: int) -> dict[str, Any]:
    return fields((planes, rows, CELLS.value), (rows * CELLS.value, CELLS.value, 1), (1, GROUPS.value, CELLS.value), linear(3))


@dataclass(frozen=True)
class Diagonals:
    """The accumulator of a call."""

    launch: Launch
    acc: Tensor

    @classmethod
    def of(cls, launch: Launch) -> Diagonals:
        call = launch.call
        assert call.bias is not None
        shape = (cls.slots(launch), launch.heads, 2, cls.height(call.bias.shape[1]) // 2, CELLS.value)
        return cls(launch, torch.zeros(shape, dtype=torch.float32, device=call.q.device))

    @staticmethod
    def height(n: int) -> int:
        """Groups of eight distances that a table of n columns can meet, and the margins."""
        return (n + 14) // 16 * 2 + 2 * MARGIN.value

    @staticmethod
    def slots(launch: Launch) -> int:
        """Packed sequences with keys of their own lie apart by anything: one slot for each rest."""
        call = launch.call
        return SLOTS if call.varlen and call.cu_seqlens_q is not call.cu_seqlens_k else 1

    @property
    def boxes(self) -> TensorDescriptor:
        slots, heads, halves, rows, _ = self.acc.shape
        return descriptor(self.acc, diagonals_fields(slots * heads * halves, rows))

    def dbias(self) -> Tensor:
        """[Hq, n] in the dtype of bias."""
        launch, call = self.launch, self.launch.call
        assert call.bias is not None
        heads, n = call.bias.shape
        out = torch.empty(heads, n, dtype=call.bias.dtype, device=call.bias.device)
        slots = self.acc.shape[0]
        shift = 0 if call.varlen else launch.sk - launch.sq
        first_slot = 0 if slots > 1 else (shift + call.spec.bias_origin) % 16

        def describe() -> dict[str, Any]:
            args = [self.acc, out, heads, n, self.height(n), first_slot, slots]
            return {"grid": (-(-n // BLOCK), heads), "args": args, "constants": {"BLOCK": BLOCK}, "num_warps": 4}

        launch.start(_diagonals_kernel, (self.acc, out), describe)
        return out
