"""A bound call on its backend: chosen once for each kind of call, replayed where the backend can do that."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from backlight import registry
from backlight._private.torch import current_device
from backlight.call import Call, all_tensors, layout_of
from backlight.registry import Forward
from backlight.spec import GRADIENTS


def forward(call: Call, backend: str | None, save_u: bool) -> Forward:
    if elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return _forward_here(call, backend, save_u)
    return _forward_here(call, backend, save_u)


def _forward_here(call: Call, backend: str | None, save_u: bool) -> Forward:
    shared = call.shared
    replay = None if shared is None else shared.get(save_u)
    found = None if replay is None else replay(all_tensors(call))
    if found is None:
        chosen = registry.choose(call, backend)
        found = chosen.forward(call, save_u)
        _learn(chosen, call, (), save_u, save_u)
    return found


def backward(
    call: Call, backend: str | None, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: Any
) -> dict[str, Tensor]:
    if elsewhere(call.q):
        with torch.cuda.device(call.q.device):
            return _backward_here(call, backend, (y, lse, u, dy, dlse), needs)
    return _backward_here(call, backend, (y, lse, u, dy, dlse), needs)


def _backward_here(
    call: Call, backend: str | None, tensors: tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], needs: Any
) -> dict[str, Tensor]:
    shared = call.shared
    if shared is None:
        return registry.choose(call, backend).backward(call, *tensors, names(needs))
    given = (*all_tensors(call), *tensors)
    q, k, v, *_ = given
    # saved tensors may come back laid out in another way, from where hooks have put them
    key = (needs, k is q, v is q, v is k, *[None if x is None else layout_of(x) for x in given])
    replay = shared.get(key)
    found = None if replay is None else replay(given)
    if found is None:
        chosen = registry.choose(call, backend)
        found = chosen.backward(call, *tensors, names(needs))
        _learn(chosen, call, tensors, names(needs), key)
    return found


def _learn(backend: Any, call: Call, tensors: tuple[Any, ...], choice: Any, key: Any) -> None:
    """How to do again what was done, if the backend can say and there are more calls of the kind."""
    if call.shared is not None and hasattr(backend, "replay"):
        replay = backend.replay(call, tensors, choice)
        if replay is not None:
            call.shared[key] = replay


def elsewhere(tensor: Tensor) -> bool:
    """On a GPU that is not the current one: kernels start on the current one."""
    return tensor.is_cuda and tensor.get_device() != current_device()


@cache
def names(needs: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(name for name, need in zip(GRADIENTS, needs, strict=True) if need)
