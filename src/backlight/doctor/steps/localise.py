"""Step 6: where the wrong values are, and whether a stage is wrong itself or inherits its error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.defects.mutants import BACKWARD_HALF, FORWARD_HALF, SAVED_ROWS, Half
from backlight.doctor.report.model import Where
from backlight.doctor.steps.compare import CELL, LIKE_O, TILE, Comparison, ratio, to_cells, units_of
from backlight.problems.axes import ROW_GRADIENTS
from backlight.problems.kink import KINK
from backlight.problems.problem import Problem
from backlight.reference.oracle import MATRICES
from backlight.reference.trace import Values
from backlight.spec import GRADIENTS, OF_PAIRS

COVER = 0.99
ROW_TENSORS = (*LIKE_O, "lse", "tlse", *ROW_GRADIENTS, *(f"d{name}" for name in OF_PAIRS))


# --- the smallest description of a wrong set -------------------------------------------------------------------------------


def describe(energy: Tensor, name: str, call: Call) -> Where | None:
    """The shortest of our templates that covers 0.99 of the error energy [B, H, S]; None when there is none."""
    total = float(energy.sum())
    if not total > 0:
        return None
    batches = _members(energy.sum((1, 2)), total)
    heads = _members(energy.sum((0, 2)), total)
    profile = energy.sum((0, 1))
    span = _span(profile, total)
    parts: list[str] = []
    if batches is not None:
        parts.append("batch " + _list(batches, energy.shape[0]))
    if heads is not None:
        parts.append(("head " if len(heads) == 1 else "heads ") + _list(heads, energy.shape[1]))
    segments = _segments(profile, total, name, call)
    rows = name in ROW_TENSORS
    word = "columns" if name == "dbias" else "rows" if rows else "keys"
    if segments is not None:
        parts.append("packed sequence " + ", ".join(map(str, segments)))
    elif span is not None:
        parts.append(f"{word[:-1]} {span[0]}" if span[1] - span[0] == 1 else f"{word} {span[0]}-{span[1] - 1}")
    return Where(
        batch=batches,
        heads=heads,
        rows=span if rows else None,
        keys=span if not rows and name != "dbias" else None,
        segments=segments,
        text=", ".join(parts) or "everywhere",
    )


def _members(weights: Tensor, total: float) -> tuple[int, ...] | None:
    """The smallest set of indices that carries the energy, None when it is all of them."""
    order = weights.argsort(descending=True)
    count = int((weights[order].cumsum(0) < COVER * total).sum()) + 1
    if count >= weights.numel() or weights.numel() == 1:
        return None
    return tuple(sorted(order[:count].tolist()))


def _span(profile: Tensor, total: float) -> tuple[int, int] | None:
    """The shortest run of positions that carries the energy, None when it is nearly all of them."""
    sums = torch.cat([profile.new_zeros(1), profile.cumsum(0)])
    ends = torch.searchsorted(sums, sums[:-1] + COVER * total)
    lengths = torch.where(ends < sums.numel(), ends - torch.arange(ends.numel(), device=ends.device), sums.numel())
    start = int(lengths.argmin())
    length = int(lengths[start])
    return None if length >= 0.9 * profile.numel() else (start, start + length)


def _segments(profile: Tensor, total: float, name: str, call: Call) -> tuple[int, ...] | None:
    if not call.varlen or profile.numel() not in (call.q.shape[2], call.k.shape[2]):
        return None
    rows = name in ROW_TENSORS
    sums = [float(profile[z.q0 : z.q1].sum() if rows else profile[z.k0 : z.k1].sum()) for z in call.segments()]
    return _members(torch.tensor(sums, dtype=torch.float64), total) if len(sums) > 1 else None


def _list(members: Sequence[int], count: int) -> str:
    if len(members) > 1 and list(members) == list(range(members[0], count)):
        return f">= {members[0]}"
    return ", ".join(map(str, members))


def worst_cell(c: Comparison) -> Where | None:
    """The cell with the largest ratio to yardstick A, or the first non-finite value."""
    if c.cells.numel() == 0:
        return None
    bad = c.nonfinite if c.nonfinite.dim() >= 3 else None
    if bad is not None and bool(bad.any()):
        b, h, s = bad.nonzero()[0, :3].tolist()
        return Where(batch=(b,), heads=(h,), rows=(s, s + 1), text=f"b{b} h{h} row {s}")
    b, h, t = (int(i) for i in torch.unravel_index(c.cells.argmax(), c.cells.shape))
    if c.truth.dim() < 3:
        return Where(heads=(h,), text=f"h{h}")
    end = min((t + 1) * TILE, c.truth.shape[2])
    return Where(batch=(b,), heads=(h,), rows=(t * TILE, end), text=f"b{b} h{h} rows {t * TILE}-{end - 1}")


def only_in_empty_rows(c: Comparison, call: Call) -> bool:
    """Whether every non-finite value of a row tensor lies in a row that sees no key."""
    allowed = torch.zeros_like(c.nonfinite)
    for z in call.segments():
        empty = ~intervals.visible_heads(call, z).any(dim=-1).to(allowed.device)
        allowed[z.batch, :, z.q0 : z.q1] = empty if allowed.dim() == 3 else empty[..., None]
    return bool(c.nonfinite.any()) and not bool((c.nonfinite & ~allowed).any())


def diagonals(cells: Tensor, offset: int) -> dict[int, int]:
    """Distance i' - j -> number of marked cells of a [.., Sq, Sk] mask, largest first."""
    index = cells.nonzero()
    if not index.numel():
        return {}
    values, counts = (index[:, -2] + offset - index[:, -1]).unique(return_counts=True)
    order = counts.argsort(descending=True)
    return dict(zip(values[order].tolist(), counts[order].tolist(), strict=True))


