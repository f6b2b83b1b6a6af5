"""Step 0: which layout the subject reads, and which logarithm its lse is."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backlight.doctor.steps.compare import compare
from backlight.doctor.subject.subject import Observed, Subject
from backlight.doctor.subject.trouble import CouldNotRun
from backlight.problems.problem import Problem
from backlight.spec import LOG2E

REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, AssertionError)
# the layout is found when o is off by less than MATCHES. A defective kernel in the right layout still RESEMBLES the answer;
# tensors read in the wrong layout have next to no correlation with it
MATCHES, RESEMBLES = 0.05, 0.5
# how close a fitted (a, b) must be to a known convention
TOLERANCE, OFFSET = 1e-3, 0.01


def settle(subject: Subject, problem: Problem, notes: list[str]) -> tuple[Subject, Observed]:
    """The subject with its layout decided, and its first answer: layouts are told apart by o alone."""
    if subject.layout != "auto":
        return subject, subject.run(problem.call, problem.dy)
    errors, best = {}, None
    names = ("packed", "BHSD", "BSHD") if problem.call.varlen else ("BHSD", "BSHD", "packed")
    for name in names:
        candidate = subject.with_layout(name)
        try:
            forward = candidate.run(problem.call)
        except REFUSALS as error:
            errors[name] = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            continue
        if forward["o"].shape != problem.truth.y.shape:
            errors[name] = f"o has shape {tuple(forward['o'].shape)}, expected {tuple(problem.truth.y.shape)}"
            continue
        score = compare("o", forward["o"], problem).relative
        best = (score, candidate, forward["o"]) if best is None or score < 0.5 * best[0] else best
        if score <= MATCHES:
            break
    if best is None and len(set(errors.values())) == 1:
        raise CouldNotRun(errors[names[0]])
    if best is None:
        raise CouldNotRun("the subject ran in no layout; " + "; ".join(f"{name}: {said}" for name, said in errors.items()))
    if names[0] in errors and not correlation(best[2], problem.truth.y) >= RESEMBLES:
        # the kernel refused its own layout; that it accepts the shapes of another one says nothing about it
        raise CouldNotRun(f"{errors[names[0]]} (layout {names[0]}; it runs as {best[1].layout}, on something else)")
    chosen = best[1]
    if chosen.layout != "BHSD":
        notes.append(f"layout {chosen.layout}, found by matching o")
    return chosen, chosen.run(problem.call, problem.dy)


def correlation(x: Tensor, truth: Tensor) -> float:
    """Cosine of the angle between two tensors; 0 where there is nothing finite to compare."""
    usable = torch.isfinite(x) & torch.isfinite(truth)
    a, b = x[usable].double(), truth[usable].double()
    return float((a @ b) / (a.norm() * b.norm()).clamp(min=1e-300))


CONVENTIONS = {"natural": 1.0, "base 2": LOG2E}


def natural_lse(subject: Subject, problem: Problem, values: Mapping[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    """The values with lse turned into natural logarithms where a known convention explains it."""
    found = dict(values)
    if "lse" not in found or found["lse"].shape != problem.truth.lse.shape:
        found.pop("lse", None)
        return found
    if not isinstance(subject.lse, str):
        a, b = subject.lse
        notes.append(f"lse convention: {a:.4g} x lse + {b:.4g}, as declared")
        found["lse"] = (found["lse"].double() - b).div(a).to(found["lse"].dtype)
        return found
    a, b = fit(found["lse"], problem.truth.lse)
    choices = CONVENTIONS | ({"divided by the softmax scale": 1 / problem.call.scale} if problem.call.scale else {})
    known = next((n for n, factor in choices.items() if abs(a - factor) <= TOLERANCE * factor and abs(b) <= OFFSET), None)
    if known is None:
        notes.append(f"lse fits {a:.4g} x lse + {b:.3g}: no convention we know")
    elif known != "natural":
        notes.append(f"lse convention: {known}")
        found["lse"] = found["lse"].double().div(choices[known]).to(found["lse"].dtype)
    return found


def fill_empty_rows(problem: Problem, values: dict[str, Tensor]) -> str:
    """Puts -inf, our convention, into lse of rows that see nothing; what stood there, or '' when nothing had to change.

    NaN is no convention and stays.
    """
    if "lse" not in values:
        return ""
    lse, empty = values["lse"], problem.truth.lse == -torch.inf
    other = empty & (lse != -torch.inf) & ~torch.isnan(lse)
    if not bool(other.any()):
        return ""
    values["lse"] = lse.masked_fill(other, -torch.inf)
    return f"{float(lse[other][0]):.4g}"


def fit(lse: Tensor, truth: Tensor) -> tuple[float, float]:
    """(a, b) of lse = a * truth + b over finite rows, least squares."""
    usable = torch.isfinite(lse) & torch.isfinite(truth)
    x, y = truth[usable].double(), lse[usable].double()
    if x.numel() < 2 or float(x.var()) == 0:
        return 1.0, 0.0
    a = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
    return a, float(y.mean()) - a * float(x.mean())
