"""Step 0: which layout the subject reads, and which logarithm its lse is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backlight.doctor.compare import compare
from backlight.doctor.inputs import Problem
from backlight.doctor.subject import CouldNotRun, Observed, Subject
from backlight.spec import LN2, LOG2E

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError)
# how close a fitted (a, b) must be to a known convention
TOLERANCE = 1e-3


def settle(subject: Subject, problem: Problem, notes: list[str]) -> tuple[Subject, Observed]:
    """The subject with its layout decided, and its first answer: layouts are told apart by o alone."""
    if subject.layout != "auto":
        return subject, subject.run(problem.call, problem.dy)
    errors, best = [], None
    for name in ("packed", "BHSD", "BSHD") if problem.call.varlen else ("BHSD", "BSHD", "packed"):
        candidate = subject.with_layout(name)
        try:
            forward = candidate.run(problem.call)
        except REFUSALS as error:
            errors.append(f"{name}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}")
            continue
        if forward["o"].shape != problem.truth.y.shape:
            errors.append(f"{name}: o has shape {tuple(forward['o'].shape)}, expected {tuple(problem.truth.y.shape)}")
            continue
        score = compare("o", forward["o"], problem).relative
        best = (score, candidate) if best is None or score < 0.5 * best[0] else best
        if score <= 0.05:
            break
    if best is None:
        raise CouldNotRun("the subject ran in no layout; " + "; ".join(errors))
    chosen = best[1]
    if chosen.layout != "BHSD":
        notes.append(f"layout {chosen.layout}, found by matching o")
    return chosen, chosen.run(problem.call, problem.dy)


CONVENTIONS = {"natural": (1.0, 0.0), "base 2": (LOG2E, 0.0)}


def natural_lse(subject: Subject, problem: Problem, values: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """The values with lse turned into natural logarithms where a known convention explains it."""
    found = dict(values)
    if "lse" not in found or found["lse"].shape != problem.truth.lse.shape:
        found.pop("lse", None)
        return found
    a, b = fit(found["lse"], problem.truth.lse) if subject.lse == "auto" else subject.lse  # type: ignore[misc]
    known = next((n for n, (x, y) in CONVENTIONS.items() if abs(a - x) <= TOLERANCE * x and abs(b - y) <= 0.01), None)
    scale = problem.call.scale
    if known is None and abs(a * scale - 1) <= TOLERANCE and abs(b) <= 0.01:
        known, a = "divided by the softmax scale", 1 / scale
    if known is None and subject.lse == "auto":
        if abs(a - 1) > TOLERANCE or abs(b) > 0.01:
            notes.append(f"lse fits {a:.4g} x lse + {b:.3g}: no convention we know")
        return found
    if known not in (None, "natural") or subject.lse != "auto":
        notes.append(f"lse convention: {known or subject.lse}")
        exact = {"base 2": 1 / LN2}.get(known or "", a)
        found["lse"] = (found["lse"].double() - (b if subject.lse != "auto" else 0.0)).div(exact).to(found["lse"].dtype)
    return found


def fit(lse: Tensor, truth: Tensor) -> tuple[float, float]:
    """(a, b) of lse = a * truth + b over finite rows, least squares."""
    usable = torch.isfinite(lse) & torch.isfinite(truth)
    x, y = truth[usable].double(), lse[usable].double()
    if x.numel() < 2 or float(x.var()) == 0:
        return 1.0, 0.0
    a = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return a, float(y.mean()) - a * float(x.mean())


