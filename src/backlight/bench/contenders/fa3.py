"""FlashAttention-3 as a contender.

Layout is [B,S,H,D], packed [T,H,D]. `fa3` runs through autograd; `fa3-bare` calls the two operators alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.bench.contender import AUTOGRAD, BARE, Contender, by_autograd, cannot, leaves_of
from backlight.bench.workload import Tensors, Workload
from backlight.peers import fa3
from backlight.peers.features import gated

ABLE = ("packed sequences", "a window", "softcap")


class Fa3:
    def __init__(self, name: str, path: str):
        self.name, self.path = name, path

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        case = workload.case
        if device.type != "cuda":
            return "FlashAttention-3 needs a CUDA device"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "FlashAttention-3 needs a Hopper GPU (sm_90)"
        if workload.dtype not in (torch.float16, torch.bfloat16):
            return "FlashAttention-3 takes fp16 and bf16 only"
        if workload.dv != case.d or case.d > 256:
            return "FlashAttention-3's backward needs Dv = D <= 256"
        return cannot("FlashAttention-3", workload, (*ABLE, *(("a gate",) if self.path == AUTOGRAD else ()))) or fa3.absent()

    def build(self, tensors: Tensors) -> Contender:
        fa3.load()
        call = tensors.call
        leaves = leaves_of(tensors, _own_layout)
        options = fa3.operator_options(call.spec, call.scale, call.cu_seqlens_q, call.cu_seqlens_k)
        shared: dict[str, Any] = {"canonical": _canonical, "path": self.path, "detail": fa3.source()}
        dy = _own_layout(tensors.dy).contiguous()
        if call.varlen:
            leaves = {name: x.detach()[0].requires_grad_() for name, x in leaves.items()}
            dy, shared["canonical"] = dy[0], lambda x: _canonical(x[None])
        if self.path == BARE:
            return _bare(self.name, leaves, dy, options, shared)

        def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Tensor:
            return gated(fa3.Fa3Function.apply(q, k, v, options)[0], gate)

        return by_autograd(self.name, leaves, dy, attend, **shared)


def _bare(name: str, leaves: dict[str, Tensor], dy: Tensor, options: dict[str, Any], shared: dict[str, Any]) -> Contender:
    q, k, v = (leaves[x].detach() for x in ("q", "k", "v"))

    def attend() -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2]
        return o, lse

    def gradients(o: Tensor, lse: Tensor, retain: bool) -> tuple[Tensor, ...]:
        return tuple(torch.ops.flash_attn_3.bwd(dy, q, k, v, o, lse, **options)[:3])

    return Contender(name, {"q": q, "k": k, "v": v}, dy, attend, gradients, **shared)


def _own_layout(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _canonical(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


ADAPTERS = (Fa3("fa3", AUTOGRAD), Fa3("fa3-bare", BARE))
