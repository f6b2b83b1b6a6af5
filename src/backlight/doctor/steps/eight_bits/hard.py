"""Inputs on which ways of scaling differ: outliers, a common part of keys, a dominant key, uneven blocks and heads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.catalogue import about
from backlight.doctor.defects.e4m3 import BLOCK
from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps import convention, hard_inputs
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.eight_bits import naming
from backlight.doctor.steps.look import Look, look
from backlight.doctor.steps.sheet import Sheet
from backlight.problems.problem import Problem

LENGTH, TILE = 2 * BLOCK, 64
OFFSET, APART, DOMINANT = 8.0, 2.0**7, 10.5
COARSE = "e4m3-coarse"
SHARED = {"tensor": "the whole tensor", "entry": "all heads of a batch entry"}
Change = Callable[[Call], dict[str, Tensor]]


def offset(call: Call) -> dict[str, Tensor]:
    """All keys share a part that is larger than what tells them apart."""
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(call.k.shape[-1], generator=generator).sign() * OFFSET
    return {"k": (call.k.float() + common.to(call.k.device)).to(call.k.dtype)}


def uneven(call: Call) -> dict[str, Tensor]:
    """Blocks of q and k, and columns of v, that are twice or more as large as their neighbours."""

    def blocks(x: Tensor) -> Tensor:
        return x * 2.0 ** (torch.arange(x.shape[2], device=x.device) // BLOCK % 2)[:, None].to(x.dtype)

    columns = 2.0 ** (torch.arange(call.v.shape[3], device=call.v.device) % 4)
    return {"q": blocks(call.q), "k": blocks(call.k), "v": call.v * columns.to(call.v.dtype)}


def apart(call: Call) -> dict[str, Tensor]:
    """The first head has a large q and a small k, all others the reverse: no scale suits both; scores stay."""

    def units(x: Tensor, first: int, sign: int) -> Tensor:
        own = torch.where(torch.arange(x.shape[1], device=x.device) < first, APART, 1 / APART) ** sign
        return x * own[:, None, None].to(x.dtype)

    return {"q": units(call.q, call.group, 1), "k": units(call.k, 1, -1)}


def dominated(call: Call) -> dict[str, Tensor]:
    """One key weighs 2^10 times as much as any other and has a v of 0: o is what the others weigh together."""
    pull = (DOMINANT * math.log(2) / (call.scale * call.q.shape[-1])) ** 0.5
    q, k, v = call.q + pull, call.k.clone(), call.v.clone()
    k[:, :, 0], v[:, :, 0] = pull, 0
    return {"q": q, "k": k, "v": v}


# recipe, what is changed, length, words; a dominant key is met in one tile with all others, whatever the order of tiles
RECIPES: dict[str, tuple[str, Change | None, int, str]] = {
    "offset": ("gaussian", offset, LENGTH, "keys with a large common part"),
    "uneven": ("gaussian", uneven, LENGTH, "blocks and columns of different sizes"),
    "apart": ("gaussian", apart, LENGTH, "heads of different units"),
    "dominated": ("gaussian", dominated, TILE, "a dominant key"),
    "outliers": ("outliers", None, LENGTH, "outliers in q and k"),
}


def run(sheet: Sheet, bench: Bench) -> None:
    """One probe a recipe; a finding for each defect that these inputs show and the subject's own do not."""
    for name, (recipe, change, length, words) in RECIPES.items():
        if any(f.severity == "defect" for f in sheet.findings):
            return
        problem = drawn(bench.problem, recipe, change, length)
        if problem is None:
            sheet.probes.append(Probe(f"8 bits, {name}", None, "no such inputs for packed sequences and masks"))
            continue
        seen = looked_at(bench, problem)
        found = naming.finding(problem, seen.known, seen.comparisons, chosen=True)
        if found is not None and found.id == COARSE:
            _as_known(sheet, found, name)
        sheet.probes.append(Probe(f"8 bits, {name}", found is None or found.severity == "note", _words(seen, words)))
        if found is not None and found.id not in {f.id for f in sheet.findings}:
            found.evidence.insert(0, f"shown by {words}, on which the rest of this evidence was taken")
            found.explained = None
            found.score = min(found.score, 40.0) if found.severity == "precision" else found.score
            sheet.add(found)


def _as_known(sheet: Sheet, found: Finding, name: str) -> None:
    """A kernel of another design than our mutants': what the probe of scales saw names it, or it is worth a note."""
    group = next((probe.data.get("group") for probe in sheet.probes if probe.name == "scale group"), None)
    if name != "apart" or group not in SHARED:
        found.severity, found.score = "note", 1.0
        return
    entry = about("e4m3-one-scale")
    found.id, found.title, found.stage = entry.id, entry.title.replace("{detail}", SHARED[group]), entry.stage
    found.next_check = entry.next_check


def drawn(problem: Problem, recipe: str, change: Change | None, length: int) -> Problem | None:
    made = hard_inputs.drawn(problem, recipe, length, length)
    if made is None:
        return None
    changed: dict[str, Any] = {} if change is None else change(made.call)
    call = replace(made.call, **changed, _segments=None)
    return made.replace(call=call, arithmetic=problem.arithmetic)


def looked_at(bench: Bench, problem: Problem) -> Look:
    values = convention.natural_lse(bench.subject, problem, bench.run(problem=problem).values, [])
    convention.fill_empty_rows(problem, values)
    return look(problem, values)


def _words(seen: Look, words: str) -> str:
    o = seen.comparisons["o"]
    return f"o is off by {100 * o.relative:.2g} % on {words}: {o.rho_b:.2f} x the error of e4m3 with scales of blocks"
