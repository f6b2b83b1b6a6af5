"""Names for wrong constants: what a measured gain is made of."""

from __future__ import annotations

import math

from backlight.call import Call
from backlight.spec import LN2, LOG2E

THREADS = (16, 32, 64, 128, 256, 512, 1024)


def table(call: Call) -> list[tuple[float, str]]:
    """(constant, words) in order of preference for one call."""
    d, group, scale = call.q.shape[-1], call.group, call.scale
    rows = [(-1.0, "the sign is flipped"), (0.0, "it is zero")]
    if group > 1:
        rows += [(1 / group, f"1/{group}: the group size of the query heads"), (float(group), f"{group}: the group size")]
    rows += [
        (1 / scale, f"1/scale = {1 / scale:.4g}: the softmax scale was left out"),
        (scale, f"scale = {scale:.4g}: the softmax scale was applied twice"),
        (scale**0.5, "the square root of scale: half of the scale was applied once too often"),
        (scale**-0.5, "1 / the square root of scale: half of the scale was left out"),
        (float(d), f"D = {d}"),
        (1 / d, f"1/D = 1/{d}"),
        (LN2, "ln 2: a base-2 exponent was differentiated as if it were natural, or the reverse"),
        (LOG2E, "log2 e: the base-2 factor of the scores was left in the gradient"),
        (LOG2E**2, "(log2 e)^2"),
        (LN2 * scale, "ln 2 x scale"),
        (LOG2E * scale, "log2 e x scale"),
    ]
    rows += [(float(n), f"{n}, an integer: the same product was added {n} times") for n in (*range(2, 13), *THREADS)]
    rows += [(1 / n, f"1/{n}") for n in (2, 3, 4, 8)]
    return rows


def name_constant(gain: float, call: Call, tolerance: float = 5e-3) -> str | None:
    """Words for a gain, or None when it matches nothing known."""
    for constant, words in table(call):
        if abs(gain - constant) <= tolerance * max(abs(constant), 0.02):
            return words
    return None


def is_repetition(gain: float, call: Call, tolerance: float = 5e-3) -> bool:
    """Whether the gain is an integer that only repeated addition explains."""
    words = name_constant(gain, call, tolerance)
    return words is not None and "added" in words


def times(gain: float, call: Call) -> str:
    """'1.0100 times what it should be (...)' for a sentence."""
    words = name_constant(gain, call)
    value = f"{gain:.4g}" if abs(gain - 1) > 0.1 and math.isfinite(gain) else f"{gain:.4f}"
    return f"{value} times what it should be" + (f" ({words})" if words else "")