# --- local error -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Local(Half):
    """Every stage recomputed in float64 from the kernel's own values before it: what it should be, given those."""

    observed: Mapping[str, Tensor] = field(default_factory=dict)

    def _heads(self, call, dy, dlse):
        for b, h, z, inputs in super()._heads(call, dy, dlse):
            rows, keys = slice(z.q0, z.q1), slice(z.k0, z.k1)
            taken = {n: (x[b, h, rows, keys] if n in MATRICES else x[b, h, rows]).double() for n, x in self.observed.items()}
            yield b, h, z, {**inputs, "observed": taken}

    def run_head(self, inputs: Mapping[str, object], names: Iterable[str]) -> Values:
        values, local = dict(inputs), {}
        taken: Mapping[str, Tensor] = inputs["observed"]  # type: ignore[assignment]
        for name in names:
            local[name] = self.stages[name](values)
            values[name] = taken.get(name, local[name])
        return local


UPSTREAM = ("s", "p", "lse", "o", "y", "delta", "dp", "ds")


def local_values(problem: Problem, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each stage should be, given the kernel's own lse, output and any intermediates it showed (names of `UPSTREAM`)."""
    taps = {name: x for name, x in values.items() if name in UPSTREAM and name not in ("lse", "o") and x.dim() >= 3}
    lse = _settled(values["lse"], problem) if "lse" in values else problem.truth.lse
    seen = dict(taps)
    if "lse" in values:
        seen["lse"] = lse
    forward = Local(FORWARD_HALF, observed=seen)(problem.call, keep=("lse", "p", "o", "u", "y", "s"))
    saved = {"lse": lse, "y": values["o"], "u": problem.truth.u}
    saved["o"] = problem.truth.o if problem.call.gate is not None else values["o"]
    saved = {name: saved[name].double() for name in SAVED_ROWS}
    names = ("p", "dp", "delta", "ds", *GRADIENTS)
    keep = [n for n in names if n not in MATRICES or n in taps]
    if "p (bwd)" in values:
        taps["p"] = values["p (bwd)"]
    backward = Local(BACKWARD_HALF, saved=saved, observed=taps)(problem.call, problem.dy, problem.dlse, keep)
    return {n: x for n, x in forward.items() if n not in backward} | dict(backward.items())


def _settled(lse: Tensor, problem: Problem) -> Tensor:
    """lse as it is; with tau, the oracle's lse where the two agree to rounding.

    A row that sees one key may sit on the kink of eq. 10. An error of 1e-7 then decides whether the key survives, and that says
    nothing about the stages after it.
    """
    truth = problem.truth.lse
    if problem.call.tau is None:
        return lse
    close = (lse == truth) | ((lse.double() - truth).abs() <= KINK * (1 + truth.abs()))
    return torch.where(close, truth, lse.double())


def local_ratio(name: str, value: Tensor, local: Tensor, problem: Problem) -> tuple[float, float]:
    """(worst cell in units of yardstick A, relative rms) of value - local."""
    units = units_of(name, problem, value.dtype)
    x = value.detach().double()
    usable = torch.isfinite(x) & torch.isfinite(local) & units.finite
    error = to_cells((x - local).masked_fill(~usable, 0))
    size = to_cells(local.masked_fill(~usable, 0))
    eps = units.rounding + float(ratio(units.rms(units.eager, (0, 1, 2, 3, 4)), units.rms(units.magnitude, (0, 1, 2, 3, 4))))
    unit = torch.maximum(units.unit(units.eager, CELL), min(eps, 0.02) * units.rms(size, CELL))
    cells = ratio(units.rms(error, CELL), unit)
    relative = float(ratio(error.norm(), size.norm()))
    return (float(cells.max()) if cells.numel() else 0.0), relative
