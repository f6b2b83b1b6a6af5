"""Calls with tensors whose columns do not lie side by side, such as transposed ones.

Kernels write rows of adjacent columns, and gradients have the layout of what they are the gradients of: such a call runs on
copies, and its results are laid out afterwards."""

from dataclasses import replace
from typing import Any

from torch import Tensor

from backlight.call import Call, laid_like

ROWS = ("q", "k", "v", "gate")


def side_by_side(call: Call) -> Call:
    """The call itself, or one with copies of those of its tensors whose columns lie apart."""
    given = {name: x for name in ROWS if (x := getattr(call, name)) is not None}
    apart = {name: x.detach().contiguous() for name, x in given.items() if x.stride(-1) != 1 and x.shape[-1] > 1}
    return replace(call, **apart) if apart else call


def outputs_like(call: Call, *found: Any) -> tuple[Any, ...]:
    """Results with rows and columns of y, laid out as y of this call is."""
    if call.v.shape[-1] != call.q.shape[-1]:
        return found
    return tuple(None if x is None else laid_like(x, call.q) for x in found)


def gradients_like(call: Call, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by their names, laid out as what they are the gradients of."""
    return {name: laid_like(x, getattr(call, name[1:])) if name[1:] in ROWS else x for name, x in found.items()}
