"""An established finding is no reason to stop: its own next check is applied, and what remains is examined again.

Each remedy gives the outputs of a run in which the finding can do no harm, or leaves out what it spoils.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps import convention
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.compare import TRUTH_OF, compare, judged
from backlight.doctor.steps.fresh import MEMORY
from backlight.doctor.steps.probes import runs_in_poison
from backlight.doctor.subject.memory import poisoned
from backlight.doctor.subject.subject import Observed, Subject
from backlight.problems.problem import Problem

ProbeRun = Callable[[Bench], Probe]
# findings that memory nobody wrote can imitate
LIKE_STALE = ("accumulates-over-calls", "race-lost-update", "do-stride", "input-stride")
MOVES = ("race-lost-update", "random-numbers", "accumulates-over-calls")


@dataclass
class Remains:
    """Outputs after the remedy of `finding`; `words` say what was done. Where `partial`, only a name that fits is believed."""

    finding: Finding
    words: str
    values: dict[str, Tensor]
    partial: bool = False


def remaining(findings: Sequence[Finding], bench: Bench) -> Remains | None:
    """What there is to examine beside the strongest finding that has a remedy; None where none has."""
    by_id = {finding.id: finding for finding in findings}
    unwritten = next((by_id[name] for name in MEMORY if name in by_id), None)
    if unwritten is not None:
        return _zeroed(unwritten, bench)
    moving = next((by_id[name] for name in MOVES if name in by_id), None)
    if moving is not None:
        return _what_repeats(moving, bench)
    if "input-changed" in by_id:
        when = "between forward and backward" if bench.subject.restores else "after the call"
        return Remains(by_id["input-changed"], f"with the inputs put back {when}", dict(bench.base.values))
    return None


def put_back(subject: Subject, problem: Problem, observed: Observed) -> tuple[Subject, Observed]:
    """A subject that changes its inputs, with copies put back where that is better: some backwards count on the change."""
    restored = replace(subject, restores=True)
    out = restored.run(problem.call, problem.dy)
    return (restored, out) if _wrong(out, problem) < _wrong(observed, problem) else (subject, observed)


def _wrong(observed: Observed, problem: Problem) -> int:
    known = {n: x for n, x in judged(observed.values, problem).items() if x.shape == problem.truth[TRUTH_OF.get(n, n)].shape}
    return sum(compare(name, x, problem).bad for name, x in known.items())


def _zeroed(finding: Finding, bench: Bench) -> Remains:
    """Fresh memory set to 0, and the oracle's values wherever its content still decides: those are explained already."""
    runs = runs_in_poison(bench)
    with poisoned(0.0):
        values = dict(bench.run().values)
    truth = bench.problem.truth
    for name, x in list(values.items()):
        key = TRUTH_OF.get(name, name)
        if key in truth and truth[key].shape == x.shape:
            follows = ~((runs[0][name] == runs[1][name]) & (runs[1][name] == x))
            # a kernel that is not repeatable differs a little everywhere, and that is no memory
            follows &= ~torch.isclose(runs[0][name].double(), x.double(), rtol=1e-2, atol=0.0)
            right = truth[key]
            if name == "lse":
                # in units of the kernel's own
                a, b = convention.fit(x.masked_fill(follows, torch.nan), right)
                right = a * right + b
            values[name] = torch.where(follows, right.to(x.dtype), x)
    return Remains(finding, "with fresh memory set to 0 and what it decides left out", values)


def _what_repeats(finding: Finding, bench: Bench) -> Remains | None:
    """Only tensors that repeat bit for bit: the others hold something else each time."""
    again = [bench.run() for _ in range(2)]
    same = {n: x for n, x in bench.base.values.items() if all(n in r and torch.equal(r[n], x) for r in again)}
    if not any(name in same for name in ("dq", "dk", "dv")):
        return None
    return Remains(finding, f"in what repeats itself ({', '.join(same)})", same, partial=True)


def still_there(bench: Bench, ran: Sequence[tuple[ProbeRun, Probe]]) -> set[str]:
    """Findings of LIKE_STALE that fail with fresh memory set to 0 as well, so that stale memory is not their cause."""
    silenced = [run for run, found in ran if found.passed is False and found.data.get("finding") in LIKE_STALE]
    with poisoned(0.0):
        clean = Bench(bench.subject, bench.problem, bench.run())
        again = [run(clean) for run in silenced]
    return {found.data["finding"] for found in again if found.passed is False and found.data.get("finding") in LIKE_STALE}
