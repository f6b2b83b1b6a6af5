"""AdaSplash-2 as a contender: entmax with a fixed alpha of 1.5 under a causal mask."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from backlight.bench.contender import TERM_WORDS, Contender, by_autograd, cannot, leaves_of
from backlight.bench.workload import Tensors, Workload

PACKAGE = "adasplash"
ALPHA = 1.5


class Adasplash:
    name = PACKAGE

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        case = workload.case
        if importlib.util.find_spec(PACKAGE) is None:
            return "adasplash is not installed"
        if case.entmax is None:
            return "adasplash computes entmax, a different function, so it cannot pass the gate of softmax attention"
        if case.entmax != ALPHA:
            return f"AdaSplash-2 takes alpha = {ALPHA} alone and has no gradient by alpha"
        if device.type != "cuda":
            return f"AdaSplash-2 does not run on {device.type}"
        if not case.causal or case.sq != case.sk or case.sk & (case.sk - 1) or case.sk < 64:
            return "AdaSplash-2 is causal, with as many rows as keys, a power of two from 64 on"
        if case.scale is not None or workload.dv != case.d or case.d & (case.d - 1):
            return "AdaSplash-2 scales by D ** -0.5 and wants Dv = D, a power of two"
        return cannot("AdaSplash-2", workload, (TERM_WORDS["entmax"],))

    def build(self, tensors: Tensors) -> Contender:
        from adasplash import adasplash_v2

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return adasplash_v2(q, k, v)

        return by_autograd(self.name, leaves_of(tensors), tensors.dy, attend, detail="adasplash_v2")


ADAPTERS = (Adasplash(),)
