"""Names for what was read off a kernel's own matrices: cells, rows and channels, whatever rule they follow.

The mutants are made of the reading itself, so they fit a defect that nobody thought of; an entry of the catalogue that fits as
well comes first, because it says why.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.loops import Cells, dk_without, dq_without, dv_without, shown, without
from backlight.doctor.defects.mutants import BACKWARD_HALF, FORWARD_HALF, Mutant, Outputs, in_both_halves, showing
from backlight.doctor.defects.rows import saved_lse
from backlight.reference import STAGES, Stage

OTHER_TILE = "Change the tile size: the cells must move with it, or the mask is at fault and not a loop."

_cells = partial(Defect, family="loops", confirm="one-hot probes, and a mutant that has these very cells")
READ: dict[str, Defect] = {
    each.id: each
    for each in (
        _cells(
            "cells-lost",
            "the forward loses visible keys: {detail}",
            "a loop bound, a mask or a tile's offset leaves out keys that the rows may see",
            "p",
            "o and lse are wrong; weights of visible keys are exactly 0",
            OTHER_TILE,
        ),
        _cells(
            "cells-lost-backward",
            "the backward loses visible keys that the forward has: {detail}",
            "a loop bound or a mask of the backward differs from the forward's",
            "p (bwd)",
            "dv and dk are wrong; the backward's weights of visible keys are exactly 0",
            OTHER_TILE,
        ),
        _cells(
            "cells-leaked",
            "the forward sees keys that are hidden: {detail}",
            "a mask is not applied, or applied to some of the tiles",
            "p",
            "o and lse are wrong; weights of hidden keys are not 0",
            OTHER_TILE,
        ),
        _cells(
            "cells-leaked-backward",
            "the backward sees keys that are hidden: {detail}",
            "a mask is not applied in the backward, or applied to some of the tiles",
            "p (bwd)",
            "dv and dk are wrong; the backward's weights of hidden keys are not 0",
            OTHER_TILE,
        ),
        _cells(
            "mask-read",
            "the forward has another mask: {detail}",
            "rows, keys or an offset of the mask are not those of the call",
            "p",
            "o and lse are wrong; weights of visible keys are 0 and those of hidden ones are not",
            OTHER_TILE,
        ),
        _cells(
            "mask-read-backward",
            "the backward has another mask than the forward: {detail}",
            "rows, keys or an offset of the backward's mask are not those of the call",
            "p (bwd)",
            "dv and dk are wrong; weights of visible keys are 0 and those of hidden ones are not",
            OTHER_TILE,
        ),
        _cells(
            "cells-lost-dk",
            "dk leaves out pairs of rows and keys: {detail}",
            "a loop of the dk/dv kernel ends early for dk alone",
            "dk",
            "dk is wrong beside a right dv and dq; ds as dk has it lacks these cells",
            OTHER_TILE,
        ),
        _cells(
            "cells-lost-dq",
            "dq leaves out pairs of rows and keys: {detail}",
            "a loop bound of the dq kernel leaves out keys that the rows may see",
            "dq",
            "dq is wrong beside a right dk; ds as dq has it lacks these cells",
            OTHER_TILE,
        ),
        Defect(
            "lse-read",
            "the backward's weights are off by one factor along each row: its lse is {detail}",
            "the row of lse that the backward subtracts is not the row's own",
            "p (bwd)",
            "I2 fails; the backward's weights divided by the right ones are constant along a row",
            "Hand the backward the right lse, computed outside: the comparison must turn healthy.",
            family="lse",
            confirm="one-hot probes, and a mutant that has this lse",
        ),
        Defect(
            "delta-read",
            "ds beside right weights speaks of another delta: {detail}",
            "the row of delta that the backward subtracts is not the row sum of dO * o",
            "delta",
            "I3 only; dv is perfect",
            "Hand the backward the row sum of dO * o, computed outside: the comparison must turn healthy.",
            family="delta",
            confirm="orthogonal probes, and a mutant that has this delta",
        ),
        Defect(
            "part-zero",
            "{detail} is 0, where it must not be: nobody computes it, or all of it is masked",
            "a grid or a loop does not reach some heads, rows or keys, and the buffer was cleared before",
            "o",
            "whole rows are exactly 0, bit for bit; the others are right",
            "Fill the output with a number before the call: it must still be there, or the kernel stores 0 itself.",
            family="tails",
            confirm="which rows are exactly 0, and a mutant that has 0 there",
        ),
        Defect(
            "dp-channels",
            "{detail}: dp = dO vT is a sum over the others alone",
            "the loop over the channels of v ends early, or a part of v is masked",
            "dp",
            "dv is perfect; ds speaks of products that are missing",
            "Set those channels of dO to 0: the comparison must turn healthy.",
            family="delta",
            confirm="orthogonal probes, and a mutant without these channels",
        ),
    )
}


def in_heads(mutant: Mutant, heads: Collection[int]) -> Mutant:
    """The mutant in some query heads, the truth in the others."""

    def mixed(name: str, changed: Callable[..., Tensor], half: Mapping[str, Stage]) -> Callable[..., Tensor]:
        own, right = Stage.of(changed, name), half[name]
        reads = tuple(dict.fromkeys((*own.reads, *right.reads, "h")))

        def stage(*given: Tensor) -> Tensor:
            values = dict(zip(reads, given, strict=True))
            return (own if values["h"] in heads else right)(values)

        positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
        stage.__signature__ = inspect.Signature([inspect.Parameter(each, positional) for each in reads])  # type: ignore[attr-defined]
        return stage

    return replace(
        mutant,
        forward={name: mixed(name, f, FORWARD_HALF) for name, f in mutant.forward.items()},
        backward={name: mixed(name, f, BACKWARD_HALF) for name, f in mutant.backward.items()},
    )


def named(name: str, mutants: Iterable[Mutant]) -> Defect:
    """An entry with the mutants of one reading."""
    found = list(mutants)
    return replace(READ[name], variants=lambda call: found)


def at_stage(entry: Defect, stage: str) -> Defect:
    return replace(entry, stage=stage)


def lost_forward(cells: Cells, detail: str) -> list[Mutant]:
    s = without(cells)
    return [Mutant(forward={"s": s}, detail=detail), in_both_halves(s=s, detail=f"{detail}; the backward does too")]


def other_mask(lost: Cells, leaked: Cells, detail: str, forward: bool) -> list[Mutant]:
    """Some visible keys hidden and some hidden ones seen: in the forward, with the backward or without, or in that alone."""

    def s(capped, bias, column, pair_bias, visible):
        size = (*visible.shape, visible.device)
        return STAGES["s"].compute(capped, bias, column, pair_bias, (visible & ~lost(*size)) | leaked(*size))

    stages = showing(s)
    if not forward:
        return [Mutant(backward=stages, detail=detail)]
    together = Mutant(forward=stages, backward=stages, detail=f"{detail}; the backward does too")
    return [Mutant(forward=stages, detail=detail), together]


def lost_backward(cells: Cells, detail: str) -> list[Mutant]:
    alone = {"dk": dk_without(cells), "dv": dv_without(cells)}
    return [
        Mutant(backward={"s": without(cells)}, detail=detail),
        Mutant(backward=alone, detail=f"{detail}, in the dk/dv kernel alone"),
    ]


def leaked_forward(cells: Cells, detail: str) -> list[Mutant]:
    stages = showing(shown(cells))
    return [
        Mutant(forward=stages, detail=detail),
        Mutant(forward=stages, backward=stages, detail=f"{detail}; the backward does too"),
    ]


def leaked_backward(cells: Cells, detail: str) -> list[Mutant]:
    return [Mutant(backward=showing(shown(cells)), detail=detail)]


def lost_of_dk(cells: Cells, detail: str) -> list[Mutant]:
    return [Mutant(backward={"dk": dk_without(cells)}, detail=detail)]


def lost_of_dq(cells: Cells, detail: str) -> list[Mutant]:
    return [Mutant(backward={"dq": dq_without(cells)}, detail=detail)]


def other_lse(take: Callable[[Tensor], Tensor], detail: str) -> list[Mutant]:
    return [saved_lse(take, detail)]


def other_delta(take: Callable[[Tensor], Tensor], detail: str) -> list[Mutant]:
    def borrowed(saved: Outputs, dy: Tensor) -> Outputs:
        return {"other_delta": take((dy * saved["y"].to(dy.dtype)).sum(dim=-1))}

    def delta(other_delta, dlse):
        return other_delta if dlse is None else other_delta - dlse

    return [Mutant(borrowed=borrowed, backward={"delta": delta}, detail=detail)]


def zero_in(masks: Mapping[str, Tensor], detail: str) -> list[Mutant]:
    """Outputs that are 0 in some rows, [B, H, S] by name: as they are returned, or as the backward reads them too."""

    def cleared(outputs: Outputs, call: Call) -> Outputs:
        changed = {}
        for name, mask in masks.items():
            if name in outputs:
                x = outputs[name]
                changed[name] = x.masked_fill(mask if x.dim() == 3 else mask[..., None], 0)
        return outputs | changed

    returned = Mutant(finish=cleared, detail=detail)
    return [returned, Mutant(finish=cleared, saved=cleared, detail=detail)] if {"y", "lse"} & set(masks) else [returned]


def without_channels(channels: tuple[int, ...], detail: str) -> list[Mutant]:
    def kept(v: Tensor) -> Tensor:
        found = torch.ones(v.shape[-1], dtype=v.dtype, device=v.device)
        found[list(channels)] = 0
        return found

    def dp(do, v):
        return do @ (v * kept(v)).mT

    def dk(p, m, do, v, delta, capped, softcap, q, scale, entmax):
        ds = STAGES["ds"].compute(p, m, dp(do, v), delta, entmax)
        return STAGES["dk"].compute(STAGES["dx"].compute(ds, capped, softcap), q, scale)

    return [Mutant(backward={"dp": dp}, detail=detail), Mutant(backward={"dk": dk}, detail=f"{detail}, in the dk/dv kernel")]
