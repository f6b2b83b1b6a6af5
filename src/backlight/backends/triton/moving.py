"""Device code of second derivatives: a tile of eq. 58 in either orientation, from raw products and the sums of its rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backlight.backends.triton.primitives import LOG2E, logits_of


class Moving(NamedTuple):
    """What is compiled in beside the variant: which tangents there are, and which gradients came in."""

    Q: bool
    K: bool
    V: bool
    BIAS: bool
    # some score has a tangent
    SCORES: bool
    # the gradients at o and at its tangent
    DO: bool
    DTO: bool


class RowSums(NamedTuple):
    """Per row, fp32 [B,Hq,pitch]: the base-2 lse, negated; its tangent mu; the means that center both brackets of eq. 58.

    Rows beyond Sq have -inf and zeros, as `delta.RowState` has.
    """

    minus_lse2: Any
    mu: Any
    eta: Any
    delta: Any


@triton.jit
def scores_and_cap(t, addend, geometry, V: tl.constexpr):
    """(base-2 logits + addend, tanh, slope) from the raw product; without a softcap the last two mean nothing."""
    if V.SOFTCAP:
        tanh, slope = logits_of(t, 1.0, 0.0, geometry, V, "apart")
        s = tanh * geometry.unit + addend
    else:
        s, tanh = logits_of(t, geometry.unit, addend, geometry, V, "none")
        slope = tanh
    return s, tanh, slope


@triton.jit
def tangent_gradient(p, ta, tx, tanh, slope, b, eta, geometry, V: tl.constexpr, T: tl.constexpr):
    """(dtx of eq. 58, its part in dx before the slope of the cap).

    ta: tangents of weights; tx: of scores before the cap; b: the raw product of values and the gradient at the tangent of o.
    """
    dr = b - eta
    part = ta * dr
    dtx = p * dr
    if V.SOFTCAP:
        if T.Q or T.K:
            # 2 / cap: constants last (softcap.py)
            part -= (tanh * ((1.0 / geometry.unit) * LOG2E * 2.0)) * (tx * dtx)
        dtx = dtx * slope
    return dtx, part


@triton.jit
def score_gradient(p, c, delta, part, slope, V: tl.constexpr):
    """dx of eq. 58; without a softcap it is ds."""
    dx = p * (c - delta) + part
    if V.SOFTCAP:
        dx = dx * slope
    return dx
