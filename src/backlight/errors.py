"""The one exception of the project's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Unsupported(NotImplementedError):
    """No backend, or not the named one, can run this call. `reasons` maps each backend asked to its reasons."""

    def __init__(self, reasons: Mapping[str, tuple[str, ...]]):
        self.reasons = dict(reasons)
        lines = [f"  {name}: {reason}" for name, why in self.reasons.items() for reason in why]
        names = ", ".join(self.reasons)
        super().__init__("\n".join([f"no backend can run this call (asked: {names}):", *lines]))

    def __reduce__(self) -> tuple[Any, ...]:
        """Exceptions are pickled with the text they were given; this one is made of its reasons."""
        return type(self), (self.reasons,)
