"""Whose row a row statistic is: lse or delta of another row, tile or head, or the same number made in another way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from backlight.doctor.steps.reading.cells import SIZES
from backlight.spec import LN2, LOG2E

# rows that must agree before a place is named
AGREE = 0.95
# wrong rows of which a place must know what it would put there
ENOUGH = 0.5
MOST_ROWS = 1024


@dataclass(frozen=True)
class Place:
    """`take` moves the rows [B, H, S] of the right statistic to where the kernel reads them."""

    words: str
    take: Callable[[Tensor], Tensor]


def place_of(
    read: Tensor, right: Tensor, close: Tensor, judged: Tensor, taken_by: Callable[[Place], Tensor] | None = None
) -> Place | None:
    """The place whose rows `read` [B, H, S] has, in the `judged` rows, up to `close`; None where there is none.

    taken_by: what a place takes, where that is not made of `right` alone.
    """
    wrong = judged & ~((read - right).abs() <= close)
    if int(wrong.sum()) < 2:
        return None
    for place in places(right):
        taken = place.take(right) if taken_by is None else taken_by(place)
        # rows that a place fills from outside may hold anything
        counted = judged & torch.isfinite(taken)
        if int((counted & wrong).sum()) < ENOUGH * int(wrong.sum()):
            continue
        good = (read - taken).abs() <= close
        if _share(good, counted & wrong) >= AGREE and _share(good, counted) >= AGREE:
            return place
    return None


def _share(good: Tensor, among: Tensor) -> float:
    return float((good & among).sum()) / max(1, int(among.sum()))


def places(right: Tensor) -> Iterator[Place]:
    yield from _numbers()
    yield from _rows(right.shape[2])
    yield from _heads(right.shape[1])
    yield from _batches(right.shape[0])
    yield from _memory(right.shape)


def _numbers() -> Iterator[Place]:
    """The same row, by another formula."""
    factors = {"0": 0.0, "its own, of the wrong sign": -1.0, "twice its own": 2.0, "half its own": 0.5}
    factors |= {"its own in base 2": LOG2E, "its own times ln 2": LN2}
    yield from (Place(words, partial(torch.mul, other=factor)) for words, factor in factors.items())


def _rows(length: int) -> Iterator[Place]:
    for size in (size for size in SIZES if size < length):
        yield Place(f"that of the row in the first tile of {size}", partial(_in_first_tile, size=size))
        yield Place(f"that of the first row of its tile of {size}", partial(_first_of_tile, size=size))
        yield Place(f"that of the last row of its tile of {size}", partial(_last_of_tile, size=size))
    most = min(length - 1, MOST_ROWS)
    for step in sorted({*range(-most, most + 1)} - {0}, key=abs):
        tile = f", a tile of {abs(step)}," if abs(step) in SIZES else ""
        words = f"that of the row {abs(step)} {'row' if abs(step) == 1 else 'rows'}{tile} {'before' if step > 0 else 'after'}"
        yield Place(words, partial(_shifted, step=step))
    yield Place("that of row 0", lambda x: x[:, :, :1].expand_as(x))
    yield Place("that of the row counted from the end", lambda x: x.flip(2))


def _at(x: Tensor) -> Tensor:
    return torch.arange(x.shape[2], device=x.device)


def _in_first_tile(x: Tensor, size: int) -> Tensor:
    return x[:, :, _at(x) % size]


def _first_of_tile(x: Tensor, size: int) -> Tensor:
    return x[:, :, _at(x) // size * size]


def _last_of_tile(x: Tensor, size: int) -> Tensor:
    return x[:, :, (_at(x) // size * size + size - 1).clamp(max=x.shape[2] - 1)]


def _shifted(x: Tensor, step: int) -> Tensor:
    """Row i holds row i - step; what comes from outside is not known."""
    rows = _at(x) - step
    return x.roll(step, dims=2).masked_fill((rows < 0) | (rows >= x.shape[2]), torch.nan)


def _heads(heads: int) -> Iterator[Place]:
    for h in range(heads if heads > 1 else 0):
        yield Place(f"that of head {h}", partial(_of_head, h=h))
    for step in range(1, heads):
        words = "the head before" if step == 1 else "the next head" if step == heads - 1 else f"the head {step} before"
        yield Place(f"that of {words}", partial(torch.roll, shifts=step, dims=1))


def _of_head(x: Tensor, h: int) -> Tensor:
    """A part of a problem may have fewer heads."""
    return x[:, min(h, x.shape[1] - 1), None].expand_as(x)


def _batches(batch: int) -> Iterator[Place]:
    for b in range(batch if batch > 1 else 0):
        yield Place(f"that of batch entry {b}", partial(_of_entry, b=b))
    if batch > 1:
        yield Place("that of the batch entry before", lambda x: x.roll(1, dims=0))


def _of_entry(x: Tensor, b: int) -> Tensor:
    return x[min(b, x.shape[0] - 1), None].expand_as(x)


def _memory(shape: torch.Size) -> Iterator[Place]:
    """Flat memory read with other strides: rows padded to whole tiles, or heads and rows exchanged."""
    batch, heads, rows = shape
    for padded in sorted({-(-rows // size) * size for size in SIZES} - {rows}) if batch * heads > 1 else ():
        words = f"at a place that is off by {padded - rows} per head (rows padded to {padded})"
        yield Place(words, partial(_unpadded, padded=padded))
        yield Place(f"{words}, the other way round", partial(_padded, padded=padded))
    if heads > 1:
        yield Place("read as [B, S, H]", lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1]).mT)


def _unpadded(x: Tensor, padded: int) -> Tensor:
    memory = torch.nn.functional.pad(x, (0, max(0, padded - x.shape[2])), value=torch.nan).flatten()
    return memory[: x.numel()].reshape(x.shape)


def _padded(x: Tensor, padded: int) -> Tensor:
    memory = torch.nn.functional.pad(x.flatten(), (0, padded * x.shape[0] * x.shape[1] - x.numel()), value=torch.nan)
    return memory.reshape(x.shape[0], x.shape[1], padded)[..., : x.shape[2]]
