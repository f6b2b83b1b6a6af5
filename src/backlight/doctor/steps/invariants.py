"""Step 2: identities a correct backward obeys whatever the inputs (docs/math.md section 6).

I1  sum_h qT dq = dkT k           both sides are qT dx k
I2  sum_h oT do = vT dv           both sides are vT (weights)T do; with a gate only its diagonal needs gated tensors alone
I3  sum_j dk_j = scale sum_i rho_i q_i, and 0 when lse is unused and there is no sink (read from the outputs: I4 of math.md)

Residuals are taken per batch entry or segment and KV head and measured against the residual that the oracle's own outputs have
after rounding to the output dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.steps.compare import REORDERING, ROUNDING
from backlight.problems.problem import Problem
from backlight.spec import Segment

LIMIT = 6.0


@dataclass
class Identity:
    """One law: worst ratio to its floor over all (segment, KV head), the fitted gain between its sides, and where it fails."""

    name: str
    law: str
    ratio: float
    gain: float
    residual: float
    ratios: Tensor

    @property
    def holds(self) -> bool:
        return self.ratio <= LIMIT


LAWS = {"I1": "qT dq = dkT k", "I2": "oT do = vT dv", "I3": "sum over keys of dk"}


def sides(call: Call, dy: Tensor, values: Mapping[str, Tensor], rho: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Per identity: left and right [Z, Hkv, *], segments stacked."""
    gate = call.gate is not None
    found: dict[str, list[tuple[Tensor, Tensor]]] = {"I1": [], "I2": [], "I3": []}
    q, k, v, do = (x.double() for x in (call.q, call.k, call.v, dy))
    o, dq, dk, dv = (values[n].double() for n in ("o", "dq", "dk", "dv"))
    hkv = call.k.shape[1]

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(hkv, -1, x.shape[-1])

    for z in call.segments():
        rows, keys = slice(z.q0, z.q1), slice(z.k0, z.k1)
        qz, oz, doz, dqz = (grouped(x[z.batch, :, rows]) for x in (q, o, do, dq))
        kz, vz, dkz, dvz = (x[z.batch, :, keys] for x in (k, v, dk, dv))
        found["I1"].append((qz.mT @ dqz, dkz.mT @ kz))
        if gate:
            left, right = (oz * doz).sum(1), (vz * dvz).sum(1)
        else:
            left, right = oz.mT @ doz, vz.mT @ dvz
        found["I2"].append((left, right))
        pull = torch.zeros_like(dkz.sum(1))
        if rho is not None:
            pull = call.scale * (grouped(rho[z.batch, :, rows, None]) * qz).sum(1)
        found["I3"].append((dkz.sum(1), pull))
    return {n: tuple(torch.stack(side) for side in zip(*parts, strict=True)) for n, parts in found.items() if parts}  # type: ignore


def rho(problem: Problem) -> Tensor | None:
    """Row sums of ds (eq. 29), None when they are 0."""
    call, truth = problem.call, problem.truth
    if call.sink is None and problem.dlse is None:
        return None
    total = truth.p_sink * truth.delta
    return total if problem.dlse is None else total + problem.dlse.double()


def identities(problem: Problem, values: Mapping[str, Tensor]) -> list[Identity]:
    """The laws that hold for this spec, checked on `values` (o, dq, dk, dv in canonical layout)."""
    if any(name not in values for name in ("o", "dq", "dk", "dv")):
        return []
    call, dtype = problem.call, values["dq"].dtype
    shift = rho(problem)
    names = ["I1", "I2"] + ([] if call.spec.softcap is not None else ["I3"])
    measured = sides(call, problem.dy, values, shift)
    exact = {"o": problem.truth.y} | {n: problem.truth[n] for n in ("dq", "dk", "dv")}
    floors = _residuals(sides(call, problem.dy, {n: x.to(dtype) for n, x in exact.items()}, shift))
    floors = {n: torch.maximum(floors[n], expected) for n, expected in _expected(problem).items()}
    if not problem.sixteen_bit or problem.arithmetic is not None:
        for yardstick in (problem.eager, problem.flashlike):
            other = {"o": yardstick["y"]} | {n: yardstick[n] for n in ("dq", "dk", "dv")}
            for n, residual in _residuals(sides(call, problem.dy, other, shift)).items():
                floors[n] = torch.maximum(floors[n], residual)
    if problem.kink is not None:
        other = {"o": problem.kink["y"]} | {n: problem.kink[n] for n in ("dq", "dk", "dv")}
        for n, residual in _residuals(sides(call, problem.dy, other, shift)).items():
            floors[n] = floors[n] + residual
    found = []
    for name in names:
        left, right = measured[name]
        residual = (left - right).flatten(2).norm(dim=2)
        ratios = torch.where(residual == 0, 0.0, residual / floors[name])
        ratios = torch.where(torch.isfinite(residual), ratios, torch.inf)
        found.append(Identity(name, LAWS[name], float(ratios.max()) if ratios.numel() else 0.0, *_fit(left, right), ratios))
    return found


def _expected(problem: Problem) -> dict[str, Tensor]:
    """Expected residuals [Z, Hkv] when every summand is rounded once: where truth is 0, rounding the truth tells nothing."""
    call, hkv = problem.call, problem.call.k.shape[1]
    unit = problem.unit * (ROUNDING if problem.sixteen_bit else REORDERING)
    # |x_i|^2 |noise of y_i|^2 summed over i is the squared Frobenius norm of xT y's error
    pairs = {"I1": (("q", "dq"), ("k", "dk")), "I2": (("dy", "y"), ("v", "dv"))}
    tensors = {"q": call.q, "k": call.k, "v": call.v, "dy": problem.dy}
    sizes = {n: (x.double() ** 2).sum(-1) for n, x in tensors.items()}
    rough = {n: (problem.noise[n].double() ** 2).sum(-1) for n in ("y", "dq", "dk", "dv")}
    # a delta made from a rounded o is shared by its whole row
    shared = (problem.dy.double() ** 2 * problem.truth.y**2).sum(-1) * sizes["q"] * call.scale**2
    found: dict[str, list[Tensor]] = {"I1": [], "I2": [], "I3": []}

    def over(x: Tensor, z: Segment, rows: bool) -> Tensor:
        part = x[z.batch, :, z.q0 : z.q1] if rows else x[z.batch, :, z.k0 : z.k1]
        return part.reshape(hkv, -1).sum(1)

    for z in call.segments():
        for name, ((a, b), (c, d)) in pairs.items():
            total = over(sizes[a] * rough[b], z, True) + over(sizes[c] * rough[d], z, False)
            found[name].append(unit * total.sqrt())
        found["I3"].append(unit * (over(rough["dk"], z, False) + over(shared, z, True)).sqrt())
    tiny = torch.finfo(call.accumulator_dtype).tiny * 1e3
    return {n: torch.stack(parts) + tiny for n, parts in found.items()}


def _residuals(found: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {n: (left - right).flatten(2).norm(dim=2) for n, (left, right) in found.items()}


def _fit(left: Tensor, right: Tensor) -> tuple[float, float]:
    """(g, relative residual) of right = g * left: the gain between the sides is the wrong constant itself."""
    energy = float((left**2).sum())
    if not energy > 0:
        return 1.0, 0.0
    gain = float((left * right).sum()) / energy
    return gain, float((right - gain * left).norm()) / max(float(right.norm()), 1e-300)
