"""Identity I14 (docs/math.md section 10): one number by forward mode and by the backward, whatever the inputs.

<do, to> + <dlse, tlse> = <dq, tq> + <dk, tk> + <dv, tv> + the same of every learned term

The sums run over a batch entry or segment and KV head, or over all entries where a learned term is shared by them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backlight.doctor.steps.compare import REORDERING, ROUNDING
from backlight.doctor.steps.invariants import Identity
from backlight.problems.along import Along
from backlight.problems.axes import AXES
from backlight.spec import OF_PAIRS, Segment

LAW = "<do, to> = <dq, tq> + <dk, tk> + <dv, tv> + ..."


def duality(problem: Along, values: Mapping[str, Tensor]) -> Identity | None:
    """I14 on `values` (to, the gradients, canonical layout); None where a side is not there."""
    names = {"to": "ty"} | {f"d{name}": f"d{name}" for name in problem.tangents}
    if any(name not in values or values[name].shape != problem.truth[key].shape for name, key in names.items()):
        return None
    left, right = _sides(problem, {key: values[name].double() for name, key in names.items()})
    residual = (left - right).abs()
    ratios = torch.where(residual == 0, 0.0, residual / _floor(problem, {key: values[n].dtype for n, key in names.items()}))
    ratios = torch.where(torch.isfinite(residual), ratios, torch.inf)
    energy = float((left**2).sum())
    gain = float((left * right).sum()) / energy if energy > 0 else 1.0
    return Identity("I14", LAW, float(ratios.max()) if ratios.numel() else 0.0, gain, 0.0, ratios)


def _sides(problem: Along, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """[Z, Hkv] each, or [1, Hkv]."""
    left = _summed(problem, "dy", problem.dy.double() * values["ty"])
    parts = [_summed(problem, name, values[f"d{name}"] * t.double()) for name, t in problem.tangents.items()]
    left, *parts = _as_coarse([left, *parts])
    return left, torch.stack(parts).sum(0)


def _floor(problem: Along, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """What rounding makes of the difference: of the results once, of every summand behind them once, and of the kink."""
    truth = {key: problem.truth[key] for key in dtypes}
    rounded = {key: x.to(dtypes[key]).double() for key, x in truth.items()}
    others = [rounded]
    if not problem.sixteen_bit:
        others += [{key: yardstick[key].double() for key in dtypes} for yardstick in (problem.eager, problem.flashlike)]
    floor = _expected(problem, dtypes)
    for other in others:
        a, b = _sides(problem, other)
        floor = torch.maximum(floor, (a - b).abs())
    if problem.kink is not None:
        flipped = {key: problem.kink[key] - x for key, x in truth.items()}
        a, b = _sides(problem, flipped)
        floor = floor + a.abs() + b.abs()
    return floor


def _expected(problem: Along, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """Root of the summed variances: rounding of the results, and of every summand behind them."""
    unit = problem.unit * (ROUNDING if problem.sixteen_bit else REORDERING)
    variances = {}
    for key, dtype in dtypes.items():
        own = ROUNDING * torch.finfo(dtype).eps * problem.truth[key]
        variances[key] = own**2 + (unit * problem.noise[key].double()) ** 2
    total = [_summed(problem, "dy", problem.dy.double() ** 2 * variances["ty"])]
    total += [_summed(problem, name, variances[f"d{name}"] * t.double() ** 2) for name, t in problem.tangents.items()]
    tiny = torch.finfo(problem.call.accumulator_dtype).tiny * 1e3
    return torch.stack(_as_coarse(total)).sum(0).sqrt() + tiny


def _as_coarse(sums: list[Tensor]) -> list[Tensor]:
    """Sums over what the coarsest of them is summed over."""
    for axis in (0, 1):
        size = min(x.shape[axis] for x in sums)
        sums = [x if x.shape[axis] == size else x.sum(axis, keepdim=True) for x in sums]
    return sums


def _summed(problem: Along, name: str, x: Tensor) -> Tensor:
    """A product of two tensors of the kind of `name`, summed per segment and KV head [Z, Hkv], as far as they have those."""
    call, axes = problem.call, AXES[name]
    hkv = call.k.shape[1]
    if name in OF_PAIRS:
        # heads and batch entries may share it
        return x.sum().reshape(1, 1)
    if "batch" not in axes:
        return x.reshape(hkv, -1).sum(1)[None]

    def part(z: Segment) -> Tensor:
        ranges = {"rows": slice(z.q0, z.q1), "keys": slice(z.k0, z.k1)}
        return x[z.batch][tuple(ranges.get(axis, slice(None)) for axis in axes[1:])].reshape(hkv, -1).sum(1)

    return torch.stack([part(z) for z in call.segments()])
