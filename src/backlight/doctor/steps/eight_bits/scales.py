"""Who shares a scale, and whether scales follow the inputs: both by bits of o that must or must not move."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from backlight.doctor.report.model import Probe
from backlight.doctor.steps.bench import Bench, differences, distances_in_words, probe
from backlight.doctor.steps.eight_bits.drawing import REFUSED, has_own_lengths, of_kind

# exact in every format; so much larger a row takes bits from all that share its scale
LARGER, UNITS = 2.0**10, 2.0**8
# multiples of this stay exact in fp16 when they are divided by UNITS
GRID = 2.0**-6
LENGTH, CHOSEN = 256, 200


@probe("static scales")
def static_scales(bench: Bench) -> Probe:
    """Another unit of q beside the inverse one of k: powers of two move no bit of an 8-bit float whose scale follows."""
    call = bench.problem.call
    if call.spec.softcap is None and call.k.numel():
        k = (call.k.float() / GRID).round() * GRID
        call = replace(call, k=k.to(call.k.dtype))
    plain = bench.subject_for(call).run(call)
    other = bench.subject_for(call).run(replace(call, q=call.q * UNITS, k=call.k / UNITS))
    found = {name: far for name, far in differences(plain, other, bench.problem.eps).items() if name == "o"}
    if not bool(torch.isfinite(call.q * UNITS).all()):
        return Probe("", None, "q has no room for another unit")
    if found and not found["o"] <= 1:
        return Probe("", False, f"q 2^8 and k 2^-8 change {distances_in_words(found)}", data={"finding": "e4m3-static-scales"})
    return Probe("", True, "q 2^8 and k 2^-8 leave every bit of o" if not found else "q 2^8 and k 2^-8 leave o")


@probe("scale group")
def scale_group(bench: Bench) -> Probe:
    """One row of q, 2^10 times as large: rows whose bits move share its scale."""
    call = bench.problem.call
    if has_own_lengths(call):
        return Probe("", None, REFUSED)
    made = of_kind(bench.problem, (2, call.q.shape[1], LENGTH, call.q.shape[3])).call
    q = made.q.clone()
    q[0, 0, CHOSEN] *= LARGER
    subject = bench.subject_for(made)
    moved = (subject.run(made)["o"] != subject.run(replace(made, q=q))["o"]).any(-1)
    group, words = group_of(moved)
    return Probe("", True, words, data={"group": group})


def group_of(moved: Tensor) -> tuple[str, str]:
    """Of [B, H, S], what moved beside the row itself."""
    moved = moved.clone()
    moved[0, 0, CHOSEN] = False
    if bool(moved[1:].any()):
        return "tensor", "one scale of q for the whole tensor"
    if bool(moved[:, 1:].any()):
        return "entry", "one scale of q for all heads of a batch entry"
    rows = moved[0, 0].nonzero().flatten().tolist()
    if not rows:
        return "row", "a scale for each row of q, or none"
    if rows[0] < LENGTH // 2:
        return "head", "one scale of q for a head"
    return "block", f"one scale of q for a block of rows: {rows[0]} to {rows[-1]} move with row {CHOSEN}"
