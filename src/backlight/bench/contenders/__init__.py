"""Every contender by name. Packages of peers are looked for when a peer is asked, never at import."""

from __future__ import annotations

from backlight.bench.contender import Adapter
from backlight.bench.contenders import adasplash, cuequivariance, e4m3, eager, fa3, flex, ours, sdpa


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
        *adasplash.ADAPTERS,
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
