"""How many calls of torch's own attention ran on our kernels, and why the others did not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Calls since the slot was taken, as eager code, compiled code and captures make them; a replayed CUDA graph makes none.

    forward, backward: calls on our kernels. fallbacks: reasons, and how many calls, of either direction, torch's own kernel
    had for each.
    """

    forward: int = 0
    backward: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        lines = [f"{self.forward} forward and {self.backward} backward calls on backlight's kernels"]
        lines += [f"{count} on torch's own: {reason}" for reason, count in self.fallbacks.most_common()]
        return "\n".join(lines)
