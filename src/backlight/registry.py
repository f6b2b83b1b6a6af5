"""The backends in order of preference. Nothing here imports a backend until it is asked for."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, runtime_checkable

from torch import Tensor

from backlight.call import Call
from backlight.errors import Unsupported

# y, lse, u, largest logits of rows
Forward = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
ORDER = ("hopper", "triton", "aten", "tiled")
# features whose names are not words for a sentence
NAMED = {
    "packed": "packed sequences",
    "part": "parts of a larger problem",
    "entmax_part": "entmax of parts of a larger problem",
    "rows": "masks by row intervals",
    "pos": "masks with positions of rows",
}


@runtime_checkable
class Backend(Protocol):
    """What a backend folder exports as `BACKEND`.

    Optional: `replay(call, tensors, choice)`, asked after a forward (tensors = (), choice = save_u) or a backward (tensors = y,
    lse, u, dy, dlse, choice = needs). It returns a function that does the same again, or None when there is no such function.
    The function takes `all_tensors(call)` and those tensors, of any call of that layout in which as many of q, k and v are
    different tensors; it returns None when it cannot run just now.

    Optional: `derivatives`, the features with which it has a `tangent` and a `second` (`differentiating`), by those two names;
    beside it `why_not_differentiated(what, call)`, reasons against one of them.

    With "entmax_part" in `takes`: `entmax_sums(call)`, [4,B,Hq,Sq] in the accumulator dtype: F, W, W2 and the sum of p ln p
    (eq. 80, 83, 89) of a part's rows at its lse.
    """

    name: str
    summary: str
    # the features it knows, of `spec.FEATURES`; "part": fp32 results that are still to be summed over keys elsewhere
    takes: frozenset[str]
    # what of a batch-invariant call keeps a sequence apart from the others (eq. 79), in words
    order: str

    def available(self) -> tuple[str, ...]:
        """Reasons this machine cannot run the backend at all; empty = it can."""
        ...

    def why_not(self, call: Call) -> tuple[str, ...]:
        """Reasons this call, whose features the backend takes, cannot run here; empty = it can."""
        ...

    def config(self, call: Call) -> object:
        """The tile configuration the call would use."""
        ...

    def forward(self, call: Call, save_u: bool) -> Forward:
        """y like q with Dv columns; lse [B,Hq,Sq] natural log; with `save_u`, where `Call.keeps`, u like y: with tau eq. 12,
        with entmax eq. 87, otherwise the low half of y (eq. 103); with `max_logit` the largest visible x of each row [B,Hq,Sq]
        (eq. 72)."""
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
    return importlib.import_module(f"{__package__}.backends.{name}").BACKEND


def refusals(call: Call) -> dict[str, tuple[str, ...]]:
    """Every backend in order with its reasons against this call; empty = it can run."""
    return {name: why_not(get(name), call) for name in ORDER}


def why_not(backend: Backend, call: Call) -> tuple[str, ...]:
    """A backend's reasons against a call: the machine's, features that it does not take, its own."""
    reasons = backend.available()
    if reasons:
        return reasons
    unknown = [feature for feature in call.features if feature not in backend.takes]
    return tuple(f"does not take {NAMED.get(feature, feature)}" for feature in unknown) or backend.why_not(call)


def choose(call: Call, name: str | None) -> Backend:
    """The named backend, or the first that can run the call; raises `Unsupported` with every reason otherwise."""
    refused = {}
    for candidate in map(get, ORDER if name is None else (name,)):
        reasons = why_not(candidate, call)
        if not reasons:
            return candidate
        refused[candidate.name] = reasons
    raise Unsupported(refused)
