"""torch's own scaled_dot_product_attention, one adapter for each of its backends."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backlight.bench.contender import Contender, by_autograd, cannot, gated, leaves_of
from backlight.bench.memory import dense_refusal
from backlight.bench.workload import Tensors, Workload

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sdpa:
    """SDPA restricted to one backend; its causal mask is aligned to the top left, ours to the bottom right."""

    name: str
    backend: SDPBackend
    devices: tuple[str, ...]

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        case = workload.case
        if device.type not in self.devices:
            return f"SDPA's {self.backend.name} backend does not run on {device.type}"
        if case.causal and workload.sq != workload.sk:
            return "SDPA aligns its causal mask to the top left, so Sq != Sk means something else there"
        if self.backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            if device.type == "cuda" and workload.dtype not in SIXTEEN_BIT:
                return f"SDPA's {self.backend.name} backend takes fp16 and bf16 only"
            if workload.dv != case.d:
                return f"SDPA's {self.backend.name} backend needs Dv = D"
        return cannot("SDPA", workload, ("a gate",)) or (
            dense_refusal(workload, device, copies=4) if self.backend == SDPBackend.MATH else None
        )

    def build(self, tensors: Tensors) -> Contender:
        spec, grouped = tensors.call.spec, tensors.call.group > 1

        def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Tensor:
            return gated(
                scaled_dot_product_attention(q, k, v, is_causal=spec.causal, scale=spec.scale, enable_gqa=grouped), gate
            )

        def scope() -> AbstractContextManager[Any]:
            return sdpa_kernel(self.backend)

        return by_autograd(self.name, leaves_of(tensors), tensors.dy, attend, scope=scope, detail=f"SDPA {self.backend.name}")


ADAPTERS = (
    Sdpa("sdpa-flash", SDPBackend.FLASH_ATTENTION, ("cuda", "cpu")),
    Sdpa("sdpa-cudnn", SDPBackend.CUDNN_ATTENTION, ("cuda",)),
    Sdpa("sdpa-efficient", SDPBackend.EFFICIENT_ATTENTION, ("cuda",)),
    Sdpa("sdpa-math", SDPBackend.MATH, ("cuda", "cpu")),
)
