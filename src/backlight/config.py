"""Tile configurations: which one a call uses.

Resolution, in this order: a scoped override (`with override("tiled", Config(...))`), then the backend's own heuristic, a pure
function of the call's shape and device. Nothing is read from the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class Config:
    """block_m rows x block_n keys per tile; `edge` rows is the finer step along mask edges; `heads` tiles run side by side."""

    block_m: int
    block_n: int
    edge: int
    heads: int = 1

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "edge", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


# a plain dict, not a context variable: autograd may run the backward in a thread of its own
_overrides: dict[str, Any] = {}


@contextmanager
def override(backend: str, config: Any) -> Iterator[None]:
    """Force the configuration of a backend ("tiled") or of one of its kernels inside the block; for tests and tuning."""
    before = _overrides.get(backend)
    _overrides[backend] = config
    try:
        yield
    finally:
        if before is None:
            del _overrides[backend]
        else:
            _overrides[backend] = before


def overridden() -> bool:
    """Whether any configuration is forced now: what was decided before does not hold then."""
    return bool(_overrides)


def resolve(backend: str, heuristic: Callable[[], Choice]) -> Choice:
    return _overrides.get(backend) or heuristic()
