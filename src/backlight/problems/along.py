"""A problem along a direction of its inputs: truth, yardsticks and noise of the tangents of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems.axes import tensors_of
from backlight.problems.kink import FLIPPED
from backlight.problems.noise import slope_of, wobble
from backlight.problems.problem import FIELDS, Problem, recast
from backlight.reference import Oracle, Trace
from backlight.reference.entmax import exponent
from backlight.reference.tangent import FORWARD_MODE, TANGENT_STAGES, TANGENTS, eager_tangent, flashlike_tangent, tangent
from backlight.reference.trace import Stage

# so that tangents differ from everything else that is drawn from the problem's seed
SEED = 101


def draw(call: Call, seed: int) -> dict[str, Tensor]:
    """A tangent for every learned tensor of a call, by its name."""
    generator = torch.Generator().manual_seed(seed + SEED)
    return {name: torch.randn(x.shape, generator=generator).to(x) for name, x in tensors_of(call).items()}


@dataclass
class Along(Problem):
    """What `base` knows, and beside it `ty` and `tlse` along `tangents` (by name of the input, any subset)."""

    tangents: Mapping[str, Tensor] = field(default_factory=dict)
    base: Problem = field(kw_only=True)

    @staticmethod
    def direction(problem: Problem, tangents: Mapping[str, Tensor]) -> Along:
        return Along(**{name: getattr(problem, name) for name in FIELDS}, tangents=tangents, base=problem)

    @cached_property
    def truth(self) -> Trace:
        return _joined(self.base.truth, tangent(self.call, self.tangents))

    @cached_property
    def eager(self) -> Trace:
        return _joined(self.base.eager, self._measured(eager_tangent))

    @cached_property
    def flashlike(self) -> Trace:
        return _joined(self.base.flashlike, self._measured(flashlike_tangent))

    @cached_property
    def noise(self) -> dict[str, Tensor]:
        return self.base.noise | noise(self.call, self.tangents)

    @cached_property
    def kink(self) -> Trace | None:
        if self.base.kink is None:
            return None
        return _joined(self.base.kink, tangent(self.call, self.tangents, Oracle(FORWARD_MODE | {"m": FLIPPED["m"]})))

    def _measured(self, run: Callable[[Call, Mapping[str, Tensor]], Trace]) -> Trace:
        """A float64 problem borrows the fp32 error, scaled down, as the other yardsticks do."""
        if self.call.q.dtype != torch.float64:
            return run(self.call, self.tangents)
        lower, along = recast(self.call, torch.float32), {name: t.float() for name, t in self.tangents.items()}
        measured, exact = run(lower, along), tangent(lower, along)
        ratio = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return Trace({n: self.truth[n] + (measured[n].double() - exact[n]).nan_to_num() * ratio for n in TANGENTS})


def _joined(known: Mapping[str, Tensor], tangents: Mapping[str, Tensor]) -> Trace:
    return Trace({**known, **tangents})


def noise(call: Call, tangents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Per value, the root sum of squares of its summands, as in `problems.noise`; for tlse the size of what is behind it."""
    ratio = torch.finfo(call.accumulator_dtype).eps / torch.finfo(call.q.dtype).eps
    found = tangent(call, tangents, Oracle(FORWARD_MODE | _squares(ratio)))
    return {"ty": found.ty.sqrt(), "tlse": found.tlse * ratio}


def _squares(ratio: float) -> dict[str, Stage]:
    """Stages whose values are sums of squares; `sized` is how large the numbers behind P ts are, with entmax behind w r."""

    def sized(p, tr, q, k, tq, tk, scale, lse, entmax, tentmax):
        moved = abs(scale) * (tq**2 @ (k**2).mT + q**2 @ (tk**2).mT).sqrt()
        if entmax is not None:
            # phi of eq. 108 is small beside its summands
            moved = moved + tentmax.abs() * exponent(entmax) ** 2
        return slope_of(p, entmax) * (moved + tr.abs() * wobble(ratio, q, k, scale, lse, entmax))

    def tlse(p_sink, tsink, *behind):
        p, *_, entmax, _ = behind
        # beside a sink that takes the row a kernel still subtracts a mean of ts over the keys, and adds it again
        weights = slope_of(p, entmax).sum(dim=-1).clamp(min=torch.finfo(p.dtype).tiny)
        total = sized(*behind).sum(dim=-1) / weights
        return total if tsink is None else total + (slope_of(p_sink, entmax) * tsink).abs()

    def tcentred(p, tr, p_sink, tsink, entmax, tentmax):
        return tr - TANGENT_STAGES["tlse"].compute(p, tr, p_sink, tsink, entmax, tentmax)[:, None]

    def tp(tcentred, *behind):
        p, _, q, k, _, _, scale, lse, entmax, _ = behind
        return slope_of(p, entmax) * tcentred.abs() * wobble(ratio, q, k, scale, lse, entmax) + ratio * sized(*behind)

    def tav(tp, m, v):
        return (m * tp**2) @ v**2

    def atv(a, p, tv, q, k, scale, lse, entmax):
        return (a**2 + (slope_of(p, entmax) * (wobble(ratio, q, k, scale, lse, entmax) - 1)) ** 2) @ tv**2

    def to(tav, atv, p, tr, tlse, o, u, tau, ttau, entmax):
        w = slope_of(p, entmax)
        behind = tlse if entmax is None else tlse * w.sum(dim=-1)
        mean = ((w * tr).sum(dim=-1).abs() + ratio * behind)[:, None]
        total = tav + atv + mean**2 * (o if entmax is None else u) ** 2
        return total if tau is None else total + ((mean * tau.abs() + ttau.abs()) * u) ** 2

    def ty(to, o, gate, tgate):
        if gate is None:
            return to
        weight = torch.sigmoid(gate)
        return weight**2 * (to + (o * (1 - weight) * tgate) ** 2)

    behind = Stage.of(sized).reads
    rest = {"tlse": Stage("tlse", "", ("p_sink", "tsink", *behind), tlse), "tp": Stage("tp", "", ("tcentred", *behind), tp)}
    return rest | {each.__name__: Stage.of(each) for each in (tcentred, tav, atv, to, ty)}
