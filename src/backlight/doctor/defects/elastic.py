"""Elastic softmax whose hidden keys have a weight: everywhere, in tiles that a kernel visits, or in cells that were read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, both, masked, positive_tau
from backlight.doctor.defects.hidden import places, visited
from backlight.doctor.defects.loops import Cells
from backlight.doctor.defects.mutants import Mutant
from backlight.reference import STAGES

# which hidden cells have a weight, from those that are visible
Leak = Callable[[Tensor], Tensor]


def leaking(leak: Leak, detail: str) -> list[Mutant]:
    """Weights tau / n of hidden keys: with what the backward saves of survivors or without it, or in one direction."""

    def m(p, tau, n, visible):
        kept = STAGES["m"].compute(p, tau, n, visible)
        return kept if tau is None or tau < 0 else kept.masked_fill(leak(visible), 1)

    def a(p, tau, n, visible):
        return STAGES["a"].compute(p, m(p, tau, n, visible), tau, n)

    return [
        Mutant(forward={"m": m}, backward={"m": m}, detail=detail),
        Mutant(forward={"a": a}, backward={"a": a}, detail=f"{detail}, and not in the mean of v that delta and dtau take"),
        Mutant(forward={"m": m}, detail=f"{detail}, in the forward alone"),
        Mutant(backward={"a": a}, detail=f"{detail}, in the backward alone"),
    ]


def _everywhere_or_visited(call: Call) -> Iterator[Mutant]:
    for tile, where in places(call):
        yield from leaking(partial(_hidden, tile), where)


def _hidden(tile: tuple[int, int] | None, visible: Tensor) -> Tensor:
    return ~visible if tile is None else ~visible & visited(visible, tile)


def of_cells(cells: Cells, detail: str) -> Defect:
    """The entry for cells that were read off a kernel."""

    def leak(visible: Tensor) -> Tensor:
        return ~visible & cells(visible.shape[0], visible.shape[1], visible.device)

    return replace(UNMASKED, variants=lambda call: leaking(leak, f": {detail}"))


UNMASKED = Defect(
    "tau-unmasked",
    "elastic softmax: positive tau gives weight to hidden keys{detail}",
    "relu(p + tau/n) is not masked again; p = 0 there but tau/n is not",
    "p",
    "o is wrong from row 0 on for heads with positive tau; forward support above the diagonal",
    "Make every tau negative: the comparison must turn healthy.",
    family="terms",
    needs=both(positive_tau, lambda call: masked(call) or call.rows is not None),
    variants=_everywhere_or_visited,
    demo={"spec": {"causal": True, "tau": True}, "level": "full"},
)
