"""What is done once per row, on the rank that holds it: sink and gate after the merge, and the backward's pre-pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from backlight.call import Call
from backlight.distributed.merge import Dual, add_sink


def finish(call: Call, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """(y, lse) of whole rows from o and lse of all keys: sink (eq. 14), gate (eq. 13), rounding to the dtypes of outputs."""
    lse, share = add_sink(lse, call.sink)
    o = o if share is None else o * share[..., None].to(o.dtype)
    return gated(call, o), lse.to(call.accumulator_dtype)


def gated(call: Call, o: Tensor) -> Tensor:
    """y from o: the gate, then rounding to the dtype of q, in the dimension order of q's strides."""
    if call.gate is not None:
        o = o * torch.sigmoid(call.gate.to(o.dtype))
    return stored(o, call.q)


def gated_tangent(call: Call, tangents: Mapping[str, Tensor], dual: Dual) -> Tensor:
    """ty of whole rows (eq. 51), rounded as y is."""
    if call.gate is None:
        return stored(dual.to, call.q)
    weight = torch.sigmoid(call.gate.to(dual.o.dtype))
    moved = dual.to
    if "gate" in tangents:
        moved = moved + dual.o * (1 - weight) * tangents["gate"].to(dual.o.dtype)
    return stored(weight * moved, call.q)


def stored(value: Tensor, like: Tensor) -> Tensor:
    """The value in the dtype of `like`, and in its strides where the shapes agree."""
    if value.shape != like.shape:
        return value.to(like.dtype)
    return torch.empty_like(like).copy_(value)


@dataclass(frozen=True)
class Prepared:
    """delta - dlse [B,Hq,Sq] of every row and the gradients that need no key: dgate, dtau and dsink, the last two summed
    over the rows of this rank only. begun: gradients to which blocks add."""

    delta: Tensor
    gradients: dict[str, Tensor]
    begun: dict[str, Tensor] = field(default_factory=dict)


def prepare(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> Prepared:
    """The pre-pass of the backward (eq. 18, 20, 23, 24, 27, 28)."""
    dtype = call.accumulator_dtype
    do, y = dy.to(dtype), y.to(dtype)
    weighted = do * y
    delta = weighted.sum(dim=-1)
    out: dict[str, Tensor] = {}
    if call.gate is not None:
        weight = torch.sigmoid(call.gate.to(dtype))
        if "dgate" in needs:
            out["dgate"] = stored(weighted * (1 - weight), call.gate)
        do = do * weight
    if call.tau is not None:
        assert u is not None
        mean = (do * u.to(dtype)).sum(dim=-1)
        delta = delta - call.tau.to(dtype)[None, :, None] * mean
        if "dtau" in needs:
            out["dtau"] = mean.sum(dim=(0, 2))
    if dlse is not None:
        # a row that sees nothing has no lse to differentiate, unless a sink gives it one
        delta = delta - dlse.to(dtype).masked_fill(lse == -torch.inf, 0)
    if "dsink" in needs:
        assert call.sink is not None
        sink = call.sink.to(dtype)[None, :, None]
        # an infinite sink is all there is, or nothing
        weight = torch.exp(sink - lse).masked_fill(lse == sink, 1).masked_fill(lse == -torch.inf, 0)
        out["dsink"] = -(weight * delta).sum(dim=(0, 2))
    return Prepared(delta, out)
