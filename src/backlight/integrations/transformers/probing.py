"""Mask functions under a compiler, which cannot follow the inside of a closure, but can follow a call.

The function is called with a row and a key that write down what is asked of them instead of comparing. Geometry comes out as
`Asked`; packed sequences, which look rows and keys up in a tensor, come out as the comparison of each row with the key before
it, which is all that their borders are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import assert_in_graph
from backlight.integrations.transformers.refusing import NAME

REFUSAL = f"{NAME} takes packed sequences, each of whose rows sees itself, got a mask that hides a row from itself"


class UnknownMask(Exception):
    """A mask function asks for more than causal and full masks, sliding windows, padding and packed sequences."""


# compilers name an operator either way
LESS_OR_EQUAL = (Tensor.le, Tensor.__le__, torch.le)
GREATER_OR_EQUAL = (Tensor.ge, Tensor.__ge__, torch.ge)
GREATER = (Tensor.gt, Tensor.__gt__, torch.gt)
MINUS = (Tensor.sub, Tensor.__sub__, torch.sub)


@dataclass(frozen=True)
class Asked:
    """What a mask asks of rows and keys: keys ahead hidden or not, and comparisons of tensors looked up at both."""

    causal: bool = False
    compared: tuple[Tensor, ...] = ()

    @property
    def device(self) -> Tensor:
        """Masks move every answer there before they join them; an answer that is a tensor by then compares two others."""
        return torch.zeros(()).as_subclass(Home)

    def to(self, _: Any) -> Asked:
        return self

    def __and__(self, other: Asked) -> Asked:
        return Asked(self.causal or other.causal, (*self.compared, *other.compared))


class Reach:
    """row - w, or the distance row - key; what is compared with it is a window, which the call gets as a keyword."""

    def __abs__(self) -> Reach:
        return self

    def __le__(self, _: Any) -> Asked:
        return Asked()

    # of key > row - w, which Python may ask the other way round
    __lt__ = __le__


class Place(Tensor):
    """Places of rows or keys."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, second = type(args[0]), type(args[1]) if len(args) > 1 else None
        if func is Tensor.new_ones and first is Row:
            return Asked()
        if func in LESS_OR_EQUAL and first is Key and second is Row:
            return Asked(causal=True)
        if func in GREATER_OR_EQUAL and first is Row and second is int and args[1] == 0:
            return Asked()
        if func in MINUS and first is Row and second in (int, Key):
            return Reach()
        if func in GREATER and first is Key and second is Reach:
            return Asked()
        if func is Tensor.to and second is Home:
            return Asked(compared=(args[0],))
        raise UnknownMask


class Row(Place):
    pass


class Key(Place):
    pass


class Home(Place):
    pass


def probe(mask_function: Callable[..., Any], batch: int, length: int, device: torch.device | str) -> tuple[bool, Tensor | None]:
    """(causal, packed sequence numbers [B, length] counted from 0, or None where none are packed)."""
    places = torch.arange(length, device=device)
    # the first row has no key before it: it is compared with itself
    asked = _ask(mask_function, batch, places, (places - 1).clamp(min=0))
    if not asked.compared:
        return asked.causal, None
    same = asked.compared[0]
    for other in asked.compared[1:]:
        same = same & other
    # whatever hides a row from itself is no border of sequences
    for own in _ask(mask_function, batch, places, places).compared:
        assert_in_graph(own.all(), REFUSAL)
    return asked.causal, (~same).expand(batch, length).long().cumsum(-1)


def _ask(mask_function: Callable[..., Any], batch: int, rows: Tensor, keys: Tensor) -> Asked:
    sequences = torch.arange(batch, device=rows.device)[:, None]
    answer = mask_function(sequences, 0, rows.as_subclass(Row), keys.as_subclass(Key))
    if not isinstance(answer, Asked):
        raise UnknownMask
    return answer
