"""The sink's place in the sum of a row: counted too often, in other units than the scores, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, both, has
from backlight.doctor.defects.mutants import Mutant, Outputs, after, with_call
from backlight.reference import STAGES
from backlight.spec import LN2, LOG2E

MOST_SPLITS = 8


def _plus(amount: float) -> Callable[[Call], Tensor]:
    def sink(call: Call) -> Tensor:
        assert call.sink is not None
        return call.sink.double() + amount

    return sink


def _lse_of(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Stage lse with another sink in the sum."""

    def lse(s, sink):
        return STAGES["lse"].compute(s, change(sink))

    return lse


def _repeated(call: Call) -> list[Mutant]:
    """The sum holds the sink once a split; its gradient counts all of them, or one."""
    found = []
    for count in range(2, MOST_SPLITS + 1):
        many = with_call(sink=_plus(log(count)))

        def once(outputs: Outputs, call: Call, count: int = count) -> Tensor:
            return outputs["dsink"] / count

        detail = f"{count} times"
        found += [Mutant(sees=many, finish=after(dsink=once), detail=detail), Mutant(sees=many, detail=detail)]
    return found


def _scaled(call: Call) -> list[Mutant]:
    """Factors and functions that scores go through and the sink must not."""
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        f"times the softmax scale, {call.scale:.4g}": lambda x: x * call.scale,
        "divided by the softmax scale": lambda x: x / call.scale,
        "times log2 e": lambda x: x * LOG2E,
        "times ln 2": lambda x: x * LN2,
        f"times the softmax scale and log2 e, {call.scale * LOG2E:.4g}": lambda x: x * (call.scale * LOG2E),
        "with the opposite sign": lambda x: -x,
    }
    cap = call.spec.softcap
    if cap is not None:
        changes |= {
            "under the soft cap": lambda x: cap * torch.tanh(x / cap),
            f"times the soft cap, {cap:g}": lambda x: cap * x,
            f"divided by the soft cap, {cap:g}": lambda x: x / cap,
        }
    found = []
    for words, change in changes.items():
        forward = {"lse": _lse_of(change)}
        found += [
            Mutant(forward=forward, detail=words),
            Mutant(forward=forward, backward={"p_sink": _share_of(change)}, detail=words),
        ]
    return found


def _share_of(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Stage p_sink of another sink."""

    def p_sink(lse, sink):
        return STAGES["p_sink"].compute(lse, change(sink))

    return p_sink


_sink = partial(
    Defect,
    family="terms",
    of_forward=True,
    needs=both(has("sink"), lambda call: call.entmax is None),
    demo=CAUSAL_TILES | {"spec": {"causal": True, "sink": True}},
)

DEFECTS = [
    _sink(
        "sink-missing-forward",
        "the forward computes no sink, the backward does",
        "the sum of a row leaves the sink out in the forward; the backward forms its gradient all the same",
        "lse",
        "o and lse are wrong, most in rows of few keys; weights sum to one; dsink is not 0",
        "Set the sink to -30: the comparison must turn healthy.",
        variants=lambda call: [Mutant(forward={"lse": lambda s: STAGES["lse"].compute(s, None)})],
    ),
    _sink(
        "sink-repeated",
        "the sink stands {detail} in the sum of a row: every split or tile of the keys adds it",
        "each part of the keys begins its sum with the sink, and the merge does not know",
        "lse",
        "o and lse are off as if the sink were larger by a logarithm; dq, dk and dv follow",
        "Run with one split of the keys: the comparison must turn healthy.",
        variants=_repeated,
    ),
    _sink(
        "sink-scaled",
        "the sink enters the sum {detail}: scores are in those units, the sink is not",
        "the sink is a logit beside scaled and capped scores; it is scaled, capped or put to another base with them",
        "lse",
        "o and lse are wrong, most in rows of few keys; weights of the keys keep their ratios",
        "Set the sink to 0: where nothing but a factor is wrong the comparison must turn healthy.",
        variants=_scaled,
    ),
]
