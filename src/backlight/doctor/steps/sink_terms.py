"""Terms of dsink that are rounded to 16 bits before they are summed, at `full` in 16 bits.

Rounding has no direction, so on ordinary inputs thousands of rows are needed before the sum shows it. Here all terms err to one
side: scores and sink are 0, so a row of n keys has the sink's weight 1 / (n + 1); one value is 2 and the others are 1, so that
o and delta are 1 exactly, and dO is 0 but in rows whose 1 / (n + 1) is rounded up. What is summed in fp32 stays right.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import about
from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.sheet import Sheet
from backlight.problems.problem import Problem
from backlight.reference import oracle
from backlight.spec import AttentionSpec

LENGTHS = tuple(range(64, 257, 16))
# in eps: which errors of a term are used. Weights that are rounded up by more would move o as well, which is no fault of dsink
LEAST, MOST = 0.125, 0.45
# share of the error of rounded terms from which on they are rounded
SEEN = 0.5


def run(sheet: Sheet, bench: Bench) -> None:
    call = bench.problem.call
    if call.sink is None or not bench.problem.sixteen_bit or bench.problem.arithmetic is not None or bench.subject.forward_only:
        return
    if call.varlen or call.rows is not None or set(call.spec.terms) != {"sink"} or call.spec.left is not None or bench.built_in:
        sheet.probes.append(
            Probe("terms of dsink", None, "packed sequences, windows, masks and other terms have no such inputs")
        )
        return
    trial = leaning(bench.problem)
    if trial is None or any(row.status != "ok" for row in sheet.rows):
        return
    out = bench.subject.run(trial.call, trial.dy)
    if "dsink" not in out:
        return
    found, truth = out["dsink"].double(), oracle(trial.call, trial.dy, keep=("dsink",)).dsink
    would = lean_of_rounded(trial)
    off = float(((found - truth) / truth).mean())
    coarse = out["dsink"].dtype in (torch.float16, torch.bfloat16)
    words = f"off by {off:+.2g} of itself where rounded terms would be by {would:+.2g}"
    if coarse:
        sheet.probes.append(Probe("terms of dsink", None, f"dsink is returned in 16 bits: {words}"))
        return
    rounded = not abs(off) <= SEEN * would
    if rounded:
        entry, mechanism = about("dsink-rounded"), "established (the probe shows it directly)"
        lines = [f"terms of dsink: {words}"]
        sheet.add(
            Finding(
                entry.id, entry.title, "precision", entry.stage, None, lines, mechanism, "high", entry.next_check, None, 40.0
            )
        )
    sheet.probes.append(Probe("terms of dsink", not rounded, words, data={"lean": off, "lean of rounded terms": would}))


def leaning(problem: Problem) -> Problem | None:
    """The inputs, for the mask of a call; None where none of the lengths has enough such rows."""
    call = problem.call
    length = next((n for n in LENGTHS if bool(_rows(call.spec, n, call.q.dtype).any())), None)
    if length is None:
        return None
    heads, kv_heads, d, dv = call.q.shape[1], call.k.shape[1], call.q.shape[3], call.v.shape[3]
    v = call.v.new_ones(1, kv_heads, length, dv)
    v[:, :, 0] = 2
    dy = call.q.new_zeros(1, heads, length, dv)
    rows = _rows(call.spec, length, call.q.dtype).nonzero().flatten().to(dy.device)
    dy[:, :, rows, rows % dv] = 1
    q, k = call.q.new_zeros(1, heads, length, d), call.k.new_zeros(1, kv_heads, length, d)
    assert call.sink is not None
    trial = replace(call, q=q, k=k, v=v, sink=torch.zeros_like(call.sink), _segments=None)
    return Problem(trial, dy, None, "leaning terms", problem.seed)


def lean_of_rounded(trial: Problem) -> float:
    """How much too large dsink is where its terms are rounded to the dtype of the inputs."""
    length, dtype = trial.call.q.shape[2], trial.call.q.dtype
    exact, rounded = (x[_rows(trial.call.spec, length, dtype)].sum() for x in _terms(trial.call.spec, length, dtype))
    return float(rounded / exact) - 1


def _terms(spec: AttentionSpec, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """1 / (n + 1) of every row, exactly and rounded."""
    exact = 1 / (spec.visible_counts(length, length).double() + 1)
    return exact, exact.to(dtype).double()


def _rows(spec: AttentionSpec, length: int, dtype: torch.dtype) -> Tensor:
    """Rows [S] whose terms are rounded up by a good part of a unit in the last place."""
    exact, rounded = _terms(spec, length, dtype)
    lean, eps = rounded / exact - 1, torch.finfo(dtype).eps
    return (lean >= LEAST * eps) & (lean <= MOST * eps)
