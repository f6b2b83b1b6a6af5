"""(y, lse) of a call from the oracle's own stages, dense and differentiable by torch as often as it likes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference.oracle import _part_of, oracle
from backlight.reference.trace import FORWARD, STAGES
from backlight.spec import LEARNED, TENSORS, Segment


def learned(call: Call) -> dict[str, Tensor]:
    return {name: x for name in LEARNED if (x := getattr(call, name)) is not None}


def dense(call: Call, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of the call with these inputs in the place of its own, in their dtype."""
    call = replace(call, **inputs)
    found = [[_head(call, z, h) for z in call.segments()] for h in range(call.q.shape[1])]
    heads = []
    for segments in found:
        by_batch = [[x for x, z in zip(segments, call.segments(), strict=True) if z.batch == b] for b in range(call.q.shape[0])]
        heads.append([torch.stack([torch.cat([x[i] for x in entries]) for entries in by_batch]) for i in range(2)])
    return torch.stack([y for y, _ in heads], dim=1), torch.stack([lse for _, lse in heads], dim=1)


def _head(call: Call, segment: Segment, h: int) -> tuple[Tensor, Tensor]:
    spec, sq, sk = call.spec, segment.sq, segment.sk
    rows, keys = slice(segment.q0, segment.q1), slice(segment.k0, segment.k1)
    own = spec.allowed(sq, sk)
    at = {"batch": segment.batch, "heads": h, "kv_heads": h // call.group, "rows": rows, "keys": keys}
    values = {
        "scale": call.scale,
        "softcap": spec.softcap,
        "own": own,
        "visible": own,
        "n": spec.visible_counts(sq, sk)[:, None],
        "rows": None,
        "pos": None,
        "column": spec.distance(0, sq, 0, sk, sq, sk) + spec.bias_origin,
        **oracle._masked(call, segment, h, own),
        **{each.name: _part_of(each, call, segment, at) for each in TENSORS if each.learned},
    }
    for name in FORWARD:
        values[name] = _lse(values) if name == "lse" else STAGES[name](values)
    return values["y"], values["lse"]


def _lse(values: dict[str, Tensor]) -> Tensor:
    """As the stage, with derivatives 0 instead of NaN where a row sees nothing."""
    # a pair bias may hide all that a mask has left
    s, empty = values["s"], (values["s"] == -torch.inf).all(dim=-1)
    if values["sink"] is not None:
        return STAGES["lse"](values)
    if not s.shape[-1]:
        return s.new_full(s.shape[:-1], -torch.inf)
    return STAGES["lse"](values | {"s": s.masked_fill(empty[:, None], 0)}).masked_fill(empty, -torch.inf)
