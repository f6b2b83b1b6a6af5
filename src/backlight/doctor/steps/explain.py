"""Step 5: which mutant reproduces the data down to rounding.

Every candidate is one float64 pass. A candidate fits when its distance from the kernel's tensors, cell by cell, is no more than
the noise of a correct kernel; the share of the error energy it removes is what the report prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import OF_VALUES
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.mutants import Mutant, run
from backlight.doctor.steps.compare import CELL, TRUTH_OF, WHOLE, Comparison, ratio, to_cells, units_of
from backlight.problems.along import Along
from backlight.problems.problem import Problem
from backlight.reference.tangent import TANGENTS
from backlight.spec import GRADIENTS, OF_PAIRS

FITS = 4.0
# candidates whose misfit is this close cannot be told apart by the data; the catalogue's order decides
TIE = 1.25
# an explanation has to be better than "nothing is wrong", also where the error is smaller than the noise of a cell
IMPROVES = 0.8
# a mutant that rounds may round a few values the other way: one cell stands out although nothing is left to explain
NEARLY_ALL = 0.995
SIFT = 3 * FITS
OF_FORWARD = ("y", "lse")


@dataclass
class Explanation:
    """One candidate: `misfit` is its worst cell in units of noise, `average` the rms over cells of the worst tensor.

    explained: share of the error energy above rounding noise that it removes. null: the same average for the truth itself.
    """

    defect: Defect
    mutant: Mutant
    misfit: float
    average: float
    explained: float
    null: float

    @property
    def fits(self) -> bool:
        good = self.misfit <= FITS or (self.explained >= NEARLY_ALL and self.average <= FITS)
        return good and not self.average > IMPROVES * self.null

    @property
    def sentence(self) -> str:
        return self.defect.sentence(self.mutant)


class Observation:
    """One of the kernel's tensors in cells with its noise, prepared once for all candidates."""

    def __init__(self, name: str, value: Tensor, problem: Problem):
        units = units_of(name, problem, value.dtype)
        self.name, self.key, self.units = name, TRUTH_OF.get(name, name), units
        self.x = value.detach().double()
        self.finite = torch.isfinite(self.x)
        self.cells = to_cells(self.x.masked_fill(~self.finite, 0))
        self.unit = units.unit(units.eager, CELL)
        self.energy = float((self.cells**2).sum()) + float((units.magnitude**2).sum()) or 1.0
        self.noise = float((units.flashlike**2).sum()) / self.energy
        relative = float(ratio(units.rms(units.eager, WHOLE), units.rms(units.magnitude, WHOLE)))
        self.relative = min(relative + units.rounding, 0.02)

    def misfit(self, candidate: Tensor, at: tuple[int, int] | None = None) -> tuple[float, float, float]:
        """(worst cell, rms over cells, squared distance relative to the data) of one candidate.

        `at` looks at one (batch, KV head) only; tensors that sum over the batch are then left out.
        """
        if at is not None and sums_over_heads(self.name, self.x):
            return 0.0, 0.0, 0.0
        part = () if at is None else self._part(at)
        x, candidate, right = self.x[part], candidate[part].double(), self.units.finite[part]
        finite, observed = torch.isfinite(candidate), self.finite[part]
        differ = (finite != observed) & right
        if bool(differ.any()) and float(differ.double().mean()) > 1e-3:
            return float("inf"), float("inf"), float(differ.double().mean())
        agree = finite & observed & right
        value = to_cells(candidate.masked_fill(~agree, 0))
        error = to_cells((x - candidate).masked_fill(~agree, 0))
        count = self.units.count[part].sum(CELL).clamp(min=1)

        def rms(cells: Tensor) -> Tensor:
            return ((cells**2).sum(CELL) / count).sqrt()

        unit = torch.maximum(self.unit[part], self.relative * rms(value))
        cells = ratio(rms(error), unit)
        return float(cells.max()), float((cells**2).mean().sqrt()), float((error**2).sum()) / self.energy

    def _part(self, at: tuple[int, int]) -> tuple[slice, ...]:
        b, g = at
        group = max(1, self.x.shape[1] // self.kv_heads)
        return slice(b, b + 1), slice(g * group, (g + 1) * group)

    @property
    def kv_heads(self) -> int:
        return self.units.problem.call.k.shape[1]


def explain(
    problem: Problem,
    values: Mapping[str, Tensor],
    comparisons: Mapping[str, Comparison],
    defects: Iterable[Defect] = OF_VALUES,
) -> list[Explanation]:
    """Candidates of `defects`, best first; `values` are the kernel's o, lse (natural) and gradients.

    Each candidate is first tried on the worst (batch, KV head) alone; only those that are not far off there run in full.
    """
    observations = observed(problem, values)
    if not observations:
        return []
    evaluate = evaluation(problem, observations)
    gains = {name: c.gain for name, c in comparisons.items() if c.gains}
    at = worst_head(problem, comparisons)
    sift = sieve(problem, observations, evaluate, at)
    right = not any(comparisons[name].bad for name in ("o", "lse") if name in comparisons)
    possible = [defect for defect in defects if not (right and defect.of_forward)]
    sifted = [(sift(mutant), defect, mutant) for defect in possible for mutant in defect.candidates(problem.call, gains)]
    close = [entry for entry in sifted if entry[0] <= SIFT] or sorted(sifted, key=lambda entry: entry[0])[:3]
    null = [o.misfit(problem.truth[o.key]) for o in observations]
    total, noise = sum(d for _, _, d in null), sum(o.noise for o in observations)
    found = []
    for _, defect, mutant in close:
        outputs = evaluate(mutant)
        parts = [o.misfit(outputs[o.key]) for o in observations]
        left = max(0.0, sum(d for _, _, d in parts) - noise)
        explained = 1 - left / max(total - noise, left, 1e-300)
        worst, average = max(p[0] for p in parts), max(p[1] for p in parts)
        found.append(Explanation(defect, mutant, worst, average, explained, max(n[1] for n in null)))
    return rank(found)


def sieve(
    problem: Problem, observations: list[Observation], evaluate: Callable[..., dict[str, Tensor]], at: tuple[int, int]
) -> Callable[[Mutant], float]:
    """How far a candidate is off on one (batch, KV head); a forward that is far off spares its backward."""
    of_forward = [o for o in observations if o.key in OF_FORWARD]

    def far(outputs: Mapping[str, Tensor], among: Iterable[Observation]) -> float:
        return max((o.misfit(outputs[o.key], at)[1] for o in among), default=0.0)

    unchanged = far(problem.truth, of_forward)

    def sift(mutant: Mutant) -> float:
        only = frozenset([at])
        if mutant.forward_changed:
            found = far(evaluate(mutant, only=only, dy=None, dlse=None), of_forward)
        else:
            found = unchanged if mutant.outputs_kept else 0.0
        return found if found > SIFT else far(evaluate(mutant, only=only), observations)

    return sift


def sums_over_heads(name: str, x: Tensor) -> bool:
    """Whether a value may be a sum over heads or batch entries, so that one of them alone does not make it."""
    return x.dim() < 3 or name[1:] in OF_PAIRS


def observed(problem: Problem, values: Mapping[str, Tensor]) -> list[Observation]:
    return [Observation(n, x, problem) for n, x in values.items() if TRUTH_OF.get(n, n) in problem.truth]


def evaluation(problem: Problem, observations: Iterable[Observation]) -> Callable[..., dict[str, Tensor]]:
    """How a mutant is run on a problem: in the directions that were observed."""
    keys = {each.key for each in observations}
    backward = any(key in GRADIENTS for key in keys)
    given: dict[str, Any] = {"truth": problem.truth, "dlse": problem.dlse if backward else None}
    if isinstance(problem, Along) and any(key in TANGENTS for key in keys):
        given["tangents"] = problem.tangents
    return partial(run, call=problem.call, dy=problem.dy if backward else None, **given)


def worst_head(problem: Problem, comparisons: Mapping[str, Comparison]) -> tuple[int, int]:
    """(batch, KV head) with the largest error, non-finite values first."""
    hkv = problem.call.k.shape[1]
    score = torch.zeros(problem.call.q.shape[0], hkv, dtype=torch.float64, device=problem.call.q.device)
    for c in comparisons.values():
        if sums_over_heads(c.name, c.truth):
            continue
        cells = c.cells.amax(dim=2) + 1e6 * c.nonfinite.flatten(2).any(dim=2)
        score = torch.maximum(score, cells.reshape(cells.shape[0], hkv, -1).amax(dim=2))
    return divmod(int(score.argmax()), hkv)


def rank(found: list[Explanation]) -> list[Explanation]:
    """By misfit; among candidates the data cannot separate, catalogue order (stable sort)."""
    if not found:
        return []
    best = min(e.average for e in found)

    def key(e: Explanation) -> tuple[bool, bool, float]:
        tied = e.fits and e.average <= TIE * max(best, 0.2)
        return (not e.fits, not tied, 0.0 if tied else e.average)

    return sorted(found, key=key)
