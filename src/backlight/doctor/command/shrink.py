"""Make a failing case small: halve what can be halved and drop what can be dropped while the same finding persists."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from backlight.doctor.subject.case import Case
from backlight.spec import TERM_NAMES

SMALLEST_LENGTH = 8
SMALLEST_HEAD_DIM = 8
# what a case can do without, in the order in which it is tried
PLAIN: dict[str, object] = dict.fromkeys(reversed(TERM_NAMES), False) | {
    "softcap": None,
    "window": (None, None),
    "causal": False,
    "scale": None,
}


@dataclass
class Shrunk:
    """The smallest case that still shows the finding, and how it was reached."""

    case: Case
    steps: list[str] = field(default_factory=list)
    tried: int = 0


def shrink(case: Case, persists: Callable[[Case], bool], seconds: float = 60.0) -> Shrunk:
    """Greedy descent: every accepted step starts the list of smaller cases anew. Stops when none is accepted or time is up."""
    end = time.monotonic() + seconds
    result = Shrunk(case)
    refused: set[str] = set()
    while True:
        for step, smaller in smaller_cases(result.case):
            if step in refused:
                continue
            if time.monotonic() > end:
                result.steps.append("stopped: time was up")
                return result
            result.tried += 1
            if persists(smaller):
                result.case = smaller
                result.steps.append(step)
                break
            refused.add(step)
        else:
            return result


def smaller_cases(case: Case) -> Iterator[tuple[str, Case]]:
    """One-step reductions with what they do, the largest savings first."""
    b, h, s, d = case.shape
    kv, sk, dv = case.kv_heads or h, case.sk or s, case.dv or d
    if case.lengths is not None and case.key_lengths is None:
        yield from _shorter_sequences(case.lengths, case)
    if not case.packed:
        if b > 1:
            yield f"B {b} -> {b // 2}", case.replace(shape=(b // 2, h, s, d))
        if s // 2 >= SMALLEST_LENGTH and sk // 2 >= SMALLEST_LENGTH:
            changes = {"sk": sk // 2} if case.sk is not None else {}
            yield f"S {s} -> {s // 2}", case.replace(shape=(b, h, s // 2, d), **changes)
        if sk != s and (case.tensors is None or sk > s):
            yield f"Sk {sk} -> {s}", case.replace(sk=s)
    if kv % 2 == 0 and h % 2 == 0:
        changes = {"kv_heads": kv // 2} if case.kv_heads is not None else {}
        yield f"H {h} -> {h // 2}", case.replace(shape=(b, h // 2, s, d), **changes)
    elif h % (2 * kv) == 0:
        yield f"Hq {h} -> {h // 2}", case.replace(shape=(b, h // 2, s, d), kv_heads=kv)
    if d // 2 >= SMALLEST_HEAD_DIM and dv // 2 >= SMALLEST_HEAD_DIM:
        changes = {"dv": dv // 2} if case.dv is not None else {}
        yield f"D {d} -> {d // 2}", case.replace(shape=(b, h, s, d // 2), **changes)
    if dv != d and (case.tensors is None or dv > d):
        yield f"Dv {dv} -> {d}", case.replace(dv=d)
    yield from _plainer(case)


def _shorter_sequences(lengths: tuple[int, ...], case: Case) -> Iterator[tuple[str, Case]]:
    if len(lengths) > 1:
        half = lengths[: (len(lengths) + 1) // 2]
        yield f"sequences {len(lengths)} -> {len(half)}", case.replace(lengths=half)
    if min(lengths) // 2 >= SMALLEST_LENGTH:
        half = tuple(length // 2 for length in lengths)
        yield f"lengths {list(lengths)} -> {list(half)}", case.replace(lengths=half)


def _plainer(case: Case) -> Iterator[tuple[str, Case]]:
    for name, plain in PLAIN.items():
        if getattr(case.spec, name) != plain:
            yield f"without {name}", case.replace(spec=case.spec.replace(**{name: plain}))
    left, right = case.spec.window
    if left is not None and left > 1:
        yield f"window left {left} -> {left // 2}", case.replace(spec=case.spec.replace(window=(left // 2, right)))
