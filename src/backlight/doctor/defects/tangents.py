"""Forward mode that is wrong: tangents of o and lse (docs/math.md, eq. 47-54)."""

from __future__ import annotations

from functools import partial

import torch

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, CAUSAL_FULL, Defect, always, capped
from backlight.doctor.defects.mutants import Mutant, after
from backlight.problems.axes import tensors_of
from backlight.reference.tangent import TANGENT_STAGES


def _reads(name: str, factor: float) -> Mutant:
    """Forward mode that takes the tangent of one input times a factor."""
    words = "is ignored" if factor == 0 else "has the wrong sign"
    return Mutant(along=lambda tangents: tangents | {name: tangents[name] * factor}, detail=f"{name} {words}")


def _misread(call: Call) -> list[Mutant]:
    """Of each input whose tangent can be told from others; that of v has an entry of its own."""
    ignored = [_reads(name, 0.0) for name in tensors_of(call) if name != "v"]
    return ignored + [_reads(name, -1.0) for name in ("q", "k", "v")]


def _scaled(power: int, detail: str) -> Mutant:
    return Mutant(tangent={"tx": lambda tqk, qtk, scale: scale**power * (tqk + qtk)}, detail=detail)


def _as_if_uncapped(tx, capped, tbias, column, tpair_bias, visible):
    return TANGENT_STAGES["ts"].compute(tx, capped, None, tbias, column, tpair_bias, visible)


_tangent = partial(Defect, family="tangents", demo=CAUSAL)

DEFECTS = [
    _tangent(
        "tangent-mu-missing",
        "forward mode: to is not centred, the tangent of the normaliser is left out: p ts instead of p (ts - mu)",
        "the weights move as if they need not sum to one; mu, the row's mean of ts, is not subtracted",
        "to",
        "to is wrong, tlse and the gradients are right; I14 fails",
        "Set v = 1 and tv = 0: to must be 0, and is mu.",
        variants=always(Mutant(tangent={"tcentred": lambda tr: tr})),
    ),
    _tangent(
        "tangent-mu-sign",
        "forward mode: the tangent of the normaliser is added where it must be subtracted: p (ts + mu)",
        "mu, the row's mean of ts, has the wrong sign in the tangent of the weights",
        "to",
        "to is wrong, tlse and the gradients are right; I14 fails",
        "Set v = 1 and tv = 0: to must be 0, and is 2 mu.",
        variants=always(Mutant(tangent={"tcentred": lambda tr, tlse: tr + tlse[:, None]})),
    ),
    _tangent(
        "tangent-lse-sign",
        "forward mode: tlse has the wrong sign",
        "tlse is the row's mean of ts; its negative is returned, and to is right",
        "tlse",
        "tlse wrong by a factor -1, everything else right",
        "Flip the sign: the comparison must turn healthy.",
        variants=always(Mutant(finish=after(tlse=lambda out, call: -out["tlse"]))),
    ),
    _tangent(
        "tangent-values-missing",
        "forward mode: v is held fixed, the part p tv of to is missing",
        "the weights move and the values do not",
        "to",
        "to is wrong, tlse and the gradients are right; I14 fails",
        "Set tv = 0: the comparison must turn healthy.",
        variants=always(Mutant(tangent={"atv": lambda a, tv: torch.zeros_like(a @ tv)})),
    ),
    _tangent(
        "tangent-weights-fixed",
        "forward mode: the weights are held fixed, to is p tv alone",
        "the tangents of q and k do not reach to",
        "to",
        "to is the forward with v replaced by tv",
        "Set tq = tk = 0: the comparison must turn healthy.",
        variants=always(Mutant(tangent={"tav": lambda a, v: torch.zeros_like(a @ v)})),
    ),
    _tangent(
        "tangent-scale",
        "forward mode: the softmax scale {detail} in the tangent of the scores",
        "ts = scale (tq k + q tk), once",
        "tlse",
        "to and tlse are wrong; the gain of tlse is scale or its inverse",
        "Set scale = 1: the comparison must turn healthy.",
        needs=lambda call: abs(call.scale - 1) > 1e-6,
        variants=always(_scaled(2, "is applied twice"), _scaled(0, "is left out")),
    ),
    _tangent(
        "tangent-input",
        "forward mode: the tangent of {detail}",
        "a product of eq. 47, or the part of a learned term, is missing or subtracted",
        "tlse",
        "to is wrong, and tlse where that input moves the scores; right where that tangent is 0",
        "Set that tangent to 0: the comparison must turn healthy.",
        variants=_misread,
    ),
    _tangent(
        "tangent-softcap",
        "forward mode: the derivative of the softcap is missing in the tangent of the scores",
        "ts lacks the factor 1 - (x/c)^2",
        "tlse",
        "to and tlse are wrong, most where scores are large",
        "Remove the softcap: the comparison must turn healthy.",
        needs=capped,
        variants=always(Mutant(tangent={"ts": _as_if_uncapped})),
        demo={"spec": {"causal": True, "softcap": 2.0}},
    ),
    _tangent(
        "tangent-uncentred",
        "forward mode: what the tangents of a row's scores have in common is rounded before it is taken out",
        "p ts is rounded instead of p (ts - nu), nu a mean of ts in the row (eq. 52)",
        "to",
        "right to rounding on random tangents, coarse where the tangents of all keys have a common part",
        "Subtract the first tile's mean of ts before the weights' tangent is rounded: the probe must pass.",
        severity="precision",
        confirm="the probe of a common tangent",
        broken="uncentred_tangent",
        demo=CAUSAL_FULL,
    ),
]
