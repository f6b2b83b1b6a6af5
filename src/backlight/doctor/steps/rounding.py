"""Where a 16-bit kernel rounds, by probes that put o on ties of the format (docs/math.md, eq. 105-107).

None of this is a defect by itself: every kernel that stores o in 16 bits and takes delta from it has the bias of eq. 105. It is
told, because training has failed there.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.catalogue import about
from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.sheet import Sheet
from backlight.doctor.steps.signed import lean
from backlight.problems import inputs
from backlight.problems.problem import Problem
from backlight.reference import oracle
from backlight.spec import LN2

# one tile of keys; all but two of them together have the weight 2^-13 of a top key
KEYS, TAIL = 64, 13
# pairs of v that are drawn: half of them are ties, give or take
PAIRS = 1024
# (107): share of o that is not the oracle rounded once
TWICE = 0.02
# (105), of bf16; other formats in proportion to their eps
BIASED, FROM_16_BITS, FP32 = 2e-3, 2e-4, 1e-5
# (106): lengths, and what fp32 sums stay below, per key
LENGTHS, LENGTHS_ON_GPU, SLOPE = (512, 2048, 8192), (512, 2048, 8192, 32768), 1e-6
BF16 = torch.finfo(torch.bfloat16).eps


def run(sheet: Sheet, bench: Bench) -> None:
    if not bench.problem.sixteen_bit or not bench.problem.call.scale > 0:
        return
    call = bench.problem.call
    if call.varlen or call.rows is not None or call.spec.terms or call.spec.softcap is not None or call.spec.left is not None:
        sheet.probes.append(Probe("ties", None, "packed sequences, windows, masks, caps and learned terms have no such inputs"))
        return
    if call.q.shape[3] < 4 or any(row.status != "ok" for row in sheet.rows):
        return
    ties = bench.problem.arithmetic is None and not bench.subject.forward_only
    looks = (_ties, _growth) if ties else (_growth,)
    sheet.probes += [found for look in looks if (found := look(sheet, bench)) is not None]


# --- ties (105, 107) ---------------------------------------------------------------------------------------------------------


def tie_problem(problem: Problem) -> Problem:
    """Rows see two equal keys on top of 62 of weight 2^-13 in all: o lies on a tie of the format for half of all pairs of v.

    As many rows as keys, and the two first: whatever a causal mask is aligned to, all rows but the first see both.
    """
    call = problem.call
    hq, hkv, d, dv = call.q.shape[1], call.k.shape[1], call.q.shape[3], call.v.shape[3]
    generator = torch.Generator().manual_seed(problem.seed + 107)
    entries = max(2, -(-PAIRS // (hkv * dv)))
    q, k = torch.zeros(entries, hq, KEYS, d), torch.zeros(entries, hkv, KEYS, d)
    # one channel carries the scores
    q[..., 0] = 8.0
    k[..., 0] = -(TAIL * LN2 + math.log(KEYS - 2)) / (8 * call.scale)
    k[:, :, :2, 0] = 0.0
    v = torch.zeros(entries, hkv, KEYS, dv)
    v[:, :, :2] = 1 + torch.rand(entries, hkv, 2, dv, generator=generator)
    dy = torch.rand(entries, hq, KEYS, dv, generator=generator) + 0.5
    q, k, v, dy = (x.to(call.q.dtype).to(call.q.device) for x in (q, k, v, dy))
    return Problem(replace(call, q=q, k=k, v=v, _segments=None), dy, None, "ties", problem.seed)


def _ties(sheet: Sheet, bench: Bench) -> Probe | None:
    ties = tie_problem(bench.problem)
    out = bench.subject.run(ties.call, ties.dy)
    truth = oracle(ties.call, ties.dy, keep=("y", "delta"))
    wrong = float((out["o"] != truth.y.to(out["o"].dtype)).double().mean())
    bias = delta_bias(out["dk"], ties.call, truth.delta)
    unit = bench.problem.eps / BF16
    words = f"{100 * wrong:.2g} % of o are not the right value rounded once"
    where = "taken from a 16-bit o" if abs(bias) > FROM_16_BITS * unit else "kept in fp32" if abs(bias) < FP32 * unit else ""
    words += f"; delta {where or 'is off'} ({bias:+.2g} of itself on ties)"
    data = {"rounded otherwise": wrong, "bias of delta": bias}
    if abs(bias) > BIASED * unit:
        sheet.add(_finding("delta-biased", f"ties: {words}"))
    if wrong > TWICE and not any(f.id.startswith("cut-") for f in sheet.findings):
        sheet.notes.append(
            f"o is rounded more than once, or not relative to the row maximum, a matter of the last bit: {words}"
        )
    return Probe("ties", True, words, data=data)


def delta_bias(dk: Tensor, call: Call, delta: Tensor) -> float:
    """(105): all q are one q_0, so q_0 . sum_j dk_j / (scale |q_0|^2) is the sum of all ds, minus the errors of delta."""
    q0 = call.q[:, :1, :1].double()
    sums = (dk.double().sum(dim=(1, 2)) * q0[:, 0, 0]).sum(dim=-1) / (call.scale * (q0 * q0).sum(dim=(1, 2, 3)))
    return float(sums.sum() / delta.abs().sum().clamp(min=1e-300))


# --- growth (106) ------------------------------------------------------------------------------------------------------------


def _growth(sheet: Sheet, bench: Bench) -> Probe | None:
    """v = 1 + noise and more and more keys: sums in fp32 do not drift."""
    call = bench.problem.call
    if call.spec.right is not None:
        return Probe("growth", None, "under a causal mask few rows see many keys")
    lengths = LENGTHS_ON_GPU if call.q.device.type == "cuda" else LENGTHS
    drift = []
    for length in lengths:
        problem = inputs.make(
            call.spec, (1, call.group, 64, call.q.shape[3]), kv_heads=1, sk=length, dv=call.v.shape[3],
            dtype=call.q.dtype, seed=bench.problem.seed, device=call.q.device,
        )  # fmt: skip
        grown = replace(problem.call, v=(1 + 0.1 * problem.call.v.float()).to(call.v.dtype))
        truth = oracle(grown, keep=("y",)).y
        drift.append(lean(bench.subject_for(grown).run(grown)["o"], truth)[0])
    slope = (drift[-1] - drift[0]) / (lengths[-1] - lengths[0])
    words = f"o leans by {drift[0]:+.1g} at {lengths[0]} keys and {drift[-1]:+.1g} at {lengths[-1]}: {slope:+.1g} per key"
    if abs(slope) > SLOPE:
        sheet.add(_finding("sum-drifts" if bench.problem.arithmetic is None else "e4m3-sum-cut", f"growth: {words}"))
    return Probe("growth", abs(slope) <= SLOPE, words, data={"lengths": list(lengths), "lean": drift})


def _finding(name: str, line: str) -> Finding:
    entry, mechanism = about(name), "established (the probe shows it directly)"
    return Finding(
        name, entry.title, "precision", entry.stage, None, [line], mechanism, "high", entry.next_check, None, 40.0
    )  # fmt: skip
