"""What one training run left: its losses, the learned terms now and then, and whether it learned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# nats per character on held-out text that a run must gain; blind guessing starts near 4.2
MARGIN = 1.5
# a parameter without a gradient stays exactly where it was
MOVED, ALPHA_MOVED = 1e-2, 1e-3


@dataclass(frozen=True, slots=True)
class Moment:
    """What is measured on held-out text now and then."""

    step: int
    loss: float


@dataclass(frozen=True, slots=True)
class LazyMoment(Moment):
    """Of a lazy model also its heads: bias [layers, H, n]; tau, density, mass [layers, H]."""

    bias: Tensor
    tau: Tensor
    density: Tensor
    mass: Tensor


@dataclass(frozen=True, slots=True)
class EntmaxMoment(Moment):
    """Of a model with entmax also its heads: alpha, density [layers, H]."""

    alpha: Tensor
    density: Tensor


@dataclass(slots=True)
class History:
    """One model's run: losses, taus and alphas after every step, moments in between, text it made at the end."""

    kind: str
    losses: list[float] = field(default_factory=list)
    taus: list[Tensor] = field(default_factory=list)
    alphas: list[Tensor] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    sample: str = ""

    @property
    def gain(self) -> float:
        """Nats per character that held-out text has become easier."""
        return self.moments[0].loss - self.moments[-1].loss

    @property
    def lazy_moments(self) -> list[LazyMoment]:
        """The moments of a lazy model, none of another."""
        return [moment for moment in self.moments if isinstance(moment, LazyMoment)]

    @property
    def entmax_moments(self) -> list[EntmaxMoment]:
        """The moments of a model with entmax, none of another."""
        return [moment for moment in self.moments if isinstance(moment, EntmaxMoment)]

    @property
    def bias_change(self) -> Tensor:
        """Largest change of the table, [layers, H]."""
        moments = self.lazy_moments
        return (moments[-1].bias - moments[0].bias).abs().amax(dim=-1)

    @property
    def tau_change(self) -> Tensor:
        """Furthest that tau went from where it started, [layers, H]; it may well come back."""
        return (torch.stack(self.taus) - self.lazy_moments[0].tau).abs().amax(dim=0)

    @property
    def alpha_change(self) -> Tensor:
        """Furthest that alpha went from where it started, [layers, H]."""
        return (torch.stack(self.alphas) - self.entmax_moments[0].alpha).abs().amax(dim=0)

    @property
    def still_heads(self) -> list[tuple[int, int]]:
        """(layer, head) whose bias or tau, or whose alpha, did not learn, NaN included."""
        if self.kind == "softmax":
            return []
        if self.kind == "entmax":
            moved = self.alpha_change > ALPHA_MOVED
        else:
            moved = (self.bias_change > MOVED) & (self.tau_change > MOVED)
        return [(layer, head) for layer, head in (~moved).nonzero().tolist()]

    @property
    def learned(self) -> bool:
        """Held-out text is easier by the stated margin, and every head took part. NaN counts as not learned."""
        return self.gain >= MARGIN and not self.still_heads
