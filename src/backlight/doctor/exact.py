"""Inputs for which every sum is exact in fp32 in any order (doctor.md 5.4).

q = 0 makes p = 1/n; only rows with n a power of two receive dO. v holds small odd integers in +- pairs around an integer mean,
dO is one-hot per row with an integer size that varies by row, k nearly cancels between its two halves: partial sums are large,
totals small. Harmless reordering then vanishes, a lost update or a 16-bit accumulator does not.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.inputs import Problem
from backlight.doctor.report.model import Probe
from backlight.doctor.subject import Subject
from backlight.reference import STAGES, Oracle, Stage, oracle

LENGTH = 256
SUMMANDS = STAGES | {
    "dq": Stage.of(lambda dx, k, scale: scale * (dx.abs() @ k.abs()), "dq"),
    "dk": Stage.of(lambda dx, q, scale: scale * (dx.abs().mT @ q.abs()), "dk"),
}
MEAN = 2.0


def applicable(call: Call) -> str:
    """Why the probe cannot run on this call; '' when it can."""
    if call.varlen or call.sink is not None or call.tau is not None or call.gate is not None:
        return "packed sequences and learned terms have no exact inputs"
    if not _power_of_two(call.scale):
        return f"the scale {call.scale:.4g} is not a power of two"
    return ""


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
    counts = call.spec.visible_counts(LENGTH, LENGTH)
    starts = call.spec.first_key(torch.arange(LENGTH), LENGTH, LENGTH)
    usable = (counts > 1) & (counts & (counts - 1) == 0) & (starts % 2 == 0)
    rows = usable.nonzero().flatten()
    sizes = 2.0 ** integers(0, 3, hq, rows.numel())
    columns = integers(0, dv, hq, rows.numel()).long()
    for h in range(hq):
        dy[0, h, rows, columns[h]] = sizes[h]
    q, k, v = (x.to(dtype).to(device) for x in (q, k, v))
    bias = None if call.bias is None else torch.zeros_like(call.bias)
    exact = replace(call, q=q, k=k, v=v, bias=bias, _segments=None)
    return Problem(exact, dy.to(dtype).to(device), None, "integer", problem.seed)


def exact_arithmetic(subject: Subject, problem: Problem) -> Probe:
    """Compare dq and dk with their exact values; a correct kernel has no mismatch."""
    reason = applicable(problem.call)
    if reason:
        return Probe("exact arithmetic", None, reason)
    wrong, total, worst = {}, 0, 0.0
    for which in ("dq", "dk"):
        trial = exact_problem(problem, which)
        out = subject.run(trial.call, trial.dy)[which].double()
        truth = oracle(trial.call, trial.dy, keep=(which,))[which]
        # p = exp2(-log2 n) and a scale folded into q are right to 1e-7 of each summand; 16-bit sums are far above that
        summands = Oracle(stages=SUMMANDS)(trial.call, trial.dy, keep=(which,))[which]
        slack = problem.eps * truth.abs() + 16 * torch.finfo(torch.float32).eps * summands
        off = (out - truth).abs() > slack
        total += off.numel()
        if bool(off.any()):
            wrong[which] = int(off.sum())
            worst = max(worst, float((out - truth).abs().max()) / (trial.call.scale * 100 / LENGTH))
    if wrong:
        words = ", ".join(f"{count} values of {name}" for name, count in wrong.items())
        return Probe(
            "exact arithmetic", False, f"{words} are not exact, off by up to {worst:.2g} contributions", data={"wrong": wrong}
        )
    return Probe("exact arithmetic", True, f"0 of {total} values differ")
