"""The doctor's main entry: run the steps in order and write the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from backlight.doctor.defects.catalogue import BY_ID, OF_VALUES, about
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.games import GAMES
from backlight.doctor.defects.probed import PROBED
from backlight.doctor.report.model import FORWARD_MODE, Finding, Probe, Report, Where
from backlight.doctor.report.words import counted
from backlight.doctor.steps import (
    adversarial,
    against,
    convention,
    deep,
    forward_mode,
    hard_inputs,
    hidden_tiles,
    prescaled,
    probes,
    remedies,
    signed,
    usable,
    verdict,
    zeros,
)
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.compare import TRUTH_OF, Comparison, compare, judged
from backlight.doctor.steps.eight_bits import examining as eight_bits
from backlight.doctor.steps.environment import self_check
from backlight.doctor.steps.explain import Explanation, explain
from backlight.doctor.steps.fresh import MEMORY
from backlight.doctor.steps.invariants import Identity, identities
from backlight.doctor.steps.localise import ROW_TENSORS, only_in_empty_rows
from backlight.doctor.steps.look import Look, look
from backlight.doctor.steps.pictures import pictures
from backlight.doctor.steps.sheet import MISREAD, Sheet
from backlight.doctor.steps.watched import in_child
from backlight.doctor.subject import interpreted
from backlight.doctor.subject.apart import Limits
from backlight.doctor.subject.layouts import ShapeMismatch
from backlight.doctor.subject.subject import Observed, Subject
from backlight.doctor.subject.trouble import CouldNotRun, DeviceLost, Unrepeatable
from backlight.problems import inputs
from backlight.problems.inputs import Settings
from backlight.problems.problem import Problem, recast
from backlight.spec import AttentionSpec

LEVELS = ("quick", "full", "forensic", "adversarial")
# a missing gradient of a kernel that has no backward: behind whatever its forward gets wrong
AFTER_FORWARD = 39.0


def diagnose(
    subject: Any,
    spec: AttentionSpec,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    level: str = "quick",
    against: Any = None,
    limits: Limits | None = None,
    precision: str | None = None,
    **settings: Unpack[Settings],
) -> Report:
    """Examine an attention kernel and say what is wrong with it.

    subject:  a differentiable callable f(q, k, v, **extras) -> o | (o, lse), an nn.Module, a (forward, backward) pair of raw
              functions, or a `Subject`. Its tangents are examined too where it has a jvp: forward mode of a callable, the third
              of (forward, backward, jvp), or `Subject.jvp`.
    spec:     what it is supposed to compute.
    q, k, v:  canonical [B,Hq,Sq,D], [B,Hkv,Sk,D], [B,Hkv,Sk,Dv] tensors (packed: B = 1 with cu_seqlens). When absent they are
              drawn from `shape` (B, Hq, Sq, D), `kv_heads`, `sk`, `dv`, `dtype`, `recipe` and `seed`, on `device`.
    level:    "quick" (comparison, identities, a few probes), "full" (all probes, tomography), "forensic" (tile sweep, more),
              "adversarial" (quick, and whether the kernel fits the examination instead of the task).
    against:  a reference of yours: it is judged by the same oracle, because a wrong reference looks like a wrong kernel.
    limits:   `doctor.Limits(seconds=60)`: examine in a child process (Linux), which may hang, crash or run out of memory; None
              examines here.
    precision: "fp8": judge as a kernel of 8 bits (docs/doctor-fp8.md).
    settings: `do`, the incoming gradient [B,Hq,Sq,Dv]; learned terms by name; `mask`, which a subject gets as `mask` or as the
              tensors `rows` and `pos`; `cu_seqlens`; and what is drawn, as above.
    """
    if level not in LEVELS:
        raise ValueError(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
    started = time.perf_counter()
    problem = eight_bits.judged_as(inputs.problem_of(spec, q, k, v, **settings), precision)
    examined, reference = Subject.of(subject), None if against is None else Subject.of(against)

    def run() -> Report:
        return examine(examined, problem, level, reference)

    report = run() if limits is None else in_child(run, limits, examined, problem)
    report.seconds = time.perf_counter() - started
    return report


def examine(subject: Subject, problem: Problem, level: str, reference: Subject | None = None) -> Report:
    notes = []
    if interpreted.misread_bf16(problem.call.q.dtype):
        problem = interpreted.wider(problem)
        dtype = str(problem.call.q.dtype).removeprefix("torch.")
        notes.append(
            "TRITON_INTERPRET=1: this Triton's interpreter multiplies the bit patterns of bf16 operands in tl.dot, so "
            f"the same inputs were examined in {dtype}"
        )
    examination = Examination(subject, problem, level)
    examination.notes += notes
    report = examination.report()
    if reference is not None:
        judged_too = Examination(reference, problem.replace(), "quick").report()
        against.judge(report, judged_too, reference)
    return report


def run_once(subject: Any, spec: AttentionSpec, *tensors: Tensor | None, **settings: Any) -> Observed:
    """One forward and one backward on what `diagnose` would examine, judged by nobody: for profilers and sanitizers.

    Takes the arguments of `diagnose`; what only an examination needs (level, against) is ignored.
    """
    drawn = {name: value for name, value in settings.items() if name not in ("level", "against", "precision")}
    problem = inputs.problem_of(spec, *tensors, **drawn)
    examined = Subject.of(subject)
    if examined.layout == "auto":
        examined, _ = convention.settle(examined, problem, [])
    return examined.run(problem.call, problem.dy)


class Examination(Sheet):
    """The steps, in order; `report` stops early only when nothing can be compared."""

    def report(self) -> Report:
        started = time.perf_counter()
        health = self_check()
        if not health["passed"]:
            return self.could_not_run("the oracle failed its self-check; nothing it says can be trusted", health)
        unusable = usable.unjudgeable(self.problem)
        if unusable:
            return self.could_not_run(unusable, health)
        observed = None
        try:
            self.subject, observed = convention.settle(self.subject, self.problem, self.notes)
            values = convention.natural_lse(self.subject, self.problem, observed.values, self.notes)
            instead = convention.fill_empty_rows(self.problem, values)
            self.examine(observed, values)
        except DeviceLost as error:
            # nothing that lies on the device can be looked at any more
            return Report(self.subject.name, "could-not-run", str(error), self.subject.location, self_check=health)
        except Unrepeatable as error:
            return self.could_not_run(str(error), health)
        except (CouldNotRun, ShapeMismatch) as error:
            return self.could_not_run(str(error) + ("" if observed else self._runs_wider()), health)
        if instead and not any(f.severity != "note" for f in self.findings):
            title = BY_ID["empty-rows-lse"].sentence().replace("...", instead)
            self.named("empty-rows-lse", ["everything else is right, in these rows too"], title=title)
        return self.finish(health, time.perf_counter() - started)

    def _runs_wider(self) -> str:
        """Words for a kernel that cannot run in 16 bits and can in fp32; '' for any other."""
        if not self.problem.sixteen_bit:
            return ""
        wide = self.problem.replace(call=recast(self.problem.call, torch.float32), dy=self.problem.dy.float())
        try:
            convention.settle(self.subject, wide, [])
        except (*convention.REFUSALS, ShapeMismatch):
            return ""
        return "; in fp32 it runs" if self.problem.recipe == "captured" else "; in fp32 it runs: try --dtype fp32"

    # --- the steps ----------------------------------------------------------------------------------------------------------

    def examine(self, observed: Observed, values: dict[str, Tensor]) -> None:
        first = eight_bits.recognised(self, observed, look(self.problem, values), values)
        problem = self.problem
        for name, x in first.misshapen.items():
            wanted = tuple(problem.truth[TRUTH_OF.get(name, name)].shape)
            self.add(Finding("open", f"{name} has shape {tuple(x.shape)} instead of {wanted}", stage=name, score=90.0))
        comparisons = first.comparisons
        self.rows = first.rows
        self._observed_faults(observed)
        # dual numbers go through plain operations that nobody meant to be differentiated
        of_tangents = self.subject.jvp is not None or not self.subject.forward_only
        seen = forward_mode.look(self, observed, values) if problem.arithmetic is None and of_tangents else None
        bench = self._probe(observed)
        explained = self._explain_what_remains(bench, first)
        if seen is not None:
            forward_mode.conclude(self, seen, comparisons, explained)
            if self.level != "quick":
                forward_mode.common_tangent(self)
        if problem.arithmetic is not None:
            eight_bits.run(self, bench)
        tangents = {} if seen is None else seen.comparisons
        self._nonfinite(comparisons | tangents)
        if not any(f.severity != "note" for f in self.findings) and not eight_bits.explained(self, first.known, comparisons):
            found = signed.cut(problem, comparisons) or verdict.precision_finding(problem, comparisons, self.probes)
            found = found or verdict.coarse_tangents(problem, tangents)
            if found is not None:
                self.add(found)
            elif self.level == "quick" and verdict.precision_hint(problem, comparisons):
                self.notes.append(verdict.precision_hint(problem, comparisons))
        shown = self._show_the_failing_run(bench) or comparisons
        self.pictures += pictures(shown | tangents, self.probes, problem)

    def _show_the_failing_run(self, bench: Bench) -> dict[str, Comparison]:
        """Rows, and comparisons for the pictures, of the run that a probe failed in, where the first run is right."""
        found = max((f for f in self.findings if f.id in bench.failing), key=lambda f: f.score, default=None)
        if found is None or any(row.status in verdict.WRONG for row in self.rows):
            return {}
        run = bench.failing[found.id]
        values = convention.natural_lse(self.subject, run.problem, dict(run.observed.values), [])
        convention.fill_empty_rows(run.problem, values)
        failing = look(run.problem, values)
        if not any(row.status in verdict.WRONG for row in failing.rows):
            return {}
        self.shows_failing_run = True
        tangents = [row for row in self.rows if row.name in FORWARD_MODE]
        self.rows = [*failing.rows, *tangents]
        self.extra_rows = [row for row in self.extra_rows if row.name not in {shown.name for shown in failing.rows}]
        self.notes.append(f"stages and pictures show the run {run.words}, in which it fails; the first run is right")
        return failing.comparisons

    def _observed_faults(self, observed: Observed) -> None:
        if observed.written_beyond:
            stage = "o" if any("forward" in words for words in observed.written_beyond) else "dq"
            self.named("write-beyond-end", [f"written in one call: {', '.join(observed.written_beyond)}"], stage=stage)
        if observed.changed_inputs:
            names = ", ".join(observed.changed_inputs)
            self.named(
                "input-changed",
                [f"{names} differ from copies taken before the call"],
                title=f"the call changes its own inputs: {names}",
            )
        if observed.missing:
            names = ", ".join(observed.missing)
            self.named(
                "gradient-missing", [f"autograd returned nothing for {names}"], title=f"no gradient arrives: {names} missing"
            )
        if observed.forward_only and not self.subject.forward_only:
            # what is wrong with o comes first
            self.findings[-1].score, self.subject = AFTER_FORWARD, replace(self.subject, forward_only=True)

    def _probe(self, observed: Observed) -> Bench:
        bench = Bench(self.subject, self.problem, observed)
        chosen = {
            "quick": probes.QUICK,
            "full": probes.FULL,
            "forensic": probes.FORENSIC,
            "adversarial": (*probes.QUICK, *adversarial.PROBES),
        }[self.level]
        if observed.forward_only:
            self.notes.append("no backward: the forward alone was examined")
            chosen = tuple(run for run in chosen if run not in probes.OF_GRADIENTS)
        elif observed.missing:
            return bench
        if observed.changed_inputs:
            bench.subject, bench.base = remedies.put_back(self.subject, self.problem, observed)
        ran = []
        for run in chosen:
            found = run(bench)
            ran.append((run, found))
            self.probes.append(found)
            if found.passed is False and found.data.get("finding", "open") != "open":
                self._probe_finding(found)
        self._one_cause(bench, ran)
        if self.level in ("full", "forensic"):
            deep.run(self, bench)
        else:
            hard_inputs.low_scores(self, bench)
        return bench

    def _probe_finding(self, found: Probe) -> None:
        identifier = found.data["finding"]
        if any(f.id == identifier for f in self.findings):
            return
        where = None
        if found.data.get("span"):
            a, b = found.data["span"]
            where = Where(rows=(a, b), text=f"rows {a}-{b - 1}")
        lines = [f"{found.name}: {found.detail}"]
        for name, gains in found.data.get("gains", {}).items():
            lines.append(f"{name}: gain per head " + " ".join(f"{g:.3g}" for g in gains))
        changed = sorted(found.data.get("wrong", ()), key=verdict.ORDER.index)
        stage = (changed or [about(identifier).stage])[0]
        title = about(identifier).title.replace("{detail}", found.detail) if identifier in GAMES | PROBED else ""
        if identifier == "atomics-reorder":
            moved = found.data["wrong"]
            title = BY_ID[identifier].title.replace(
                "dq differs", f"{', '.join(moved)} {'differs' if len(moved) == 1 else 'differ'}"
            )
        # an input that the forward reads right is misread, or its gradient misplaced, in the backward
        only_backward = identifier == "input-stride" and stage not in ("o", "lse")
        if only_backward:
            title = f"{', '.join(changed)}: stored, or made of q, k or v read, with strides that are not its own"
            title += "; o does not change with the memory layout"
        self.named(identifier, lines, where, title, None if identifier in MISREAD and not only_backward else stage)

    def _one_cause(self, bench: Bench, ran: list[tuple[Callable[[Bench], Probe], Probe]]) -> None:
        """Memory faults look like races and stride errors too: keep what explains the others, and what it does not explain."""
        found = {f.id for f in self.findings}
        gone: set[str] = set()
        if found & set(MEMORY):
            gone = {name for name in remedies.LIKE_STALE if name in found}
            gone -= remedies.still_there(bench, ran) if gone else set()
        elif "accumulates-over-calls" in found:
            # a kernel that repeats itself keeps nothing from call to call: its gradients for dO = 0 have another cause
            remembers = "race-lost-update" in found
            gone = {"race-lost-update", "do-stride", "input-stride"} if remembers else {"accumulates-over-calls"}
        if "read-beyond-end" in found:
            # in another layout something else lies beyond the end
            gone |= {"do-stride", "input-stride"}
        self.findings = [f for f in self.findings if f.id not in gone]

    def _explain_what_remains(self, bench: Bench, first: Look) -> Explanation | None:
        """The first run explained, or, beside a finding that spoils it, what is left once its own next check is applied."""
        remains = remedies.remaining(self.findings, bench)
        if remains is None:
            spoiled = any(f.id in remedies.MOVES for f in self.findings)
            return None if spoiled else self._explain(first.known, first.comparisons, first.laws)
        values = convention.natural_lse(self.subject, self.problem, remains.values, [])
        convention.fill_empty_rows(self.problem, values)
        left = look(self.problem, values)
        if left.right:
            remains.finding.evidence.append(f"{remains.words}, everything is right")
            return None
        before = len(self.findings)
        found = self._explain(left.known, left.comparisons, left.laws, remains)
        if len(self.findings) == before and not remains.partial:
            self._name_nonfinite([c for c in left.comparisons.values() if bool(c.nonfinite.any())])
        for finding in self.findings[before:]:
            finding.evidence.insert(0, f"this remains {remains.words}")
            # what spoils a run comes first, whatever else is wrong
            finding.score = min(finding.score, remains.finding.score - 1)
        return found

    def _explain(
        self,
        values: Mapping[str, Tensor],
        comparisons: dict[str, Comparison],
        laws: list[Identity],
        remains: remedies.Remains | None = None,
    ) -> Explanation | None:
        """Step 5: a name for what the comparison saw, returned where a mutant has it."""
        bad = [c for c in comparisons.values() if c.bad]
        if bad and eight_bits.explained(self, values, comparisons):
            return None
        broken_laws = [i for i in laws if not i.holds]
        if not bad and not broken_laws:
            return None
        rounded = signed.cut(self.problem, comparisons) or prescaled.finding(self.problem, values, bad)
        if rounded is not None:
            self.add(rounded)
            return None
        ranked, problem, _, cs, ids = self._candidates(values, comparisons, laws, again=remains is None)
        if ranked and ranked[0].fits:
            self.add(self._with_readings(verdict.from_explanation(ranked[0], ranked, problem, cs, ids)))
            return ranked[0]
        told = remains is not None and remains.partial
        cut_off = any(f.id == "gradient-missing" for f in self.findings) and not self.subject.forward_only
        if told or cut_off or self._only_nonfinite(comparisons):
            return None
        coarse = verdict.lower_precision(problem, cs)
        self.add(coarse or self._with_readings(verdict.open_finding(self.seen_rows(), problem, cs, ids, ranked)))
        return None

    def _with_readings(self, finding: Finding) -> Finding:
        """What was read off the kernel's own matrices, as evidence, and in the headline of a finding that has no name."""
        said = self.read.readings
        if finding.id == "open" and said and finding.title.startswith(f"{finding.stage} is wrong"):
            about = next((each for each in said if each.stage == finding.stage), said[0])
            finding.title = f"{about.stage} is wrong: {about.sentence}"
            finding.confidence = "medium"
        finding.evidence[1:1] = [f"read off the kernel, {each.stage}: {each.sentence}" for each in said]
        return finding

    def _candidates(
        self, values: Mapping[str, Tensor], comparisons: dict[str, Comparison], laws: list[Identity], again: bool
    ) -> tuple[list[Explanation], Problem, Mapping[str, Tensor], dict[str, Comparison], list[Identity]]:
        """Tried on a smaller problem where this one is large, if the subject may run `again` as it is."""
        if not again and self.smaller_problem() is not None:
            return [], self.problem, values, comparisons, laws
        smaller = self._smaller()
        if smaller is not None:
            problem, seen, cs = smaller
            self.notes.append(f"explained on a smaller problem of the same kind: {tuple(problem.call.q.shape)}")
            return explain(problem, seen, cs, self._known(seen, problem)), problem, seen, cs, identities(problem, seen)
        known = self._known(values, self.problem)
        return explain(self.problem, values, comparisons, known), self.problem, values, comparisons, laws

    def _known(self, values: Mapping[str, Tensor], problem: Problem) -> tuple[Defect, ...]:
        """The catalogue, and after it what was read off this kernel: of two that fit alike the one with a cause comes first."""
        return (*OF_VALUES, *self.read.defects, *zeros.read(values, problem))

    def _smaller(self) -> tuple[Problem, dict[str, Tensor], dict[str, Comparison]] | None:
        """The first positions of a few heads, if the defect shows there too."""
        problem = self.smaller_problem()
        if problem is None:
            return None
        try:
            out = self.subject.with_room().run(problem.call, problem.dy)
        except DeviceLost:
            raise
        except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError):
            return None
        values = convention.natural_lse(self.subject, problem, out.values, [])
        known = judged(values, problem)
        comparisons = {n: compare(n, x, problem) for n, x in known.items()}
        return (problem, known, comparisons) if any(c.bad for c in comparisons.values()) else None

    @staticmethod
    def _only_nonfinite(comparisons: Mapping[str, Comparison]) -> bool:
        bad = [c for c in comparisons.values() if c.bad]
        return bool(bad) and all(bool(c.nonfinite.any()) and c.rho_a <= verdict.RHO_FAIL for c in bad)

    def _nonfinite(self, comparisons: Mapping[str, Comparison]) -> None:
        """Values that are not finite are a finding of their own, unless another finding already explains them."""
        wrong = [c for c in comparisons.values() if bool(c.nonfinite.any())]
        # an input read with other strides makes no NaN in a run that it does not spoil
        if not any(f.score >= 100 and f.id not in MISREAD for f in self.findings):
            self._name_nonfinite(wrong)

    def _name_nonfinite(self, wrong: list[Comparison]) -> None:
        if not wrong:
            return
        first = min(wrong, key=lambda c: verdict.ORDER.index(c.name))
        where, lines = verdict.worst_cell(first), [f"{c.name}: {c.nonfinite_words}" for c in wrong]
        if first.name in ROW_TENSORS and only_in_empty_rows(first, self.problem.call):
            self.named("empty-rows-nan", lines, where, stage=first.name)
            return
        if first.name in ("o", "lse"):
            rows = first.nonfinite.flatten(3).any(dim=-1) if first.name == "o" else first.nonfinite
            tile = hidden_tiles.tile_of(rows, self.problem.call)
            if tile is not None:
                detail = "{} rows by {} keys".format(*tile)
                self.named("maximum-hidden-tile", lines, where, about("maximum-hidden-tile").title.replace("{detail}", detail))
                return
        place = f", first at {where.text}" if where is not None else ""
        count = int(first.nonfinite.sum())
        verb = "is" if count == 1 else "are"
        title = f"{counted(count, 'value')} of {first.name} {verb} NaN or infinite{place}"
        self.named("nan-cell", lines, where, title=title, stage=first.name)
