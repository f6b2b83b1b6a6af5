"""Columns of an output that nobody computes: fewer threads, or a narrower tile, than there are channels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect
from backlight.doctor.defects.mutants import Mutant, Outputs

WIDTHS = (8, 16, 32, 64, 128)


def first(x: Tensor, width: int) -> Tensor:
    """x with 0 in all but the first `width` columns."""
    x = x.clone()
    x[..., width:] = 0
    return x


def _cut(names: tuple[str, ...], width: int) -> Callable[[Outputs, Call], Outputs]:
    def finish(outputs: Outputs, call: Call) -> Outputs:
        return outputs | {name: first(outputs[name], width) for name in names if name in outputs}

    return finish


def _narrow(width: int) -> Callable[..., Tensor]:
    def o(a, v):
        return first(a @ v, width)

    return o


def _columns(call: Call) -> list[Mutant]:
    found = []
    d, dv = call.q.shape[3], call.v.shape[3]
    for width in sorted({w for whole in (d, dv) for w in (*WIDTHS, whole // 2, 3 * whole // 4) if 0 < w < whole}):
        words = f"are 0 from column {width} on"
        if width < dv:
            o = _narrow(width)
            found.append(Mutant(forward={"o": o}, detail=f"o {words}".replace("are", "is")))
            everything = _cut(("dq", "dk", "dv"), width)
            found.append(Mutant(forward={"o": o}, finish=everything, detail=f"o, dq, dk and dv {words}"))
        for name, whole in (("dq", d), ("dk", d), ("dv", dv)):
            if width < whole:
                found.append(Mutant(finish=_cut((name,), width), detail=f"{name} {words}".replace("are", "is")))
    return found


def _products(width: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Stages x and dp over the first channels."""

    def x(q, k, scale):
        return scale * (q[:, :width] @ k[:, :width].mT)

    def dp(do, v):
        return do[:, :width] @ v[:, :width].mT

    return x, dp


def _narrow_scores(call: Call) -> list[Mutant]:
    """q k over the first channels, the scale as it is; gradients are whole, or narrow too, and so may be everything."""
    d, dv, found = call.q.shape[3], call.v.shape[3], []
    for width in sorted({w for w in (*WIDTHS, d // 2, 3 * d // 4) if 0 < w < d}):
        words = f"the first {width} of {d} channels"
        x, dp = _products(width)
        mutant = Mutant(forward={"x": x}, backward={"x": x}, detail=words)
        found += [mutant, *(replace(mutant, finish=_cut(names, width)) for names in (("dq", "dk"), ("dq",), ("dk",)))]
        found.append(Mutant(forward={"x": x}, detail=f"{words}, in the forward"))
        found.append(Mutant(backward={"x": x}, detail=f"{words}, in the backward"))
        if width < dv:
            everything, words = _cut(("dq", "dk", "dv"), width), f"{words}, and so does everything else"
            forward, backward = {"x": x, "o": _narrow(width)}, {"x": x, "dp": dp}
            found.append(Mutant(forward=forward, backward=backward, finish=everything, detail=words))
    return found


_columns_lost = partial(Defect, family="tails", demo=CAUSAL_TILES)
DEFECTS = [
    _columns_lost(
        "columns-lost",
        "{detail}: columns of the output are never computed",
        "one thread has one column and there are fewer threads than columns, or a tile is narrower than a row",
        "o",
        "the first columns are right and the others exactly 0",
        "Run with as many channels as there are right columns (--shape B,H,S,D): the comparison must turn healthy.",
        confirm="mutant",
        variants=_columns,
    ),
    _columns_lost(
        "score-columns",
        "q k sums over {detail}",
        "the width of a head stands in the code as a number, or the loop over channels ends early",
        "s",
        "o is wrong everywhere; weights are those of q and k with their last channels at 0",
        "Set the last channels of q to 0: the comparison must turn healthy.",
        confirm="mutant",
        variants=_narrow_scores,
    ),
]
