"""Weights that are off by one factor along each row: exp of an error of lse, so lse itself can be read off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.doctor.steps.reading.cells import SIZES
from backlight.doctor.steps.reading.places import AGREE, Place, place_of

# a row whose cells all differ by one factor is off by no more than this, in units of what a correct kernel's rows are
STRAIGHT = 3.0


@dataclass(frozen=True)
class Factors:
    """factor [B, H, S] of each row, which rows are wrong, and the lse that the factors speak of."""

    factor: Tensor
    wrong: Tensor
    lse: Tensor
    place: Place | None = None
    part: str = ""


def factors(value: Tensor, truth: Tensor, lse: Tensor, usable: Tensor, eps: float) -> Factors | None:
    """What the rows of weights [B, H, Sq, Sk] say, where they are right up to one factor each; None where they are not.

    `usable` marks the cells that may be compared; `lse` is the right one, [B, H, Sq].
    """
    x, right = value.masked_fill(~usable, 0), truth.masked_fill(~usable, 0)
    energy = (right * right).sum(-1)
    factor = (x * right).sum(-1) / energy.clamp(min=1e-300)
    # products of 16-bit operands and one rounding of the result
    noise = 4 * eps + 1e-5
    seen = usable.any(-1) & (energy > 0)
    off = (x - factor[..., None] * right).norm(dim=-1) / (factor.abs() * energy.sqrt()).clamp(min=1e-300)
    # what vanishes is missing, not scaled
    wrong = seen & ~((factor - 1).abs() <= noise) & (factor > 1e-6)
    if not bool(wrong.any()) or float((off <= STRAIGHT * noise)[wrong].double().mean()) < AGREE:
        return None
    read = lse - torch.log(factor.clamp(min=1e-300))
    close = torch.full_like(read, 2 * noise)
    found = place_of(read, lse, close, seen & torch.isfinite(lse))
    part = "" if found is not None else part_of(read - lse, right, close, seen)
    return Factors(factor, wrong, read, found, part)


def part_of(excess: Tensor, p: Tensor, close: Tensor, seen: Tensor) -> str:
    """Words for an lse that covers some of the keys only: exp(excess) is then the share of the weights that it counts."""
    judged = seen & (excess.abs() > close)
    sk = p.shape[-1]

    def fits(share: Tensor) -> bool:
        expected = torch.log(share.clamp(min=1e-30))
        good = (excess - expected).abs() <= close + 1e-2 * expected.abs()
        return float((good & judged).sum()) >= AGREE * int(judged.sum())

    if fits(p.amax(dim=-1)):
        return "the row maximum alone, without the logarithm of the row sum"
    sums = p.cumsum(-1)
    for size in SIZES:
        for edge in range(size, sk, size) if size < sk <= 64 * size else ():
            if fits(sums[..., edge - 1]):
                return f"that of the first {edge} keys alone"
            if fits(sums[..., -1] - sums[..., edge - 1]):
                return f"that of keys {edge}-{sk - 1} alone"
    constant = excess[judged]
    if float((constant - constant.median()).abs().max()) <= float(close.max()) * 2:
        return f"its own {'+' if constant.median() > 0 else '-'} {abs(float(constant.median())):.4g}"
    return ""
