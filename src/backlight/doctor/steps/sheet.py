"""The sheet of an examination: what its steps write down, and the report it becomes."""

from __future__ import annotations

from typing import Any

from backlight.doctor.defects.catalogue import about
from backlight.doctor.report.model import FORWARD_MODE, Finding, Picture, Probe, Report, StageRow, Where
from backlight.doctor.steps import verdict
from backlight.doctor.steps.environment import environment
from backlight.doctor.steps.expected import expected_zeros
from backlight.doctor.steps.fresh import MEMORY
from backlight.doctor.steps.reading.read import Read
from backlight.doctor.subject.subject import Subject
from backlight.problems.axes import tensors_of
from backlight.problems.problem import Problem, shrink

# with more scores than this, a smaller problem of the same kind is explained instead
EXPLAIN_CELLS = 16 * 512 * 512

# a probe that caught the subject in the act outranks an explanation of a single run
PROBE_SCORES = {
    "input-changed": 130.0,
    # what is stored elsewhere is missing where it belongs
    "write-beyond-end": 125.0,
    **dict.fromkeys(MEMORY, 120.0),
    **dict.fromkeys(("race-lost-update", "random-numbers"), 115.0),
    "accumulates-over-calls": 112.0,
    "do-in-flight": 110.0,
    # a mutant that reproduces the data says more than where a leak shows
    "hidden-reached": 95.0,
}
# here the probe names the input that is misread, not the tensors that come out wrong
MISREAD = ("do-stride", "do-in-flight", "input-stride")


class Sheet:
    """One subject on one problem, and everything that was found about it so far."""

    def __init__(self, subject: Subject, problem: Problem, level: str):
        self.subject, self.problem, self.level = subject, problem, level
        self.notes: list[str] = []
        self.tangents = ""
        self.probes: list[Probe] = []
        self.rows: list[StageRow] = []
        self.findings: list[Finding] = []
        self.extra_rows: list[StageRow] = []
        self.pictures: list[Picture] = []
        self.read = Read()
        self.shows_failing_run = False

    def named(self, name: str, lines: list[str], where: Where | None = None, title: str = "", stage: str | None = None) -> None:
        defect = about(name)
        self.add(
            Finding(
                name,
                title or defect.title,
                defect.severity,  # type: ignore[arg-type]
                stage or defect.stage,
                where,
                lines,
                "established (the probe shows it directly)",
                "high",
                defect.next_check,
                None,
                PROBE_SCORES.get(name, 105.0) if defect.severity != "note" else 1.0,
            )
        )

    def smaller_problem(self) -> Problem | None:
        """Part of a problem that is too large to try every candidate on, if it can be cut."""
        b, h, sq, _ = self.problem.call.q.shape
        if b * h * sq * self.problem.call.k.shape[2] <= EXPLAIN_CELLS:
            return None
        # terms that are built in may follow from the number of heads
        cut = {"heads": self.problem.call.k.shape[1]} if self.subject.built_in(self.problem.call) else {}
        return shrink(self.problem, **cut)

    def add(self, finding: Finding) -> None:
        self.findings.append(finding)

    def seen_rows(self) -> list[StageRow]:
        """Rows of both directions, those that probes recovered among them, in the order in which things are computed."""
        rows = [row for row in (*self.rows, *self.extra_rows) if row.name not in FORWARD_MODE]
        return sorted(rows, key=lambda row: verdict.ORDER.index(row.name))

    def finish(self, health: dict[str, Any], seconds: float) -> Report:
        findings = sorted(self.findings, key=lambda f: -f.score)
        serious = [f for f in findings if f.severity in ("defect", "test-fault")]
        precise = [f for f in findings if f.severity == "precision"]
        outcome = "defect" if serious else "precision" if precise else "healthy"
        headline = (serious or precise)[0].title if serious or precise else "no defect found"
        # in a run that is not spoiled by a misread input, wrong rows have another cause
        shown = [f for f in serious if self.shows_failing_run or f.id not in MISREAD]
        if shown or precise:
            self._blame((shown or precise)[0])
        for row in self.rows:
            row.settle_local_error()
        return self._report(outcome, headline, findings, health, seconds)

    def _blame(self, finding: Finding) -> None:
        """An established name decides which stage is guilty: wrong rows after it inherit, also when it was not seen itself."""
        if finding.severity == "precision":
            for row in self.rows:
                row.status = "precision" if row.name == finding.stage and row.status == "ok" else row.status
        rows = [*self.rows, *self.extra_rows]
        inferred = finding.id == "open" and not any(row.name == finding.stage for row in rows)
        inferred |= finding.id in MISREAD
        if (finding.explained is None and not inferred) or finding.stage not in verdict.ORDER:
            return
        for row in rows:
            if (row.name in FORWARD_MODE) != (finding.stage in FORWARD_MODE):
                continue
            if row.name == finding.stage and row.status != "ok":
                row.status = "culprit"
            elif row.status in ("culprit", "suspect"):
                row.status = "inherited"
        if not any(row.name == finding.stage for row in rows):
            wrong = ", ".join(row.name for row in rows if row.status == "inherited")
            shown = wrong or ", ".join(probe.name for probe in self.probes if probe.passed is False)
            self.extra_rows.append(StageRow(finding.stage, "culprit", note=f"not seen itself; inferred from {shown}"))

    def could_not_run(self, sentence: str, health: dict[str, Any]) -> Report:
        return self._report("could-not-run", sentence, [], health, 0.0)

    def _report(self, outcome: str, headline: str, findings: list[Finding], health: dict[str, Any], seconds: float) -> Report:
        call = self.problem.call
        untold = self.subject.untold(call)
        if untold:
            words = ", ".join(untold)
            self.notes.append(f"the subject has no parameter for {words}: assumed to be built in")
        recipe = describe_problem(self.problem, self.level) | {"notes": self.notes, "layout": self.subject.layout}
        if self.tangents:
            recipe["tangents"] = self.tangents
        order = {name: i for i, name in enumerate(verdict.ORDER)}
        rows = sorted([*self.rows, *self.extra_rows], key=lambda r: order.get(r.name, 99))
        return Report(
            subject=self.subject.name,
            verdict=outcome,  # type: ignore[arg-type]
            headline=headline,
            location=self.subject.location,
            stages=rows,
            findings=findings,
            probes=self.probes,
            readings=self.read.readings,
            expected_zeros=expected_zeros(call),
            pictures=self.pictures,
            environment=environment(call.q.device),
            recipe=recipe,
            spec={f: getattr(call.spec, f) for f in call.spec.__dataclass_fields__},
            self_check=health,
            seconds=seconds,
        )


def describe_problem(problem: Problem, level: str) -> dict[str, Any]:
    call = problem.call
    found: dict[str, Any] = {"recipe": problem.recipe, "seed": problem.seed, "dtype": str(call.q.dtype)[6:], "level": level}
    found["shapes"] = {name: list(x.shape) for name, x in tensors_of(call).items()}
    found["strides"] = {n: list(getattr(call, n).stride()) for n in ("q", "k", "v")}
    if problem.arithmetic is not None:
        found["precision"] = problem.arithmetic.name
    if call.varlen:
        found["cu_seqlens_q"], found["cu_seqlens_k"] = call.cu_seqlens_q.tolist(), call.cu_seqlens_k.tolist()  # type: ignore
    return found
