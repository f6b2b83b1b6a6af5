"""Where probes are run: a subject, a problem and the first answer, and how answers are compared without a guessed tolerance.

Results must be equal bit for bit, or within a few units in the last place where the subject itself is not repeatable.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.report.model import Probe
from backlight.doctor.subject.subject import Observed, Subject
from backlight.doctor.subject.trouble import DeviceLost, Unrepeatable
from backlight.problems.problem import Problem

# other strides may select another code path with other rounding; a stride error is of order one
CLOSE = 8.0
# how far beyond its own run-to-run differences a subject may be before another cause is named
SPREAD = 3.0
# fp32 sums in another order, rounded once to the output dtype: a unit in the last place of the largest values
REORDERED, REORDERED_WIDE = 16.0, 256.0


@dataclass
class Failing:
    """A run in which a probe's defect shows: how it differs from the first one, and what came out."""

    words: str
    problem: Problem
    observed: Observed


@dataclass
class Bench:
    """A subject, a problem, and the first answer it gave."""

    subject: Subject
    problem: Problem
    base: Observed
    spread: dict[str, float] = field(default_factory=dict)
    failing: dict[str, Failing] = field(default_factory=dict)

    @property
    def built_in(self) -> list[str]:
        """Learned terms that the subject cannot be told, and which no probe may change."""
        return self.subject.built_in(self.problem.call)

    @property
    def close(self) -> float:
        """eps that another order of the same sums may move a value by: 16-bit results are rounded once, wide ones are not."""
        return CLOSE if self.problem.sixteen_bit else REORDERED_WIDE

    def equal(self, found: dict[str, float], what: str, finding: str, close: float | None = None) -> Probe:
        """Passed when nothing differs by more than the subject's own repeats do, or by a few eps (`close`)."""
        few = self.close if close is None else close
        far = {n: d for n, d in found.items() if not d <= max(few, SPREAD * self.spread.get(n, 0.0))}
        if far:
            return Probe("", False, f"{what}: {distances_in_words(far)}", data={"finding": finding, "wrong": list(far)})
        return Probe("", True, "equal" if not found else f"equal up to {max(found.values()):.1f} eps")

    def run(
        self, dy: Tensor | None = None, dlse: Tensor | None = None, problem: Problem | None = None, **layout: Any
    ) -> Observed:
        problem = problem or self.problem
        subject = self.subject.with_room() if layout else self.subject_for(problem.call)
        return subject.run(problem.call, problem.dy if dy is None else dy, dlse, **layout)

    def subject_for(self, call: Call) -> Subject:
        """The subject, with room around what it allocates where it is asked for lengths that are not the user's."""
        own = self.problem.call
        return self.subject if (call.q.shape, call.k.shape) == (own.q.shape, own.k.shape) else self.subject.with_room()


def distance(a: Tensor, b: Tensor, rms: bool = False) -> float:
    """Largest difference, or its rms, in units of the rms of a; inf when one is finite and the other is not."""
    if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
        return float("inf")
    a, b = (torch.where(torch.isfinite(x), x, 0).double() for x in (a, b))
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    size = torch.maximum(a, b).pow(2).mean().sqrt() + 1e-300
    return float(((a - b).pow(2).mean().sqrt() if rms else (a - b).abs().max()) / size)


def differences(a: Observed, b: Observed, eps: float, rms: bool = False) -> dict[str, float]:
    """Name -> distance in eps for every output that both runs have and that is not equal."""
    found = {n: distance(a[n], b[n], rms) / eps for n in a.values if n in b and a[n].shape == b[n].shape}
    return {n: d for n, d in found.items() if d > 0}


def distances_in_words(found: dict[str, float]) -> str:
    return ", ".join(
        f"{n} by {d:.3g} eps" if d != float("inf") else f"{n} (finite against not finite)" for n, d in found.items()
    )


def probe(name: str) -> Callable[[Callable[[Bench], Probe]], Callable[[Bench], Probe]]:
    """Times the probe, names it, and turns a refusal of the subject into 'not run'."""

    def wrap(function: Callable[[Bench], Probe]) -> Callable[[Bench], Probe]:
        def run(bench: Bench) -> Probe:
            started = time.perf_counter()
            try:
                found = function(bench)
            except (Unrepeatable, DeviceLost):
                raise
            except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
                found = Probe(name, None, f"the subject refused: {str(error).splitlines()[0][:200] if str(error) else error!r}")
            found.name, found.seconds = name, time.perf_counter() - started
            return found

        run.__name__ = function.__name__
        return run

    return wrap


def gradients(observed: Observed) -> dict[str, Tensor]:
    return {n: x for n, x in observed.values.items() if n.startswith("d") and n not in ("delta", "dp", "ds")}
