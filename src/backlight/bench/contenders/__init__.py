"""Every contender by name. Packages of peers are looked for when a peer is asked, never at import."""

from __future__ import annotations

import importlib.util

import torch

from backlight.bench.contender import Adapter, Contender
from backlight.bench.contenders import cuequivariance, e4m3, eager, fa3, flex, ours, sdpa
from backlight.bench.workload import Tensors, Workload


class Adasplash:
    """Named so that its absence from the tables is explained."""

    name = "adasplash"

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        if importlib.util.find_spec("adasplash") is None:
            return "adasplash is not installed"
        if workload.case.entmax is not None:
            return "adasplash has no gradient by alpha, which the gate of entmax asks for"
        return "adasplash computes entmax, a different function, so it cannot pass the gate of softmax attention"

    def build(self, tensors: Tensors) -> Contender:
        raise NotImplementedError("adasplash computes entmax")


def adapters() -> dict[str, Adapter]:
    """Every adapter, ours first."""
    found: tuple[Adapter, ...] = (
        *ours.adapters(),
        *e4m3.ADAPTERS,
        *sdpa.ADAPTERS,
        *flex.ADAPTERS,
        *fa3.ADAPTERS,
        *cuequivariance.ADAPTERS,
        *eager.ADAPTERS,
        Adasplash(),
    )
    return {adapter.name: adapter for adapter in found}


def adapter(name: str) -> Adapter:
    found = adapters()
    if name not in found:
        raise ValueError(f"no contender is called {name!r}; there are {', '.join(found)}")
    return found[name]


def select(names: tuple[str, ...]) -> tuple[Adapter, ...]:
    """The named adapters, in that order, each once."""
    return tuple(adapter(name) for name in dict.fromkeys(names))
