"""Kernels beside the large ones: the padded bias table; first tiles of packed sequences and sums over heads, as elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl

from backlight.backends.replaying.small import BLOCK, _first_tiles_kernel, _head_sums_kernel

__all__ = ["BLOCK", "_first_tiles_kernel", "_head_sums_kernel", "_table_kernel"]


@triton.jit(do_not_specialize=["n", "head_stride", "stride", "unit"])
def _table_kernel(bias_ptr, table_ptr, n, head_stride, stride, unit, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """bias [Hq, n] in units of scores, fp32, with PAD zeros on both sides."""
    h = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) - PAD
    inside = (column >= 0) & (column < n)
    value = tl.load(bias_ptr + h * head_stride + column * stride, mask=inside, other=0.0).to(tl.float32)
    tl.store(table_ptr + h * (n + 2 * PAD) + PAD + column, tl.div_rn(value, unit), mask=column < n + PAD)
