"""What rows of a tile bring to a threshold of entmax: which there are, their sink, the bound by their first block (eq. 84)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.primitives import INF, WM, row_sum_layout
from backlight.backends.hopper.threshold import (
    Bound,
    above_threshold,
    base_of,
    bends_of,
    line_of,
    newton,
    rooted,
    row_max,
    slopes_of,
)

# steps by which the first block is solved by itself
FIRST_STEPS = gl.constexpr(3)


@gluon.jit
def exist(view, s_l: gl.constexpr):
    """Which of the rows there are: the others would keep every block alive."""
    return view.i0 + gl.arange(0, WM, gl.SliceLayout(1, s_l)) < view.sq


@gluon.jit
def no_sums(p):
    """Partial sums of rows (`row_sum_layout`)."""
    return gl.zeros([WM, 8], gl.float32, row_sum_layout(p.V.BN))


@gluon.jit
def sink_of(p, head):
    """z of the sink, -inf where it takes no part in a threshold: an infinite one is all there is."""
    z = -INF
    if p.V.SINK:
        sink = gl.load(p.terms.sink_ptr + head % p.heads).to(gl.float32)
        z = gl.where(sink == INF, -INF, sink / p.entmax.e)
    return z


@gluon.jit
def sink_sums(p, z, base):
    """(F, W, W2) of the sink alone."""
    u = gl.minimum(gl.maximum(z - base, 0.0), 1.0)
    slopes = slopes_of(u, p.entmax.e, p.V.ENTMAX)
    return slopes * u, slopes, gl.where(u > 0, bends_of(u, p.entmax.e, p.V.ENTMAX), 0.0)


@gluon.jit
def sums_at(p, s, sink, theta):
    """F and W of a block and the sink at thresholds."""
    base = base_of(theta)
    u = above_threshold(s, p.entmax.gain, base)
    slopes = slopes_of(u, p.entmax.e, p.V.ENTMAX)
    f = gl.sum(slopes * u, 1)
    w = gl.sum(slopes, 1)
    if p.V.SINK:
        sink_f, sink_w, _ = sink_sums(p, sink, base)
        f += sink_f
        w += sink_w
    return f, w


@gluon.jit
def first_bound(p, s, sink):
    """(`Bound`, largest z) of the first block and the sink, whose own threshold is nearly found."""
    top = row_max(s) * p.entmax.gain
    if p.V.SINK:
        top = gl.maximum(top, sink)
    theta = top - 1
    for _ in range(FIRST_STEPS):
        f, w = sums_at(p, s, sink, theta)
        theta = theta + gl.maximum(newton(f, w, rooted(f, p.entmax.e, p.V.ENTMAX)), 0.0)
    f, w = sums_at(p, s, sink, theta)
    line, slope = line_of(f, w, p.entmax.e, p.V.ENTMAX)
    return Bound(theta, line, slope), top
