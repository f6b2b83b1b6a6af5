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


@triton.jit
def borders(cu_ptr, z, exists, length):
    """First and last border of packed sequences z, int32, held within the tensor: kernels stay in their memory whatever
    cu_seqlens says."""
    begin = tl.load(cu_ptr + z, mask=exists, other=0)
    end = tl.load(cu_ptr + z + 1, mask=exists, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), length).to(tl.int32)
    return begin, tl.maximum(tl.minimum(end, length).to(tl.int32), begin)


@triton.jit(do_not_specialize=["length", "n", "rows"])
def _first_tiles_kernel(cu_ptr, first_ptr, length, n, rows, BLOCK: tl.constexpr):
    """first [n + 1] int32: how many tiles of `rows` rows lie before each of n sequences packed into `length`, and in all."""
    before = tl.zeros([1], tl.int32)
    tl.store(first_ptr + tl.arange(0, 1), before)
    for begin in range(0, n, BLOCK):
        z = begin + tl.arange(0, BLOCK)
        first, last = borders(cu_ptr, z, z < n, length)
        tiles = (last - first + rows - 1) // rows
        tl.store(first_ptr + 1 + z, before + tl.cumsum(tiles, 0), mask=z < n)
        before += tl.sum(tiles, 0)
