"""Small kernels around the large ones: copies and sums that torch would start several kernels for."""

from __future__ import annotations

import triton
import triton.language as tl

from backlight.backends.replaying.small import BLOCK, _first_tiles_kernel, _head_sums_kernel

__all__ = ["BLOCK", "COLUMNS", "PARTS", "_copy_kernel", "_dbias_sums_kernel", "_first_tiles_kernel", "_head_sums_kernel"]

COLUMNS, PARTS = tl.constexpr(64), tl.constexpr(32)


@triton.jit(do_not_specialize=["heads", "rows", "columns"])
def _copy_kernel(from_rows, column_stride, to_ptr, heads, rows, columns, BLOCK: tl.constexpr):
    """to [B,H,S,D], contiguous: what lies at any strides."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < tl.cast(rows, tl.int64) * columns
    from_ptr = from_rows.ptr + tl.cast(b, tl.int64) * from_rows.batch + tl.cast(h, tl.int64) * from_rows.head
    value = tl.load(from_ptr + at // columns * from_rows.row + at % columns * column_stride, mask=exists, other=0.0)
    tl.store(to_ptr + tl.program_id(1).to(tl.int64) * rows * columns + at, value, mask=exists)


@triton.jit(do_not_specialize=["batch", "heads", "splits", "offsets", "n"])
def _dbias_sums_kernel(
    partial_ptr, dbias_ptr, batch, heads, splits, offsets, n, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """dbias [Hq, n]: sums of partial [B, Hq, splits, offsets, 2, BN] over B and splits, always in the same order.

    Place x of the 2 BN at offset o is column o BN + x - (BN - 1); of those places a tile reaches BM + BN - 1.
    """
    h = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    offset, place = (column + BN - 1) // BN, (column + BN - 1) % BN
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, batch * splits, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        pair_ptr = (
            partial_ptr
            + (((part // splits * heads + h) * splits + part % splits).to(tl.int64) * offsets + offset) * (2 * BN)
            + place
        )
        exists = (part < batch * splits) & (column < n)
        total += tl.load(pair_ptr, mask=exists, other=0.0)
        # the second half of the offset before
        total += tl.load(pair_ptr - BN, mask=exists & (offset > 0) & (place < BM - 1), other=0.0)
    tl.store(dbias_ptr + h * n + column, tl.sum(total, 0).to(dbias_ptr.dtype.element_ty), mask=column < n)
