"""Step 1: one observed tensor against the oracle, in units of two yardsticks (docs/numerics.md).

Order, for each quantity: non-finite values on their own; exact zeros; gains per head; error per cell (batch, head, 64 rows) in
units of yardstick A; error of the whole tensor in units of yardstick B. Every test reads `not (value <= limit)`: NaN fails.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.problems.axes import KEY_GRADIENTS, ROW_GRADIENTS
from backlight.problems.kink import STEEP
from backlight.problems.problem import Problem
from backlight.spec import PER_HEAD

TILE = 64
RHO_PASS, RHO_FAIL = 2.0, 4.0
RHO_B = 1.25
GAIN_FAIL = 2e-3
GAIN_ELEMENTS = 10_000
# eager's relative error in eps: about 0.5, 1 with peaky rows, 10 and more where logits of -120 are rounded to 16 bits. Errors
# that large come from few scores, move whole rows and columns together, and with them the gain of a head
AMPLIFIED = 4.0
ROUNDING = 0.29
# a mean over N noisy numbers strays by a few times noise / sqrt(N)
FLUCTUATION = 4.0
# fp32 and fp64 sums of another order: a small multiple of rounding every summand once
REORDERING = 2.0
# rounding twice instead of once, or 16-bit lse, is still the same algorithm in fp32; TF32 is 1000 times that
RHO_B_WIDE = 8.0

TRUTH_OF = {"o": "y", "o (jvp)": "y", "to": "ty"}
LIKE_O = tuple(TRUTH_OF)
PARAMETERS = tuple(f"d{name}" for name in PER_HEAD)


@dataclass
class Comparison:
    """How one quantity compares; `cells` is rho_A per [B, H, tile], `energy` the squared error per [B, H, row].

    versus_flash is rho_B without the allowance for one more rounding: 1 for a flash kernel.
    """

    name: str
    x: Tensor
    truth: Tensor
    nonfinite: Tensor
    stray_zeros: Tensor
    gain: float
    gains: list[float]
    gain_limit: float
    gain_ok: bool
    rho_a: float
    rho_b: float
    cells: Tensor
    unit: Tensor
    relative: float
    noise_relative: float
    versus_flash: float
    ulp: Tensor = field(repr=False)

    @property
    def bad(self) -> bool:
        """Beyond what any correct kernel of this dtype does."""
        return bool(self.nonfinite.any() or self.stray_zeros.any() or not self.gain_ok or not self.rho_a <= RHO_FAIL)

    @property
    def misplaced(self) -> bool:
        """Whether the values counted in `nonfinite` are numbers that stand where an infinity belongs."""
        wrong, right = self.x[self.nonfinite], self.truth[self.nonfinite]
        return wrong.numel() > 0 and not bool(torch.isnan(wrong).any()) and not bool(torch.isfinite(right).any())

    @property
    def nonfinite_words(self) -> str:
        """'64 of 69632 values are not finite', or what stands where the right value is infinite."""
        count = int(self.nonfinite.sum())
        verb = "is" if count == 1 else "are"
        what = "something else where the right value is infinite" if self.misplaced else "not finite"
        return f"{count} of {self.nonfinite.numel()} values {verb} {what}"

    @property
    def suspect(self) -> bool:
        return not self.bad and not self.rho_a <= RHO_PASS

    @property
    def energy(self) -> Tensor:
        """Squared error per [B, H, row], non-finite values counted as one."""
        error = canonical(self.x) - canonical(self.truth)
        error = torch.where(torch.isfinite(error), error, torch.isnan(error).to(error.dtype))
        return (error**2).sum(dim=-1)


def judged(values: Mapping[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """The observed values that are compared with the oracle: all it has, but not delta, whose errors show in ds."""
    return {n: x for n, x in values.items() if TRUTH_OF.get(n, n) in problem.truth and n != "delta"}


def canonical(x: Tensor) -> Tensor:
    """[H] -> [1,H,1,1]; [H,n] -> [1,H,n,1]; [B,H,S] -> [B,H,S,1]."""
    return {1: lambda: x[None, :, None, None], 2: lambda: x[None, :, :, None], 3: lambda: x[..., None]}.get(
        x.dim(), lambda: x
    )()


def to_cells(x: Tensor, tile: int = TILE) -> Tensor:
    """[B,H,S,C] -> [B,H,tiles,tile,C], padded with zeros."""
    x = canonical(x)
    s = x.shape[2]
    tiles = max(1, -(-s // tile))
    padded = torch.nn.functional.pad(x, (0, 0, 0, tiles * tile - s))
    return padded.reshape(*x.shape[:2], tiles, tile, x.shape[-1])


class Units:
    """Noise of one quantity of one problem per cell: the denominator of rho_A, and of rho_B for the whole tensor."""

    def __init__(self, name: str, problem: Problem, dtype: torch.dtype):
        key = TRUTH_OF.get(name, name)
        self.key, self.truth = key, problem.truth[key]
        self.finite = torch.isfinite(self.truth)
        self.count = to_cells(self.finite.double())
        self.rounding = ROUNDING * torch.finfo(dtype).eps
        self.rounding_noise = problem.unit * (ROUNDING if problem.sixteen_bit else REORDERING)
        self.problem = problem
        wide = torch.finfo(problem.call.accumulator_dtype)
        # below these sizes numbers lose digits whatever the algorithm does
        self.absolute = torch.finfo(dtype).tiny * torch.finfo(dtype).eps + wide.tiny * max(problem.call.k.shape[2], 16)
        self.flashlike = self._error(problem.flashlike[key])
        self.eager = self.flashlike if self._jumps(key) else self._error(problem.eager[key])
        self.noise = to_cells(problem.noise[key].double().masked_fill(~self.finite, 0))
        self.kink = None if problem.kink is None else self._error(problem.kink[key])
        self.magnitude = to_cells(self.truth.masked_fill(~self.finite, 0))

    def _error(self, value: Tensor) -> Tensor:
        error = (value.double() - self.truth).masked_fill(~self.finite, 0)
        return to_cells(torch.where(torch.isfinite(error), error, 0))

    def _jumps(self, key: str) -> bool:
        """Eager moves 16-bit scores across a threshold at which gradients of scores jump (eq. 93): its errors say nothing."""
        alphas = self.problem.call.entmax
        of_scores = key.startswith("d") and key not in ("dv", "dgate")
        return alphas is not None and of_scores and bool((alphas > STEEP).any())

    def rms(self, value: Tensor, dims: tuple[int, ...]) -> Tensor:
        return ((value**2).sum(dims) / self.count.sum(dims).clamp(min=1)).sqrt()

    def floor(self, dims: tuple[int, ...]) -> Tensor:
        share = FLUCTUATION / self.count.sum(dims).clamp(min=1).sqrt()
        if dims == WHOLE:
            # a row shares its delta and its lse: the errors of few rows, as in decoding, do not average out over columns
            rows = max(1, math.prod(self.problem.call.q.shape[:3]))
            share = share.clamp(min=ROUNDING / rows**0.5)
        if not self.problem.sixteen_bit:
            share = share + REORDERING
        floor = self.problem.unit * share * self.rms(self.noise, dims) + self.absolute
        return floor if self.kink is None else floor + self.rms(self.kink, dims)

    def unit(self, error: Tensor, dims: tuple[int, ...]) -> Tensor:
        if dims == CELL and self.key == "lse" and self.problem.arithmetic is not None:
            # rounded scores of few keys decide an lse: their errors vary from cell to cell more than they do elsewhere
            spread = self.rms(error, OF_ONE)[..., None]
            return torch.maximum(self.rms(error, dims), spread) + self.floor(dims)
        return self.rms(error, dims) + self.rounding * self.rms(self.magnitude, dims) + self.floor(dims)


def units_of(name: str, problem: Problem, dtype: torch.dtype) -> Units:
    """The noise of a quantity, computed once for a problem."""
    kept = problem.units
    if (name, dtype) not in kept:
        kept[name, dtype] = Units(name, problem, dtype)
    return kept[name, dtype]


OF_ONE = (2, 3, 4)
CELL, HEAD, WHOLE = (3, 4), (0, 2, 3, 4), (0, 1, 2, 3, 4)


def compare(name: str, value: Tensor, problem: Problem) -> Comparison:
    """Judge `value` (canonical layout) of quantity `name`."""
    units = units_of(name, problem, value.dtype)
    x, truth = value.detach().double(), units.truth
    nonfinite = ~torch.isfinite(x) & units.finite
    wrong_infinity = ~units.finite & (x != truth)
    nonfinite = nonfinite | wrong_infinity
    stray = exact_zeros(name, problem.call, truth) & (x != 0) & torch.isfinite(x)
    usable = units.finite & torch.isfinite(x)
    error = to_cells((x - truth).masked_fill(~usable, 0))
    unit_a = units.unit(units.eager, CELL)
    cells = ratio(units.rms(error, CELL), unit_a)
    rho_b = float(ratio(units.rms(error, WHOLE), units.unit(units.flashlike, WHOLE)))
    gain, gains, limit, gain_ok = _gains(name, x.masked_fill(~usable, 0), units)
    spread = units.rms(units.magnitude, WHOLE)
    return Comparison(
        name,
        x,
        truth,
        nonfinite,
        stray,
        gain,
        gains,
        limit,
        gain_ok,
        float(cells.max()) if cells.numel() else 0.0,
        rho_b,
        cells,
        unit_a,
        float(ratio(units.rms(error, WHOLE), spread)),
        float(ratio(units.unit(units.eager, WHOLE), spread)),
        float(ratio(units.rms(error, WHOLE), units.rms(units.flashlike, WHOLE) + units.floor(WHOLE))),
        _ulp(x, truth, usable, problem.call.q.dtype if name in PARAMETERS else value.dtype),
    )


def _gains(name: str, x: Tensor, units: Units) -> tuple[float, list[float], float, bool]:
    """g = <x, ref> / <ref, ref>, whole and per head, with the limit of the tightest head; lse is affine and has none."""
    if name == "lse":
        return 1.0, [], float("inf"), True
    reference = units.magnitude
    cells = to_cells(x)

    def fit(value: Tensor, dims: tuple[int, ...]) -> Tensor:
        energy = (reference**2).sum(dims)
        return torch.where(energy > 0, (value * reference).sum(dims) / energy.masked_fill(energy == 0, 1), 1.0)

    gains = fit(cells, HEAD)
    spread = torch.maximum(fit(units.eager + reference, HEAD) - 1, fit(units.flashlike + reference, HEAD) - 1).abs()
    energy = (reference**2).sum(HEAD)
    per_value = units.eager**2 + (units.rounding_noise * units.noise) ** 2 + (units.rounding * reference) ** 2
    per_value = per_value + units.absolute**2
    if units.kink is not None:
        per_value = per_value + units.kink**2
    sigma = ratio((per_value * reference**2).sum(HEAD).sqrt(), energy)
    limit = torch.maximum(4 * spread, 10 * sigma)
    if units.problem.sixteen_bit:
        many = units.count.sum(HEAD) * cells.shape[-1] >= GAIN_ELEMENTS
        limit = torch.where(many, limit.clamp(min=GAIN_FAIL), limit.clamp(min=2 * GAIN_FAIL))
        relative = ratio(units.rms(units.eager, HEAD), units.rms(reference, HEAD))
        amplified = (relative > AMPLIFIED * units.problem.eps) | (units.problem.arithmetic is not None)
        limit = torch.where(amplified, torch.maximum(limit, 2 * relative), limit)
    else:
        limit = limit.clamp(min=64 * units.problem.eps)
    off = (gains - 1).abs()
    return float(fit(cells, WHOLE)), gains.tolist(), float(limit.max()) if limit.numel() else 0.0, bool((off <= limit).all())


def ratio(error: Tensor, unit: Tensor) -> Tensor:
    """error / unit with 0 / 0 = 0."""
    return torch.where((error == 0) & (unit == 0), 0.0, error / unit)


def _ulp(x: Tensor, truth: Tensor, usable: Tensor, dtype: torch.dtype) -> Tensor:
    """|error| in units of the last place of the reference, flat; values below the tensor's rms share that rms' ulp."""
    if not usable.any():
        return x.new_zeros(0)
    reference = truth[usable]
    scale = reference.abs().clamp(min=float(reference.pow(2).mean().sqrt()) or 1e-300)
    ulp = torch.exp2(torch.floor(torch.log2(scale))) * torch.finfo(dtype).eps
    return (x[usable] - reference).abs() / ulp


def exact_zeros(name: str, call: Call, truth: Tensor) -> Tensor:
    """Where a value is 0 by geometry alone: rows without keys, keys without rows, table entries no visible pair meets."""
    zeros = torch.zeros(truth.shape, dtype=torch.bool, device=truth.device)
    if name in LIKE_O or name in ROW_GRADIENTS or name in KEY_GRADIENTS:
        for segment in call.segments():
            seen = intervals.unhidden_heads(call, segment).to(truth.device)
            if name in KEY_GRADIENTS:
                groups = seen if seen.shape[0] == 1 else seen.unflatten(0, (-1, call.group)).any(dim=1)
                zeros[segment.batch, :, segment.k0 : segment.k1] = ~groups.any(dim=1)[..., None]
            else:
                zeros[segment.batch, :, segment.q0 : segment.q1] = ~seen.any(dim=2)[..., None]
    elif name == "dpair_bias":
        zeros[:] = True
        for segment in call.segments():
            seen = intervals.unhidden_heads(call, segment).to(truth.device)
            own = call.pairs_of(zeros, segment)
            for axis in (0, 1):
                seen = seen.any(dim=axis, keepdim=True) if own.shape[axis] == 1 else seen
            own &= ~seen
    elif name == "dbias":
        met: Tensor | None = None
        for segment in call.segments():
            seen = intervals.unhidden_heads(call, segment).to(truth.device)
            met = torch.zeros(len(seen), truth.shape[1], dtype=torch.bool, device=truth.device) if met is None else met
            h, i, j = seen.nonzero(as_tuple=True)
            column = i + (segment.sk - segment.sq) - j + call.spec.bias_origin
            inside = (column >= 0) & (column < truth.shape[1])
            met[h[inside], column[inside]] = True
        zeros[:] = True if met is None else ~met
    return zeros
