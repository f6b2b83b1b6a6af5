"""Memory that a subject allocates: filled with a number, or with a margin around it that shows what is written beyond it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Allocate = Callable[..., Tensor]
EMPTY = [(torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty")]
FILLED = [(torch, "zeros"), (torch, "zeros_like"), (torch, "full"), (torch, "full_like"), (torch.Tensor, "new_zeros")]
# what a margin holds: finite, so that a tile that is loaded beyond the end and multiplied by 0 does no harm
MARGIN = 0.75
# a margin of that many rows, whichever of the two inner axes are rows, but not more elements than MOST
TILE_ROWS, MOST = 256, 2**18


@contextlib.contextmanager
def _allocating(places: list[tuple[Any, str]], changed: Callable[[Allocate], Allocate]) -> Iterator[None]:
    """torch's functions that allocate, each replaced by `changed` of itself."""
    saved = [(owner, name, getattr(owner, name)) for owner, name in places]
    try:
        for owner, name, original in saved:
            setattr(owner, name, changed(original))
        yield
    finally:
        for owner, name, original in saved:
            setattr(owner, name, original)


@contextlib.contextmanager
def poisoned(value: float) -> Iterator[None]:
    """Fresh memory of torch.empty and its relatives holds `value` instead of whatever was there."""

    def filled(original: Allocate) -> Allocate:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            new = original(*args, **kwargs)
            return new.fill_(value) if new.is_floating_point() and new.numel() else new

        return allocate

    with _allocating(EMPTY, filled):
        yield


@dataclass
class Allocated:
    """A tensor in the middle of a larger buffer."""

    shape: tuple[int, ...]
    buffer: Tensor
    begin: int
    end: int

    @property
    def beyond(self) -> int:
        """How many elements of the margins were written."""
        before, behind = self.buffer[: self.begin], self.buffer[self.end :]
        return int((before != MARGIN).sum()) + int((behind != MARGIN).sum())


class Room:
    """What was allocated with margins."""

    def __init__(self) -> None:
        self.allocated: list[Allocated] = []
        # as it is before it is replaced
        self.empty = torch.empty

    def written_beyond(self, direction: str) -> tuple[str, ...]:
        """Words for every tensor around which something was written."""
        found = [(each.shape, each.beyond) for each in self.allocated]
        words = "{} elements beyond a tensor of shape {} of the {}"
        return tuple(words.format(count, list(shape), direction) for shape, count in found if count)

    def spacious(self, original: Allocate) -> Allocate:
        def allocate(*args: Any, **kwargs: Any) -> Tensor:
            new = original(*args, **kwargs)
            # tensors of compilers, transforms and of the device "meta" have no memory of their own
            if type(new) is not Tensor or new.is_meta or not new.is_floating_point() or not new.numel() or new.requires_grad:
                return new
            extent = 1 + sum((n - 1) * step for n, step in zip(new.shape, new.stride(), strict=True))
            inner = new.shape[-2:].numel()
            margin = -(-min(TILE_ROWS * inner, MOST) // TILE_ROWS) * TILE_ROWS
            buffer = self.empty(extent + 2 * margin, dtype=new.dtype, device=new.device).fill_(MARGIN)
            values = new.clone()
            # not a view: autograd treats views that a function returns in its own way
            new.set_(buffer.untyped_storage(), margin, new.shape, new.stride())  # type: ignore[call-overload]
            new.copy_(values)
            self.allocated.append(Allocated(tuple(new.shape), buffer, margin, margin + extent))
            return new

        return allocate


@contextlib.contextmanager
def spacious(wanted: bool = True) -> Iterator[Room]:
    """Tensors that are allocated in here lie between margins, so that a tile written beyond an end harms nobody, and shows."""
    room = Room()
    with _allocating([*EMPTY, *FILLED], room.spacious) if wanted else contextlib.nullcontext():
        yield room
