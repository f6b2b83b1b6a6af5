"""The defect catalogue: every way to be wrong that the doctor knows by name.

Entries are data (`doctor.defects.*`), each with the sentence shown, the first signal, what confirms it, one check that would
prove it false, and a mutant of the oracle or a maker of a broken kernel (`defects.broken`). To add one, append a `Defect` to
the group it belongs to; the demo, the mutation test and the docs pick it up from here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from backlight.doctor.defects import (
    borrowed,
    calls,
    columns,
    dividing,
    eight_bits,
    elsewhere,
    groups,
    heads,
    hidden,
    intervals,
    layouts,
    loops,
    masks,
    maxima,
    packed,
    pairs,
    parts,
    rescaling,
    rows,
    scale,
    sinks,
    slopes,
    softcaps,
    sparse,
    splits,
    tails,
    tangents,
    terms,
    windows,
)
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.games import GAMES
from backlight.doctor.defects.probed import PROBED
from backlight.doctor.defects.read import READ
from backlight.spec import AttentionSpec

# earlier groups win ties: the plainest explanation first
DEFECTS: tuple[Defect, ...] = (
    *scale.DEFECTS,
    *calls.DEFECTS,
    *masks.DEFECTS,
    *intervals.DEFECTS,
    *windows.DEFECTS,
    *tails.DEFECTS,
    *loops.DEFECTS,
    *packed.DEFECTS,
    *heads.DEFECTS,
    *groups.DEFECTS,
    *rows.DEFECTS,
    *borrowed.DEFECTS,
    *maxima.DEFECTS,
    *rescaling.DEFECTS,
    *dividing.DEFECTS,
    *splits.DEFECTS,
    *parts.DEFECTS,
    *softcaps.DEFECTS,
    *hidden.DEFECTS,
    *layouts.DEFECTS,
    *columns.DEFECTS,
    *terms.DEFECTS,
    *sinks.DEFECTS,
    *elsewhere.DEFECTS,
    *slopes.DEFECTS,
    *pairs.DEFECTS,
    *sparse.DEFECTS,
    *tangents.DEFECTS,
    *eight_bits.DEFECTS,
)
# forward mode has a search of its own: what it computes and what the two other directions do go wrong apart
OF_TANGENTS: tuple[Defect, ...] = tuple(tangents.DEFECTS)
# of kernels that round to 8 bits: nothing else can have them
OF_EIGHT_BITS: tuple[Defect, ...] = tuple(eight_bits.DEFECTS)
OF_VALUES: tuple[Defect, ...] = tuple(defect for defect in DEFECTS if defect not in (*OF_TANGENTS, *OF_EIGHT_BITS))
BY_ID: dict[str, Defect] = {defect.id: defect for defect in DEFECTS}
OPEN = Defect(
    "open",
    "a quantity is wrong, by a mechanism the catalogue does not know",
    "nothing that has a name here",
    "",
    "values beyond what a correct kernel of this dtype gives, or an identity that fails",
    "That of the report: it follows from the stage that is wrong and from the identities that fail.",
    family="open",
    confirm="nothing yet: the stage and the place are right, the cause is not known",
)
STORIES = {"case-a": "call-causal-lost", "case-b": "accumulate-repeated", "case-c": "do-stride", "case-d": "nan-cell"}
DEMO_SHAPE = (2, 4, 136, 64)


def get(name: str) -> Defect:
    """A defect by id or by the name of its story (case-a .. case-d)."""
    try:
        return BY_ID[STORIES.get(name, name)]
    except KeyError:
        raise KeyError(f"no defect named {name!r}; `backlight doctor --list` shows all {len(DEFECTS)}") from None


def about(name: str) -> Defect:
    """What a finding's id means: an entry of the catalogue, a name of `adversarial`, of a probe or of a reading, or `open`."""
    return {OPEN.id: OPEN, **GAMES, **PROBED, **READ}.get(name) or get(name)


def names() -> tuple[str, ...]:
    return tuple(BY_ID)


def families() -> dict[str, list[Defect]]:
    found: dict[str, list[Defect]] = {}
    for defect in DEFECTS:
        found.setdefault(defect.family, []).append(defect)
    return found


def mutable() -> Iterator[Defect]:
    """Defects that a mutant oracle can reproduce."""
    return (defect for defect in DEFECTS if defect.variants is not None)


def demo_arguments(name: str) -> dict[str, Any]:
    """Keyword arguments of `diagnose` that show the defect: spec, shape, level and what else it needs."""
    demo = dict(get(name).demo)
    spec = AttentionSpec(**demo.pop("spec", {}))
    arguments: dict[str, Any] = {"spec": spec, "shape": DEMO_SHAPE, "dtype": torch.bfloat16} | demo
    if "cu_seqlens" in arguments:
        borders = torch.tensor(arguments["cu_seqlens"], dtype=torch.int32)
        # of rows, or of rows and of keys
        arguments["cu_seqlens"] = borders if borders.dim() == 1 else tuple(borders)
    return arguments
