"""Hidden keys whose score is a number where it must be -inf: everywhere, or in the tiles that a kernel visits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, capped, masked
from backlight.doctor.defects.mutants import Mutant, showing
from backlight.reference import STAGES

TILES = (16, 32, 64, 128)
# what a mask is multiplied by or filled with by mistake; lower ones leave no weight that could be seen
FILLS = (0.0, -1.0, -10.0)


def visited(visible: Tensor, tile: tuple[int, int]) -> Tensor:
    """Cells of the tiles in which anything is visible, [Sq,Sk]."""
    sq, sk = visible.shape
    rows, keys = tile
    padded = torch.nn.functional.pad(visible, (0, -sk % keys, 0, -sq % rows))
    some = padded.unflatten(1, (-1, keys)).unflatten(0, (-1, rows)).any(dim=3).any(dim=1)
    return some.repeat_interleave(rows, 0).repeat_interleave(keys, 1)[:sq, :sk]


def _filled(fill: float, tile: tuple[int, int] | None) -> Callable[..., Tensor]:
    """Stage s with a number for what is hidden."""

    def s(capped, bias, column, pair_bias, visible):
        right = STAGES["s"].compute(capped, bias, column, pair_bias, visible)
        there = ~visible if tile is None else ~visible & visited(visible, tile)
        return right.masked_fill(there, fill)

    return s


def _flat(ds, capped, softcap, visible):
    """The filled number does not depend on q and k."""
    return STAGES["dx"].compute(ds, capped, softcap).masked_fill(~visible, 0)


def places(call: Call) -> Iterator[tuple[tuple[int, int] | None, str]]:
    """Everywhere, and the tiles of each size that differ from it and from each other on the call's first sequence."""
    yield None, ""
    visible = intervals.visible_heads(call, call.segments()[0]).flatten(0, -3)[0]
    known = [torch.ones_like(visible)]
    # of tiles that have the same cells the square ones are told
    for tile in sorted(product(TILES, TILES), key=lambda size: (size[0] != size[1], size)):
        cells = visited(visible, tile)
        if not any(torch.equal(cells, other) for other in known):
            known.append(cells)
            yield tile, f", in tiles of {tile[0]} x {tile[1]} that have visible cells"


def _ways(call: Call, fill: float, words: str) -> list[Mutant]:
    found = []
    for tile, where in places(call):
        stages = dict(showing(_filled(fill, tile)))
        found += [
            Mutant(forward=stages, backward=stages | {"dx": _flat}, detail=words + where),
            Mutant(forward=stages, backward=stages, detail=f"{words}{where}, with gradients that pass it"),
            Mutant(forward=stages, detail=f"{words}{where}, in the forward alone"),
        ]
    return found


def _after_the_mask(call: Call) -> list[Mutant]:
    assert call.spec.softcap is not None
    return _ways(call, -call.spec.softcap, f"-{call.spec.softcap:g}")


def _finite(call: Call) -> list[Mutant]:
    return [each for fill in FILLS for each in _ways(call, fill, f"{fill:g}")]


def _some_hidden(call: Call) -> bool:
    return (masked(call) or call.rows is not None) and call.tau is None and call.entmax is None


_hidden = partial(Defect, family="masks", of_forward=True)
DEFECTS = [
    _hidden(
        "softcap-after-mask",
        "hidden keys have a weight, because the soft cap is applied after the mask: their score is {detail}",
        "scores are masked with -inf and capped then; c tanh(-inf / c) is -c",
        "s",
        "o is wrong, in rows that see few keys most; weights of hidden keys are exp(-c - lse)",
        "Raise the cap to 1e4: the comparison must turn healthy.",
        needs=lambda call: capped(call) and _some_hidden(call),
        variants=_after_the_mask,
        demo=CAUSAL_TILES | {"spec": {"causal": True, "softcap": 2.0}},
    ),
    _hidden(
        "hidden-finite",
        "hidden keys have a weight: their score is not -inf but {detail}",
        "scores are multiplied by the mask, or filled with a number that ordinary scores reach",
        "s",
        "o and lse are wrong; weights of hidden keys are all the same within a row",
        "Add 50 to all scores of a row (one more channel of q and k): the error must vanish.",
        needs=_some_hidden,
        variants=_finite,
        demo=CAUSAL_TILES,
    ),
]
