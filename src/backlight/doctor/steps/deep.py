"""The part of an examination that only `full` and `forensic` run: tomography, exact arithmetic, the gradient through lse."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from backlight.doctor.report.model import FORWARD_MODE, Picture, Probe, StageRow
from backlight.doctor.steps import convention, exact, hard_inputs, range_of_ds, rounding, sink_terms, tomography
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.compare import compare, judged
from backlight.doctor.steps.explain import explain
from backlight.doctor.steps.invariants import identities
from backlight.doctor.steps.reading.read import read
from backlight.doctor.steps.sheet import Sheet
from backlight.doctor.steps.verdict import WRONG, from_explanation
from backlight.doctor.subject.trouble import DeviceLost
from backlight.problems import inputs
from backlight.problems.problem import Problem
from backlight.reference import eager, oracle

CELLS = 24
LENGTHS = (128, 129, 191, 192, 193, 255)
REFUSALS = convention.REFUSALS
NAMES: dict[Callable[..., None], str] = {
    hard_inputs.run: "hard inputs",
    hard_inputs.far_below: "far scores",
    rounding.run: "ties and growth",
    sink_terms.run: "terms of dsink",
    range_of_ds.run: "range of ds",
}


def run(sheet: Sheet, bench: Bench) -> None:
    """Adds probes, stage rows, pictures and findings to the sheet."""
    steps: list[Callable[[Sheet, Bench], None]] = [_tomography, _exact, _through_lse, sink_terms.run, hard_inputs.run]
    steps += [hard_inputs.far_below, rounding.run, range_of_ds.run]
    if sheet.problem.arithmetic is not None:
        # these read results that were rounded to 16 bits, no coarser
        steps = [step for step in steps if step not in (_tomography, _exact, hard_inputs.far_below)]
    if sheet.level == "forensic":
        steps.append(_lengths)
    for step in steps:
        started = time.perf_counter()
        count = len(sheet.probes)
        try:
            step(sheet, bench)
        except DeviceLost:
            raise
        except REFUSALS as error:
            first = str(error).splitlines()[0][:200] if str(error) else repr(error)
            name = NAMES.get(step) or step.__name__.strip("_").replace("_", " ")
            sheet.probes.append(Probe(name, None, f"the subject refused: {first}"))
        for found in sheet.probes[count:]:
            found.seconds = found.seconds or (time.perf_counter() - started) / max(1, len(sheet.probes) - count)


def _tomography(sheet: Sheet, bench: Bench) -> None:
    call = bench.problem.call
    longest = max(call.q.shape[2], call.k.shape[2])
    if longest > tomography.LONGEST or min(call.q.shape[2], call.k.shape[2]) == 0:
        sheet.probes.append(Probe("tomography", None, f"only up to {tomography.LONGEST} positions"))
        return
    if longest > tomography.WHOLE and call.varlen:
        sheet.probes.append(Probe("tomography", None, f"packed sequences only up to {tomography.WHOLE} positions"))
        return
    problem = tomography.part(bench.problem)
    recovered = []
    looks = (tomography.forward_weights, tomography.backward_weights, tomography.score_gradient)
    for look in looks[:1] if bench.subject.forward_only else looks:
        found = look(bench.subject, problem)
        recovered.append((found, not _shown(sheet, found, problem)))
    wrong = {row.name for row in sheet.rows if row.status in WRONG}
    if "dq" in wrong and "o" not in wrong and not any(bad for _, bad in recovered):
        # the dq kernel has a ds of its own; a row of the table is made of what dk shows
        found = tomography.score_gradient_of_dq(bench.subject, problem)
        recovered.append((found, not found.relative <= _limit(found, problem)))
    sheet.read = read(recovered, problem, bench.subject)
    for row in sheet.extra_rows:
        said = sheet.read.about(row.name)
        row.note = "; ".join([row.note, *(reading.sentence for reading in said)]) if said else row.note
    _inherit(sheet)


def _shown(sheet: Sheet, found: tomography.Recovered, problem: Problem) -> bool:
    """Puts a matrix on the sheet; whether it is right."""
    words = found.support_words(found.call)
    limit = _limit(found, problem)
    good = not words and found.relative <= limit
    row = StageRow(found.name, gain=found.gain, global_error=found.relative, note=words or "read by one-hot probes")
    row.status = "ok" if good else "culprit"
    if not any(known.name == row.name for known in sheet.rows):
        sheet.extra_rows.append(row)
    detail = words or f"off by {100 * found.relative:.2g} % (a correct kernel: below {100 * limit:.2g} %)"
    detail += "" if bool(found.known.all()) else f"; {100 * float(found.known.double().mean()):.2g} % of the cells were read"
    sheet.probes.append(Probe(f"tomography of {found.name}", good, detail))
    if words:
        sheet.pictures.append(_support(found))
    return good


def _limit(found: tomography.Recovered, problem: Problem) -> float:
    """What plain PyTorch's rounding would do to the same matrix, with room for the probe's own inversion."""
    name = {"p": "a", "p (bwd)": "a"}.get(found.name, "dx")
    yardstick = eager(problem.call, problem.dy, keep=(name,))[name].double()
    truth = oracle(problem.call, problem.dy, keep=(name,))[name]
    return 4 * float((yardstick - truth).norm() / truth.norm().clamp(min=1e-300)) + 8 * problem.eps


def _inherit(sheet: Sheet) -> None:
    """The first wrong stage is the culprit; wrong stages after it inherit."""
    order = ("p", "p (bwd)", "ds")
    recovered = sorted(sheet.extra_rows, key=lambda r: order.index(r.name))
    wrong = [r for r in recovered if r.status == "culprit"]
    for row in wrong[1:]:
        row.status = "inherited"
    for row in sheet.rows if wrong else ():
        if row.status == "culprit" and (wrong[0].name == "p" or row.name.startswith("d")):
            row.status = "inherited"


def _support(found: tomography.Recovered) -> Picture:
    """One head as a small picture: the head with the most wrong cells."""
    wrong = (found.leaks | found.holes).sum((2, 3))
    b, h = divmod(int(wrong.argmax()), wrong.shape[1])
    sq, sk = found.truth.shape[-2:]
    step = max(1, -(-max(sq, sk) // (4 * CELLS)))
    kind = (found.truth[b, h] != 0).long()
    kind = torch.where(found.leaks[b, h], 2, torch.where(found.holes[b, h], 3, kind))
    pad = torch.nn.functional.pad(kind, (0, -sk % step, 0, -sq % step))
    cells = pad.unflatten(1, (-1, step)).unflatten(0, (-1, step)).amax(dim=(1, 3))
    data = {"stage": found.name, "head": f"b{b} h{h}", "sq": sq, "sk": sk, "step": step}
    data |= {"leaks": int(found.leaks[b, h].sum()), "holes": int(found.holes[b, h].sum()), "cells": cells.tolist()}
    direction = "backward" if found.name.endswith("(bwd)") else "forward"
    return Picture("support", f"which keys each row uses in the {direction} ({found.name} of b{b} h{h})", data)


def _exact(sheet: Sheet, bench: Bench) -> None:
    found = exact.exact_arithmetic(bench.subject, bench.problem)
    sheet.probes.append(found)
    for finding in sheet.findings:
        if finding.id in ("race-lost-update", "atomics-reorder") and found.passed is not None:
            finding.evidence.append(f"exact-arithmetic probe: {found.detail}")


def _through_lse(sheet: Sheet, bench: Bench) -> None:
    """A loss on lse as well: gradients must follow eq. 20."""
    problem, subject = bench.problem, bench.subject
    if "lse" not in bench.base:
        sheet.probes.append(Probe("gradient through lse", None, "the subject returns no lse"))
        return
    a, _ = convention.fit(bench.base["lse"], problem.truth.lse)
    generator = torch.Generator().manual_seed(problem.seed + 5)
    dlse = torch.randn(problem.truth.lse.shape, generator=generator).to(problem.call.q.device)
    dlse = dlse.to(problem.call.accumulator_dtype)
    with_lse = problem.replace(dlse=dlse)
    out = subject.run(problem.call, problem.dy, dlse / a if abs(a - 1) > 1e-3 else dlse)
    plain = bench.run()
    if all(torch.equal(out[n], plain[n]) for n in ("dq", "dk") if n in out):
        sheet.probes.append(_ignored(sheet, with_lse, out.values))
        return
    _judge_lse(sheet, with_lse, out.values)


def _differentiable(sheet: Sheet, problem: Problem) -> bool:
    """Whether the subject's lse takes part in autograd at all."""
    return sheet.subject.backward is None and sheet.subject.lse_differentiable(problem.call)


