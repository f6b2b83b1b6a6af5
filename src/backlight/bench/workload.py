"""One thing to measure: a case in a dtype, its tensors on a device, and how many operations it counts for (math.md eq. 42)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.problems.case import DTYPE_NAMES, Case
from backlight.problems.draw import borders, call_of, fall, mask_terms, normal, pair_bias_term, terms_to_draw

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
        return self.case.sizes.batch

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
        return self.case.sizes.rows

    @property
    def sk(self) -> int:
        return self.case.sizes.keys

    @property
    def dv(self) -> int:
        return self.case.sizes.values

    @property
    def pairs(self) -> int:
        """N of eq. 42: visible (row, key) pairs over all heads, batches and packed sequences."""
        if self.case.mask is not None:
            return self._masked_pairs()
        counted = {lengths: self.case.spec.visible_pairs(*lengths) for lengths in set(self.lengths)}
        return self.case.hq * sum(counted[lengths] for lengths in self.lengths)

    def _masked_pairs(self) -> int:
        """As many as the mask of the first seed leaves."""
        case = self.case
        shapes = (self.batch, case.hq, self.sq, 0), (self.batch, case.hkv, self.sk, 0)
        q, k = (torch.empty(shape) for shape in shapes)
        cu_q = None if case.lengths_q is None else borders(case.lengths_q)
        cu_k = cu_q if case.lengths_k is None else borders(case.lengths_k)
        call = call_of(case.spec, {"q": q, "k": k, "v": k} | self._mask(), cu_q, cu_k)
        if intervals.can_fold(call):
            return int(intervals.visible_counts(call).expand(q.shape[:3]).long().sum())
        return int(intervals.visible_whole(call).expand(-1, case.hq, -1, -1).sum())

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
        case, chosen = self.case, self.case.chosen(self.dtype, device)
        names = ("q", "k", "v", *terms_to_draw(case.spec, chosen), "dy")
        drawn = normal(case.sizes, names, dtype=self.dtype, seed=seed, device=device) | chosen
        drawn["q"] *= case.logits
        if case.falling:
            fall(drawn, case.falling / case.spec.resolve_scale(case.d))
        drawn |= {name: x.to(device) for name, x in self._mask(seed).items()}
        if case.pair_bias is not None:
            drawn["pair_bias"] = pair_bias_term(case.sizes, case.pair_bias, self.dtype, seed, device, torch.float32)
        cu_q = None if case.lengths_q is None else borders(case.lengths_q, device)
        cu_k = cu_q if case.lengths_k is None else borders(case.lengths_k, device)
        return Tensors(self, call_of(case.spec, drawn, cu_q, cu_k), drawn["dy"])

    def _mask(self, seed: int = 0) -> dict[str, Tensor]:
        case = self.case
        return {} if case.mask is None else mask_terms(case.spec, case.sizes, case.mask, seed, case.mask_of)

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
