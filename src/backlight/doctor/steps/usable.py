"""Inputs about which nothing can be said, whatever the subject makes of them."""

from __future__ import annotations

import torch

from backlight.problems.axes import tensors_of
from backlight.problems.problem import Problem


def unjudgeable(problem: Problem) -> str:
    """Why nothing computed from these inputs can be judged: one sentence, or ''."""
    return _not_finite(problem) or _overflowing(problem)


def _not_finite(problem: Problem) -> str:
    call, found = problem.call, []
    for name, x in (tensors_of(call) | {"do": problem.dy}).items():
        if bool(torch.isfinite(x).all()):
            continue
        nan, wrong = int(torch.isnan(x).sum()), (~torch.isfinite(x)).nonzero()
        kinds = [f"{count} {word}" for count, word in ((nan, "NaN"), (len(wrong) - nan, "infinite")) if count]
        found.append(f"{name} has {' and '.join(kinds)} of {x.numel()} values, the first at {wrong[0].tolist()}")
    return f"the inputs hold values that are not finite: {'; '.join(found)}" if found else ""


def _overflowing(problem: Problem) -> str:
    """Finite inputs on which every kernel with fp32 sums leaves the range of its numbers: that is not the subject's doing."""
    if problem.call.q.dtype == torch.float64:
        return ""
    for name in ("y", "dq", "dk", "dv"):
        count = int((~torch.isfinite(problem.flashlike[name].to(problem.call.q.dtype))).sum())
        if count:
            word, dtype = "o" if name == "y" else name, str(problem.call.q.dtype)[6:]
            return f"the inputs are too large for {dtype}: a textbook kernel gets {count} values of {word} that are not finite"
    return ""
