"""Steps to the thresholds of alpha-entmax (eq. 80-84) in plain torch, for whoever sums over keys itself.

e = 1 / (alpha - 1) has one value a row, or one that broadcasts; z = (alpha - 1) s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def power(u: Tensor, exponent: Tensor | float) -> Tensor:
    """u ** exponent where u > 0; 0 elsewhere, with an exponent of 0 too. What is not a number stays none."""
    return torch.where(u <= 0, 0, u.pow(exponent))


@dataclass(slots=True)
class Sums:
    """Of one row each: F, W and W2 of eq. 80 and 83 at a threshold. They are sums over keys, and so over parts of them."""

    f: Tensor
    w: Tensor
    w2: Tensor

    def add_(self, part: slice, u: Tensor, e: Tensor) -> None:
        for total, exponent in ((self.f, e), (self.w, e - 1), (self.w2, e - 2)):
            total[:, part] += power(u, exponent).sum(dim=-1, keepdim=True)

    def newton(self, e: Tensor) -> Tensor:
        """Eq. 81: the step of the threshold; 0 where nothing weighs."""
        return torch.where(self.w > 0, (self.f - power(self.f, 1 - 1 / e)) / self.w, 0)

    def step(self, e: Tensor, room: Tensor) -> Tensor:
        """Eq. 83, held within its bounds; room: how far the largest z lies above the threshold, at most."""
        newton = self.newton(e)
        h, down = power(self.f, 1 / e), self.w * power(self.f, 1 / e - 1)
        bend = (e - 1) * (self.w2 * power(self.f, 1 / e - 1) - self.w**2 * power(self.f, 1 / e - 2))
        halley = 2 * (h - 1) * down / (2 * down**2 - (h - 1) * bend)
        held = torch.minimum(torch.maximum(halley, newton), room * (1 - 1 / h))
        # beyond alpha 1.5 W2 has no bound
        usable = (e >= 2) & (h > 1) & torch.isfinite(held)
        return torch.where(usable, held, newton)


class Bound(NamedTuple):
    """A lower bound theta of thresholds by the keys seen so far, and a line that lies below their F ** (1 / e) from there on:
    it starts at `line` and falls by `slope`."""

    theta: Tensor
    line: Tensor
    slope: Tensor

    def moved(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """(the bound `new`, 0 where it is none; what the line has come down to there). `new` is nowhere lower than theta."""
        # what is not a number stays one
        seen, known = new != -math.inf, self.theta != -math.inf
        base = torch.where(seen, new, 0)
        by = torch.where(known, base - torch.where(known, self.theta, 0), 0)
        return base, (self.line - self.slope * by).clamp(min=0)

    def joined(self, new: Tensor, f: Tensor, w: Tensor, e: Tensor) -> Bound:
        """With more keys, whose F and W at `new` are f and w: eq. 84."""
        base, had = self.moved(new)
        h, b = power(f, 1 / e), self.slope
        s = torch.where(h > 0, w / power(h, e - 1), 0)
        t = torch.zeros_like(h)
        for _ in range(2):
            t = t + sum_of(had - b * t, h - s * t, b, s, e).newton(e).clamp(min=0)
        both = sum_of(had - b * t, h - s * t, b, s, e)
        slope = torch.where(both.f > 0, both.w / power(both.f, 1 - 1 / e), 0)
        return Bound(torch.where(new != -math.inf, base + t, -math.inf), power(both.f, 1 / e), slope)


def sum_of(left: Tensor, right: Tensor, b: Tensor, s: Tensor, e: Tensor) -> Sums:
    """F and W of two lines, held at 0 from below, with the slopes b and s."""
    left, right = left.clamp(min=0), right.clamp(min=0)
    return Sums(power(left, e) + power(right, e), power(left, e - 1) * b + power(right, e - 1) * s, torch.zeros_like(left))
