"""Intermediates that a kernel shows of itself (s, p, delta, dp, ds) as rows of the report, beside its outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backlight.doctor.report.model import StageRow
from backlight.doctor.report.words import counted
from backlight.problems.problem import Problem
from backlight.reference import eager, oracle

SHOWN = {"s": "s", "p": "p", "p (bwd)": "p", "delta": "delta", "dp": "dp", "ds": "ds"}
# beyond this many scores the matrices of all heads do not fit beside each other
MOST_CELLS = 16 * 1024 * 1024
# times the error of plain PyTorch, and units in the last place for what it happens to hit exactly
ROOM, ULPS = 4.0, 8.0


def rows(problem: Problem, values: Mapping[str, Tensor], local: Mapping[str, Tensor]) -> list[StageRow]:
    """One row a quantity; a name that the oracle does not have, or another shape, is nothing we can judge."""
    call = problem.call
    cells = call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2]
    seen = {name: values[name].detach().double() for name in SHOWN if isinstance(values.get(name), Tensor)}
    if not seen or cells > MOST_CELLS:
        return []
    names = tuple(dict.fromkeys(["p", *(SHOWN[name] for name in seen)]))
    truth, yardstick = oracle(call, problem.dy, keep=names), eager(call, problem.dy, keep=names)
    found: list[StageRow] = []
    for name, x in seen.items():
        right, plain = truth[SHOWN[name]], yardstick[SHOWN[name]].double()
        if x.shape == right.shape:
            found.append(_row(name, x, right, plain, local.get(SHOWN[name]), truth["p"] == 0, ULPS * problem.eps, found))
    by_name = {row.name: row for row in found}
    if "delta" in by_name and "ds" in by_name and by_name["ds"].status == "ok" != by_name["delta"].status:
        by_name["delta"].status, by_name["delta"].note = "ok", "not the oracle's, and ds is right: another convention"
    return found


def _row(
    name: str,
    x: Tensor,
    right: Tensor,
    plain: Tensor,
    local: Tensor | None,
    hidden: Tensor,
    slack: float,
    before: list[StageRow],
) -> StageRow:
    usable = torch.isfinite(right)
    # a score or a dp that nobody may see can be anything; a weight and its ds must be 0 there
    hidden = hidden if x.shape == hidden.shape else torch.zeros_like(usable)
    must_be_zero = name in ("p", "p (bwd)", "ds")
    usable = usable if must_be_zero else usable & ~hidden
    strange = usable & ~torch.isfinite(x)
    leaked = hidden & (x != 0) if must_be_zero else torch.zeros_like(usable)
    judged = usable & ~strange

    def off(from_: Tensor, of: Tensor = x, among: Tensor = judged) -> float:
        where = among & torch.isfinite(from_)
        return float((of - from_)[where].norm() / from_[where].norm().clamp(min=1e-300))

    limit = ROOM * off(right, plain) + slack
    gain = float((x * right)[judged].sum() / (right * right)[judged].sum().clamp(min=1e-300))
    row = StageRow(name, gain=gain, global_error=off(right), nonfinite=int(strange.sum()), note="shown by the kernel")
    if local is not None and local.shape == x.shape:
        row.local_error = off(local, among=judged & ~hidden)
    if not row.global_error <= limit or row.nonfinite or bool(leaked.any()):  # type: ignore[operator]
        own = row.local_error is None or not row.local_error <= limit
        guilty = any(other.status == "culprit" for other in before)
        row.status = "inherited" if not own else "suspect" if guilty else "culprit"
        row.note = f"off by {100 * row.global_error:.2g} % (a correct kernel: below {100 * limit:.2g} %)"  # type: ignore
        if bool(leaked.any()):
            row.note += f"; {counted(int(leaked.sum()), 'cell')} must be 0"
    return row
