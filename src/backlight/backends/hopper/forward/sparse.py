"""A consumer partition of the forward with entmax: thresholds by sweeps over the keys, then o and u (eq. 80-86).

  bound   S = Q K^T of all blocks: a lower bound of each row's threshold (eq. 84), and which blocks reach above it
  steps   S of those blocks: one to three steps to the threshold (eq. 83); the first finds the blocks that live (eq. 85)
  output  S of the blocks that live, P and its slopes w from registers into O += P V and U += w V; one more step (eq. 86)

The bound is raised once in a few blocks, from sums that threads keep for themselves. In the first sweeps arithmetic runs under
the matmuls of the other warpgroups, in the last one also under the products of the block before. Registers: S, O and U fp32, P
and w 16 bit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from backlight.backends.hopper.compat import arguments, warpgroup_mma_wait
from backlight.backends.hopper.forward.elastic import skip_keys, skip_keys_and_values
from backlight.backends.hopper.forward.live_blocks import (
    BYTES,
    CHUNK,
    ask_for_more,
    between_places,
    chunks_of,
    goes_on,
    live_chunk,
    lowest,
    mark,
    meet,
)
from backlight.backends.hopper.forward.ring import release, ring_stage, wait_full
from backlight.backends.hopper.forward.rows_of_entmax import exist, first_bound, no_sums, sink_of, sink_sums
from backlight.backends.hopper.forward.scores import at_edge, cap_of, hide, scored, with_bias
from backlight.backends.hopper.forward.steps import (
    accumulator,
    first_head,
    load_gate,
    next_head,
    no_products,
    release_q,
    row_totals,
    start_scores,
    store_rows,
    take_scores,
    write_o,
)
from backlight.backends.hopper.forward.tiles import END, place_of, q_buffer, read_field, view_of
from backlight.backends.hopper.primitives import INF, WM, end_block, partial_sums
from backlight.backends.hopper.threshold import (
    above_threshold,
    base_of,
    bends_of,
    halley,
    larger,
    or_one,
    raised_bound,
    row_max,
    slopes_of,
)

# blocks after which the bound is raised
GROUP = gl.constexpr(4)
# a step this large is followed by another: of a smaller one the error, its third power, is lost in 16 bits
FAR = gl.constexpr(2.0**-6)


@gluon.jit
def seen_scores(p, view, s, block):
    """Scores of a block with terms, -inf where a key is hidden."""
    s = with_bias(p, view, scored(p, s, cap_of(p, s)), block)
    if p.V.MASKED:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if at_edge(view, block):
            position = view.i0 + view.sk - view.sq + gl.arange(0, WM, gl.SliceLayout(1, s.type.layout))
            s = hide(p, s, position, block, view.sk)
    return s


# --- bound -------------------------------------------------------------------------------------------------------------------


@gluon.jit
def bounding(p, q, view, sink, slot, k_count, W: gl.constexpr):
    """(lower bounds of thresholds, largest z, tiles of K so far) of rows that have met the keys they see."""
    s_l: gl.constexpr = accumulator(p.V.BN)
    gain = p.entmax.gain
    s = seen_scores(p, view, take_scores(p, q, k_count), view.end - 1)
    k_count += 1
    bound, top = first_bound(p, s, sink)
    rest = view.end - 1 - view.begin
    for group in range((rest + GROUP - 1) // GROUP):
        base = base_of(bound.theta)
        f = no_sums(p)
        w = no_sums(p)
        for j in range(gl.minimum(rest - group * GROUP, GROUP)):
            block = view.end - 2 - group * GROUP - j
            s = seen_scores(p, view, take_scores(p, q, k_count), block)
            k_count += 1
            largest = row_max(s) * gain
            top = larger(top, largest)
            mark(p, p.entmax.bounded_ptr, slot, block, (largest > bound.theta) & exist(view, s_l), W)
            u = above_threshold(s, gain, base)
            slopes = slopes_of(u, p.entmax.e, p.V.ENTMAX)
            f = f + partial_sums(slopes * u, f)
            w = w + partial_sums(slopes, w)
        bound = raised_bound(bound, row_totals(f, s_l), row_totals(w, s_l), top, p.entmax.e, p.V.ENTMAX)
    return bound.theta, top, k_count


@gluon.jit
def own_chunk(p, read_ptr, view, slot, chunk):
    """`live_chunk` of the published tile."""
    return live_chunk(p, read_ptr, read_field(p, slot, BYTES), view.tile_begin, view.tile_end, chunk, 4)


# --- steps -------------------------------------------------------------------------------------------------------------------


@arguments
class Rows:
    """Of each row its threshold so far and its largest z; z of the sink."""

    theta: gl.tensor
    top: gl.tensor
    sink: gl.tensor


@gluon.jit
def stepping(p, q, view, rows, read_ptr, slot, step, k_count, W: gl.constexpr, MARKS: gl.constexpr):
    """(`Rows` after one step, tiles of K so far); asks for another where a row has moved far."""
    s_l: gl.constexpr = accumulator(p.V.BN)
    theta = rows.theta
    base = base_of(theta)
    f = no_sums(p)
    w = no_sums(p)
    w2 = no_sums(p)
    hidden = view.tile_end - view.end
    seen_end = view.tile_end - view.begin
    if p.V.HAS_RIGHT:
        k_count = skip_keys(p, hidden, k_count)
    for chunk in range(chunks_of(view.begin, view.tile_end)):
        bits = own_chunk(p, read_ptr, view, slot, chunk)
        bits = between_places(bits, chunk, hidden, seen_end)
        while bits != 0:
            block = view.tile_end - 1 - chunk * CHUNK - lowest(bits)
            bits = bits & (bits - 1)
            s = seen_scores(p, view, take_scores(p, q, k_count), block)
            k_count += 1
            u = above_threshold(s, p.entmax.gain, base)
            bends = bends_of(u, p.entmax.e, p.V.ENTMAX)
            slopes = slopes_of(u, p.entmax.e, p.V.ENTMAX)
            here = partial_sums(bends, w2)
            if MARKS:
                alive = gl.convert_layout(gl.max(here, 1), gl.SliceLayout(1, s_l), assert_trivial=True) > 0.0
                mark(p, p.entmax.live_ptr, slot, block, alive & exist(view, s_l), W)
            f = f + partial_sums(slopes * u, f)
            w = w + partial_sums(slopes, w)
            w2 = w2 + here
    if p.V.HAS_LEFT:
        k_count = skip_keys(p, unseen_count(p, view, read_ptr, slot, seen_end), k_count)
    f = row_totals(f, s_l)
    w = row_totals(w, s_l)
    w2 = row_totals(w2, s_l)
    if p.V.SINK:
        sink_f, sink_w, sink_w2 = sink_sums(p, rows.sink, base)
        f += sink_f
        w += sink_w
        w2 += sink_w2
    known = theta > -INF
    room = gl.where(known, rows.top - theta, 0.0)
    moved = gl.where(known, halley(f, w, w2, room, p.entmax.e, p.V.ENTMAX), 0.0)
    ask_for_more(p, slot, step, (gl.abs(moved) > FAR) & exist(view, s_l))
    return Rows(theta + moved, rows.top, rows.sink), k_count


@gluon.jit
def unseen_count(p, view, read_ptr, slot, first):
    """How many blocks of the tile live beyond the last that these rows see."""
    count = first * 0
    for chunk in range(chunks_of(view.tile_begin, view.tile_end)):
        bits = own_chunk(p, read_ptr, view, slot, chunk)
        bits = between_places(bits, chunk, first, view.tile_end - view.tile_begin)
        while bits != 0:
            bits = bits & (bits - 1)
            count += 1
    return count


# --- output ------------------------------------------------------------------------------------------------------------------


@arguments
class Output:
    """O and U, what the block before adds to them (operands of matmuls to come), and partial sums of F, W and W2."""

    o: gl.tensor
    u: gl.tensor
    a: gl.tensor
    m: gl.tensor
    f: gl.tensor
    w: gl.tensor
    w2: gl.tensor


@gluon.jit
def operands(p, u, slopes):
    """P and w as register operands of the products with V."""
    dtype: gl.constexpr = p.q_desc.dtype
    a_l: gl.constexpr = gl.DotOperandLayout(0, accumulator(p.V.BDV), 2)
    a = gl.convert_layout((slopes * u).to(dtype), a_l, assert_trivial=True)
    return a, gl.convert_layout(slopes.to(dtype), a_l, assert_trivial=True)


@gluon.jit
def add_products(p, rows, stage):
    """O += P V and U += w V, in flight."""
    v = p.v.tiles.index(stage)
    return warpgroup_mma(rows.a, v, rows.o, is_async=True), warpgroup_mma(rows.m, v, rows.u, is_async=True)


@gluon.jit
def first_block(p, view, s, base):
    """`Output` before any product: zeros, and the operands and sums of the first block."""
    u = above_threshold(seen_scores(p, view, s, view.end - 1), p.entmax.gain, base)
    slopes = slopes_of(u, p.entmax.e, p.V.ENTMAX)
    a, m = operands(p, u, slopes)
    none = no_sums(p)
    o = no_products(p.V.BDV)
    w2 = partial_sums(bends_of(u, p.entmax.e, p.V.ENTMAX), none)
    return Output(o, o, a, m, partial_sums(slopes * u, none), partial_sums(slopes, none), w2)


@gluon.jit
def advance(p, q, view, base, rows, k_count, v_count, block):
    """S of a block, the products of the one before it, then the weights of this block under those."""
    stage = ring_stage(p.k, k_count)
    previous = ring_stage(p.v, v_count - 1)
    wait_full(p.k, k_count)
    s_token = start_scores(p, q, stage)
    wait_full(p.v, v_count - 1)
    o, o2 = add_products(p, rows, previous)
    s = warpgroup_mma_wait(2, deps=[s_token])
    release(p.k, stage)
    u = above_threshold(seen_scores(p, view, s, block), p.entmax.gain, base)
    slopes = slopes_of(u, p.entmax.e, p.V.ENTMAX)
    f = rows.f + partial_sums(slopes * u, rows.f)
    w = rows.w + partial_sums(slopes, rows.w)
    w2 = rows.w2 + partial_sums(bends_of(u, p.entmax.e, p.V.ENTMAX), rows.w2)
    if p.V.ENTMAX > 0:
        # ends the basic block: ptxas would move the wait for the products above the sums
        u = end_block(u)
        o, o2, u = warpgroup_mma_wait(0, deps=[o, o2, u])
        a, m = operands(p, u, slopes_of(u, p.entmax.e, p.V.ENTMAX))
    else:
        new_a, new_m = operands(p, end_block(u), slopes)
        o, o2, a, m = warpgroup_mma_wait(0, deps=[o, o2, new_a, new_m])
    release(p.v, previous)
    return Output(o, o2, a, m, f, w, w2)


@gluon.jit
def output(p, q, view, theta, slot, k_count, v_count):
    """(`Output` whose last products are still to be made, tiles of K and of V so far)."""
    base = base_of(theta)
    hidden = view.tile_end - view.end
    if p.V.HAS_RIGHT:
        k_count, v_count = skip_keys_and_values(p, hidden, k_count, v_count)
    rows = first_block(p, view, take_scores(p, q, k_count), base)
    k_count += 1
    v_count += 1
    for chunk in range(chunks_of(view.begin, view.tile_end)):
        bits = own_chunk(p, p.entmax.live_ptr, view, slot, chunk)
        bits = between_places(bits, chunk, hidden + 1, view.tile_end - view.begin)
        while bits != 0:
            block = view.tile_end - 1 - chunk * CHUNK - lowest(bits)
            bits = bits & (bits - 1)
            rows = advance(p, q, view, base, rows, k_count, v_count, block)
            k_count += 1
            v_count += 1
    return rows, k_count, v_count


@gluon.jit
def row_results(p, place, theta, top, f, w, w2, sink):
    """Stores lse and, for the backward, W; returns (what U is multiplied by, what of that is taken from O).

    The step of lse is that of eq. 83: its rounding is fp32's, where o has that of 16 bits.
    """
    e = p.entmax.e
    numbers = place.i0 + gl.arange(0, WM, f.type.layout)
    at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
    room = gl.where(theta > -INF, top - theta, 0.0)
    lse = (theta + halley(f, w, w2, room, e, p.V.ENTMAX) + 1) * e
    # NaN, where the largest score is
    lse = gl.where(top == top, lse, top)
    weight = gl.where(top == top, gl.where(w > 0, 1.0 / or_one(w), 0.0), top)
    share = gl.where(w > 0, f - 1, 0.0)
    if p.V.SINK:
        lse = gl.where(sink == INF, INF, lse)
    gl.store(p.lse_ptr + at, lse, mask=numbers < place.sq)
    if p.V.SAVE_U:
        gl.store(p.entmax.slopes_ptr + at, or_one(w), mask=numbers < place.sq)
    return weight, share


@gluon.jit
def beside_products(values, o):
    return gl.expand_dims(gl.convert_layout(values, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)


@gluon.jit
def finish(p, rows, theta, top, sink, v_count, turn, W: gl.constexpr):
    """The products of the last block, lse; O and U on their way to global memory."""
    s_l: gl.constexpr = accumulator(p.V.BN)
    last = ring_stage(p.v, v_count - 1)
    wait_full(p.v, v_count - 1)
    o_token, u_token = add_products(p, rows, last)
    place = place_of(p, turn & 3, W)
    f = row_totals(rows.f, s_l)
    w = row_totals(rows.w, s_l)
    w2 = row_totals(rows.w2, s_l)
    all_there_is = 0.0
    if p.V.SINK:
        sink_f, sink_w, sink_w2 = sink_sums(p, sink, base_of(theta))
        f += sink_f
        w += sink_w
        w2 += sink_w2
        all_there_is = gl.load(p.terms.sink_ptr + place.h).to(gl.float32)
    weight, share = row_results(p, place, theta, top, f, w, w2, all_there_is)
    if not p.V.GATE:
        # the stores of the tile before have left the buffers
        tma.store_wait(0)
    o, u = warpgroup_mma_wait(0, deps=[o_token, u_token])
    release(p.v, last)
    u = u * beside_products(weight, u)
    o = o - u * beside_products(share, o)
    if p.V.SINK:
        o = gl.where(all_there_is == INF, 0.0, o)
        u = gl.where(all_there_is == INF, 0.0, u)
    write_o(p, o, turn, W)
    if p.V.SAVE_U:
        p.buffers.u.index(W).store(u.to(p.q_desc.dtype))
    fence_async_shared()
    store_rows(p, p.o_desc, place, p.buffers.o.index(W))
    if p.V.SAVE_U:
        store_rows(p, p.u_desc, place, p.buffers.u.index(W))


@gluon.jit
def sparse_consumer(p, W: gl.constexpr):
    s_l: gl.constexpr = accumulator(p.V.BN)
    head = first_head(p, W)
    k_count = head * 0
    v_count = head * 0
    turn = head * 0
    while head != END:
        q = p.buffers.q.index(q_buffer(p, turn, W))
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        if p.V.GATE:
            load_gate(p, W, turn)
        sink = sink_of(p, head)
        if p.V.HAS_RIGHT:
            k_count = skip_keys(p, view.tile_end - view.end, k_count)
        theta, top, k_count = bounding(p, q, view, sink, turn & 3, k_count, W)
        if p.V.HAS_LEFT:
            k_count = skip_keys(p, view.begin - view.tile_begin, k_count)
        meet(p)
        # what the rows see is read again: registers are short in the loops
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        step = turn * 0
        rows = Rows(theta, top, sink)
        rows, k_count = stepping(p, q, view, rows, p.entmax.bounded_ptr, turn & 3, step, k_count, W, True)
        meet(p)
        while goes_on(p, read_field(p, turn & 3, BYTES), step):
            step += 1
            rows, k_count = stepping(p, q, view, rows, p.entmax.live_ptr, turn & 3, step, k_count, W, False)
            meet(p)
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        made, k_count, v_count = output(p, q, view, rows.theta, turn & 3, k_count, v_count)
        release_q(p, turn, W)
        finish(p, made, rows.theta, rows.top, rows.sink, v_count, turn, W)
        if p.V.HAS_LEFT:
            view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
            unseen = unseen_count(p, view, p.entmax.live_ptr, turn & 3, view.tile_end - view.begin)
            k_count, v_count = skip_keys_and_values(p, unseen, k_count, v_count)
        turn += 1
        head = next_head(p, turn, W)
    tma.store_wait(0)
