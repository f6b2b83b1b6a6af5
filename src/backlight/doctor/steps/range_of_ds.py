"""How far the gradients of fp16 kernels reach, at `full`: ds beyond 65504 where the scale would bring it back.

ds is rounded for its two products, by some kernels before the softmax scale and by others after it. Both are right; the first
kind makes infinities of a ds that the second still holds, which a large loss scale can meet. It is told, and no finding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from backlight.doctor.report.model import Probe
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.sheet import Sheet
from backlight.problems import inputs
from backlight.problems.problem import Problem
from backlight.reference import oracle

LARGEST = torch.finfo(torch.float16).max
# of the largest ds, and of what it is with the scale on it
BEYOND, WITHIN = 2.0, 0.6
LENGTH, SMALL = 64, 0.02


def run(sheet: Sheet, bench: Bench) -> None:
    call = bench.problem.call
    if call.q.dtype != torch.float16 or bench.problem.arithmetic is not None or bench.subject.forward_only:
        return
    if call.varlen or call.rows is not None or call.spec.terms or call.spec.softcap is not None or bench.built_in:
        sheet.probes.append(Probe("range of ds", None, "packed sequences, masks, caps and learned terms have no such inputs"))
        return
    if any(row.status != "ok" for row in sheet.rows):
        return
    trial = large(bench.problem)
    if trial is None:
        sheet.probes.append(Probe("range of ds", None, "the softmax scale is too large to bring such a ds back"))
        return
    out = bench.subject.run(trial.call, trial.dy)
    gone = [name for name in ("dq", "dk") if name in out and not bool(torch.isfinite(out[name]).all())]
    held = "of fp16 after the scale, or kept wider: it may exceed 65504"
    words = f"of fp16 before the scale: {' and '.join(gone)} overflow where |ds| exceeds 65504" if gone else held
    sheet.probes.append(Probe("range of ds", True, f"ds is {words}", data={"overflows": gone}))


def large(problem: Problem) -> Problem | None:
    """Scores near 0 and a ds beyond the range, by v and dO; with the scale it is within."""
    call = problem.call
    if not 0 < abs(call.scale) * BEYOND <= WITHIN:
        return None
    shape = (1, call.q.shape[1], LENGTH, call.q.shape[3])
    drawn = inputs.make(
        call.spec, shape, kv_heads=call.k.shape[1], dv=call.v.shape[3], dtype=torch.float32, seed=problem.seed,
        device=call.q.device,
    )  # fmt: skip
    near = replace(drawn.call, q=SMALL * drawn.call.q, k=SMALL * drawn.call.k, _segments=None)
    size = float((BEYOND * LARGEST / oracle(near, drawn.dy, keep=("ds",)).ds.abs().max()) ** 0.5)
    q, k, v, dy = (x.half() for x in (near.q, near.k, size * near.v, size * drawn.dy))
    trial = Problem(replace(near, q=q, k=k, v=v, _segments=None), dy, None, "large ds", problem.seed)
    reached = oracle(trial.call, trial.dy, keep=("y", "dq", "dk", "dv"))
    return trial if all(float(reached[name].abs().max()) < LARGEST / 2 for name in ("y", "dq", "dk", "dv")) else None
