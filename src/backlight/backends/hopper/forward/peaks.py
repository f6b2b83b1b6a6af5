"""The largest logit of each row (eq. 72), for those who ask for it.

A row that looks for its maximum in every block has it at the end, if its scores are the logits (`BY_MAXIMUM`). One that keeps
its first maximum has weights relative to it, of which the largest says by how much it was exceeded (`BY_WEIGHTS`, eq. 74):
weights are positive, so their 16 bits compare as integers, of which Hopper compares six at a time; within 2^-8. With a cap, a
bias or a sink a look at every raw product remains (`BY_SCORES`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.forward.steps import accumulator
from backlight.backends.hopper.primitives import INF, LN2, WM, row_sum_layout

NO_PEAKS = gl.constexpr(0)
BY_MAXIMUM = gl.constexpr(1)
BY_WEIGHTS = gl.constexpr(2)
BY_SCORES = gl.constexpr(3)


@gluon.jit
def first_peak(p, nothing):
    """What `Rows.peak` begins as, for each row 8 of which the largest counts; a number that nobody reads where none is kept."""
    peak = nothing
    if p.V.PEAKS == BY_WEIGHTS:
        peak = gl.zeros([WM, 8], p.q_desc.dtype, row_sum_layout(p.V.BN))
    elif p.V.PEAKS == BY_SCORES:
        peak = gl.full([WM, 8], -INF, gl.float32, row_sum_layout(p.V.BN))
    return peak


@gluon.jit
def larger(a, b):
    """Of positive numbers of 16 bits, two at a time."""
    return gl.inline_asm_elementwise("max.s16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def with_columns(peak, weights):
    """The largest of `peak` and of every eighth column of `weights`."""
    COLUMNS: gl.constexpr = weights.shape[1]
    if COLUMNS > 8:
        halves = gl.permute(gl.reshape(weights, [WM, 2, COLUMNS // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        peak = with_columns(with_columns(peak, left), right)
    else:
        peak = larger(peak, gl.convert_layout(weights, peak.type.layout, assert_trivial=True))
    return peak


@gluon.jit
def with_weights(p, peak, weights):
    """After the weights of a block. Those relative to a maximum that still rises are 1 at most, which says nothing new."""
    if p.V.PEAKS == BY_WEIGHTS:
        peak = with_columns(peak, gl.convert_layout(weights, accumulator(p.V.BN), assert_trivial=True))
    return peak


@gluon.jit
def with_scores(p, peak, products, s):
    """After a block of raw products, those left out that s hides."""
    if p.V.PEAKS == BY_SCORES:
        products = gl.where(s == -INF, -INF, products)
        largest = gl.max(gl.reshape(products, [WM, products.shape[1] // 8, 8]), 1)
        peak = gl.maximum(peak, gl.convert_layout(largest, peak.type.layout, assert_trivial=True))
    return peak


@gluon.jit
def store_peaks(p, peak, row_max, offset, keep):
    """The largest logits of rows in natural units."""
    if p.V.PEAKS == BY_MAXIMUM:
        gl.store(p.extras.peaks_ptr + offset, row_max * p.scale.unit, mask=keep)
    elif p.V.PEAKS != NO_PEAKS:
        largest = gl.convert_layout(gl.max(peak.to(gl.float32), 1), row_max.type.layout, assert_trivial=True)
        if p.V.PEAKS == BY_WEIGHTS:
            largest = row_max * p.scale.unit + gl.maximum(gl.log2(largest), 0.0) * LN2
        else:
            largest = largest * p.extras.unit
        gl.store(p.extras.peaks_ptr + offset, largest, mask=keep)
