"""Parts of the keys, the steps of a ring or the splits of a kernel, that do not become one softmax."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect, plain_softmax
from backlight.doctor.defects.mutants import Mutant, Stages
from backlight.doctor.defects.rescaling import lengths_of_parts
from backlight.reference import STAGES

# exp of more than this is no number of fp32
OVERFLOWS = 88.73
LONG = {"shape": (1, 2, 128, 32)}


def _normalised(length: int, share: bool) -> Stages:
    """Weights that sum to 1 in every part of the keys, and a ds of the delta of the part, or of the row."""

    def p(s: Tensor) -> Tensor:
        return torch.cat([torch.softmax(part, dim=1).nan_to_num(0.0) for part in s.split(length, dim=1)], dim=1)

    def ds(p: Tensor, m: Tensor, dp: Tensor) -> Tensor:
        w = p * m
        own = [
            (a * b).sum(dim=1, keepdim=True).expand_as(a) for a, b in zip(*(x.split(length, 1) for x in (w, dp)), strict=True)
        ]
        return w * (dp - torch.cat(own, dim=1))

    return {"p": p, "ds": ds} if share else {"p": p}


def _own_softmaxes(call: Call) -> list[Mutant]:
    found = []
    for length, words in lengths_of_parts(call):
        found.append(Mutant(backward=_normalised(length, True), detail=f"lse and delta of its own keys alone ({words})"))
        found.append(Mutant(backward=_normalised(length, False), detail=f"lse of its own keys alone ({words})"))
    return found


def updated(length: int, detail: str) -> Mutant:
    """lse + log(1 + exp(its - lse)) in fp32, part after part: infinite where a part lies far above those before it."""

    def rows(s: Tensor) -> tuple[Tensor, Tensor]:
        """Which rows have overflowed after the last part, and which had before it."""
        whole = s.new_full(s.shape[:1], -torch.inf)
        gone = before = torch.zeros_like(whole, dtype=torch.bool)
        for part in s.split(length, dim=1):
            its, before = torch.logsumexp(part, dim=1), gone
            gone = gone | ((its - whole > OVERFLOWS) & (whole > -torch.inf))
            whole = torch.logaddexp(whole, its)
        return gone, before

    def lse(s: Tensor) -> Tensor:
        return STAGES["lse"].compute(s, None).masked_fill(rows(s)[0], torch.inf)

    def p(s: Tensor) -> Tensor:
        gone, before = rows(s)
        right = STAGES["p"].compute(s, STAGES["lse"].compute(s, None))
        return right.masked_fill(gone[:, None], 0).masked_fill(before[:, None], torch.nan)

    return Mutant(forward={"lse": lse, "p": p}, detail=detail)


DEFECTS = [
    Defect(
        "part-softmax-backward",
        "the backward takes every part of the keys for all of them: each has the {detail}",
        "the backward of a ring's step, or of a split, is handed what its own forward returned, not the merged o and lse",
        "p (bwd)",
        "I2 and I3 fail; o is fine; the backward's weights sum to 1 in each part, and to the number of parts in a row",
        "Run in one process, or with one split: the comparison must turn healthy.",
        family="loops",
        confirm="mutant; tomography of the backward's weights",
        needs=plain_softmax,
        variants=_own_softmaxes,
        demo=CAUSAL | LONG,
    ),
    partial(Defect, family="lse", needs=plain_softmax, of_forward=True)(
        "merge-difference",
        "exp of a difference overflows where a part of the keys lies 89 above those before it: lse is updated by "
        "log(1 + exp(its - lse)) ({detail})",
        "lse = lse + log(1 + exp(lse_i - lse)) for the part i; max + log(exp(lse - max) + exp(lse_i - max)) is needed",
        "lse",
        "lse is infinite and o is 0 or NaN in rows whose later keys score far above the earlier ones; others are right",
        "Take the parts in the other order: the rows must turn healthy.",
        confirm="mutant, on inputs whose scores rise along the keys",
        variants=lambda call: [updated(length, words) for length, words in lengths_of_parts(call)],
        demo={"recipe": "rising"} | LONG,
    ),
]
