"""The scores that a kernel's weights speak of, as a function of the right ones: log p = f(x) + a constant of the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.catalogue import BY_ID
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.softcaps import FUNCTIONS, mutants
from backlight.reference import oracle

# share of the spread of the scores within a row that a curve may leave over
LEFT = 0.02
MOST_CELLS = 200_000
# how far below and above the largest score a cap is looked for
CAPS = torch.logspace(-1.3, 0.7, 61, dtype=torch.float64)


@dataclass(frozen=True)
class Fitted:
    text: str
    cause: str
    defect: Defect


def function_of(weights: Tensor, call: Call, usable: Tensor) -> Fitted | None:
    """The curve on which the scores lie, where they lie on one that is not the call's own."""
    if call.tau is not None or call.varlen:
        return None
    kept = oracle(call, keep=("x", "capped", "s"))
    added = (kept.s - kept.capped).masked_fill(~usable, 0)
    y = torch.log(weights.clamp(min=1e-300)) - added
    rows = usable.sum(-1) >= 4
    usable = usable & rows[..., None] & (weights > 1e-6)
    if int(usable.sum()) < 64:
        return None
    flat = (kept.x.flatten(0, 2), y.flatten(0, 2), usable.flatten(0, 2))
    some = torch.arange(flat[0].shape[0])[:: max(1, flat[0].numel() // MOST_CELLS)]
    x, y, seen = (each[some] for each in flat)
    own = call.spec.softcap
    if _left(kept.capped.flatten(0, 2)[some], y, seen) <= LEFT:
        return None
    scaled = _scaled(x, y, seen)
    if scaled is not None:
        return None
    largest = float(x[seen].abs().max())
    best = min(_fits(x, y, seen, largest, own), key=lambda found: found[0], default=None)
    if best is None or not best[0] <= LEFT:
        return None
    _, words, function, cap = best
    exactly = own is not None and abs(cap - own) <= 0.02 * own
    text = f"scores are {words} of the right ones, c = {cap:.3g}"
    asked = f"c tanh(x / c) with c = {own:g}" if own is not None else "no cap"
    change = mutants(function, words, None if exactly else cap)
    defect = replace(BY_ID["softcap-function"], variants=lambda call: change, needs=lambda call: True)
    return Fitted(text, f"{asked} is asked for", defect)


def _centred(x: Tensor, seen: Tensor) -> Tensor:
    kept = x.masked_fill(~seen, 0)
    return (kept - kept.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)).masked_fill(~seen, 0)


def _left(curve: Tensor, y: Tensor, seen: Tensor) -> float:
    """What a curve leaves of the scores within a row, as a share of their spread."""
    return float(_centred(curve - y, seen).norm() / _centred(y, seen).norm().clamp(min=1e-300))


def _scaled(x: Tensor, y: Tensor, seen: Tensor) -> float | None:
    """The factor between the scores and the right ones, where that is all."""
    a, b = _centred(x, seen), _centred(y, seen)
    factor = float((a * b).sum() / (a * a).sum().clamp(min=1e-300))
    return factor if _left(factor * x, y, seen) <= LEFT else None


def _fits(
    x: Tensor, y: Tensor, seen: Tensor, largest: float, own: float | None
) -> list[tuple[float, str, Callable[[Tensor, float], Tensor], float]]:
    tried = FUNCTIONS | {"c tanh(x / c)": lambda x, c: c * torch.tanh(x / c)}
    caps = [*([own] if own is not None else []), *(largest * CAPS).tolist()]
    return [(_left(f(x, cap), y, seen), words, f, cap) for words, f in tried.items() for cap in caps]
