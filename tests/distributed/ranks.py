"""The checks of a Gloo world by name, and the process that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from backlight.distributed import ContextParallel

TIMEOUT = 600.0

CHECKS: dict[str, Callable[[Rank], None]] = {}
WORLDS: dict[str, tuple[int, ...]] = {}
SLOW: set[str] = set()


@dataclass(frozen=True)
class Rank:
    """This process: its number, the size of the world and the mesh over all of it."""

    number: int
    world: int
    mesh: DeviceMesh

    def context(self, **settings: object) -> ContextParallel:
        return ContextParallel(self.mesh, **({"timeout": TIMEOUT} | settings))


def check(worlds: tuple[int, ...], name: str | None = None, slow: bool = False) -> Callable:
    def register(function: Callable[[Rank], None]) -> Callable[[Rank], None]:
        key = name or function.__name__
        CHECKS[key], WORLDS[key] = function, worlds
        SLOW.update([key] if slow else [])
        return function

    return register


def checks_of(world: int, slow: bool) -> list[str]:
    return [name for name, worlds in WORLDS.items() if world in worlds and (name in SLOW) == slow]
