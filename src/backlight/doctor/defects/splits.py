"""Splits of the keys whose lse is written by other strides than it is read by: parts are weighed by those of others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.mutants import FORWARD_HALF, Half, Mutant, Outputs

PARTS = (2, 3, 4, 8)
# axes of the buffer of lse: n the split, b the batch entry, h the head, i the row
LAYOUTS = {"nbhi": "[split, batch, head, row]", "bhni": "[batch, head, split, row]", "bhin": "[batch, head, row, split]"}
# what a buffer of lse must not cost to try
MOST_CELLS = 2**23
Parts = Callable[[], tuple[Tensor, Tensor]]


def _parts(call: Call, count: int) -> Parts:
    """o [n, B, H, S, Dv] and lse [n, B, H, S] of every part of the keys, computed when they are first asked for."""
    kept: list[tuple[Tensor, Tensor]] = []

    def parts() -> tuple[Tensor, Tensor]:
        if not kept:
            s = Half(FORWARD_HALF)(call, keep=("s",))["s"]
            v = call.v.detach().double().repeat_interleave(call.group, dim=1)
            length = -(-s.shape[-1] // count)
            cuts = s.split(length, dim=-1)
            lse = torch.stack([cut.logsumexp(dim=-1) for cut in cuts])
            o = [
                torch.softmax(cut, dim=-1).nan_to_num(0.0) @ own for cut, own in zip(cuts, v.split(length, dim=2), strict=True)
            ]
            kept.append((torch.stack(o), lse))
        return kept[0]

    return parts


def _read(lse: Tensor, written: str, read: str) -> Tensor:
    """[n, b, h, i] stored in one order of axes and read in another."""
    stored = lse.permute(["nbhi".index(axis) for axis in written]).contiguous()
    sizes = dict(zip("nbhi", lse.shape, strict=True))
    seen = stored.view([sizes[axis] for axis in read])
    return seen.permute([read.index(axis) for axis in "nbhi"])


def _merged(parts: Parts, written: str, read: str, own_lse: bool, detail: str) -> Mutant:
    def wrong(outputs: Outputs, call: Call) -> Outputs:
        o, lse = parts()
        weights = _read(lse, written, read)
        whole = weights.logsumexp(dim=0)
        share = torch.exp(weights - whole.masked_fill(whole == -torch.inf, 0))
        changed = {"y": (share[..., None] * o).sum(dim=0)}
        if not own_lse:
            changed["lse"] = whole
        return outputs | {name: x for name, x in changed.items() if name in outputs}

    return Mutant(saved=wrong, finish=wrong, detail=detail)


def _variants(call: Call) -> list[Mutant]:
    found = []
    for count in PARTS:
        if count >= call.k.shape[2]:
            break
        parts = _parts(call, count)
        for written, wrote in LAYOUTS.items():
            for read, reads in LAYOUTS.items():
                if written != read:
                    words = f"it is stored as {wrote} and read as {reads} ({count} parts)"
                    found += [_merged(parts, written, read, own_lse, words) for own_lse in (False, True)]
    return found


def _possible(call: Call) -> bool:
    plain = call.sink is None and call.tau is None and call.entmax is None and call.gate is None and not call.varlen
    return plain and call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * call.k.shape[2] <= MOST_CELLS


DEFECTS = [
    Defect(
        "merge-elsewhere",
        "parts of the keys are merged by the lse of other parts, heads or rows: {detail}",
        "one kernel writes the lse of splits, another reads it, and they do not agree on its strides",
        "p",
        "o is wrong; weights of one part keep their ratios, and shares of parts are those of other heads or rows",
        "Run with one split of the keys: the comparison must turn healthy.",
        family="lse",
        needs=_possible,
        of_forward=True,
        variants=_variants,
        demo={"shape": (1, 4, 72, 32)},
    ),
]
