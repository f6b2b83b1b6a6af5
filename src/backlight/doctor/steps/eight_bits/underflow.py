"""Gradients of scores that an 8-bit backward flushes to 0: rms errors do not see them, the sum of what is lost does."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from backlight.doctor.report.model import Probe
from backlight.doctor.steps.bench import Bench, probe
from backlight.doctor.steps.eight_bits.drawing import REFUSED, has_own_lengths, of_kind
from backlight.reference import oracle

KEYS = 256
# share of |ds| where the kernel has 0: a scale of tiles or heads loses 5e-4 at most, one 256 times too large up to a tenth
LIMIT = 2e-3


@probe("underflow of ds")
def underflow(bench: Bench) -> Probe:
    """Rows of q are unit vectors, so that dk of a key holds its column of ds, one value a channel."""
    call, problem = bench.problem.call, bench.problem
    if has_own_lengths(call):
        return Probe("", None, REFUSED)
    if call.spec.softcap is not None or "dk" not in bench.base:
        return Probe("", None, "needs dk, and scores without a cap")
    width = call.q.shape[3]
    made = of_kind(problem, (1, call.q.shape[1], width, width), KEYS)
    q = torch.zeros_like(made.call.q)
    # of a group of heads that share keys one sends gradients
    q[:, :: call.group] = torch.eye(width, dtype=q.dtype, device=q.device) * 2.0 ** round(math.log2(width) / 2)
    unit = replace(made.call, q=q, _segments=None)
    share = lost(bench.subject_for(unit).run(unit, made.dy)["dk"], oracle(unit, made.dy, keep=("ds",)).ds[:, :: call.group])
    words = f"{100 * share:.2g} % of |ds| is where dk has 0"
    return Probe("", share <= LIMIT, words, data={"share": share, "finding": "e4m3-ds-underflow"})


def lost(dk: Tensor, ds: Tensor) -> float:
    """The share of |ds| [B, Hkv, D, Sk] at places where dk [B, Hkv, Sk, D] is 0."""
    size = ds.abs()
    return float(size.masked_fill(dk.mT != 0, 0).sum() / size.sum().clamp(min=1e-300))
