"""One thing to measure: a case in a dtype, its tensors on a device, and how many operations it counts for (math.md eq. 42)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.cases import DTYPE_NAMES, Case

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
PHASES = ("forward", "backward", "both")


@dataclass(frozen=True)
class Tensors:
    """A bound call in canonical layout, without gradients attached, and the gradient dy [B,Hq,Sq,Dv] that comes in."""

    workload: Workload
    call: Call
    dy: Tensor


@dataclass(frozen=True)
class Workload:
    """A case in one dtype. Everything here follows from the case: nothing is drawn until `draw`."""

    case: Case
    dtype: torch.dtype

    @property
    def id(self) -> str:
        return f"{self.case.name}/{DTYPE_NAMES[self.dtype]}"

    @property
    def batch(self) -> int:
        return 1 if self.case.varlen else self.case.b

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """(Sq, Sk) of every independent problem of one head."""
        case = self.case
        if case.lengths_q is None:
            return ((case.sq, case.sk),) * case.b
        return tuple(zip(case.lengths_q, case.lengths_q if case.lengths_k is None else case.lengths_k, strict=True))

    @property
    def sq(self) -> int:
        """Rows of one batch entry; all rows of a packed case."""
        return sum(sq for sq, _ in self.lengths) if self.case.varlen else self.case.sq

    @property
    def sk(self) -> int:
        return sum(sk for _, sk in self.lengths) if self.case.varlen else self.case.sk

    @property
    def dv(self) -> int:
        return self.case.d if self.case.dv is None else self.case.dv

    @property
    def pairs(self) -> int:
        """N of eq. 42: visible (row, key) pairs over all heads, batches and packed sequences."""
        counted = {lengths: self.case.spec.visible_pairs(*lengths) for lengths in set(self.lengths)}
        return self.case.hq * sum(counted[lengths] for lengths in self.lengths)

    def flops(self) -> dict[str, int]:
        """The plain numerator of eq. 42, whatever the variant: recomputation and extra passes show as cost."""
        forward, backward = 2 * self.pairs * (self.case.d + self.dv), 2 * self.pairs * (3 * self.case.d + 2 * self.dv)
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def input_bytes(self) -> int:
        """Bytes of q, k and v together."""
        case, size = self.case, self.dtype.itemsize
        return self.batch * size * (case.hq * self.sq * case.d + case.hkv * self.sk * (case.d + self.dv))

    def least_bytes(self) -> dict[str, int]:
        """Bytes that must cross the memory bus: inputs read once, outputs written once."""
        output = self.batch * self.dtype.itemsize * self.case.hq * self.sq * self.dv
        forward, backward = self.input_bytes() + output, 2 * self.input_bytes() + 2 * output
        return {"forward": forward, "backward": backward, "both": forward + backward}

    def draw(self, device: torch.device, seed: int = 0) -> Tensors:
        """N(0, 1) tensors made on the device in the workload's dtype; learned terms per head stay fp32."""
        case, b = self.case, self.batch
        generator = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        parameter = torch.float64 if self.dtype == torch.float64 else torch.float32
        tau = None
        if case.tau is not None:
            values = [case.tau[h % len(case.tau)] for h in range(case.hq)]
            tau = torch.tensor(values, dtype=parameter, device=device)
        cu_q = cumulative(case.lengths_q, device)
        call = Call(
            case.spec,
            normal(b, case.hq, self.sq, case.d),
            normal(b, case.hkv, self.sk, case.d),
            normal(b, case.hkv, self.sk, self.dv),
            None if case.bias is None else normal(case.hq, case.bias, dtype=parameter),
            normal(case.hq, dtype=parameter) if case.sink else None,
            tau,
            normal(b, case.hq, self.sq, self.dv) if case.gate else None,
            cu_q,
            cu_q if case.lengths_k is None else cumulative(case.lengths_k, device),
        )
        return Tensors(self, call, normal(b, case.hq, self.sq, self.dv))

    def to_json(self) -> dict[str, Any]:
        """The workload as plain data: only the fields of the case that differ from their defaults."""
        changed = {f.name: getattr(self.case, f.name) for f in fields(Case) if f.name != "dtypes"}
        plain = Case(self.case.name)
        return {
            "dtype": DTYPE_NAMES[self.dtype],
            "case": {n: x for n, x in changed.items() if n in SHAPE or x != getattr(plain, n)},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Workload:
        options: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in data["case"].items()}
        return Workload(Case(**options), DTYPES[data["dtype"]])


SHAPE = ("name", "b", "hq", "hkv", "sq", "sk", "d", "causal")


def cumulative(lengths: tuple[int, ...] | None, device: torch.device) -> Tensor | None:
    return None if lengths is None else torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
