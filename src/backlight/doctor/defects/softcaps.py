"""Functions that kernels use where the soft cap c tanh(x / c) is asked for, with the derivative that belongs to them or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import pi

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, capped
from backlight.doctor.defects.mutants import Mutant, in_both_halves

# (x, c) -> capped score
FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "clip(x, -c, c)": lambda x, c: x.clamp(-c, c),
    "min(x, c)": lambda x, c: x.clamp(max=c),
    "x / (1 + |x| / c)": lambda x, c: x / (1 + x.abs() / c),
    "x / sqrt(1 + (x / c)^2)": lambda x, c: x / torch.sqrt(1 + (x / c) ** 2),
    "(2 c / pi) atan(pi x / (2 c))": lambda x, c: 2 * c / pi * torch.atan(pi * x / (2 * c)),
    "c erf(x / c)": lambda x, c: c * torch.erf(x / c),
    "c (2 sigmoid(x / c) - 1)": lambda x, c: c * (2 * torch.sigmoid(x / c) - 1),
    "c tanh(x)": lambda x, c: c * torch.tanh(x),
    "tanh(x / c)": lambda x, c: torch.tanh(x / c),
    "x tanh(x / c)": lambda x, c: x * torch.tanh(x / c),
    "x tanh(x)": lambda x, c: x * torch.tanh(x),
    "c tanh(tanh(x / c))": lambda x, c: c * torch.tanh(torch.tanh(x / c)),
}


def slope(function: Callable[[Tensor, float], Tensor], x: Tensor, c: float) -> Tensor:
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        return torch.autograd.grad(function(at, c).sum(), at)[0]


def mutants(function: Callable[[Tensor, float], Tensor], words: str, cap: float | None = None) -> list[Mutant]:
    """In both directions with its own derivative or that of the tanh, and in the forward alone; `cap` instead of the call's."""

    def capped(x, softcap):
        return function(x, softcap if cap is None else cap)

    def dx(ds, x, softcap):
        return ds * slope(function, x, softcap if cap is None else cap)

    def dx_of_tanh(ds, x, softcap):
        return ds * (1 - torch.tanh(x / (softcap if cap is None else cap)) ** 2)

    return [
        in_both_halves({"dx": dx}, capped=capped, detail=words),
        in_both_halves(capped=capped, detail=f"{words}, with the derivative of the tanh"),
        in_both_halves({"dx": dx_of_tanh}, capped=capped, detail=f"{words}, with the derivative of the tanh"),
        Mutant(forward={"capped": capped}, detail=f"{words}, in the forward alone"),
    ]


def _others(call: Call) -> list[Mutant]:
    return [each for words, function in FUNCTIONS.items() for each in mutants(function, words)]


_softcap = partial(Defect, family="softcap", needs=capped, demo=CAUSAL_TILES | {"spec": {"causal": True, "softcap": 2.0}})
DEFECTS = [
    _softcap(
        "softcap-function",
        "the soft cap is {detail} instead of c tanh(x / c)",
        "another function that saturates stands where the tanh is asked for",
        "s",
        "o is wrong where scores are large; weights, as a function of the right scores, are on another curve",
        "Raise the cap to 1e4: the comparison must turn healthy, if the function is the identity for small scores.",
        confirm="mutant; the curve of the scores, read off p",
        variants=_others,
    ),
]
