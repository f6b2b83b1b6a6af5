"""The numeric gate: is this result as good as a correct kernel of its dtype? (doctor.md section 7)

    verdict = judge(problem.call, problem.dy, problem.dlse, result)     # result: y, lse, dq, dk, ... by name
    assert verdict.ok, verdict

Order of the checks, for each quantity: non-finite values first and on their own; exact zeros where the geometry demands them;
the gain of each head; the error of each cell (batch, head, 64 rows) in units of yardstick A; the error of the whole tensor in
units of yardstick B. Every comparison is written `not (value <= limit)`, so a NaN fails.

Few roundings fluctuate, and fp32 kernels differ in the order of their sums. Both get one floor: `eps` times the root sum of
squares of the summands that make up a value, taken before they cancel (`noise`). Inputs must keep weights away from the kink of
the elastic softmax (math.md eq. 35): `cases.kink_margin` measures that, and a case that comes too near is drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference import GRADIENTS, OUTPUTS, STAGES, Oracle, Trace, eager, flashlike, oracle
from backlight.reference.trace import Stage

TILE = 64
RHO_A = 2.0
RHO_B = 1.25
GAIN = 2e-3
GAIN_ELEMENTS = 10_000
# rms of rounding to nearest, in units of eps
ROUNDING = 0.29
# four standard deviations of the rms of N roundings: kernel and yardstick each draw their own
FLUCTUATION = 4.0
# fp32 and fp64: dozens of roundings behind each summand and its partial sums, in an order of the kernel's own
REORDERING = 6.0
SIXTEEN_BIT = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Yardsticks:
    """The truth and three measures of normal error for one problem."""

    truth: Trace
    eager: Trace
    flashlike: Trace
    noise: Mapping[str, Tensor]


@dataclass
class Row:
    """What was found about one quantity. A defect is an error; `precision` is correct but coarser than a good kernel."""

    name: str
    nonfinite: int = 0
    gains: list[float] = field(default_factory=list)
    rho_a: float = 0.0
    rho_b: float = 0.0
    defects: list[str] = field(default_factory=list)
    precision: list[str] = field(default_factory=list)


@dataclass(repr=False)
class Verdict:
    rows: list[Row]

    @property
    def defects(self) -> list[str]:
        return [f"{row.name}: {sentence}" for row in self.rows for sentence in row.defects]

    @property
    def precision(self) -> list[str]:
        return [f"{row.name}: {sentence}" for row in self.rows for sentence in row.precision]

    @property
    def ok(self) -> bool:
        return not self.defects and not self.precision

    @property
    def defective(self) -> set[str]:
        return {row.name for row in self.rows if row.defects}

    @property
    def coarse(self) -> set[str]:
        return {row.name for row in self.rows if row.precision}

    def __str__(self) -> str:
        lines = [f"{'':8}{'rho_A':>8}{'rho_B':>8}{'nonfinite':>11}  gains"]
        for row in self.rows:
            gains = " ".join(f"{gain:.4f}" for gain in row.gains)
            lines.append(f"{row.name:8}{row.rho_a:8.2f}{row.rho_b:8.2f}{row.nonfinite:11d}  {gains}")
        return "\n".join([*self.defects, *self.precision, *lines])

    __repr__ = __str__


def measure(call: Call, dy: Tensor | None = None, dlse: Tensor | None = None) -> Yardsticks:
    names = OUTPUTS if dy is None and dlse is None else OUTPUTS + GRADIENTS
    truth = oracle(call, dy, dlse, keep=names)
    return Yardsticks(truth, eager(call, dy, dlse, names), flashlike(call, dy, dlse, names), noise(call, dy, dlse, truth.lse))


def judge(
    call: Call,
    dy: Tensor | None,
    dlse: Tensor | None,
    result: Mapping[str, Tensor],
    yardsticks: Yardsticks | None = None,
    names: Iterable[str] | None = None,
) -> Verdict:
    """Examine `result` (canonical layout, by name) of one call; `names` defaults to the outputs and every gradient it has."""
    yardsticks = yardsticks or measure(call, dy, dlse)
    if names is None:
        names = OUTPUTS if dy is None and dlse is None else (*OUTPUTS, *call.gradients)
    return Verdict([_examine(name, result[name], call, yardsticks) for name in names])


def _examine(name: str, value: Tensor, call: Call, yardsticks: Yardsticks) -> Row:
    row = Row(name)
    truth, x = yardsticks.truth[name], value.detach().double()
    if x.shape != truth.shape:
        row.defects.append(f"shape {tuple(x.shape)} instead of {tuple(truth.shape)}")
        return row
    finite = torch.isfinite(truth)
    row.nonfinite = int((~torch.isfinite(x) & finite).sum())
    if row.nonfinite:
        row.defects.append(
            f"{row.nonfinite} of {x.numel()} values are not finite, first at {_first(~torch.isfinite(x) & finite)}"
        )
        return row
    if not torch.equal(x[~finite], truth[~finite]):
        row.defects.append(f"must be -inf at {_first(~finite & (x != truth))}, where a row sees no key")
        return row
    zeros = exact_zeros(name, call, truth)
    if not bool((x[zeros] == 0).all()):
        row.defects.append(f"{int((x[zeros] != 0).sum())} values must be exactly 0, first at {_first(zeros & (x != 0))}")
    if x.numel() == 0:
        return row
    _ratios(row, value.dtype, call, x, yardsticks)
    return row


def _ratios(row: Row, out_dtype: torch.dtype, call: Call, x: Tensor, yardsticks: Yardsticks) -> None:
    truth, yard_a, yard_b, noise_ = (
        _cells(trace[row.name].double())
        for trace in (yardsticks.truth, yardsticks.eager, yardsticks.flashlike, yardsticks.noise)
    )
    finite = torch.isfinite(truth)
    x, truth, yard_a, yard_b, noise_ = (t.masked_fill(~finite, 0) for t in (_cells(x), truth, yard_a, yard_b, noise_))
    weight = finite.double()
    sixteen_bit = call.q.dtype in SIXTEEN_BIT and row.name != "lse"
    batch, heads, length = call.q.shape[:3]
    cell, head, whole = (3, 4), (0, 2, 3, 4), (0, 1, 2, 3, 4)

    def rms(value: Tensor, dims: tuple[int, ...]) -> Tensor:
        return ((value**2).sum(dims) / weight.sum(dims).clamp(min=1)).sqrt()

    def rounding(dims: tuple[int, ...]) -> Tensor:
        return ROUNDING * torch.finfo(out_dtype).eps * rms(truth, dims)

    def independent(dims: tuple[int, ...]) -> Tensor:
        """How many errors there are to average: a row shares its delta, so never more than rows."""
        rows = rows_behind(row.name, call) if dims == cell else torch.tensor((heads if dims == whole else 1) * batch * length)
        return torch.minimum(weight.sum(dims), rows.double()).clamp(min=1)

    def floor(dims: tuple[int, ...]) -> Tensor:
        share = FLUCTUATION / independent(dims).sqrt() + (0 if sixteen_bit else REORDERING)
        return share * ROUNDING * torch.finfo(call.q.dtype).eps * rms(noise_, dims)

    rho_a = _ratio(rms(x - truth, cell), rms(yard_a - truth, cell) + rounding(cell) + floor(cell))
    row.rho_a = float(rho_a.max())
    if not row.rho_a <= RHO_A:
        b, h, tile = _first(~(rho_a <= RHO_A))
        row.defects.append(f"rho_A {row.rho_a:.2f} > {RHO_A:g}, first in batch {b} head {h} rows from {tile * TILE}")

    row.rho_b = float(_ratio(rms(x - truth, whole), rms(yard_b - truth, whole) + floor(whole)))
    if not row.rho_b <= RHO_B:
        row.precision.append(f"rho_B {row.rho_b:.2f} > {RHO_B:g}: precision below the algorithm's own")

    energy = (truth * truth).sum(head)

    def gain(value: Tensor) -> Tensor:
        return torch.where(energy > 0, (value * truth).sum(head) / energy, 1.0)

    normal = rms(yard_a - truth, head) + rounding(head) + floor(head)
    spread = 10 * _ratio(normal, rms(truth, head)) / independent(head).sqrt()
    limit = torch.maximum(spread, 2 * (gain(yard_a) - 1).abs())
    if sixteen_bit:
        limit = torch.where(weight.sum(head) >= GAIN_ELEMENTS, limit.clamp(min=GAIN), limit)
    gains = gain(x)
    row.gains = gains.tolist()
    for h in (~((gains - 1).abs() <= limit)).nonzero().flatten().tolist():
        row.defects.append(f"gain {gains[h]:.5f} of head {h} is off by more than {limit[h]:.1e}")


def exact_zeros(name: str, call: Call, truth: Tensor) -> Tensor:
    """Where a value is 0 by geometry alone: rows without keys, keys without rows, table entries no visible pair meets."""
    zeros = torch.zeros(truth.shape, dtype=torch.bool, device=truth.device)
    if name in ("y", "dq", "dgate", "dk", "dv"):
        for segment in call.segments():
            seen = call.spec.allowed(segment.sq, segment.sk, truth.device)
            if name in ("dk", "dv"):
                zeros[segment.batch, :, segment.k0 : segment.k1] = ~seen.any(0)[:, None]
            else:
                zeros[segment.batch, :, segment.q0 : segment.q1] = ~seen.any(1)[:, None]
    elif name == "dbias":
        met = torch.zeros(truth.shape[1], dtype=torch.bool, device=truth.device)
        for segment in call.segments():
            i, j = call.spec.allowed(segment.sq, segment.sk, truth.device).nonzero(as_tuple=True)
            column = i + (segment.sk - segment.sq) - j + call.spec.bias_origin
            met[column[(column >= 0) & (column < truth.shape[1])]] = True
        zeros[:] = ~met
    return zeros


def rows_behind(name: str, call: Call) -> Tensor:
    """Query rows that contribute to each cell, [B or 1, 1, tiles]: rows of the tile itself, or rows that see its keys."""
    batch, _, sq, _ = call.q.shape
    if name in ("dbias", "dsink", "dtau"):
        return torch.full((1, 1, 1), batch * sq)
    length = call.k.shape[2] if name in ("dk", "dv") else sq
    counts = torch.zeros(batch, 1, -(-length // TILE), dtype=torch.long)
    for segment in call.segments():
        start, end = (segment.k0, segment.k1) if name in ("dk", "dv") else (segment.q0, segment.q1)
        for tile in range(start // TILE, -(-end // TILE)):
            first, last = max(start, tile * TILE), min(end, (tile + 1) * TILE)
            if name in ("dk", "dv"):
                first, last = call.spec.row_range(first - start, last - start, segment.sq, segment.sk)
            counts[segment.batch, 0, tile] += last - first
    return counts


# --- the noise of rounding every summand once ----------------------------------------------------------------


def _root(value: Tensor) -> Tensor:
    return value.sum(dim=-1).sqrt()


def _noise_stages(fine: float) -> dict[str, Stage]:
    """Stages that add up squared summands, each taken before it cancels against others.

    `fine` is the noise of the accumulators' arithmetic in units of eps of the storage dtype: 1 for fp32, where every step
    rounds alike; tiny for 16 bits, where only stored values (y, hence delta) and matmul operands (weights, ds) round coarsely.
    """

    def weight(a, s, lse):
        """exp(s - lse) inherits the rounding of its argument."""
        s, lse = (logit.masked_fill(logit == -torch.inf, 0).abs() for logit in (s, lse))
        return a * (1 + fine * (s + lse.reshape(-1, *[1] * (a.dim() - 1))))

    def incoming(do, o, u, tau, n, delta):
        plain = _root((do * o) ** 2) + fine * delta.abs()
        return plain if tau is None else plain + tau.abs() / n.squeeze(-1).clamp(min=1) * _root((do * u) ** 2)

    def a(p, m, tau, n, s, lse):
        return weight(p, s, lse) if tau is None else m * (weight(p, s, lse) + tau.abs() / n.clamp(min=1))

    def o(p, m, tau, n, v):
        return STAGES["a"].compute(p, m, tau, n) @ v

    def y(a, v, gate):
        o = a**2 @ v**2
        return o if gate is None else o * torch.sigmoid(gate) ** 2

    def dgate(dy, a, v, gate):
        o = a**2 @ v**2
        return o if gate is None else o * (dy * torch.sigmoid(gate) * torch.sigmoid(-gate)) ** 2

    def dv(a, do):
        return (a**2).mT @ do**2

    def ds(p, m, dp, do, v, o, u, tau, n, delta, s, lse):
        stored = (m * dp - delta[:, None]).abs() + incoming(do, o, u, tau, n, delta)[:, None]
        return weight(p, s, lse) * (stored + fine * m * (dp.abs() + (do**2 @ (v**2).mT).sqrt()))

    def dbias(ds, bias, column):
        return STAGES["dbias"].compute(ds**2, bias, column)

    def dsink(p_sink, do, o, u, tau, n, delta, sink, lse):
        return ((weight(p_sink, lse if sink is None else sink, lse) * incoming(do, o, u, tau, n, delta)) ** 2).sum()

    def dtau(m, do, v, u, n):
        return ((do**2 * (u**2 + m @ v**2)).sum(-1) / n.squeeze(-1).clamp(min=1) ** 2).sum()

    def dq(dx, k, scale):
        return scale**2 * (dx**2 @ k**2)

    def dk(dx, q, scale):
        return scale**2 * ((dx**2).mT @ q**2)

    return STAGES | {stage.__name__: Stage.of(stage) for stage in (a, o, y, dgate, dv, ds, dbias, dsink, dtau, dq, dk)}


def noise(call: Call, dy: Tensor | None, dlse: Tensor | None, lse: Tensor) -> dict[str, Tensor]:
    """Per value, the root sum of squares of its summands; for lse the size of the numbers behind it in its own eps."""
    backward = dy is not None or dlse is not None
    fine = torch.finfo(call.accumulator_dtype).eps / torch.finfo(call.q.dtype).eps
    stages = _noise_stages(fine * REORDERING if call.q.dtype in SIXTEEN_BIT else fine)
    sums = Oracle(stages=stages)(call, dy, dlse, keep=("y", *GRADIENTS) if backward else ("y",))
    return {name: value.sqrt() for name, value in sums.items()} | {"lse": fine * (lse.abs() + math.log(call.k.shape[2] + 2))}


# --- shapes ----------------------------------------------------------------


def _cells(value: Tensor) -> Tensor:
    """[B,H,S,C] or lower -> [B, H, tiles, TILE, C], padded with NaN; parameters [H], [H,n] become one cell per head."""
    if value.dim() == 1:
        value = value[None, :, None, None]
    elif value.dim() == 2:
        value = value[None, :, None, :]
    elif value.dim() == 3:
        value = value[..., None]
    b, h, s, c = value.shape
    tiles = -(-s // TILE)
    padded = torch.nn.functional.pad(value, (0, 0, 0, tiles * TILE - s), value=torch.nan)
    return padded.reshape(b, h, tiles, TILE, c)


def _ratio(error: Tensor, unit: Tensor) -> Tensor:
    """error / unit with 0 / 0 = 0."""
    return torch.where((error == 0) & (unit == 0), 0.0, error / unit)


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())
