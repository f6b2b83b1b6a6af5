"""Inputs that ordinary ones do not resemble, at `full`: jumps of lse between blocks of rows, low scores, outliers.

A running maximum that starts or stays at the wrong value, an exp that overflows and a bound that trusts small scores are right
on Gaussian inputs and wrong here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from backlight.doctor.defects.catalogue import about
from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps import convention, prescaled
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.compare import Comparison
from backlight.doctor.steps.explain import FITS, Explanation, evaluation, explain, observed
from backlight.doctor.steps.look import Look, look
from backlight.doctor.steps.sheet import Sheet
from backlight.doctor.steps.verdict import WRONG, from_explanation
from backlight.problems import inputs
from backlight.problems.axes import AXES
from backlight.problems.problem import Problem

HARD = {
    "jumps": "lse that jumps by 100 from block to block",
    "high_lse": "scores near +120",
    "low_lse": "scores near -120",
    "rising": "scores that rise by 110 along the keys",
    "falling": "scores that fall by 110 along the keys",
    "outliers": "outliers in q and k",
}
LENGTH = 256
# at `quick`: positions, more keys than rows, and how far off is wrong beyond doubt
SHORT, MORE_KEYS, GROSS, NOTHING_LEFT = 72, 37, 0.25, 1.0
# far below what any start value of a running maximum may be; fp32 still tells scores apart there
FAR = 80000.0


def run(sheet: Sheet, bench: Bench) -> None:
    """One probe a recipe; a finding where the subject is right on its own inputs and wrong on these."""
    if any(row.status in WRONG for row in sheet.rows):
        sheet.probes.append(Probe("hard inputs", None, "wrong on ordinary inputs already"))
        return
    for recipe, words in HARD.items():
        problem = drawn(bench.problem, recipe, kept=bench.built_in)
        if problem is None or problem.recipe == bench.problem.recipe:
            continue
        seen = _look(bench, problem)
        wrong = [name for name, c in seen.comparisons.items() if c.bad and (problem.arithmetic is None or _gross(c, problem))]
        excuse = prescaled.folded(problem, seen.known) if wrong else ""
        if wrong == ["dsink"] and any(each.id == "dsink-rounded" for each in sheet.findings):
            excuse = "terms of dsink are rounded, as the probe of them says"
        if excuse:
            sheet.probes.append(Probe(f"inputs {recipe}", True, f"right for a kernel in which {excuse}"))
            continue
        sheet.probes.append(Probe(f"inputs {recipe}", not wrong, f"{', '.join(wrong)} wrong on {words}" if wrong else "right"))
        if wrong:
            sheet.add(_finding(bench, seen, recipe, wrong))
            return


def low_scores(sheet: Sheet, bench: Bench) -> None:
    """At `quick`: scores near -120 and, where no mask says how they are aligned, more keys than rows.

    Padding counts with a score of 0, which ordinary scores hide and these do not. Only what is wrong beyond doubt is told.
    """
    call = bench.problem.call
    if any(row.status in WRONG for row in sheet.rows) or call.pair_bias is not None:
        return
    rows = min(SHORT, call.q.shape[2])
    keys = rows + MORE_KEYS if not call.spec.masked else min(SHORT, call.k.shape[2])
    kept = bench.built_in
    if kept:
        rows, keys = call.q.shape[2], call.k.shape[2]
    problem = drawn(bench.problem, "low_lse", rows, keys, kept)
    if problem is None or problem.recipe == bench.problem.recipe or not keys:
        return
    words = f"scores near -120, {rows} rows and {keys} keys"
    try:
        seen = _look(bench, problem)
    except convention.REFUSALS as error:
        first = str(error).splitlines()[0][:200] if str(error) else repr(error)
        sheet.probes.append(Probe("low scores", None, f"the subject refused {rows} rows and {keys} keys: {first}"))
        return
    wrong = [n for n, c in seen.comparisons.items() if c.bad and _gross(c, problem)]
    sheet.probes.append(
        Probe("low scores", not wrong, f"{', '.join(wrong)} wrong on {words}" if wrong else f"right on {words}")
    )
    if wrong:
        sheet.add(_finding(bench, seen, "low_lse", wrong))


def far_below(sheet: Sheet, bench: Bench) -> None:
    """At `full`: scores near -80000, by one channel of q and k. Only an o that is wrong beyond doubt is told.

    A running maximum that starts at a large negative number, or a mask filled with one, is right on all others.
    """
    call = bench.problem.call
    plain = call.spec.softcap is None and call.sink is None and call.tau is None and call.pair_bias is None
    wrong = any(row.status in WRONG for row in sheet.rows)
    skipped = wrong or not plain or call.q.dtype == torch.float16
    problem = None if skipped else drawn(bench.problem, "gaussian", kept=bench.built_in)
    if problem is None:
        return
    size = (FAR / problem.call.scale) ** 0.5
    q, k = problem.call.q.clone(), problem.call.k.clone()
    q[..., 0], k[..., 0] = size, -size
    problem = problem.replace(call=replace(problem.call, q=q, k=k))
    values = convention.natural_lse(bench.subject, problem, bench.run(problem=problem).values, [])
    convention.fill_empty_rows(problem, values)
    seen = look(problem, {name: values[name] for name in ("o", "lse") if name in values})
    o = seen.comparisons.get("o")
    bad = o is not None and o.bad and (bool(o.nonfinite.any()) or not o.relative <= GROSS)
    words = f"scores near {-FAR:g}"
    if not bad:
        sheet.probes.append(Probe("far scores", True, f"right on {words}"))
        return
    # scores near -120 were right, so no exp of a whole score is to blame
    explained = explain(problem, seen.known, seen.comparisons, [about("maximum-start")])
    ranked = [each for each in explained if each.fits]
    if not ranked:
        detail = f"o is off on {words}, as it is where a mask is filled with a finite number; no start of a maximum explains it"
        sheet.probes.append(Probe("far scores", None, detail))
        return
    sheet.probes.append(Probe("far scores", False, f"o wrong on {words}"))
    found = from_explanation(ranked[0], ranked, problem, seen.comparisons, seen.laws)
    found.evidence.insert(0, f"one channel of q and k brings all {words}: o is wrong; with ordinary inputs nothing is")
    sheet.add(found)


def _gross(c: Comparison, problem: Problem) -> bool:
    """Wrong beyond doubt: 8 bits leave little of scores that are large and nearly equal."""
    most = GROSS if problem.arithmetic is None else NOTHING_LEFT
    return bool(c.nonfinite.any()) or not c.relative <= most


def drawn(
    problem: Problem, recipe: str, rows: int | None = None, keys: int | None = None, kept: Iterable[str] = ()
) -> Problem | None:
    """The same kind of problem with inputs of a recipe, at most LENGTH positions; None where that cannot be.

    kept: learned terms that stay what they are, because the subject has them built in.
    """
    call = problem.call
    (b, hq, _, d), sq, sk = call.q.shape, rows or call.q.shape[2], keys or call.k.shape[2]
    if call.rows is not None or call.varlen or not call.scale > 0 or not sq or not sk or max(sq, sk) > 4 * LENGTH:
        return None
    own: dict[str, Any] = {} if call.bias is None else {"bias": call.bias.shape[1]}
    if call.tau is not None:
        own["tau"] = call.tau
    for name in kept:
        x = getattr(call, name)
        own[name] = x[: min(b, 1)] if "batch" in AXES[name] else x
    settings: dict[str, Any] = {
        "kv_heads": call.k.shape[1],
        "sk": sk,
        "dv": call.v.shape[3],
        "dtype": call.q.dtype,
        "device": call.q.device,
    }
    made = inputs.make(call.spec, (min(b, 1), hq, sq, d), recipe=recipe, seed=problem.seed, **settings, **own)
    return made.replace(arithmetic=problem.arithmetic)


def _look(bench: Bench, problem: Problem) -> Look:
    values = convention.natural_lse(bench.subject, problem, bench.run(problem=problem).values, [])
    convention.fill_empty_rows(problem, values)
    return look(problem, values)


def _finding(bench: Bench, seen: Look, recipe: str, wrong: list[str]) -> Finding:
    ordinary = _ordinary(bench, seen.problem)
    right = ordinary is None or not any(c.bad for c in ordinary.comparisons.values())
    ranked = [each for each in explain(seen.problem, seen.known, seen.comparisons) if each.fits]
    ranked = [each for each in ranked if ordinary is None or _fits_too(each, ordinary)]
    first = f"recipe {recipe}, seed {seen.problem.seed}: {', '.join(wrong)} wrong"
    first += "; with ordinary inputs nothing is" if right else "; so is something with ordinary inputs of these lengths"
    if ranked:
        found = from_explanation(ranked[0], ranked, seen.problem, seen.comparisons, seen.laws)
        found.evidence.insert(0, first)
        return found
    entry = about("hard-inputs")
    bad = [seen.comparisons[name] for name in wrong]
    lines = [first, *(f"{c.name}: {_how(c)}" for c in bad)]
    title, check = entry.title.replace("{detail}", HARD[recipe]), entry.next_check.replace("{detail}", recipe)
    culprit = next((row.name for row in seen.rows if row.status == "culprit"), wrong[0])
    return Finding(entry.id, title, "defect", culprit, None, lines, "open", "medium", check, None, 60.0)


def _how(c: Comparison) -> str:
    return c.nonfinite_words if bool(c.nonfinite.any()) else f"off by {100 * c.relative:.3g} %"


def _ordinary(bench: Bench, hard: Problem) -> Look | None:
    """The same lengths with ordinary inputs."""
    kept = bench.built_in
    problem = drawn(bench.problem, "gaussian", hard.call.q.shape[2], hard.call.k.shape[2], kept)
    return None if problem is None else _look(bench, problem)


def _fits_too(found: Explanation, ordinary: Look) -> bool:
    """Whether a defect that explains hard inputs says of ordinary ones what is there: where all weights vanish, many fit."""
    seen = observed(ordinary.problem, ordinary.known)
    outputs = evaluation(ordinary.problem, seen)(found.mutant)
    return all(each.misfit(outputs[each.key])[1] <= FITS for each in seen)
