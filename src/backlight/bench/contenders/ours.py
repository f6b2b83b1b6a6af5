"""backlight itself: the automatic choice, and every backend by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight
from backlight import registry
from backlight.bench.contender import PER_KIND, Contender, by_autograd, leaves_of, options_of
from backlight.bench.workload import Tensors, Workload
from backlight.mask import Mask, documents

OURS = "backlight"


class Ours:
    """`backlight` chooses the backend, `backlight:NAME` demands one."""

    compiles = PER_KIND

    def __init__(self, backend: str | None = None):
        self.backend = backend
        self.name = OURS if backend is None else f"{OURS}:{backend}"

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        reasons = () if self.backend is None else registry.get(self.backend).available()
        return "; ".join(reasons) or None

    def build(self, tensors: Tensors) -> Contender:
        call = tensors.call
        options: dict[str, Any] = options_of(call) | {"mask": mask_of(tensors), "backend": self.backend}
        leaves, dy = leaves_of(tensors), tensors.dy
        if call.varlen:
            leaves, dy = leaves_of(tensors, packed_rows), packed_rows(dy).contiguous()
            options |= {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
        attend = backlight.attention_varlen if call.varlen else backlight.attention
        chosen = backlight.explain(**(leaves | options))
        if chosen.chosen is None:
            asked = chosen.reasons if self.backend is None else {self.backend: chosen.reasons[self.backend]}
            raise backlight.Unsupported(asked)
        return by_autograd(
            self.name,
            leaves,
            dy,
            lambda **inputs: attend(**inputs, **options),
            canonical=canonical_rows if call.varlen else lambda x: x,
            detail=", ".join(filter(None, (f"{chosen.chosen}, {chosen.config}", chosen.documents))),
        )


def mask_of(tensors: Tensors) -> Mask | None:
    """The mask as its user would make it: documents by their lengths, everything else of its intervals."""
    call = tensors.call
    kind, _, lengths = str(tensors.workload.case.mask).partition(":")
    if kind == "documents" and lengths:
        *first, _ = map(int, lengths.split(","))
        # the last one holds what is left
        return documents(lengths=[*first, call.k.shape[2] - sum(first)], causal=True, device=call.q.device)
    return None if call.rows is None else Mask(call.rows, call.pos)


def packed_rows(x: Tensor) -> Tensor:
    """[1,H,T,D] -> [T,H,D]."""
    return x[0].transpose(0, 1)


def canonical_rows(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def adapters() -> tuple[Ours, ...]:
    return (Ours(), *(Ours(name) for name in registry.names()))
