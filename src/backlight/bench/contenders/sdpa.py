"""PyTorch's scaled_dot_product_attention as a contender, one for each of its backends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from backlight.bench.contender import Contender, by_autograd, cannot, leaves_of
from backlight.bench.room import dense_refusal
from backlight.bench.workload import Tensors, Workload
from backlight.peers import sdpa
from backlight.peers.features import gated

SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sdpa:
    """SDPA restricted to one backend; its causal mask is aligned to the top left, ours to the bottom right."""

    name: str
    backend: str
    devices: tuple[str, ...]

    @property
    def shown(self) -> str:
        return sdpa.BACKENDS[self.backend].name

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        case = workload.case
        if device.type not in self.devices:
            return f"SDPA's {self.shown} backend does not run on {device.type}"
        if case.causal and workload.sq != workload.sk:
            return "SDPA aligns its causal mask to the top left, so Sq != Sk means something else there"
        if self.backend in ("flash", "cudnn"):
            if device.type == "cuda" and workload.dtype not in SIXTEEN_BIT:
                return f"SDPA's {self.shown} backend takes fp16 and bf16 only"
            if workload.dv != case.d:
                return f"SDPA's {self.shown} backend needs Dv = D"
        # a dense mask, which the others do not take
        able = ("a gate", "a pair bias") if self.backend in ("efficient", "math") else ("a gate",)
        return cannot("SDPA", workload, able) or (dense_refusal(workload, device, copies=4) if self.backend == "math" else None)

    def build(self, tensors: Tensors) -> Contender:
        call = tensors.call
        attention = sdpa.prepared(call.spec, call.q.shape[2], call.k.shape[2], call.group > 1, call.q.device)

        def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None, pair_bias: Tensor | None = None) -> Tensor:
            return gated(attention(q, k, v, pair_bias=pair_bias), gate)

        scope = partial(sdpa.restricted_to, self.backend)
        return by_autograd(self.name, leaves_of(tensors), tensors.dy, attend, scope=scope, detail=f"SDPA {self.shown}")


ADAPTERS = (
    Sdpa("sdpa-flash", "flash", ("cuda", "cpu")),
    Sdpa("sdpa-cudnn", "cudnn", ("cuda",)),
    Sdpa("sdpa-efficient", "efficient", ("cuda",)),
    Sdpa("sdpa-math", "math", ("cuda", "cpu")),
)
