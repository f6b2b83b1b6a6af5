"""Words of the command line as values; a word that means nothing gets a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def absolute(subject: str) -> str:
    """`kernel.py:fn` with its full path, so that a script finds it from anywhere; other names unchanged."""
    place, _, attribute = subject.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else subject


def pair(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return (None, None)
    sides = [side.strip() for side in text.split(",")]
    if len(sides) != 2:
        raise ValueError(f"--window wants two sides as in 95,0 or *,0, got {text!r}")
    try:
        left, right = (None if side in ("", "*", "none") else int(side) for side in sides)
    except ValueError:
        raise ValueError(f"--window wants whole numbers or *, as in 95,0, got {text!r}") from None
    return left, right


def sizes(option: str, text: str, count: int | None = None) -> tuple[int, ...]:
    try:
        values = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        raise ValueError(f"{option} wants whole numbers with commas between them, got {text!r}") from None
    if (count is not None and len(values) != count) or min(values) < 1:
        raise ValueError(f"{option} wants {count or 'some'} positive numbers, got {text!r}")
    return values


def one_of(option: str, value: str, allowed: Iterable[str]) -> str:
    if value not in allowed:
        raise ValueError(f"{option} must be one of {', '.join(allowed)}, got {value!r}")
    return value
