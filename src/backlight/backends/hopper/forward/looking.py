"""A consumer partition of one sweep with entmax, for the backward: lse is known, which blocks of keys live and W are not."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.forward.elastic import skip_keys
from backlight.backends.hopper.forward.live_blocks import mark
from backlight.backends.hopper.forward.rows_of_entmax import no_sums, sink_of, sink_sums
from backlight.backends.hopper.forward.sparse import seen_scores
from backlight.backends.hopper.forward.steps import accumulator, first_head, next_head, release_q, row_totals, take_scores
from backlight.backends.hopper.forward.tiles import END, place_of, q_buffer, view_of
from backlight.backends.hopper.primitives import INF, WM, partial_sums
from backlight.backends.hopper.threshold import above_threshold, or_one, slopes_of


@gluon.jit
def known_base(p, place, row_l: gl.constexpr):
    """Thresholds from lse, +inf of rows that are not there or see nothing."""
    numbers = place.i0 + gl.arange(0, WM, row_l)
    at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
    lse = gl.load(p.lse_ptr + at, mask=numbers < place.sq, other=-INF)
    return gl.where(lse > -INF, lse / p.entmax.e - 1, INF)


@gluon.jit
def look(p, q, view, base, slot, k_count, W: gl.constexpr):
    """(partial sums of W, tiles of K so far); marks the blocks that live."""
    s_l: gl.constexpr = accumulator(p.V.BN)
    w = no_sums(p)
    for j in range(view.end - view.begin):
        block = view.end - 1 - j
        s = seen_scores(p, view, take_scores(p, q, k_count), block)
        k_count += 1
        slopes = slopes_of(above_threshold(s, p.entmax.gain, base), p.entmax.e, p.V.ENTMAX)
        here = partial_sums(slopes, w)
        alive = gl.convert_layout(gl.max(here, 1), gl.SliceLayout(1, s_l), assert_trivial=True) > 0.0
        mark(p, p.entmax.live_ptr, slot, block, alive, W)
        w = w + here
    return w, k_count


@gluon.jit
def looking_consumer(p, W: gl.constexpr):
    """In the backward: which blocks of keys live, and W of rows."""
    s_l: gl.constexpr = accumulator(p.V.BN)
    row_l: gl.constexpr = gl.SliceLayout(1, s_l)
    head = first_head(p, W)
    k_count = head * 0
    turn = head * 0
    while head != END:
        q = p.buffers.q.index(q_buffer(p, turn, W))
        view = view_of(p, head, turn & 3, W, row_l)
        place = place_of(p, turn & 3, W)
        base = known_base(p, place, row_l)
        if p.V.HAS_RIGHT:
            k_count = skip_keys(p, view.tile_end - view.end, k_count)
        w, k_count = look(p, q, view, base, turn & 3, k_count, W)
        if p.V.HAS_LEFT:
            k_count = skip_keys(p, view.begin - view.tile_begin, k_count)
        release_q(p, turn, W)
        w = row_totals(w, s_l)
        if p.V.SINK:
            _f, sink_w, _w2 = sink_sums(p, sink_of(p, head), base)
            w += sink_w
        numbers = place.i0 + gl.arange(0, WM, row_l)
        at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
        gl.store(p.entmax.slopes_ptr + at, or_one(w), mask=numbers < place.sq)
        turn += 1
        head = next_head(p, turn, W)
