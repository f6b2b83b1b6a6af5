"""Tangents, where the subject has a jvp: against the oracle, against its own backward (I14), and a name for what is wrong.

Forward mode and the backward are two programs. Each is compared with the oracle by itself, so that a defect of one is not
looked for in the other; I14 ties them without an oracle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import BY_ID, OF_TANGENTS
from backlight.doctor.report.model import FORWARD_MODE, Finding, Probe, StageRow
from backlight.doctor.steps import convention, verdict
from backlight.doctor.steps.compare import TRUTH_OF, WHOLE, Comparison, compare, ratio, units_of
from backlight.doctor.steps.duality import LAW, duality
from backlight.doctor.steps.environment import tangents_checked
from backlight.doctor.steps.explain import FITS, Explanation, evaluation, explain, observed
from backlight.doctor.steps.invariants import Identity
from backlight.doctor.steps.sheet import Sheet
from backlight.doctor.subject import forward_mode
from backlight.doctor.subject.subject import Observed, Subject
from backlight.doctor.subject.trouble import CouldNotRun
from backlight.problems.along import Along, draw
from backlight.problems.problem import Problem

# how large the common part of a row's tangent scores is made, and how much coarser than a centred kernel's `to` may then be
COMMON, COARSE = 16.0, 3.0


@dataclass
class Seen:
    """One run in forward mode: what came out, how it compares, and I14 with the backward of the same subject."""

    problem: Along
    values: dict[str, Tensor]
    comparisons: dict[str, Comparison]
    rows: list[StageRow] = field(default_factory=list)
    law: Identity | None = None

    @property
    def bad(self) -> list[str]:
        return [name for name, c in self.comparisons.items() if c.bad]


def look(sheet: Sheet, outputs: Observed, values: Mapping[str, Tensor]) -> Seen | None:
    """Adds the rows of the tangents to the sheet; None when the subject has no forward mode, or refuses this call."""
    seen = _run(sheet, sheet.problem, outputs, values)
    if seen is None:
        return None
    for name in [name for name, x in seen.values.items() if x.shape != seen.problem.truth[TRUTH_OF.get(name, name)].shape]:
        wanted, came = tuple(seen.problem.truth[TRUTH_OF.get(name, name)].shape), tuple(seen.values.pop(name).shape)
        sheet.add(Finding("open", f"{name} has shape {came} instead of {wanted}", stage=name, score=90.0))
    seen.comparisons = {name: compare(name, x, seen.problem) for name, x in seen.values.items()}
    seen.rows = verdict.stage_rows(seen.problem, seen.values, seen.comparisons, {})
    if any(row.name in ("lse", "o") and row.status != "ok" for row in sheet.rows):
        for row in seen.rows:
            row.status = "suspect" if row.status == "culprit" else row.status
    seen.law = duality(seen.problem, {**values, **seen.values})
    sheet.rows += seen.rows
    sheet.tangents = _way(sheet.subject)
    return seen


def _way(subject: Subject) -> str:
    if subject.jvp is None:
        return "dual numbers through the call"
    jvp = Subject(subject.jvp)
    return f"{jvp.name} ({jvp.location})"


def _run(sheet: Sheet, problem: Problem, outputs: Observed, values: Mapping[str, Tensor]) -> Seen | None:
    """The subject along directions drawn for the problem; lse in natural logarithms, as `values` have it."""
    tangents = forward_mode.told(sheet.subject, draw(problem.call, problem.seed))
    try:
        found = forward_mode.run(sheet.subject, problem.call, tangents)
    except CouldNotRun as error:
        if sheet.subject.jvp is not None:
            raise
        sheet.probes.append(Probe("forward mode", None, f"the subject refused: {error}"))
        return None
    if found is None:
        return None
    if not tangents_checked():
        raise CouldNotRun("the oracle's tangents failed their self-check; nothing it says of forward mode can be trusted")
    if "tlse" in found:
        found["tlse"] = _natural(found["tlse"], outputs.values.get("lse"), values.get("lse"), problem)
    return Seen(Along.direction(problem, tangents), found, {})


def _natural(tlse: Tensor, raw: Tensor | None, lse: Tensor | None, problem: Problem) -> Tensor:
    """tlse in natural logarithms; rows that see nothing have no lse that could move, and are not judged."""
    if raw is not None and lse is not None and raw is not lse:
        a, _ = convention.fit(raw, lse)
        tlse = (tlse.double() / a).to(tlse.dtype) if abs(a - 1) > convention.TOLERANCE else tlse
    if tlse.shape != problem.truth.lse.shape:
        return tlse
    return tlse.masked_fill(problem.truth.lse == -torch.inf, 0)


# how many times the relative error of a forward its tangents may have: they are sums of larger terms
AS_COARSE = 3


# --- what is wrong -----------------------------------------------------------------------------------------------------------


def conclude(sheet: Sheet, seen: Seen, comparisons: Mapping[str, Comparison], explained: Explanation | None) -> None:
    """Findings about forward mode, and what I14 says in those about the backward, for which `explained` is a name."""
    gradients = [c.name for c in comparisons.values() if c.bad and c.name.startswith("d")]
    reading = _reading(seen, gradients, "o" in comparisons and comparisons["o"].bad)
    for finding in sheet.findings:
        if reading and finding.severity != "note" and finding.stage not in FORWARD_MODE and gradients:
            finding.evidence.append(reading)
    if seen.bad:
        _name(sheet, seen, comparisons, explained, reading)
    elif seen.law is not None and not seen.law.holds and not gradients and not sheet.findings:
        title = f"identity I14 ({LAW}) fails although every tensor is within noise of the oracle"
        sheet.add(Finding("open", title, "defect", "to", None, [_ratio(seen.law)], "open", "low", "", None, 20.0))


def _reading(seen: Seen, gradients: list[str], forward: bool) -> str:
    """Which side of I14 is wrong, in words; '' where it has nothing to say."""
    if seen.law is None or not (seen.bad or gradients):
        return ""
    if seen.law.holds:
        both = seen.bad and gradients and forward
        return "identity I14 holds: forward mode and backward agree with each other" if both else ""
    if seen.bad and gradients:
        return f"{_ratio(seen.law)}; neither side agrees with the oracle"
    wrong, right = ("forward mode", "the gradients") if seen.bad else ("the backward", "the tangents")
    return f"{_ratio(seen.law)}; {right} agree with the oracle, so {wrong} is wrong"


def _ratio(law: Identity) -> str:
    size = f"{law.ratio:.3g} x its floor" if law.ratio < float("inf") else "a side is not finite"
    return f"identity I14 ({LAW}) fails at {size}"


def _name(sheet: Sheet, seen: Seen, comparisons: Mapping[str, Comparison], explained: Explanation | None, reading: str) -> None:
    if explained is not None and _follows(seen, explained):
        for row in seen.rows:
            if row.status in ("culprit", "suspect"):
                row.status, row.note = "inherited", "wrong as the forward is"
        return
    if all(bool(c.nonfinite.any()) and c.rho_a <= verdict.RHO_FAIL for c in seen.comparisons.values() if c.bad):
        return
    ranked, smaller = _candidates(sheet, seen)
    lines = [reading] if reading else []
    if ranked and ranked[0].fits:
        found = verdict.from_explanation(ranked[0], ranked, smaller.problem, smaller.comparisons, [])
    elif "o" in comparisons and comparisons["o"].bad:
        # tangents of a wrong forward: whatever explains o comes first
        return
    elif _as_coarse(sheet, seen, comparisons):
        for row in seen.rows:
            if row.status in ("culprit", "suspect"):
                row.status, row.note = "inherited", "as coarse as the forward is"
        return
    else:
        found = verdict.open_finding(seen.rows, seen.problem, seen.comparisons, [], ranked)
    found.evidence[1:1] = lines
    sheet.add(found)


def _as_coarse(sheet: Sheet, seen: Seen, comparisons: Mapping[str, Comparison]) -> bool:
    """Whether the forward lost digits, and tangents no more than a few times as many."""
    if verdict.precision_finding(sheet.problem, comparisons, sheet.probes) is None:
        return False
    coarsest = max(c.relative for c in comparisons.values())
    return all(c.relative <= AS_COARSE * coarsest for c in seen.comparisons.values() if c.bad)


def _follows(seen: Seen, explained: Explanation) -> bool:
    """Whether forward mode of the forward that was named gives these tangents."""
    observations = observed(seen.problem, seen.values)
    outputs = evaluation(seen.problem, observations)(explained.mutant)
    return all(o.key in outputs and o.misfit(outputs[o.key])[1] <= FITS for o in observations)


def _candidates(sheet: Sheet, seen: Seen) -> tuple[list[Explanation], Seen]:
    """Candidates, tried on a smaller problem of the same kind where the problem is large, if the defect shows there too."""
    part = sheet.smaller_problem()
    if part is not None:
        outputs = sheet.subject.run(part.call)
        values = convention.natural_lse(sheet.subject, part, outputs.values, [])
        found = _run(sheet, part, outputs, values)
        if found is not None:
            found.comparisons = {name: compare(name, x, found.problem) for name, x in found.values.items()}
            if found.bad:
                return explain(found.problem, found.values, found.comparisons, OF_TANGENTS), found
    return explain(seen.problem, seen.values, seen.comparisons, OF_TANGENTS), seen


# --- precision ---------------------------------------------------------------------------------------------------------------


def common_tangent(sheet: Sheet) -> None:
    """Tangents of k with a large common part, which moves no weight (I15): a kernel that rounds it with the rest is coarse."""
    started, problem = time.perf_counter(), sheet.problem
    tk = draw(problem.call, problem.seed)["k"]
    generator = torch.Generator().manual_seed(problem.seed)
    shift = COMMON * torch.randn(tk.shape[-1], generator=generator).to(tk)
    tangents = {name: torch.zeros_like(getattr(problem.call, name)) for name in ("q", "v")} | {"k": tk + shift}
    found = forward_mode.run(sheet.subject, problem.call, tangents)
    if found is None or not problem.sixteen_bit:
        # sums of fp32 round the common part whatever they do
        return
    along = Along.direction(problem, tangents)
    units, relative = units_of("to", along, found["to"].dtype), compare("to", found["to"], along).relative
    size = units.rms(units.magnitude, WHOLE)
    centred = float(ratio(units.rms(units.flashlike, WHOLE) + units.rounding * size, size))
    words = f"to is off by {100 * relative:.2g} %, a kernel that subtracts a mean first by {100 * centred:.2g} %"
    probe = Probe("common tangent", relative <= COARSE * centred, words, time.perf_counter() - started)
    sheet.probes.append(probe)
    if not probe.passed and not any(finding.severity == "defect" for finding in sheet.findings):
        probe.data["finding"] = "tangent-uncentred"
        defect = BY_ID["tangent-uncentred"]
        lines = [
            f"common tangent: {words}",
            f"tk has a common part of {COMMON:g} times its spread, which moves no weight (I15)",
        ]
        sheet.named(defect.id, lines, title=defect.title)
