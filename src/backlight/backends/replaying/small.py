"""Small kernels around the large ones: what would be several operations of torch, each with a launch of its own."""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit(do_not_specialize=["batch", "heads", "tiles"])
def _head_sums_kernel(parts_ptr, out_ptr, batch, heads, tiles, BLOCK: tl.constexpr):
    """out [Hq]: sums of parts [B, Hq, tiles] in fp32, always in the same order."""
    h = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, batch * tiles, BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(parts_ptr + (at // tiles * heads + h) * tiles + at % tiles, mask=at < batch * tiles, other=0.0)
    tl.store(out_ptr + h, tl.sum(total, 0).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["length", "n", "rows"])
def _first_tiles_kernel(cu_ptr, first_ptr, borders_ptr, length, n, rows, BLOCK: tl.constexpr):
    """first [n + 1] int32: how many tiles of `rows` rows lie before each of n sequences packed into `length`, and in all.

    borders [n + 1] int32: cu_seqlens, as kernels may follow them: from 0 on, never down and never beyond the length, whatever
    cu_seqlens has become since it was checked.
    """
    tiles_before = tl.zeros([1], tl.int32)
    rows_before = tl.zeros([1], tl.int64)
    tl.store(first_ptr + tl.arange(0, 1), tiles_before)
    tl.store(borders_ptr + tl.arange(0, 1), tiles_before)
    for begin in range(0, n, BLOCK):
        z = begin + tl.arange(0, BLOCK)
        own = tl.load(cu_ptr + z + 1, mask=z < n, other=0) - tl.load(cu_ptr + z, mask=z < n, other=0)
        own = tl.minimum(tl.maximum(own, 0), length).to(tl.int64)
        end = rows_before + tl.cumsum(own, 0)
        last = tl.minimum(end, length)
        tiles = ((last - tl.minimum(end - own, length) + rows - 1) // rows).to(tl.int32)
        tl.store(borders_ptr + 1 + z, last.to(tl.int32), mask=z < n)
        tl.store(first_ptr + 1 + z, tiles_before + tl.cumsum(tiles, 0), mask=z < n)
        rows_before += tl.sum(own, 0)
        tiles_before += tl.sum(tiles, 0)
