"""How a private name is looked up: found, or noted as missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


def find(path: str) -> Any:
    """What a dotted name stands for; None where there is no such thing."""
    first, *rest = path.split(".")
    try:
        found, at = import_module(first), first
        for part in rest:
            at = f"{at}.{part}"
            found = getattr(found, part) if hasattr(found, part) else import_module(at)
    except ImportError:
        return None
    return found


@dataclass(frozen=True, slots=True)
class Cost:
    """without: what happens where the name is missing. gpu: it matters on machines with a GPU only."""

    without: str
    gpu: bool = False


class Names:
    """A table of private names and which of them were looked for in vain."""

    def __init__(self, costs: dict[str, Cost]):
        self.costs = costs
        # in the order they were looked for
        self.missing: dict[str, Cost] = {}

    def take(self, path: str, otherwise: Any) -> Any:
        """What the name stands for, or what does the same without it."""
        cost, found = self.costs[path], find(path)
        if found is None:
            self.missing[path] = cost
            return otherwise
        return found

    def slower(self, gpu: bool) -> dict[str, str]:
        """Missing names and what happens without them, on a machine with or without a GPU."""
        return {path: cost.without for path, cost in self.missing.items() if gpu or not cost.gpu}
