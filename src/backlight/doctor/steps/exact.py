"""Inputs for which every sum is exact in fp32 in any order.

q = 0 makes p = 1/n; only rows with n a power of two receive dO. v holds small odd integers in +- pairs around an integer mean,
dO is one-hot per row with an integer size that varies by row, k nearly cancels between its two halves: partial sums are large,
totals small. Harmless reordering then vanishes, a lost update or a 16-bit accumulator does not: its partial sums do not fit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.report.model import Probe
from backlight.doctor.subject.subject import Subject
from backlight.problems.problem import Problem, recast
from backlight.reference import STAGES, Oracle, Stage, oracle
from backlight.spec import LOG2E

LENGTH = 256
SUMMANDS = STAGES | {
    "dq": Stage.of(lambda dx, k, scale: scale * (dx.abs() @ k.abs()), "dq"),
    "dk": Stage.of(lambda dx, q, scale: scale * (dx.abs().mT @ q.abs()), "dk"),
}
MEAN = 2.0
# exp2 and log2 of real hardware, and a scale folded into q, move a summand by a few 1e-7 of itself; 16-bit sums are 100 x above
SLACK = 64 * torch.finfo(torch.float32).eps


def applicable(subject: Subject, call: Call) -> str:
    """Why the probe cannot run on this call; '' when it can."""
    if call.varlen or set(call.spec.terms) - {"bias"}:
        return "packed sequences and learned terms have no exact inputs"
    if subject.forward_only:
        return "it looks at dq and dk"
    if subject.built_in(call):
        return "a learned term that is built in cannot be left out"
    if not _power_of_two(call.scale) and not subject.takes("scale"):
        return f"the scale {call.scale:.4g} is not a power of two and cannot be chosen"
    if not _usable_rows(call).numel():
        return "no row sees a number of keys that is a power of two"
    return ""


def _usable_rows(call: Call) -> Tensor:
    """Rows whose weights are exact: 2, 4, 8, ... visible keys that begin at an even one, so that values come in pairs."""
    counts = call.spec.visible_counts(LENGTH, LENGTH)
    starts = call.spec.first_key(torch.arange(LENGTH), LENGTH, LENGTH)
    return ((counts > 1) & (counts & (counts - 1) == 0) & (starts % 2 == 0)).nonzero().flatten()


def exact_scale(scale: float) -> float:
    """The power of two nearest to a scale."""
    return math.copysign(2.0 ** round(math.log2(abs(scale))), scale) if scale else 1.0


def _power_of_two(x: float) -> bool:
    mantissa, _ = torch.frexp(torch.tensor(abs(x), dtype=torch.float64))
    return float(mantissa) == 0.5


def exact_problem(problem: Problem, which: str) -> Problem:
    """Inputs that test `which` ("dq": q = 0, "dk": k = 0) on B 1, the problem's heads and LENGTH positions."""
    call = problem.call
    hq, hkv, d, dv = call.q.shape[1], call.k.shape[1], call.q.shape[-1], call.v.shape[-1]
    dtype, device = call.q.dtype, call.q.device
    generator = torch.Generator().manual_seed(problem.seed + 17)

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=generator).double()

    half = LENGTH // 2
    odd = 2 * integers(0, 4, 1, hkv, half, dv) + 1
    v = torch.stack([odd, -odd], dim=3).flatten(2, 3) + MEAN
    first = integers(-100, 101, 1, hq if which == "dk" else hkv, half, d)
    moving = torch.cat([first, -first + integers(-1, 2, *first.shape)], dim=2)
    zero = torch.zeros(1, hkv if which == "dk" else hq, LENGTH, d, dtype=torch.float64)
    q, k = (zero, moving) if which == "dq" else (moving, zero)
    dy = torch.zeros(1, hq, LENGTH, dv, dtype=torch.float64)
    rows = _usable_rows(call)
    sizes = 2.0 ** integers(0, 3, hq, rows.numel())
    columns = integers(0, dv, hq, rows.numel()).long()
    for h in range(hq):
        dy[0, h, rows, columns[h]] = sizes[h]
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    bias = None if call.bias is None else torch.zeros_like(call.bias)
    spec = call.spec if _power_of_two(call.scale) else call.spec.replace(scale=exact_scale(call.scale))
    exact = replace(call, spec=spec, q=q, k=k, v=v, bias=bias, _segments=None)
    return Problem(exact, dy.to(dtype).to(device), None, "integer", problem.seed)


def exact_arithmetic(subject: Subject, problem: Problem) -> Probe:
    """Compare dq and dk with their exact values; a correct kernel has no mismatch."""
    reason = applicable(subject, problem.call)
    if reason:
        return Probe("exact arithmetic", None, reason)
    wrong: dict[str, int] = {}
    folded: list[str] = []
    sizes, worst = {}, 0.0
    for which in ("dq", "dk"):
        trial = exact_problem(problem, which)
        out = subject.run(trial.call, trial.dy)[which].double()
        truth = oracle(trial.call, trial.dy, keep=(which,))[which]
        summands = Oracle(stages=SUMMANDS)(trial.call, trial.dy, keep=(which,))[which]
        slack = problem.eps * truth.abs() + SLACK * summands
        off = (out - truth).abs() > slack
        sizes[which] = off.numel()
        if bool(off.any()) and not bool(_off_prescaled(out, trial, which, problem.eps, summands).any()):
            folded.append(which)
        elif bool(off.any()):
            wrong[which] = int(off.sum())
            worst = max(worst, float((out - truth).abs().max()) / (trial.call.scale * 100 / LENGTH))
    if wrong:
        words = ", ".join(f"{count} of {sizes[name]} values of {name}" for name, count in wrong.items())
        off_by = f"off by up to {worst:.2g} contributions"
        return Probe("exact arithmetic", False, f"not exact: {words}, {off_by}", data={"wrong": wrong})
    words = f"; {' and '.join(folded)} sum an operand that was scaled and rounded before, in fp32" if folded else ""
    return Probe("exact arithmetic", True, f"0 of {sum(sizes.values())} values differ{words}")


def _off_prescaled(out: Tensor, trial: Problem, which: str, eps: float, summands: Tensor) -> Tensor:
    """Values that differ also from exact sums over k (dq) or q (dk) times log2 e, rounded to the storage dtype.

    The scale of a trial is a power of two and rounds nothing, so log2 e is the one factor that kernels fold into an operand.
    """
    operand = "k" if which == "dq" else "q"
    stored = getattr(trial.call, operand)
    rounded = (stored.double() * LOG2E).to(stored.dtype).double() / LOG2E
    call = replace(recast(trial.call, torch.float64), **{operand: rounded})
    truth = oracle(call, trial.dy.double(), keep=(which,))[which]
    return (out - truth).abs() > eps * truth.abs() + SLACK * summands
