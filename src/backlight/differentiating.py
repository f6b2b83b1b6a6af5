"""A bound call's tangent and second derivatives on a backend that has them: the first that can, or the one that was named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import registry
from backlight.call import ByName, Call
from backlight.errors import Unsupported
from backlight.running import elsewhere

Tensors = tuple[Any, ...]
WORDS = {"tangent": "forward-mode derivative", "second": "second derivative"}


def tangent(call: Call, backend: str | None, tangents: dict[str, Tensor], known: tuple[Any, ...] | None) -> tuple[Any, ...]:
    """(y, lse, u, ty, tlse, tu); known: y, lse, u of the forward. u and tu are there with tau only, tu with tv only."""
    chosen = choose("tangent", call, backend)
    if elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return chosen.tangent(call, tangents, known)
    return chosen.tangent(call, tangents, known)


def second(
    call: Call, backend: str | None, tangents: ByName, results: Tensors, incoming: Tensors, needs: frozenset[str]
) -> ByName:
    """Gradients at the call's tensors and tangents (dq, ..., dtq, ...) of a loss with these gradients at y, lse, ty, tlse."""
    chosen = choose("second", call, backend)
    if elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return chosen.second(call, tangents, results, incoming, needs)
    return chosen.second(call, tangents, results, incoming, needs)


def choose(what: str, call: Call, name: str | None) -> Any:
    """The named backend, or the first that has this derivative of the call."""
    refused = {}
    for candidate in map(registry.get, registry.names() if name is None else (name,)):
        reasons = registry.why_not(candidate, call) or _lacks(what, candidate, call)
        if not reasons:
            return candidate
        refused[candidate.name] = reasons
    raise Unsupported(refused)


def _lacks(what: str, backend: Any, call: Call) -> tuple[str, ...]:
    takes = getattr(backend, "derivatives", {}).get(what)
    if takes is None:
        return (f"has no {WORDS[what]}",)
    unknown = [feature for feature in call.features if feature not in takes]
    if unknown:
        return tuple(f"has no {WORDS[what]} with {registry.NAMED.get(feature, feature)}" for feature in unknown)
    return getattr(backend, "why_not_differentiated", _nothing_against)(what, call)


def _nothing_against(what: str, call: Call) -> tuple[str, ...]:
    return ()
