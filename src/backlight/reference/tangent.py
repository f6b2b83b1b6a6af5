"""Forward mode as stages: how y and lse move along tangents of the inputs (docs/math.md, eq. 47-51; entmax: eq. 108-110).

A leading t marks a tangent. Inputs of a head are those of `trace` and, for each of them that is learned, its tangent `t<name>`,
0 where it does not move, None where the input is. `tlse` is mu of eq. 48.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference import entmax as sparse
from backlight.reference.eager import UNROUNDED
from backlight.reference.oracle import Oracle
from backlight.reference.trace import FORWARD, STAGES, Stage, Trace
from backlight.spec import LEARNED

TANGENT_STAGES: dict[str, Stage] = {}
TANGENTS = ("ty", "tlse")


def _stage(equation: str) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
        TANGENT_STAGES[compute.__name__] = Stage.of(compute, equation=equation)
        return compute

    return register


@_stage("47")
def tqk(tq, k):
    return tq @ k.mT


@_stage("47")
def qtk(q, tk):
    return q @ tk.mT


@_stage("47")
def tx(tqk, qtk, scale):
    return scale * (tqk + qtk)


@_stage("47")
def ts(tx, capped, softcap, tbias, column, tpair_bias, visible):
    """0, never -inf, where masked."""
    moved = tx if softcap is None else tx * (1 - (capped / softcap) ** 2)
    if tbias is not None:
        inside = (column >= 0) & (column < tbias.numel())
        moved = moved + torch.cat([tbias, tbias.new_zeros(1)])[torch.where(inside, column, tbias.numel())]
    if tpair_bias is not None:
        moved = moved + tpair_bias
    return moved.masked_fill(~visible, 0)


@_stage("108")
def tr(ts, p, entmax, tentmax):
    """With what a tangent of alpha adds to it."""
    return ts if entmax is None else ts + tentmax * sparse.by_tangent_of_alpha(p, entmax)


@_stage("48, 109")
def tlse(p, tr, p_sink, tsink, entmax, tentmax):
    if entmax is not None:
        moved = tentmax * sparse.by_tangent_of_alpha(p_sink, entmax)
        return sparse.mean_by_slopes(p, p_sink, tr, moved if tsink is None else moved + tsink, entmax)
    mean = (p * tr).sum(dim=-1)
    return mean if tsink is None else mean + p_sink * tsink


@_stage("49")
def tcentred(tr, tlse):
    return tr - tlse[:, None]


@_stage("49, 110")
def tp(p, tcentred, entmax):
    return tcentred * (p if entmax is None else sparse.slope(p, entmax))


@_stage("50")
def ta(tp, m, ttau, n):
    return tp if ttau is None else m * (tp + ttau / n.clamp(min=1))


@_stage("50")
def tav(ta, v):
    return ta @ v


@_stage("50")
def atv(a, tv):
    return a @ tv


@_stage("50")
def to(tav, atv):
    return tav + atv


@_stage("51")
def ty(to, o, gate, tgate):
    if gate is None:
        return to
    weight = torch.sigmoid(gate)
    return weight * (to + o * (1 - weight) * tgate)


FORWARD_MODE: dict[str, Stage] = {name: STAGES[name] for name in FORWARD} | TANGENT_STAGES
LIKE = {"ty": "y", "tlse": "lse"}


def tangent(call: Call, tangents: Mapping[str, Tensor], how: Oracle | None = None, keep: Iterable[str] = TANGENTS) -> Trace:
    """ty and tlse along tangents by name of the input, any subset; `how` says with which stages and arithmetic."""
    for name in tangents:
        if not any(f"t{name}" in stage.reads for stage in TANGENT_STAGES.values()):
            raise NotImplementedError(f"the oracle has no tangent of {name}: its mathematics belongs in reference/tangent.py")
    how = Oracle(FORWARD_MODE) if how is None else how
    names = [name for name in how.stages if name in FORWARD_MODE]
    found = {name: how._blank(LIKE.get(name, name), call) for name in keep}
    for (b, h, segment, inputs), (*_, moving) in zip(
        how._heads(call, None, None), how._heads(moved(call, tangents), None, None), strict=True
    ):
        values = how.run_head(inputs | {f"t{name}": moving[name] for name in LEARNED}, names)
        for name in found:
            how._place(found[name], LIKE.get(name, name), values[name], b, h, segment, call)
    return Trace(found)


def moved(call: Call, tangents: Mapping[str, Tensor]) -> Call:
    """The tangents in the place of a call's own tensors."""
    given = {name: x for name in LEARNED if (x := getattr(call, name)) is not None}
    along: dict[str, Any] = {name: tangents[name] if name in tangents else torch.zeros_like(x) for name, x in given.items()}
    return replace(call, **along)


# --- yardsticks --------------------------------------------------------------------------------------------------------------


def eager_tangent(call: Call, tangents: Mapping[str, Tensor]) -> Trace:
    """Yardstick A: forward mode of plain PyTorch in the inputs' own dtype, every intermediate rounded to it."""
    return _rounded(call, tangents, lambda name: name not in (*UNROUNDED, "tlse"))


def flashlike_tangent(call: Call, tangents: Mapping[str, Tensor]) -> Trace:
    """Yardstick B: weights and their tangents, centred, are rounded as operands of a product; everything else is fp32."""
    return _rounded(call, tangents, lambda name: name in ("a", "ta", "ty"))


def _rounded(call: Call, tangents: Mapping[str, Tensor], to_storage: Callable[[str], bool]) -> Trace:
    storage = call.q.dtype
    wide = torch.float64 if storage == torch.float64 else torch.float32

    def rounded(name: str, value: Tensor) -> Tensor:
        return value.to(storage).to(wide) if to_storage(name) else value

    return tangent(call, tangents, Oracle(FORWARD_MODE, wide, rounded))
