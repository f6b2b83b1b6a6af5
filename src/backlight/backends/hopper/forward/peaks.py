"""The largest logit of each row (eq. 72), for those who ask for it.

A row that looks for its maximum in every block has it at the end, if its scores are the logits (`BY_MAXIMUM`). One that keeps
its first maximum has weights relative to it, of which the largest says by how much it was exceeded (`BY_WEIGHTS`, eq. 74):
weights are positive, so their 16 bits compare as integers, of which Hopper compares six at a time; within 2^-8. With a cap or
a bias a look at every raw product remains (`BY_SCORES`), and with a sink unless the first maximum is kept. Beside a sink more
than 88 above all of a row's logits their weights are 0, and the row has none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.forward.scores import sink_maximum
from backlight.backends.hopper.forward.steps import accumulator
from backlight.backends.hopper.primitives import INF, LN2, WM, row_sum_layout

NO_PEAKS = gl.constexpr(0)
BY_MAXIMUM = gl.constexpr(1)
BY_WEIGHTS = gl.constexpr(2)
BY_SCORES = gl.constexpr(3)


@gluon.jit
def first_peak(p, nothing):
    """What `Rows.peak` begins as, for each row 8 of which the largest counts; a number that nobody reads where none is kept.

    Weights of 16 bits stand two in one number of 32: kept apart, each would have a register of its own from block to block.
    """
    peak = nothing
    if p.V.PEAKS == BY_WEIGHTS:
        peak = gl.zeros([WM, 4], gl.int32, pair_layout())
    elif p.V.PEAKS == BY_SCORES:
        peak = gl.full([WM, 8], -INF, gl.float32, row_sum_layout(p.V.BN))
    return peak


# of two pairs of positive numbers of 16 bits, of which the first comes twice and leaves twice
LARGER = gl.constexpr("max.s16x2 $0, $2, $4; mov.u32 $1, $0;")


@gluon.constexpr_function
def pair_layout():
    """[64, 4]: one number for every two columns of `row_sum_layout`."""
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0]], lanes, [[16, 0], [32, 0]], [], [64, 4])


@gluon.jit
def with_columns(peak, weights):
    """The largest of `peak`, [64, 8] with every pair twice, and of every eighth column of `weights`."""
    COLUMNS: gl.constexpr = weights.shape[1]
    if COLUMNS > 8:
        halves = gl.permute(gl.reshape(weights, [WM, 2, COLUMNS // 2]), [0, 2, 1])
        left, right = gl.split(halves)
        peak = with_columns(with_columns(peak, left), right)
    else:
        weights = gl.convert_layout(weights, peak.type.layout, assert_trivial=True)
        peak = gl.inline_asm_elementwise(LARGER, "=r,=r,r,r,r", [peak, weights], dtype=gl.int32, is_pure=True, pack=2)
    return peak


@gluon.jit
def with_weights(p, peak, weights):
    """After the weights of a block. Those relative to a maximum that still rises are 1 at most, which says nothing new."""
    if p.V.PEAKS == BY_WEIGHTS:
        twice = gl.reshape(gl.join(peak, peak), [WM, 8])
        both = with_columns(twice, gl.convert_layout(weights, accumulator(p.V.BN), assert_trivial=True))
        peak, _ = gl.split(gl.reshape(both, [WM, 4, 2]))
        peak = gl.convert_layout(peak, pair_layout(), assert_trivial=True)
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
def store_peaks(p, peak, row_max, head, offset, keep):
    """The largest logits of rows in natural units."""
    if p.V.PEAKS == BY_MAXIMUM:
        gl.store(p.extras.peaks_ptr + offset, row_max * p.scale.unit, mask=keep)
    elif p.V.PEAKS == BY_WEIGHTS:
        dtype: gl.constexpr = p.q_desc.dtype
        left = (peak & 0xFFFF).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        right = (peak >> 16).to(gl.int16).to(dtype, bitcast=True).to(gl.float32)
        above = gl.log2(gl.convert_layout(gl.max(gl.maximum(left, right), 1), row_max.type.layout))
        # a maximum that is one of the logits has been met, a sink has not
        met = row_max == row_max
        if p.V.SINK:
            met = row_max > sink_maximum(p, head)
        above = gl.where(met, gl.maximum(above, 0.0), above)
        gl.store(p.extras.peaks_ptr + offset, row_max * p.scale.unit + above * LN2, mask=keep)
    elif p.V.PEAKS == BY_SCORES:
        largest = gl.convert_layout(gl.max(peak, 1), row_max.type.layout, assert_trivial=True)
        gl.store(p.extras.peaks_ptr + offset, largest * p.extras.unit, mask=keep)
