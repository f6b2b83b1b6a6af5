"""When nobody may look at values: in a graph they are not there yet, or will be others when it runs again."""

from __future__ import annotations

import torch
from torch import Tensor


def blind(x: Tensor) -> bool:
    """Whether nothing may depend on the values of `x`: torch.compile, torch.export or torch.jit traces, a CUDA graph is
    captured, or `x` has no values."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or x.is_meta or type(x).__name__ == "FakeTensor":
        return True
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
