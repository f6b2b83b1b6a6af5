"""A correct flash attention with the choices that kernels are free to make: none of them is a defect.

Each choice is a keyword: base of the exponent, lazy rescaling, dtype of the weights that meet v, parts of the keys merged last,
order of tiles, where the scale goes, what the maximum starts at, how lse is stored, how delta is formed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

LOG2E, LN2, INF = math.log2(math.e), math.log(2.0), math.inf


@dataclass(frozen=True)
class Legal:
    """The choices; the defaults are those of a textbook."""

    tile: int = 32
    base2: bool = False
    # the maximum is kept while it moves by less than this
    lazy: float = 0.0
    weights_16: bool = True
    parts: int = 1
    backwards: bool = False
    scaled_q: bool = False
    start: float = -INF
    lse_base2: bool = False
    rounds_o_twice: bool = False
    delta_of_p: bool = False
    atomics_order: bool = False
    transposed: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window=None) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            group = q.shape[1] // k.shape[1]
            kf, vf = (x.repeat_interleave(group, 1).float() for x in (k, v))
            seen = visible(q.shape[2], k.shape[2], causal, window)
            bounds = torch.linspace(0, k.shape[2], self.parts + 1).long().tolist()
            o, lse = None, torch.full(q.shape[:3], -INF)
            for first, end in pairwise(bounds):
                part, its = self.part(q.float(), kf, vf, seen, first, end, v.dtype)
                both = torch.logaddexp(lse, its)
                safe = both.masked_fill(both == -INF, 0)
                part = part * torch.exp(its - safe)[..., None]
                o = part if o is None else o * torch.exp(lse - safe)[..., None] + part
                lse = both
            o = o.to(q.dtype)
            if self.transposed:
                o = o.transpose(1, 2).contiguous().transpose(1, 2)
            return o, lse * LOG2E if self.lse_base2 else lse

    def part(self, q, k, v, seen, first: int, end: int, dtype) -> tuple[Tensor, Tensor]:
        unit = LOG2E if self.base2 else 1.0
        scale, power = q.shape[3] ** -0.5 * unit, torch.exp2 if self.base2 else torch.exp
        m = torch.full(q.shape[:3], self.start)
        total, acc = torch.zeros(q.shape[:3]), torch.zeros(*q.shape[:3], v.shape[3])
        starts = list(range(first, end, self.tile))
        for j0 in reversed(starts) if self.backwards else starts:
            j = slice(j0, min(j0 + self.tile, end))
            s = (q * scale) @ k[:, :, j].mT if self.scaled_q else q @ k[:, :, j].mT * scale
            s = s.masked_fill(~seen[:, j], -INF)
            higher = torch.maximum(m, s.amax(-1))
            higher = torch.where((higher - m < self.lazy) & (m > -INF), m, higher)
            safe = higher.masked_fill(higher == -INF, 0)
            p, fade = power(s - safe[..., None]), power(m - safe)
            total, m = total * fade + p.sum(-1), higher
            p = p.to(dtype).float() if self.weights_16 else p
            acc = acc * fade[..., None] + p @ v[:, :, j]
        if self.rounds_o_twice:
            acc = acc.to(dtype).float()
        o = acc / total.masked_fill(total == 0, 1)[..., None]
        return o, torch.where(total == 0, -INF, m + torch.log(total) * unit) / unit

    def backward(self, do, q, k, v, o, lse, *, causal: bool = False, window=None) -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
            qf, dof = q.float(), do.float()
            kf, vf = (x.repeat_interleave(group, 1).float() for x in (k, v))
            row = lse * LN2 if self.lse_base2 else lse
            s = (qf @ kf.mT * scale).masked_fill(~visible(q.shape[2], k.shape[2], causal, window), -INF)
            p = torch.exp(s - row.masked_fill(row == -INF, 0)[..., None])
            dp = dof @ vf.mT
            delta = (p * dp).sum(-1) if self.delta_of_p else (dof * o.float()).sum(-1)
            ds = p * (dp - delta[..., None])
            rounded, a = (x.to(q.dtype).float() if self.weights_16 else x for x in (ds, p))
            dk, dv = rounded.mT @ qf * scale, a.mT @ dof
            if self.atomics_order:
                # sums over the heads of a group from the last to the first
                dk, dv = (x.unflatten(1, (-1, group)).flip(2).flatten(1, 2) for x in (dk, dv))
            dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
            return (rounded @ kf * scale).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def visible(sq: int, sk: int, causal: bool, window) -> Tensor:
    distance = torch.arange(sq)[:, None] + sk - sq - torch.arange(sk)[None, :]
    left, right = window or (None, None)
    found = torch.ones_like(distance, dtype=torch.bool)
    if causal or right is not None:
        found &= distance >= (0 if causal else -right)
    return found if left is None else found & (distance <= left)


CHOICES: dict[str, Legal] = {
    "textbook": Legal(),
    "base 2": Legal(base2=True, lse_base2=True),
    "lazy rescaling": Legal(lazy=8.0),
    "lazy in base 2": Legal(base2=True, lazy=8.0),
    "weights of fp32": Legal(weights_16=False),
    "three parts": Legal(parts=3),
    "two parts from the end": Legal(parts=2, backwards=True, tile=16),
    "scale on q": Legal(scaled_q=True),
    "starts at -1e30": Legal(start=-1e30),
    "one tile": Legal(tile=4096),
    "sum rounded before it divides": Legal(rounds_o_twice=True),
    "delta of p": Legal(delta_of_p=True),
    "groups in reverse": Legal(atomics_order=True),
    "o stored transposed": Legal(transposed=True),
}
