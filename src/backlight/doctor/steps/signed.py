"""Errors with a sign: rounding to nearest has none, cutting has (docs/math.md, eq. 104)."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from backlight.doctor.defects.catalogue import about
from backlight.doctor.report.model import Finding
from backlight.doctor.steps.compare import RHO_FAIL, Comparison
from backlight.problems.problem import Problem

# deviations from a mean of 0, over rows: 4.3 was the most in 36 runs of correct kernels, 9 the least of those that cut
DEVIATIONS = 5.0
# what leans, of o and the gradients, when a quantity is cut
PATTERNS = {"cut-p": ("o", "dv"), "cut-o": ("o",), "cut-ds": ("dq", "dk")}
LOOKED_AT = ("o", "dq", "dk", "dv")


def lean(x: Tensor, truth: Tensor) -> tuple[float, float]:
    """(g - 1, z) of eq. 104: how much too large x is on average, and in how many rows it agrees about that."""
    rows = ((x.double() - truth) * truth).sum(dim=-1).flatten()
    energy, spread = float((truth * truth).sum()), float((rows * rows).sum()) ** 0.5
    return (float(rows.sum()) / energy if energy else 0.0), (float(rows.sum()) / spread if spread else 0.0)


def cut(problem: Problem, comparisons: Mapping[str, Comparison]) -> Finding | None:
    """A finding where the errors of a 16-bit kernel lean towards zero by less than eps and in nearly all rows."""
    looked = {n: comparisons[n] for n in LOOKED_AT if n in comparisons}
    if not problem.sixteen_bit or problem.arithmetic is not None or not {"o", "dq", "dk", "dv"} <= looked.keys():
        return None
    if any(bool(c.nonfinite.any() or c.stray_zeros.any()) or not c.rho_a <= RHO_FAIL for c in comparisons.values()):
        return None
    leans = {name: lean(c.x, c.truth) for name, c in looked.items()}
    biased = [n for n, (g, z) in leans.items() if z < -DEVIATIONS and -problem.eps < g < -problem.eps / 8]
    others = [c.name for c in comparisons.values() if c.bad and c.name not in biased]
    name = next((name for name, pattern in PATTERNS.items() if set(pattern) <= set(biased)), None)
    if name is None or others:
        return None
    lines = [f"{n}: {100 * g:+.2g} % on average, {abs(z):.0f} deviations from no direction" for n, (g, z) in leans.items()]
    entry = about(name)
    return Finding(
        name, entry.title, "precision", entry.stage, None, lines, "open", "medium", entry.next_check, None, 45.0
    )  # fmt: skip
