"""Yardstick A: what plain PyTorch in the inputs' own dtype would give, every intermediate rounded to it.

Arithmetic runs in fp32 and each stage is rounded once, which is what a low-precision matmul or softmax does in hardware; so the
yardstick costs the same on a CPU without 16-bit units. lse and parameter gradients stay fp32, as kernels return them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference.oracle import Oracle
from backlight.reference.trace import Trace
from backlight.spec import PER_HEAD

UNROUNDED = ("lse", "delta", "p_sink", "m", *(f"d{name}" for name in PER_HEAD))


def eager(call: Call, dy: Tensor | None = None, dlse: Tensor | None = None, keep: Iterable[str] | None = None) -> Trace:
    storage = call.q.dtype
    compute = torch.float64 if storage == torch.float64 else torch.float32

    def to_storage(name: str, value: Tensor) -> Tensor:
        return value if name in UNROUNDED else value.to(storage).to(compute)

    return Oracle(dtype=compute, round=to_storage)(call, dy, dlse, keep)
