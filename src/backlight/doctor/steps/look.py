"""One run of a subject as the oracle sees it: comparisons, identities and stage rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from backlight.doctor.report.model import StageRow
from backlight.doctor.steps import taps, verdict
from backlight.doctor.steps.compare import TRUTH_OF, Comparison, compare, judged
from backlight.doctor.steps.invariants import Identity, identities
from backlight.doctor.steps.localise import local_values
from backlight.problems.problem import Problem


@dataclass
class Look:
    """`known` are the outputs that can be judged, `misshapen` those with another shape than the oracle's."""

    problem: Problem
    known: dict[str, Tensor]
    misshapen: dict[str, Tensor]
    comparisons: dict[str, Comparison]
    laws: list[Identity]
    rows: list[StageRow]

    @property
    def right(self) -> bool:
        return not any(c.bad for c in self.comparisons.values()) and all(i.holds for i in self.laws)


def look(problem: Problem, values: Mapping[str, Tensor]) -> Look:
    """values: o, lse in natural units, gradients, and what the kernel showed of itself."""
    seen = judged(dict(values), problem)
    misshapen = {n: x for n, x in seen.items() if x.shape != problem.truth[TRUTH_OF.get(n, n)].shape}
    known = {n: x for n, x in seen.items() if n not in misshapen}
    comparisons = {n: compare(n, x, problem) for n, x in known.items()}
    local = local_values(problem, values) if "o" in known else {}
    rows = [*verdict.stage_rows(problem, known, comparisons, local), *taps.rows(problem, values, local)]
    rows.sort(key=lambda row: verdict.ORDER.index(row.name))
    return Look(problem, known, misshapen, comparisons, identities(problem, known), rows)
