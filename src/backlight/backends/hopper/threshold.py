"""Thresholds of entmax (eq. 80-84): powers of what lies above them, and steps of rows towards them.

u = z - theta, held between 0 and 1: theta is never below the largest z of its row less 1. Where alpha is 1.5 or 1.25 powers are
products (ENTMAX: the exponent e), between them exp2 and log2 (ENTMAX: -1). Vectors of rows are in the layout of a tile's rows.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.compat import arguments
from backlight.backends.hopper.primitives import INF

LARGE = gl.constexpr(2.0**100)


@gluon.jit
def larger(a, b):
    """The larger one; NaN where one is NaN."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def row_max(s):
    """The largest of each row; NaN where one is, which the powers do not show."""
    return gl.reduce(s, 1, larger)


@gluon.jit
def above_threshold(s, gain, base, TRANSPOSED: gl.constexpr = False):
    """u of scores: a multiply-add that saturates. TRANSPOSED: tiles [keys, rows]."""
    base = gl.expand_dims(base, 0 if TRANSPOSED else 1)
    return gl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;",
        "=f,f,f,f",
        [s, gain, -base],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def base_of(theta):
    """theta as it is subtracted: rows that have met no key stay below everything."""
    return gl.where(theta > -INF, theta, INF)


@gluon.jit
def slopes_of(u, e, ENTMAX: gl.constexpr):
    """u ** (e - 1) where u > 0, else 0."""
    if ENTMAX == 2:
        found = u
    elif ENTMAX == 4:
        found = u * u * u
    else:
        found = gl.where(u > 0, gl.exp2((e - 1) * gl.log2(u)), 0.0)
    return found


@gluon.jit
def bends_of(u, e, ENTMAX: gl.constexpr):
    """u ** (e - 2) where u > 0, else 0."""
    if ENTMAX == 2:
        # 1 or 0: nothing above a threshold is as small as this makes up for
        found = gl.inline_asm_elementwise(
            "mul.rn.sat.f32 $0, $1, $2;", "=f,f,f", [u, LARGE], dtype=gl.float32, is_pure=True, pack=1
        )
    elif ENTMAX == 4:
        found = u * u
    else:
        found = gl.where(u > 0, gl.exp2((e - 2) * gl.log2(u)), 0.0)
    return found


@gluon.jit
def rooted(f, e, ENTMAX: gl.constexpr):
    """f ** (1 / e); f is not negative."""
    if ENTMAX == 2:
        found = gl.sqrt(f)
    elif ENTMAX == 4:
        found = gl.sqrt(gl.sqrt(f))
    else:
        found = gl.where(f > 0, gl.exp2(gl.log2(f) / e), 0.0)
    return found


@gluon.jit
def or_one(x):
    """x where it is positive, else 1: something to divide by."""
    return gl.where(x > 0, x, 1.0)


@gluon.jit
def newton(f, w, root):
    """Eq. 81: the step of a threshold; root: f ** (1 / e). 0 where nothing weighs."""
    return gl.where(w > 0, (f - f / or_one(root)) / or_one(w), 0.0)


@gluon.jit
def halley(f, w, w2, room, e, ENTMAX: gl.constexpr):
    """Eq. 83, held within its bounds; room: from theta to the largest z."""
    root = rooted(f, e, ENTMAX)
    step = newton(f, w, root)
    safe = or_one(f)
    down = w * root / safe
    bend = (e - 1) * (w2 - w * w / safe) * root / safe
    found = 2 * (root - 1) * down / (2 * down * down - (root - 1) * bend)
    found = gl.minimum(gl.maximum(found, step), room * (1 - 1 / or_one(root)))
    return gl.where(root > 1, found, step)


@arguments
class Bound:
    """Of each row: a lower bound theta of its threshold, and over the keys met F ** (1 / e) (theta + t) >= line - slope t."""

    theta: gl.tensor
    line: gl.tensor
    slope: gl.tensor


@gluon.jit
def line_of(f, w, e, ENTMAX: gl.constexpr):
    """(line, slope) of `Bound` from F and W; zeros where nothing weighs."""
    line = rooted(f, e, ENTMAX)
    return line, gl.where(f > 0, w * line / or_one(f), 0.0)


@gluon.jit
def both_lines(had, b, h, s, t, e, ENTMAX: gl.constexpr):
    """F and W at t of two lines that fall from had and h by b and s, held at 0."""
    left = gl.maximum(had - b * t, 0.0)
    right = gl.maximum(h - s * t, 0.0)
    left_w = slopes_of(left, e, ENTMAX)
    right_w = slopes_of(right, e, ENTMAX)
    return left_w * left + right_w * right, left_w * b + right_w * s


@gluon.jit
def raised_bound(bound, f, w, top, e, ENTMAX: gl.constexpr):
    """The bound after more keys: F and W of them at its theta, and the largest z so far (eq. 84).

    Of rows that had met no key, the largest alone is known.
    """
    known = bound.theta > -INF
    base = gl.where(known, bound.theta, 0.0)
    lift = gl.where(known, gl.maximum(top - 1 - base, 0.0), 0.0)
    h, s = line_of(f, w, e, ENTMAX)
    had = gl.maximum(bound.line - bound.slope * lift, 0.0)
    h = gl.maximum(h - s * lift, 0.0)
    t = h * 0.0
    for _ in gl.static_range(2):
        both, fall = both_lines(had, bound.slope, h, s, t, e, ENTMAX)
        t += gl.maximum(newton(both, fall, rooted(both, e, ENTMAX)), 0.0)
    both, fall = both_lines(had, bound.slope, h, s, t, e, ENTMAX)
    line, slope = line_of(both, fall, e, ENTMAX)
    # where lift is large, rounding may leave their sum below what u is held by
    theta = gl.maximum(gl.where(known, base + lift + t, -INF), top - 1)
    one = gl.where(top > -INF, 1.0, 0.0)
    return Bound(theta, gl.where(known, line, one), gl.where(known, slope, one))
