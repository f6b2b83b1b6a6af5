"""Device code of second derivatives: a tile of eq. 58 in either orientation, from raw products and the sums of its rows."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from backlight.backends.triton.loads import load_vector
from backlight.backends.triton.pair import pair_tile
from backlight.backends.triton.primitives import LOG2E, logits_of


class Moving(NamedTuple):
    """What is compiled in beside the variant: which tangents there are, and which gradients came in."""

    Q: bool
    K: bool
    V: bool
    BIAS: bool
    PAIR: bool
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
def sums_of(sums, offset, i0, n_rows, B: tl.constexpr, CHECKED: tl.constexpr):
    """(minus_lse2, mu, eta, delta) of B rows from i0 on, as columns."""
    minus_lse2 = load_vector(sums.minus_lse2 + offset, i0, n_rows, float("-inf"), B, CHECKED)[:, None]
    mu = load_vector(sums.mu + offset, i0, n_rows, 0.0, B, CHECKED)[:, None]
    eta = load_vector(sums.eta + offset, i0, n_rows, 0.0, B, CHECKED)[:, None]
    delta = load_vector(sums.delta + offset, i0, n_rows, 0.0, B, CHECKED)[:, None]
    return minus_lse2, mu, eta, delta


class Pairs(NamedTuple):
    """The pair bias and its tangent, and where the kernels of dq and dk leave what they have of its gradient: tiles of ds, or
    column sums of it by a pointer to [B,Hq,Sk]; else None."""

    pair: Any
    tpair: Any
    dpair: Any = None
    columns_ptr: Any = None


@triton.jit
def add_pairs(
    s, ts, pairs, place, sq, V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TURNED: tl.constexpr
):  # fmt: skip
    """(base-2 logits, their tangents) of a tile with those of the pair bias; arguments as of `pair_tile`."""
    if V.PAIR > 0:
        s += pair_tile(pairs.pair, pairs.pair.ptr, place, sq, V, False, BM, BN, TURNED) * LOG2E
    if T.PAIR:
        ts += pair_tile(pairs.tpair, pairs.tpair.ptr, place, sq, V, False, BM, BN, TURNED)
    return s, ts


@triton.jit
def product(a, b, WANTED: tl.constexpr, V: tl.constexpr):
    """a b^T, or zero."""
    total = 0.0
    if WANTED:
        total = tl.dot(a, tl.trans(b), input_precision=V.PRECISION)
    return total


@triton.jit
def add_product(total, a, b, THERE: tl.constexpr, V: tl.constexpr):
    """total + a b^T, or the product alone where there is no total yet."""
    if THERE:
        total = tl.dot(a, tl.trans(b), total, input_precision=V.PRECISION)
    else:
        total = tl.dot(a, tl.trans(b), input_precision=V.PRECISION)
    return total


@triton.jit
def below_cap(tx, slope, V: tl.constexpr):
    """The tangent of scores from that of scores before the cap."""
    ts = tx
    if V.SOFTCAP:
        ts = tx * slope
    return ts


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


@triton.jit
def ds_of(p, ta, b, eta, c, delta):
    """ds of eq. 58, of which dbias and dpair_bias are sums."""
    return p * (c - delta) + ta * (b - eta)
