"""The numeric gate: a contender's own results on this very workload against the oracle, before any time of it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from backlight.bench.contender import gradients_of
from backlight.bench.truth import narrowed, problem_of, sample
from backlight.bench.workload import Tensors
from backlight.doctor.defects.e4m3 import PRECISIONS
from backlight.doctor.steps.compare import RHO_B, RHO_B_WIDE, RHO_FAIL, Comparison, compare
from backlight.problems.problem import Problem

OK, SUSPECT, WRONG = "ok", "suspect", "wrong"
# the doctor calls the observed output o, with or without a gate
OBSERVED = {"y": "o"}


@dataclass
class Verdict:
    """What the gate found: `status`, the heads judged, the worst figures of each quantity, and the reasons in words."""

    status: str
    judged: tuple[str, ...]
    quantities: dict[str, dict[str, float]] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "judged": list(self.judged),
            "quantities": self.quantities,
            "reasons": list(self.reasons),
            "notes": list(self.notes),
        }


class Gate:
    """The truth of one workload, computed once and used for every contender; yardsticks of 8 bits once one asks for them."""

    def __init__(self, tensors: Tensors, seed: int = 0):
        self.tensors, self.call = tensors, tensors.call
        self.parts = sample(tensors.call, seed)
        self._problems: dict[str | None, list[Problem]] = {}

    @property
    def judged(self) -> tuple[str, ...]:
        return tuple(part.label for part in self.parts)

    def problems(self, precision: str | None = None) -> list[Problem]:
        """One for each judged slice, with the yardsticks of a precision."""
        if precision not in self._problems:
            dy, group = self.tensors.dy, self.call.group
            arithmetic = None if precision is None else PRECISIONS[precision]
            self._problems[precision] = [
                problem_of(narrowed(self.call, part), part.take("dy", dy, group), arithmetic) for part in self.parts
            ]
        return self._problems[precision]

    def judge(self, results: Mapping[str, Tensor], precision: str | None = None, forward_only: bool = False) -> Verdict:
        """`results`: y and the gradients of the whole workload by name, canonical layout."""
        expected = ("y",) if forward_only else ("y", *gradients_of(self.call))
        missing = [name for name in expected if name not in results]
        if missing:
            return Verdict(WRONG, self.judged, reasons=tuple(f"{name} was not returned" for name in missing))
        problems = self.problems(precision)
        found = [
            compare(OBSERVED.get(name, name), part.take(name, results[name], self.call.group), problem)
            for part, problem in zip(self.parts, problems, strict=True)
            for name in expected
        ]
        status = WRONG if any(x.bad for x in found) else SUSPECT if any(x.suspect for x in found) else OK
        limit = RHO_B if problems[0].sixteen_bit else RHO_B_WIDE
        coarse = dict.fromkeys(_shown(x.name) for x in found if not x.rho_b <= limit)
        return Verdict(
            status,
            self.judged,
            {_shown(name): _worst([x for x in found if x.name == name]) for name in dict.fromkeys(x.name for x in found)},
            tuple(dict.fromkeys(reason for x in found if x.bad for reason in _reasons(x))),
            tuple(f"{name} is coarser than the algorithm's own rounding" for name in coarse),
        )


def _shown(name: str) -> str:
    return "y" if name == "o" else name


def _worst(found: list[Comparison]) -> dict[str, float]:
    farthest = max((gain for x in found for gain in (x.gain, *x.gains)), key=lambda gain: abs(gain - 1))
    return {
        "rho_a": _round(max(x.rho_a for x in found)),
        "rho_b": _round(max(x.rho_b for x in found)),
        "relative": _round(max(x.relative for x in found)),
        "gain": _round(farthest),
    }


def _round(value: float) -> float:
    """Four digits. JSON has no NaN or infinity, so a number that fails every limit stands for them."""
    return float(f"{value:.4g}") if abs(value) < 1e30 else 1e30


def _reasons(x: Comparison) -> list[str]:
    name, found = _shown(x.name), []
    if bool(x.nonfinite.any()):
        found.append(f"{name}: {int(x.nonfinite.sum())} values are NaN or infinite")
    if bool(x.stray_zeros.any()):
        found.append(f"{name}: {int(x.stray_zeros.sum())} values must be zero and are not")
    if not x.gain_ok:
        farthest = max((x.gain, *x.gains), key=lambda gain: abs(gain - 1))
        found.append(f"{name}: a head is {farthest:.4g} times what it should be")
    if not x.rho_a <= RHO_FAIL:
        found.append(f"{name}: error {x.rho_a:.3g} times that of eager PyTorch (limit {RHO_FAIL:g})")
    return found
