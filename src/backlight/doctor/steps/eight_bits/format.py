"""In which format v is multiplied: rows whose weight lies on one key return it, and values between two codes return alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.steps.bench import Bench

# of 2 to the power: no other key weighs anything beside this score
ALONE = 60.0
LARGEST_V = 2.0
# values of one octave, and how many different ones of an octave a format has at most, with a border inside it
LEAST_COLUMNS = 16
FORMATS = {"e5m2": 6, "e4m3": 12}
# half of what lies between two values of e5m2 there, and half as much again for scales that are no powers of two
COARSEST = 0.1875
WIDER = "16 bits or more"


def format_of_v(bench: Bench) -> str:
    """ "e4m3", "e5m2", `WIDER`, or '' where it cannot be asked."""
    made = on_one_key(bench.problem.call)
    if made is None:
        return ""
    call, row = made
    found = bench.subject_for(call).run(call)["o"][0, 0, row].double()
    # a kernel that loses the key, or takes another, has some other v
    if not bool(((found - octave(found.numel()).to(found)).abs() <= COARSEST).all()):
        return ""
    different = found.unique().numel()
    return next((name for name, most in FORMATS.items() if different <= most), WIDER)


def on_one_key(call: Call) -> tuple[Call, int] | None:
    """The call with all weight on one key, whose v runs through an octave; and a row that sees the key. None: not possible."""
    if call.v.shape[3] < LEAST_COLUMNS or call.spec.softcap is not None or not call.scale > 0 or not call.k.shape[2]:
        return None
    seen = intervals.visible_whole(call)[0, 0]
    key = int(seen.sum(0).argmax())
    if not bool(seen[:, key].any()):
        return None
    size = (ALONE / call.scale) ** 0.5
    q, k, v = (torch.zeros_like(x) for x in (call.q, call.k, call.v))
    q[..., 0], k[:, :, key, 0] = size, size
    # another key fixes the scale of each column
    v[:] = LARGEST_V
    v[:, :, key] = octave(call.v.shape[3]).to(v)
    terms: dict[str, Any] = {
        name: torch.zeros_like(x) for name in ("bias", "pair_bias", "gate") if (x := getattr(call, name)) is not None
    }
    return replace(call, q=q, k=k, v=v, **terms, _segments=None), int(seen[:, key].nonzero()[0])


def octave(columns: int) -> Tensor:
    """Numbers from 1 to 1.9, too close for 8 bits to tell apart."""
    return 1 + 0.9 * torch.arange(columns) / columns
