"""The numeric gate: is this result as good as a correct kernel of its dtype? (docs/numerics.md)

    verdict = judge(problem.call, problem.dy, problem.dlse, result)     # result: y, lse, dq, dk, ... by name
    assert verdict.ok, verdict

`doctor.steps.compare` does the measuring: non-finite values on their own, exact zeros, the gain of each head, the error of each
cell in units of plain PyTorch's, the error of the whole tensor in units of a flash kernel's. The gate is stricter than the
doctor: what the doctor calls suspect fails here, and a kernel of ours gets no allowance for one more rounding than a flash
kernel's.

Inputs must keep weights away from the kink of the elastic softmax (math.md eq. 35): `cases.kink_margin` measures that, and a
case that comes too near is drawn again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from hashlib import sha1

import torch
from torch import Tensor

from backlight.call import Call, all_tensors
from backlight.doctor.steps.compare import RHO_B, RHO_PASS, Comparison, compare
from backlight.doctor.steps.localise import worst_cell
from backlight.problems.problem import Problem
from backlight.reference import OUTPUTS
from backlight.spec import TENSOR_NAMES

# the truth and the measures of normal error for one call, computed once and kept: truth, eager, flashlike, noise
Yardsticks = Problem
OBSERVED = {"y": "o"}


@dataclass
class Row:
    """What was found about one quantity. A defect is an error; `precision` is correct but coarser than a good kernel."""

    name: str
    found: Comparison | None = None
    defects: list[str] = field(default_factory=list)
    precision: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        if self.found is None:
            return self.name
        c = self.found
        gains = " ".join(f"{gain:.4f}" for gain in c.gains)
        return f"{self.name:8}{c.rho_a:8.2f}{c.versus_flash:8.2f}{int(c.nonfinite.sum()):11d}  {gains}"


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
        head = f"{'':8}{'rho_A':>8}{'rho_B':>8}{'nonfinite':>11}  gains"
        return "\n".join([*self.defects, *self.precision, head, *map(str, self.rows)])

    __repr__ = __str__


def measure(call: Call, dy: Tensor | None = None, dlse: Tensor | None = None) -> Yardsticks:
    """The yardsticks of a call, kept for a while by the values of its tensors: many tests run one problem in several ways."""
    # float64 borrows the errors of fp32 and knows no forward alone
    if dy is None and (dlse is not None or call.q.dtype == torch.float64):
        dy = torch.zeros(*call.q.shape[:3], call.v.shape[-1], dtype=call.q.dtype, device=call.q.device)
    key = (call.spec, call.deterministic, *[_digest(x) for x in (*all_tensors(call), dy, dlse)])
    # without incoming gradients the oracle and its yardsticks are forward only
    found = _measured.pop(key, None) or Problem(*_copied(call, dy, dlse))  # type: ignore[arg-type]
    # the newest last
    _measured[key] = found
    if len(_measured) > KEPT:
        del _measured[next(iter(_measured))]
    return found


KEPT = 16
_measured: dict[tuple[object, ...], Yardsticks] = {}


def _digest(x: Tensor | None) -> tuple[object, ...] | None:
    if x is None:
        return None
    # memory of its own: a tensor of one element may keep a stride of 0, which `view` refuses
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.detach().reshape(-1))
    return tuple(x.shape), x.dtype, x.device, sha1(flat.view(torch.uint8).numpy().tobytes()).digest()


def _copied(call: Call, dy: Tensor | None, dlse: Tensor | None) -> tuple[Call, Tensor | None, Tensor | None]:
    """The problem in memory of its own: yardsticks are computed at need, and a test may change its tensors before."""
    tensors = {name: x.detach().clone() for name, x in zip(TENSOR_NAMES, all_tensors(call), strict=True) if x is not None}
    own = [None if x is None else x.detach().clone() for x in (dy, dlse)]
    return replace(call, **tensors), *own  # type: ignore[return-value]


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
    return Verdict([_examine(name, result[name], yardsticks) for name in names])


def _examine(name: str, value: Tensor, problem: Yardsticks) -> Row:
    wanted = problem.truth[name].shape
    if value.shape != wanted:
        return Row(name, defects=[f"shape {tuple(value.shape)} instead of {tuple(wanted)}"])
    c = compare(OBSERVED.get(name, name), value, problem)
    row = Row(name, c)
    if bool(c.nonfinite.any()):
        row.defects.append(f"{c.nonfinite_words}, first at {_first(c.nonfinite)}")
        return row
    if bool(c.stray_zeros.any()):
        row.defects.append(f"{int(c.stray_zeros.sum())} values must be exactly 0, first at {_first(c.stray_zeros)}")
    if not c.rho_a <= RHO_PASS:
        row.defects.append(f"rho_A {c.rho_a:.2f} > {RHO_PASS:g}, worst at {worst_cell(c)}")
    if not c.gain_ok:
        row.defects.append(f"gain {' '.join(f'{gain:.5f}' for gain in c.gains)} by head, off by more than {c.gain_limit:.1e}")
    if not c.versus_flash <= RHO_B:
        row.precision.append(f"rho_B {c.versus_flash:.2f} > {RHO_B:g}: precision below the algorithm's own")
    return row


def _first(where: Tensor) -> tuple[int, ...]:
    return tuple(where.nonzero()[0].tolist())
