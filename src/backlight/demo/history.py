"""What one training run left: its losses, the learned terms now and then, and whether it learned."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

# nats per character on held-out text that a run must gain; blind guessing starts near 4.2
MARGIN = 1.5
# a parameter without a gradient stays exactly where it was
MOVED = 1e-2


@dataclass(frozen=True, slots=True)
class Moment:
    """What is measured on held-out text now and then. Lazy models: bias [layers, H, n]; tau, density, mass [layers, H]."""

    step: int
    loss: float
    bias: Tensor | None = None
    tau: Tensor | None = None
    density: Tensor | None = None
    mass: Tensor | None = None


@dataclass(slots=True)
class History:
    """One model's run: losses and taus after every step, moments in between, text it made at the end."""

    kind: str
    losses: list[float] = field(default_factory=list)
    taus: list[Tensor] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    sample: str = ""

    @property
    def gain(self) -> float:
        """Nats per character that held-out text has become easier."""
        return self.moments[0].loss - self.moments[-1].loss

    @property
    def bias_change(self) -> Tensor:
        """Largest change of the table, [layers, H]."""
        first, last = self.moments[0].bias, self.moments[-1].bias
        assert first is not None
        assert last is not None
        return (last - first).abs().amax(dim=-1)

    @property
    def tau_change(self) -> Tensor:
        """Furthest that tau went from where it started, [layers, H]; it may well come back."""
        first = self.moments[0].tau
        assert first is not None
        return (torch.stack(self.taus) - first).abs().amax(dim=0)

    @property
    def still_heads(self) -> list[tuple[int, int]]:
        """(layer, head) whose bias or tau did not learn, NaN included."""
        if self.kind == "softmax":
            return []
        moved = (self.bias_change > MOVED) & (self.tau_change > MOVED)
        return [(layer, head) for layer, head in (~moved).nonzero().tolist()]

    @property
    def learned(self) -> bool:
        """Held-out text is easier by the stated margin, and every head took part. NaN counts as not learned."""
        return self.gain >= MARGIN and not self.still_heads
