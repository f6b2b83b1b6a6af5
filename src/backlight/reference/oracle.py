"""The oracle: dense attention in float64 with a hand-written backward, one head of one segment at a time.

It returns every intermediate by name as a `Trace`. Memory is a handful of Sq x Sk matrices of ONE head; ask for outputs only
(`keep=OUTPUTS + GRADIENTS`) and a long sequence fits. The formulas live in `trace.py`; this file slices the call into heads,
runs the stages and puts the pieces together (GQA sums, sums over batch).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.reference.trace import BACKWARD, FORWARD, STAGES, Stage, Trace, Values
from backlight.spec import OF_PAIRS, PER_HEAD, TENSORS, TERMS, Input, Segment

Rounding = Callable[[str, Tensor], Tensor]

MATRICES = ("x", "capped", "s", "p", "m", "a", "dp", "ds", "dx")
ROWS = ("lse", "p_sink", "delta")
ROW_VECTORS = ("o", "u", "y", "do", "dgate", "dq")
KEY_VECTORS = ("dk", "dv")
# terms of which stages see only what they hide
GEOMETRY = ("rows", "pos")
PARAMETERS = tuple(f"d{name}" for name in PER_HEAD)


def _exact(name: str, value: Tensor) -> Tensor:
    return value


def _part_of(each: Input, call: Call, segment: Segment, at: Mapping[str, int | slice]) -> Tensor | None:
    """What one head of one segment sees of a tensor."""
    tensor = getattr(call, each.name)
    if tensor is None:
        return None
    if each.of_pairs:
        return _pairs_of_head(tensor, call, segment, at["heads"])  # type: ignore[arg-type]
    return tensor[tuple(at.get(axis, slice(None)) for axis in each.axes)]


def _pairs_of_head(tensor: Tensor, call: Call, segment: Segment, h: int) -> Tensor:
    """A bias of pairs, or its gradient, of a head of a segment, a view."""
    return call.pairs_of(tensor, segment)[h if tensor.shape[1] > 1 else 0]


def _head_of_group(h: int, group: int) -> int:
    return h // group


@dataclass(frozen=True)
class Oracle:
    """How a call is evaluated. The default is the truth; mutants replace stages, the head map or the final sums.

    dtype:   arithmetic of every stage.
    round:   applied to each stage's value, by name (yardsticks round to a storage dtype here).
    kv_head: query head, group size -> key/value head.
    """

    stages: Mapping[str, Stage] = field(default_factory=lambda: STAGES)
    dtype: torch.dtype = torch.float64
    round: Rounding = _exact
    kv_head: Callable[[int, int], int] = _head_of_group

    def __call__(
        self,
        call: Call,
        dy: Tensor | None = None,
        dlse: Tensor | None = None,
        keep: Iterable[str] | None = None,
    ) -> Trace:
        """Forward, and backward too when `dy` or `dlse` is given. `keep` names the quantities to return; None = all."""
        for term in call.spec.terms:
            if term in GEOMETRY:
                continue
            if not any(term in stage.reads for stage in STAGES.values()) or f"d{term}" not in STAGES:
                raise NotImplementedError(f"the oracle has no stages for {term}: its mathematics belongs in reference/trace.py")
        backward = dy is not None or dlse is not None
        names = [name for name in self.stages if name in FORWARD or (backward and name in BACKWARD)]
        kept = list(names if keep is None else [name for name in names if name in set(keep)])
        if backward and dy is None:
            dy = call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1])
        trace = {name: self._blank(name, call) for name in kept}
        for batch, h, segment, inputs in self._heads(call, dy, dlse):
            values = self.run_head(inputs, names)
            for name in kept:
                self._place(trace[name], name, values[name], batch, h, segment, call)
        return Trace(trace)

    def run_head(self, inputs: Mapping[str, object], names: Iterable[str]) -> Values:
        """All named stages of one head, in order."""
        values = dict(inputs)
        for name in names:
            values[name] = self.round(name, self.stages[name](values))
        return values  # type: ignore[return-value]

    def _heads(
        self, call: Call, dy: Tensor | None, dlse: Tensor | None
    ) -> Iterator[tuple[int, int, Segment, dict[str, object]]]:
        """Inputs of every (segment, query head) in ascending order."""
        spec = call.spec

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(self.dtype)

        for segment in call.segments():
            sq, sk, b = segment.sq, segment.sk, segment.batch
            rows, keys = slice(segment.q0, segment.q1), slice(segment.k0, segment.k1)
            own = spec.allowed(sq, sk, call.q.device)
            geometry: dict[str, object] = {
                "scale": call.scale,
                "softcap": spec.softcap,
                "own": own,
                "visible": own,
                "n": spec.visible_counts(sq, sk, call.q.device)[:, None],
                "rows": None,
                "pos": None,
                "column": spec.distance(0, sq, 0, sk, sq, sk, call.q.device) + spec.bias_origin,
            }
            for h in range(call.q.shape[1]):
                g = self.kv_head(h, call.group)
                at: dict[str, int | slice] = {"batch": b, "heads": h, "kv_heads": g, "rows": rows, "keys": keys}
                inputs = geometry | self._masked(call, segment, h, own)
                inputs |= {
                    **{each.name: cast(_part_of(each, call, segment, at)) for each in TENSORS if each.learned},
                    "dy": None if dy is None else cast(dy[b, h, rows]),
                    "dlse": None if dlse is None else self._finite_rows(cast(dlse[b, h, rows]), h, segment, call),
                }
                yield b, h, segment, inputs

    def _masked(self, call: Call, segment: Segment, h: int, own: Tensor) -> dict[str, object]:
        """What a mask by row intervals makes of a head's geometry, counted and not computed (eq. 61-63 are not used)."""
        if call.rows is None:
            return {}
        rows, pos = intervals.of_head(call, segment, h)
        seen = own & intervals.seen(rows, pos)
        return {"visible": seen, "n": seen.sum(dim=-1, keepdim=True), "rows": rows, "pos": pos}

    @staticmethod
    def _finite_rows(dlse: Tensor | None, h: int, segment: Segment, call: Call) -> Tensor:
        """dlse of rows that see nothing is ignored, unless a sink gives them an lse."""
        assert dlse is not None
        if call.sink is not None and call.sink[h] != -torch.inf:
            return dlse
        if call.pair_bias is None:
            seen = intervals.visible(call, segment, h)
        else:
            heads = intervals.unhidden_heads(call, segment)
            seen = heads[min(h, len(heads) - 1)]
        return dlse.masked_fill(~seen.any(dim=-1), 0)

    def _blank(self, name: str, call: Call) -> Tensor:
        batch, hq, sq, d = call.q.shape
        sk, dv = call.v.shape[2:]
        if name in MATRICES:
            shape: tuple[int, ...] = (batch, hq, sq, sk)
        elif name in ROWS:
            shape = (batch, hq, sq)
        elif name in ROW_VECTORS:
            shape = (batch, hq, sq, d if name == "dq" else dv)
        elif name in KEY_VECTORS:
            shape = (batch, call.k.shape[1], sk, d if name == "dk" else dv)
        else:
            term = next(term for term in TERMS if name == f"d{term.name}")
            given = getattr(call, term.name)
            absent = (0,) * len(term.axes) if term.of_pairs else (hq, *[0 for _ in term.axes[1:]])
            shape = absent if given is None else tuple(given.shape)
        return torch.full(shape, -torch.inf if name == "s" else 0.0, dtype=self.dtype, device=call.q.device)

    def _place(self, out: Tensor, name: str, value: Tensor, b: int, h: int, segment: Segment, call: Call) -> None:
        rows, keys = slice(segment.q0, segment.q1), slice(segment.k0, segment.k1)
        if name in MATRICES:
            out[b, h, rows, keys] = value
        elif name in KEY_VECTORS:
            out[b, self.kv_head(h, call.group), keys] += value
        elif name in PARAMETERS:
            out[h] += value
        elif name[1:] in OF_PAIRS:
            if out.numel():
                _pairs_of_head(out, call, segment, h).add_(value)
        else:
            out[b, h, rows] = value


oracle = Oracle()


def max_logit(call: Call) -> Tensor:
    """The largest x of each query head (eq. 72) over batch, rows and the keys they see: float64 [Hq], -inf where there is none.

    What a bias of -inf hides is not seen.
    """
    trace = oracle(call, keep=("x", "s"))
    x = trace["x"].masked_fill(trace["s"] == -torch.inf, -torch.inf).transpose(0, 1).flatten(1)
    return torch.cat([x, x.new_full((x.shape[0], 1), -torch.inf)], dim=1).amax(dim=1)
