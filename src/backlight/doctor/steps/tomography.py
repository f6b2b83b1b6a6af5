"""Step 4: looking inside a fused kernel through its outputs.

One-hot columns of v make o the forward's weights; one-hot rows of dO make dv the backward's weights; orthonormal rows of q make
dk the matrix ds. The probe replaces v, dO or q, so it looks at the kernel, not at the user's data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.report.words import counted
from backlight.doctor.steps.localise import diagonals
from backlight.doctor.subject.subject import Subject
from backlight.problems.problem import Problem
from backlight.reference import oracle

# weights below this may underflow in a correct kernel's output dtype
FAINT = 1e-4


@dataclass
class Recovered:
    """A matrix read off the kernel, [B, Hq, Sq, Sk], beside the oracle's, and the cells that are wrong by support alone."""

    name: str
    value: Tensor
    truth: Tensor
    leaks: Tensor
    holes: Tensor

    @property
    def gain(self) -> float:
        return float((self.value * self.truth).sum() / (self.truth**2).sum().clamp(min=1e-300))

    @property
    def relative(self) -> float:
        return float((self.value - self.truth).norm() / self.truth.norm().clamp(min=1e-300))

    def support_words(self, call: Call) -> str:
        """'192 leaked cells, all at i-j = 96', or ''."""
        offset = call.k.shape[2] - call.q.shape[2] if not call.varlen else 0
        words = []
        for kind, cells in (("leaked", self.leaks), ("missing", self.holes)):
            count = int(cells.sum())
            if count:
                found = diagonals(cells, offset)
                first = ", ".join(map(str, list(found)[:3]))
                place = f"{'all ' if count > 1 else ''}at i-j = {first}" if len(found) <= 3 else f"on {len(found)} diagonals"
                words.append(f"{counted(count, f'{kind} cell')}, {place}")
        return "; ".join(words)


def neutral(call: Call) -> Call:
    """Gates wide open: the probes read weights, not gates."""
    return call if call.gate is None else replace(call, gate=torch.full_like(call.gate, 30.0))


def forward_weights(subject: Subject, problem: Problem) -> Recovered:
    """Weights of the forward: v = one-hot columns, ceil(Sk / Dv) forward passes for all heads at once."""
    call = neutral(problem.call)
    sk, dv = call.v.shape[2:]
    parts = []
    for j0 in range(0, sk, dv):
        v = torch.zeros_like(call.v)
        width = min(dv, sk - j0)
        v[:, :, range(j0, j0 + width), range(width)] = 1
        parts.append(subject.run(replace(call, v=v))["o"][..., :width].double())
    return _judge("p", torch.cat(parts, dim=-1), oracle(call, keep=("a",)).a, call)


def backward_weights(subject: Subject, problem: Problem) -> Recovered:
    """Weights of the backward: dO = one-hot rows, one query head per group at a time, gives dv = weightsT."""
    call = neutral(problem.call)
    b, hq, sq, _ = call.q.shape
    sk, dv = call.v.shape[2:]
    value = torch.zeros(b, hq, sq, sk, dtype=torch.float64, device=call.q.device)
    for member in range(call.group):
        heads = slice(member, None, call.group)
        for i0 in range(0, sq, dv):
            width = min(dv, sq - i0)
            dy = torch.zeros_like(problem.dy)
            dy[:, heads, i0 : i0 + width, :width] = torch.eye(width, dtype=dy.dtype, device=dy.device)
            found = subject.run(call, dy)["dv"].double()
            value[:, heads, i0 : i0 + width] = found[..., :width].mT
    return _judge("p (bwd)", value, oracle(call, keep=("a",)).a, call)


def score_gradient(subject: Subject, problem: Problem) -> Recovered:
    """ds (dx under a soft-cap): orthogonal rows of q in blocks of at most D, dO in one block and one head per group."""
    call = neutral(problem.call)
    b, hq, sq, d = call.q.shape
    sk = call.k.shape[2]
    generator = torch.Generator().manual_seed(problem.seed)
    basis = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))[0] * d**0.5
    rows = basis.repeat(-(-sq // d), 1)[:sq].to(call.q.dtype).to(call.q.device)
    call = replace(call, q=rows.expand(b, hq, sq, d).contiguous())
    value = torch.zeros(b, hq, sq, sk, dtype=torch.float64, device=call.q.device)
    for member in range(call.group):
        heads = slice(member, None, call.group)
        for i0 in range(0, sq, d):
            block = slice(i0, min(i0 + d, sq))
            dy = torch.zeros_like(problem.dy)
            dy[:, heads, block] = problem.dy[:, heads, block]
            dk = subject.run(call, dy)["dk"].double()
            inverse = torch.linalg.pinv(rows[block].double())
            value[:, heads, block] = (dk @ inverse).mT / call.scale
    truth = oracle(call, problem.dy, keep=("dx",)).dx
    return _judge("ds", value, truth, call, exact=False)


def _judge(name: str, value: Tensor, truth: Tensor, call: Call, exact: bool = True) -> Recovered:
    if not exact:
        none = torch.zeros_like(truth, dtype=torch.bool)
        return Recovered(name, value, truth, none, none)
    hidden = ~intervals.visible_whole(call).to(truth.device).expand_as(truth)
    leaks = hidden & (value != 0)
    holes = ~hidden & (truth > FAINT) & (value == 0)
    return Recovered(name, value, truth, leaks, holes)
