"""Rows of outputs that are exactly 0 and must not be: a reading of the outputs alone, at every level."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from backlight.doctor.defects import read as names
from backlight.doctor.defects.defect import Defect
from backlight.doctor.steps.compare import TRUTH_OF
from backlight.doctor.steps.localise import describe
from backlight.doctor.steps.verdict import ORDER
from backlight.problems.problem import Problem

OF_ROWS = ("o", "lse", "dq", "dk", "dv")
# rows that a correct kernel may round to 0
SMALL = 1e-3


def read(values: Mapping[str, Tensor], problem: Problem) -> list[Defect]:
    """An entry with the very rows that are 0, if there are some and not all are."""
    masks = {}
    for name in OF_ROWS:
        key = TRUTH_OF.get(name, name)
        if name in values and key in problem.truth and problem.truth[key].shape == values[name].shape:
            mask, plain = _zero_rows(values[name], problem.truth[key])
            if bool(plain.any()) and not bool(mask.all()):
                masks[name] = mask
    if not masks:
        return []
    stages = sorted(masks, key=ORDER.index)
    places = {name: describe(masks[name].double(), name, problem.call) for name in stages}
    detail = " and ".join(f"{name} of {where.text if where is not None else 'some rows'}" for name, where in places.items())
    found = names.named("part-zero", names.zero_in({TRUTH_OF.get(name, name): masks[name] for name in stages}, detail))
    return [names.at_stage(found, stages[0])]


def _zero_rows(x: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, S]: rows that are 0 to the last bit and must not be, and which of them would be of the usual size."""
    x, size = (x[..., None], truth[..., None].abs()) if x.dim() == 3 else (x, truth.abs())
    size = size.masked_fill(~torch.isfinite(size), 0).amax(dim=-1)
    mask = (x == 0).all(dim=-1) & (size > 0)
    return mask, mask & (size > SMALL * size.mean())
