"""Portable Triton kernels: every variant, on any GPU Triton compiles for."""

from __future__ import annotations

import importlib.util
import os

import torch
from torch import Tensor

from backlight.call import Call

MAX_HEAD_DIM = 256


def interpreting() -> bool:
    """Triton's interpreter runs kernels on CPU tensors; it is chosen before the kernels are imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonBackend:
    name = "triton"
    summary = "portable GPU kernels, fp16 bf16 fp32, every variant"
    parts = True

    def available(self) -> tuple[str, ...]:
        if importlib.util.find_spec("triton") is None:
            return ("triton is not installed",)
        if not torch.cuda.is_available() and not interpreting():
            return ("no GPU that torch can see",)
        return ()

    def why_not(self, call: Call) -> tuple[str, ...]:
        reasons = []
        if call.q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            reasons.append(f"dtype {call.q.dtype} is not one of fp16, bf16, fp32")
        if call.q.device.type != "cuda" and not interpreting():
            reasons.append(f"tensors are on {call.q.device.type}, not on a GPU")
        for name, width in (("q", call.q.shape[-1]), ("v", call.v.shape[-1])):
            if width > MAX_HEAD_DIM:
                reasons.append(f"head dimension {width} of {name} is above {MAX_HEAD_DIM}")
        return tuple(reasons)

    def config(self, call: Call) -> dict[str, object]:
        from backlight.backends.triton.config import config_of, kernels_of

        return {kernel: config_of(kernel, call) for kernel in kernels_of(call)}

    @torch.no_grad()
    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        from backlight.backends.triton.forward import forward

        return forward(call, save_u)

    @torch.no_grad()
    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        from backlight.backends.triton.backward import backward

        return backward(call, y, lse, u, dy, dlse, needs)


BACKEND = TritonBackend()
