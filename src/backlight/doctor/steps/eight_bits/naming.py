"""Which 8-bit way of doing it wrong has the kernel's own numbers: mutants that round what the kernel rounds, forward only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import OF_EIGHT_BITS, about
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.e4m3 import BLOCKS, PLAIN
from backlight.doctor.defects.mutants import Mutant, run
from backlight.doctor.report.model import Finding
from backlight.doctor.steps.compare import TRUTH_OF, Comparison
from backlight.doctor.steps.verdict import precision_limit, worst_cell
from backlight.problems.problem import Problem

# what explains an error leaves less than half of it; roundings of another design leave up to twice that of one design
CLOSER, MOST = 0.5, 2.0
# mutants whose distance is this close cannot be told apart
TIE = 1.25
SEEN = ("o", "lse")


@dataclass
class Named:
    """A defect, the mutant that fits, how far off it is and how far the 8-bit ways without a defect are, in errors of those."""

    defect: Defect
    mutant: Mutant
    distance: float
    healthy: float


def closest(problem: Problem, values: Mapping[str, Tensor], defects: Iterable[Defect] = OF_EIGHT_BITS) -> Named | None:
    """The defect whose mutant reproduces o and lse, where healthy 8-bit ways do not."""
    distance = Distance(problem, values)
    if not distance.sizes:
        return None
    healthy = min(distance(manner.mutant()) for manner in (BLOCKS, PLAIN))
    tried = [Named(d, m, distance(m), healthy) for d in defects for m in d.candidates(problem.call)]
    best = min((each.distance for each in tried), default=torch.inf)
    if not best <= min(MOST, CLOSER * healthy):
        return None
    return next(each for each in tried if each.distance <= TIE * best)


class Distance:
    """Of a mutant from what was seen of one (batch, KV head), in rms errors of the 8-bit yardstick, the worst tensor."""

    def __init__(self, problem: Problem, values: Mapping[str, Tensor]):
        self.problem, self.sizes = problem, {}
        group = problem.call.group
        self.values = {name: values[name][:1, :group].double() for name in SEEN if name in values}
        for name, x in self.values.items():
            key = TRUTH_OF.get(name, name)
            right, yardstick = (trace[key][:1, :group].double() for trace in (problem.truth, problem.flashlike))
            finite = torch.isfinite(right) & torch.isfinite(yardstick) & torch.isfinite(x)
            self.values[name] = x.masked_fill(~finite, 0)
            error = (yardstick - right).masked_fill(~finite, 0).norm()
            # what is wrong by a power of two is rounded as what it is
            larger = max(right.masked_fill(~finite, 0).norm(), self.values[name].norm())
            rounding = 0 if name == "lse" else problem.eps * larger / 4
            self.sizes[name] = (float(error + rounding) or 1e-300, finite)

    def __call__(self, mutant: Mutant) -> float:
        found = run(mutant, self.problem.call, only=frozenset([(0, 0)]), keep=("y", "lse"))
        far = 0.0
        for name, x in self.values.items():
            size, finite = self.sizes[name]
            other = found[TRUTH_OF.get(name, name)][:1, : x.shape[1]].double().masked_fill(~finite, 0)
            far = max(far, float((x - other).norm().nan_to_num(torch.inf)) / size)
        return far


def finding(
    problem: Problem, values: Mapping[str, Tensor], comparisons: Mapping[str, Comparison], chosen: bool = False
) -> Finding | None:
    """The name of what 8-bit mutants reproduce; without one, a finding about precision where only that is lost.

    chosen: by us, so that a design that is worse on these inputs is worth a note; on the caller's own it is a loss.
    """
    wrong = [c for c in comparisons.values() if c.bad]
    coarse = [c for c in comparisons.values() if not c.rho_b <= precision_limit(problem, c.name)]
    if not wrong and not coarse:
        return None
    lines = [coarseness(c) for c in wrong or coarse]
    named = closest(problem, values)
    if named is not None:
        return of(named, lines, chosen, worst=(wrong or coarse)[0])
    if wrong:
        return None
    entry, worst = about("e4m3-coarse"), max(coarse, key=lambda c: c.rho_b)
    title = entry.title.replace("{detail}", ", ".join(c.name for c in coarse))
    return Finding(
        entry.id, title, "precision", worst.name, worst_cell(worst), lines, "open", "medium", entry.next_check, None, 30.0
    )  # fmt: skip


def of(named: Named, lines: list[str], chosen: bool, worst: Comparison) -> Finding:
    defect = named.defect
    severity = "precision" if defect.severity == "note" and not chosen else defect.severity
    first = f"a mutant with exactly this defect has the kernel's o and lse to {named.distance:.2g} x the error of e4m3"
    first += f"; without a defect they are {named.healthy:.2g} x off"
    explained = 1 - (named.distance / named.healthy) ** 2
    scores = {"defect": 100.0, "precision": 45.0, "note": 1.0}
    return Finding(
        defect.id,
        defect.sentence(named.mutant),
        severity,  # type: ignore[arg-type]
        defect.stage,
        worst_cell(worst),
        [first, *lines],
        f"established (explains {100 * min(explained, 0.9999):.2f} % of the error energy)",
        "high",
        defect.next_check,
        explained,
        scores[severity],
    )


def coarseness(c: Comparison) -> str:
    return f"{c.name}: off by {100 * c.relative:.3g} %, {c.rho_b:.3g} x the error of e4m3 with scales of blocks"
