"""What a call asks of a peer beyond plain attention; a feature that the peer does not have is refused, never dropped.

A dropped feature would be reported as a defect of the kernel, or win a race that it did not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.spec import AttentionSpec

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Features:
    """The features that any of the peers has, by the project's keywords."""

    causal: bool = False
    window: Window = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    bias_origin: int = 0
    pair_bias: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            self.causal,
            self.window,
            self.scale,
            self.softcap,
            bias=self.bias is not None,
            bias_origin=self.bias_origin,
            pair_bias=self.pair_bias is not None,
        )


def features_of(name: str, given: Mapping[str, Any], known: tuple[str, ...]) -> Features:
    """The keywords of a call, if the peer knows them all."""
    unknown = [feature for feature, value in given.items() if feature not in known and value is not None]
    if unknown:
        raise NotImplementedError(f"{name} has no {' and no '.join(unknown)}")
    return Features(**given)


def on_cuda(name: str, q: Tensor) -> None:
    if not q.is_cuda:
        raise NotImplementedError(f"{name} needs a CUDA device and the tensors are on {q.device}")


def gated(y: Tensor, gate: Tensor | None) -> Tensor:
    """The output gate as a peer without one computes it: after attention, as an operation of its own."""
    return y if gate is None else y * torch.sigmoid(gate)
