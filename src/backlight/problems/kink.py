"""The kink of the elastic softmax (math.md eq. 10 and 35): which weights sit near it, and what the other side would give. That
of entmax near alpha 2 (eq. 93), where a key that enters the support changes gradients at once, is kept away from.

A correct fp32 kernel moves p by about 1e-6 of itself, so a weight that near to -tau/n may fall on either side.
"""

from __future__ import annotations

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.reference import STAGES, oracle
from backlight.reference.trace import Stage

# relative to tau/n: entries this close may fall on either side ...
KINK = 3e-6
# ... and cases are drawn again until every entry is this far away
KINK_MARGIN = 1e-5
# alphas from which on a key at the threshold of an entmax counts as one at a kink
STEEP = 1.6


def margin(call: Call) -> float:
    """Smallest |p + tau/n| relative to |tau|/n over visible keys of heads with tau < 0; inf when there is none.

    A row with one visible key and no sink has p = 1 by definition (math.md section 5), so it may sit on the kink.
    """
    if call.entmax is not None:
        return _threshold_margin(call, call.entmax)
    if call.tau is None or not bool((call.tau < 0).any()):
        return float("inf")
    p = oracle(call, keep=["p"]).p
    smallest = float("inf")
    for segment in call.segments():
        block = p[segment.batch, :, segment.q0 : segment.q1, segment.k0 : segment.k1]
        for h in (call.tau < 0).nonzero().flatten().tolist():
            visible = intervals.visible(call, segment, h)
            n = visible.sum(dim=-1)
            if not call.spec.sink:
                visible = visible & (n > 1)[:, None]
            threshold = -call.tau[h].double() / n.clamp(min=1)[:, None]
            distance = ((block[h] - threshold).abs() / threshold)[visible]
            smallest = min(smallest, *distance.amin().reshape(-1).tolist()) if distance.numel() else smallest
    return smallest


def _threshold_margin(call: Call, alphas: Tensor) -> float:
    """Smallest |z - theta| over visible keys of heads whose slopes rise steeply from the threshold."""
    steep = [h for h, alpha in enumerate(alphas.tolist()) if alpha > STEEP]
    if not steep:
        return float("inf")
    found = oracle(call, keep=["s", "lse"])
    rate = (alphas.double() - 1)[None, :, None, None]
    u = (1 + rate * (found.s - found.lse[..., None]))[:, steep]
    near = u[torch.isfinite(u)].abs()
    return float(near.min()) if near.numel() else float("inf")


def _flipped(p: Tensor, tau: Tensor | None, n: Tensor, visible: Tensor) -> Tensor:
    """Survivors (stage m) with every entry near the kink on its other side."""
    if tau is None or tau >= 0:
        return visible.to(p.dtype)
    above = p + tau / n.clamp(min=1)
    near = visible & (above.abs() <= KINK * -tau / n.clamp(min=1))
    return ((visible & (above > 0)) ^ near).to(p.dtype)


FLIPPED = STAGES | {"m": Stage.of(_flipped, "m")}
