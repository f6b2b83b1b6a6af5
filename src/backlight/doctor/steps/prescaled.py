"""Kernels that fold the softmax scale, or log2 e, into q or k and round the product: a choice, and no defect.

On ordinary inputs that costs nothing. Where scores reach hundreds the rounding moves them by tenths, and a backward that rounds
otherwise than its forward has weights that do not sum to 1. Such values are reproduced here, to the bit of each operand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.catalogue import about
from backlight.doctor.defects.mutants import Mutant, with_call
from backlight.doctor.report.model import Finding
from backlight.doctor.steps.compare import RHO_PASS, Comparison
from backlight.doctor.steps.explain import evaluation, observed
from backlight.problems.problem import Problem
from backlight.spec import LOG2E

SMALL = 0.25
# what explains an error leaves less than half of it
CLOSER = 0.5
ESTABLISHED = "established (an oracle that rounds so reproduces the data)"


def folded(problem: Problem, values: Mapping[str, Tensor], bad: Sequence[Comparison] = ()) -> str:
    """Which operand was scaled and rounded before the product, where that reproduces all of `values`, and those that are
    `bad` far better than the truth does; else ''."""
    if not problem.sixteen_bit or problem.arithmetic is not None:
        return ""
    observations = observed(problem, values)
    evaluate = evaluation(problem, observations)
    most = {c.name: min(RHO_PASS, CLOSER * c.rho_a) for c in bad}
    for mutant in candidates(problem.call):
        outputs = evaluate(mutant)
        if all(each.misfit(outputs[each.key])[0] <= most.get(each.name, RHO_PASS) for each in observations):
            return mutant.detail
    return ""


def finding(problem: Problem, values: Mapping[str, Tensor], bad: Sequence[Comparison]) -> Finding | None:
    """A loss of precision where the inputs are such that the rounding shows."""
    entry = about("operand-prescaled")
    # what is lost, leaked or scaled is off by more
    if any(not c.relative <= SMALL or bool(c.nonfinite.any()) for c in bad):
        return None
    words = folded(problem, values, bad)
    if not words:
        return None
    title = entry.title.replace("{detail}", words)
    line = "an oracle with that operand rounded so, and nothing else changed, reproduces the data"
    return Finding(entry.id, title, "precision", entry.stage, None, [line], ESTABLISHED, "high", entry.next_check, None, 40.0)


def candidates(call: Call) -> list[Mutant]:
    factors = {"scale times log2 e": call.scale * LOG2E, "scale": call.scale, "log2 e": LOG2E}
    # a power of two rounds nothing
    factors = {words: x for words, x in factors.items() if math.frexp(x)[0] != 0.5}
    found = []
    for words, factor in factors.items():
        for name in ("k", "q"):
            sees = with_call(**{name: lambda call, name=name, factor=factor: rounded(getattr(call, name), factor)})
            detail = f"{name} times {words} is rounded before the product"
            found.append(Mutant(sees_backward=sees, detail=f"{detail}, in the backward"))
            found.append(Mutant(sees=sees, detail=detail))
    return found


def rounded(x: Tensor, factor: float) -> Tensor:
    return (x.double() * factor).to(x.dtype).double() / factor
