"""The bias table as tiles read it: in logit units, padded, in both orders, each in two copies one entry apart."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import TABLE_PAD

BLOCK = 1024


@triton.jit(do_not_specialize=["n", "pitch", "head_stride"])
def _table_kernel(bias_ptr, table_ptr, n, pitch, head_stride, column_stride, factor, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Program (block, h, order * 2 + copy): entry x is the bias of column x + copy - PAD, in order 1 counted from the end."""
    x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    h = tl.program_id(1)
    column = x + tl.program_id(2) % 2 - PAD
    column = tl.where(tl.program_id(2) >= 2, n - 1 - column, column)
    inside = (column >= 0) & (column < n)
    value = tl.load(bias_ptr + tl.cast(h, tl.int64) * head_stride + column * column_stride, mask=inside, other=0.0)
    place = (tl.cast(h, tl.int64) * 4 + tl.program_id(2)) * pitch + x
    tl.store(table_ptr + place, value.to(tl.float32) * factor, mask=x < pitch)


def table_of(start: Callable[..., None], bias: Tensor, factor: float) -> Tensor:
    """[Hq, ascending or descending, copy, pitch] in fp32; pitch is even."""
    heads, n = bias.shape
    pitch = (n + 2 * TABLE_PAD.value + 1) // 2 * 2
    table = torch.empty(heads, 2, 2, pitch, dtype=torch.float32, device=bias.device)
    if heads:
        start(
            _table_kernel,
            (triton.cdiv(pitch, BLOCK), heads, 4),
            *(bias, table, n, pitch, *bias.stride(), factor),
            PAD=TABLE_PAD.value,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return table