def _ignored(sheet: Sheet, problem: Problem, values: dict[str, torch.Tensor]) -> Probe:
    if not _differentiable(sheet, problem):
        return Probe("gradient through lse", None, "lse is returned without a gradient")
    _judge_lse(sheet, problem, values, report=False)
    return Probe("gradient through lse", False, "a gradient into lse changes nothing", data={"finding": "dlse-ignored"})


def _judge_lse(sheet: Sheet, problem: Problem, values: dict[str, torch.Tensor], report: bool = True) -> None:
    known = {name: x for name, x in judged(values, problem).items() if name.startswith("d")}
    comparisons = {n: compare(n, x, problem) for n, x in known.items()}
    wrong = [c.name for c in comparisons.values() if c.bad]
    if report:
        detail = "right" if not wrong else ", ".join(wrong) + " wrong when the loss uses lse"
        sheet.probes.append(Probe("gradient through lse", not wrong, detail))
    already = any(r.status in ("culprit", "inherited") for r in sheet.rows if r.name not in FORWARD_MODE)
    if not wrong or already:
        return
    ranked = explain(problem, known, comparisons)
    laws = identities(problem, {**known, "o": values["o"]}) if "o" in values else []
    if ranked and ranked[0].fits:
        found = from_explanation(ranked[0], ranked, problem, comparisons, laws)
        found.evidence.insert(0, "all of this holds for a loss that uses lse; with a loss on o alone nothing is wrong")
        sheet.findings.append(found)


def _lengths(sheet: Sheet, bench: Bench) -> None:
    """Other lengths around the usual tile sizes, the same spec."""
    call = bench.problem.call
    if call.varlen or call.q.shape[2] != call.k.shape[2] or bench.built_in:
        sheet.probes.append(Probe("lengths", None, "packed or unequal lengths, or a learned term that is built in"))
        return
    bad = []
    for length in LENGTHS:
        problem = inputs.make(
            call.spec, (1, call.q.shape[1], length, call.q.shape[3]), kv_heads=call.k.shape[1], dv=call.v.shape[3],
            dtype=call.q.dtype, seed=bench.problem.seed, device=call.q.device,
        )  # fmt: skip
        out = convention.natural_lse(bench.subject, problem, bench.run(problem=problem).values, [])
        names = [name for name, x in judged(out, problem).items() if compare(name, x, problem).bad]
        if names:
            bad.append(f"S = {length}: {', '.join(names)}")
    sheet.probes.append(Probe("lengths", not bad, "; ".join(bad) or f"right for S in {', '.join(map(str, LENGTHS))}"))
