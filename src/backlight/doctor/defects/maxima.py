"""Row maxima that do their work on ordinary scores only: a start value that stays, a merge that takes exp of a whole lse."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, always, keys_everywhere
from backlight.doctor.defects.mutants import Mutant

# below this a sum in fp32 has lost half of its digits
COARSE = 1e-41
# what stands for -inf where nobody expects scores so low
FINITE_STARTS = (1e3, 1e4, 5e4, 65504.0, 1e5)


def _in_fp32(x: Tensor) -> Tensor:
    """Numbers as fp32 holds them: infinite where they are too large, 0 where they are too small."""
    return x.float().to(x.dtype)


def started(start: float, guarded: bool, operand: torch.dtype = torch.float32) -> Mutant:
    """A running maximum that begins at a number, and stays there in rows of lower scores; weights meet v in `operand`."""

    def weights(s: Tensor) -> tuple[Tensor, Tensor]:
        maximum = s.amax(dim=-1, keepdim=True).clamp(min=start)
        return _in_fp32(torch.exp(s - maximum)), maximum

    def lse(s):
        w, maximum = weights(s)
        return maximum[:, 0] + torch.log(_in_fp32(w.sum(dim=-1)))

    def divisor(w: Tensor) -> Tensor:
        total = _in_fp32(w.sum(dim=-1, keepdim=True))
        return total.masked_fill(total == 0, 1) if guarded else total

    def p(s):
        w, _ = weights(s)
        return w.to(operand).to(w.dtype) / divisor(w)

    def o(s, v):
        w, _ = weights(s)
        total, w = divisor(w), w.to(operand).to(w.dtype)
        sums = w @ v
        # the last numbers that fp32 has stand far apart: each product falls on one of them
        coarse = (total[:, 0] < COARSE).nonzero().flatten()
        sums[coarse] = _in_fp32(w[coarse, :, None] * v).sum(dim=1)
        return sums / total

    return Mutant(forward={"lse": lse, "p": p, "o": o}, detail=f"starts at {start:g} or another number")


def counted_start(start: float) -> Mutant:
    """The start value has a weight: the sum begins at 1."""

    def lse(s):
        return torch.logsumexp(torch.cat([s, s.new_full((s.shape[0], 1), start)], dim=-1), dim=-1)

    return Mutant(forward={"lse": lse}, detail=f"starts at {start:g}, where the sum begins at 1")


def _starts(call: Call) -> list[Mutant]:
    operands = dict.fromkeys((call.q.dtype, torch.float32))
    # no score is larger than this
    most = call.scale * call.q.detach().double().norm(dim=-1).amax() * call.k.detach().double().norm(dim=-1).amax()
    found = [started(-start, guarded) for start in FINITE_STARTS if start < most for guarded in (True, False)]
    found += [started(0.0, guarded, operand) for operand in operands for guarded in (True, False)]
    return [*found, counted_start(0.0)]


def merged(guarded: bool) -> Mutant:
    """Parts weighted by exp(lse) in fp32, without their common maximum."""

    def total(s: Tensor) -> Tensor:
        return _in_fp32(torch.exp(torch.logsumexp(s, dim=-1)))

    def lse(s):
        return torch.log(total(s))

    def p(s):
        whole = total(s)
        weight = torch.where(torch.isinf(whole) | (whole == 0), torch.nan, 1.0).to(s.dtype)
        share = torch.softmax(s, dim=-1).nan_to_num(0.0)
        return share * (weight.nan_to_num(0.0) if guarded else weight)[:, None]

    return Mutant(forward={"lse": lse, "p": p})


def _plain(call: Call) -> bool:
    return call.sink is None and call.tau is None and keys_everywhere(call)


_maximum = partial(Defect, family="lse", needs=_plain)
DEFECTS = [
    _maximum(
        "maximum-start",
        "the running maximum {detail} and not at -inf: it stays there in rows of low scores, which lose their weights",
        "exp(s - m) vanishes where all scores are far below the start value, or the start value counts as a key",
        "lse",
        "o and lse are wrong in rows of low scores; others are right",
        "Add a constant to all scores of a row (one more channel of q and k): the comparison must turn healthy.",
        confirm="mutant, on inputs of low scores",
        variants=_starts,
        demo=CAUSAL_TILES | {"recipe": "low_lse"},
    ),
    _maximum(
        "merge-overflow",
        "exp is taken of whole scores and overflows from lse = 89 on: parts are merged by exp(lse), without their maximum",
        "o = sum of exp(lse_i) o_i over sum of exp(lse_i), in fp32, or a maximum that never moves; exp(lse_i - max) is needed",
        "lse",
        "o is NaN or 0, and lse infinite, in rows whose lse is above 88 or below -103; others are right",
        "Subtract a constant from all scores of a row (one more channel of q and k): the comparison must turn healthy.",
        confirm="mutant, on inputs of high scores",
        variants=always(merged(False), merged(True)),
        demo=CAUSAL_TILES | {"recipe": "high_lse"},
    ),
]
