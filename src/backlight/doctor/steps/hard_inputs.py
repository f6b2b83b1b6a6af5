"""Inputs that ordinary ones do not resemble, at `full`: jumps of lse between blocks of rows, low scores, outliers.

A running maximum that starts or stays at the wrong value, an exp that overflows and a bound that trusts small scores are right
on Gaussian inputs and wrong here.
"""

from __future__ import annotations

from typing import Any

from backlight.doctor.defects.catalogue import about
from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps import convention
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.explain import explain
from backlight.doctor.steps.look import Look, look
from backlight.doctor.steps.sheet import Sheet
from backlight.doctor.steps.verdict import WRONG, from_explanation
from backlight.problems import inputs
from backlight.problems.problem import Problem

HARD = {"jumps": "lse that jumps by 100 from block to block", "low_lse": "scores near -120", "outliers": "outliers in q and k"}
LENGTH = 256


def run(sheet: Sheet, bench: Bench) -> None:
    """One probe a recipe; a finding where the subject is right on its own inputs and wrong on these."""
    if any(row.status in WRONG for row in sheet.rows):
        sheet.probes.append(Probe("hard inputs", None, "wrong on ordinary inputs already"))
        return
    for recipe, words in HARD.items():
        problem = drawn(bench.problem, recipe)
        if problem is None or problem.recipe == bench.problem.recipe:
            continue
        seen = _look(bench, problem)
        wrong = [name for name, c in seen.comparisons.items() if c.bad]
        sheet.probes.append(Probe(f"inputs {recipe}", not wrong, f"{', '.join(wrong)} wrong on {words}" if wrong else "right"))
        if wrong:
            sheet.add(_finding(seen, recipe, wrong))
            return


def drawn(problem: Problem, recipe: str) -> Problem | None:
    """The same kind of problem with inputs of a recipe, at most LENGTH positions; None where that cannot be."""
    call = problem.call
    (b, hq, sq, d), sk = call.q.shape, call.k.shape[2]
    if call.rows is not None or call.varlen or not call.scale > 0 or not sq or not sk or max(sq, sk) > 4 * LENGTH:
        return None
    own: dict[str, Any] = {} if call.bias is None else {"bias": call.bias.shape[1]}
    if call.tau is not None:
        own["tau"] = call.tau
    settings: dict[str, Any] = {
        "kv_heads": call.k.shape[1],
        "sk": sk,
        "dv": call.v.shape[3],
        "dtype": call.q.dtype,
        "device": call.q.device,
    }
    return inputs.make(call.spec, (min(b, 1), hq, sq, d), recipe=recipe, seed=problem.seed, **settings, **own)


def _look(bench: Bench, problem: Problem) -> Look:
    values = convention.natural_lse(bench.subject, problem, bench.run(problem=problem).values, [])
    convention.fill_empty_rows(problem, values)
    return look(problem, values)


def _finding(seen: Look, recipe: str, wrong: list[str]) -> Finding:
    ranked = explain(seen.problem, seen.known, seen.comparisons)
    first = f"recipe {recipe}, seed {seen.problem.seed}: {', '.join(wrong)} wrong; with ordinary inputs nothing is"
    if ranked and ranked[0].fits:
        found = from_explanation(ranked[0], ranked, seen.problem, seen.comparisons, seen.laws)
        found.evidence.insert(0, first)
        return found
    entry = about("hard-inputs")
    bad = [seen.comparisons[name] for name in wrong]
    lines = [first, *(f"{c.name}: {c.nonfinite_words or f'off by {100 * c.relative:.3g} %'}" for c in bad)]
    title, check = entry.title.replace("{detail}", HARD[recipe]), entry.next_check.replace("{detail}", recipe)
    culprit = next((row.name for row in seen.rows if row.status == "culprit"), wrong[0])
    return Finding(entry.id, title, "defect", culprit, None, lines, "open", "medium", check, None, 60.0)
