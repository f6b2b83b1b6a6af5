"""The backends in order of preference. Nothing here imports a backend until it is asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, runtime_checkable

from torch import Tensor

from backlight.call import Call
from backlight.errors import Unsupported

ORDER = ("hopper", "triton", "tiled")


@runtime_checkable
class Backend(Protocol):
    """What a backend folder exports as `BACKEND`.

    Optional: `again(call, tensors, choice)`, after a forward (tensors = (), choice = save_u) or a backward (tensors = y, lse,
    u, dy, dlse, choice = needs): a function of `inputs(call)` and those tensors that does the same for every call of that
    layout in which q, k, v are as many different tensors, and returns None when it cannot just now. None: there is none.
    """

    name: str
    summary: str
    # takes calls with `Call.part`: fp32 results that are still to be summed over keys elsewhere
    parts: bool

    def available(self) -> tuple[str, ...]:
        """Reasons this machine cannot run the backend at all; empty = it can."""
        ...

    def why_not(self, call: Call) -> tuple[str, ...]:
        """Reasons this call cannot run here; empty = it can."""
        ...

    def config(self, call: Call) -> object:
        """The tile configuration the call would use."""
        ...

    def forward(self, call: Call, save_u: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        """(y, lse, u): y like q with Dv columns, lse [B,Hq,Sq] natural log, u like y when `save_u` and the call has tau."""
        ...

    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """The gradients named in `needs` (subset of `call.gradients`), dtypes and shapes of their inputs."""
        ...


def names() -> tuple[str, ...]:
    return ORDER


@cache
def get(name: str) -> Backend:
    if name not in ORDER:
        raise ValueError(f"backend must be one of {', '.join(ORDER)}, got {name!r}")
    return importlib.import_module(f"backlight.backends.{name}").BACKEND


def refusals(call: Call) -> dict[str, tuple[str, ...]]:
    """Every backend in order with its reasons against this call; empty reasons = it can run."""
    return {name: get(name).available() or get(name).why_not(call) for name in ORDER}


def inputs(call: Call) -> tuple[Tensor | None, ...]:
    """The tensors of a call; borders of keys that are those of the rows stand there once."""
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    return call.q, call.k, call.v, call.bias, call.sink, call.tau, call.gate, cu_q, None if cu_k is cu_q else cu_k


def choose(call: Call, name: str | None) -> Backend:
    """The named backend, or the first that can run the call; raises `Unsupported` with every reason otherwise."""
    if name is not None:
        backend = get(name)
        reasons = backend.available() or backend.why_not(call)
        if reasons:
            raise Unsupported({name: reasons})
        return backend
    refused = {}
    for candidate in map(get, ORDER):
        reasons = candidate.available() or candidate.why_not(call)
        if not reasons:
            return candidate
        refused[candidate.name] = reasons
    raise Unsupported(refused)
