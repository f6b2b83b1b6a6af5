"""A consumer partition: a warpgroup that owns 64 rows of every tile.

The product of each block with V begins at zero and is added to O in fp32 (eq. 99), in the multiply-add that rescales O: all
its columns at once up to 128 of them, two pieces of 64 at a time beyond, since a second O finds no registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from backlight.backends.hopper.compat import Maybe, arguments, warpgroup_mma_wait
from backlight.backends.hopper.forward.consumer import skip_blocks
from backlight.backends.hopper.forward.ring import hand_on_turn, release, ring_stage, wait_full, wait_turn
from backlight.backends.hopper.forward.scores import hide
from backlight.backends.hopper.forward.steps import first_head, load_gate, next_head, release_q, store_rows, wait_gate
from backlight.backends.hopper.forward.tiles import BLOCK, END, SEGMENT, place_of, read_field, view_of
from backlight.backends.hopper.fp8.producer import first_tiles
from backlight.backends.hopper.fp8.steps import (
    HEADROOM,
    LARGEST,
    accumulator,
    added,
    entry_of,
    factor_of,
    first_sums,
    hide_and_release,
    no_products,
    release_k,
    seen_scores,
    softmax_step,
    start_scores,
    termed,
)
from backlight.backends.hopper.primitives import INF, LN2, WM, end_block, log2_of_sum
from backlight.backends.hopper.terms import sigmoid
from backlight.backends.intervals.kernels import KINDS

# columns of O that fit into registers twice, and those of a piece where they do not
WHOLE, PIECE = gl.constexpr(128), gl.constexpr(64)


@arguments
class Rows:
    """What a warpgroup carries from block to block: O, scores of the next block, sums of rows; factor: of the scores.

    o: pieces of columns (`piece_of`). Weights are not carried, since the compiler would take a register for each of them:
    matmuls of one warpgroup run under the softmax of the other.
    """

    o: Maybe
    s: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    factor: gl.tensor


@gluon.constexpr_function
def piece_of(D):
    """Columns of O that a product of a block is made of at a time."""
    return D if D <= WHOLE else PIECE


@gluon.jit
def no_outputs(p):
    """O before the first block."""
    WIDTH: gl.constexpr = piece_of(p.V.D)
    o = ()
    for _ in gl.static_range(p.V.D // WIDTH):
        o += (no_products(WIDTH),)
    return o


@gluon.jit
def start_piece(p, weights, stage, NUMBER: gl.constexpr):
    """P V of a stage of the ring, from zero, in flight: a piece of its columns."""
    WIDTH: gl.constexpr = piece_of(p.V.D)
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator(WIDTH), 4)
    v = p.v.tiles.index(stage).slice(NUMBER * WIDTH, WIDTH, 0)
    weights = gl.convert_layout(weights, operand, assert_trivial=True)
    return warpgroup_mma(weights, v.permute((1, 0)), no_products(WIDTH), use_acc=False, is_async=True)


@gluon.jit
def start_outputs(p, weights, stage):
    """The first pieces in flight: two, where there are several."""
    tokens = (start_piece(p, weights, stage, 0),)
    if piece_of(p.V.D) < p.V.D:
        tokens += (start_piece(p, weights, stage, 1),)
    return tokens


@gluon.jit
def collect_outputs(p, o, rescale, weights, stage, tokens, BEHIND: gl.constexpr):
    """O with all pieces of a block, of which two are in flight at a time, and BEHIND matmuls behind them; the stage is
    released."""
    PIECES: gl.constexpr = p.V.D // piece_of(p.V.D)
    added_up = ()
    for i in gl.static_range(PIECES):
        part = warpgroup_mma_wait(BEHIND + (1 if i < PIECES - 1 else 0), deps=[tokens[i]])
        if i == PIECES - 1:
            release(p.v, stage)
        piece = added(o[i], rescale, part)
        if PIECES > 1:
            # or ptxas would put off the additions until two more products are in flight, and have no registers for three
            piece = end_block(piece)
        added_up += (piece,)
        if i + 2 < PIECES:
            tokens += (start_piece(p, weights, stage, i + 2),)
    return added_up


@gluon.jit
def first_scores(p, q, view, head, q_scale, k_scale_ptr, count):
    """`Rows` before the block that the mask may cut, the last one."""
    row_max, row_sum = first_sums(p, view, head)
    block = view.end - 1
    entry = block
    if p.V.INTERVALS == 0:
        factor = factor_of(p, q_scale, k_scale_ptr, block)
    wait_full(p.k, count)
    if p.V.INTERVALS > 0:
        entry = entry_of(p, count)
        block = entry // KINDS
        # rows that see nothing are given a block that does not exist
        factor = factor_of(p, q_scale, k_scale_ptr, gl.where(block * p.V.BN < view.sk, block, 0))
    s = warpgroup_mma_wait(0, deps=[start_scores(p, q, ring_stage(p.k, count))])
    release_k(p, count)
    s, factor = termed(p, view, s, factor, block)
    if p.V.INTERVALS > 0:
        s = hide_and_release(p, view, s, entry, count)
    elif p.V.MASKED:
        s = hide(p, s, view.position, block, view.sk)
    return Rows(no_outputs(p), s, row_max, row_sum, factor)


@gluon.jit
def advance(p, q, view, rows, q_scale, k_scale_ptr, count, block, W: gl.constexpr):
    """The softmax of the block before, its P V, and S of `block`: last where it has no terms, since O is added up under it
    then; otherwise first, and terms come under P V. A cap's squares do not fit into registers beside the product.

    Limits of row intervals, and a cap of wide scores, leave no register to a product at all: S is last there too, and terms
    come after both.
    """
    ALONE: gl.constexpr = p.V.INTERVALS > 0 or (p.V.SOFTCAP and p.V.D > 64)
    LAST: gl.constexpr = ALONE or not (p.V.HAS_LEFT or p.V.HAS_RIGHT or p.V.BIAS or p.V.SOFTCAP)
    entry = block
    if p.V.INTERVALS == 0:
        following = factor_of(p, q_scale, k_scale_ptr, block)
    weights, row_max, row_sum, rescale = softmax_step(p, rows.s, rows.factor, rows.row_max, rows.row_sum)
    k_stage = ring_stage(p.k, count + 1)
    v_stage = ring_stage(p.v, count)
    wait_full(p.k, count + 1)
    wait_full(p.v, count)
    if p.V.INTERVALS > 0:
        entry = entry_of(p, count + 1)
        block = entry // KINDS
        following = factor_of(p, q_scale, k_scale_ptr, block)
    if p.V.PINGPONG:
        wait_turn(p, W)
    if LAST:
        tokens = start_outputs(p, weights, v_stage)
        s_token = start_scores(p, q, k_stage)
    else:
        s_token = start_scores(p, q, k_stage)
        tokens = start_outputs(p, weights, v_stage)
    if p.V.PINGPONG:
        hand_on_turn(p, W)
    if LAST:
        o = collect_outputs(p, rows.o, rescale, weights, v_stage, tokens, 1)
        s = warpgroup_mma_wait(0, deps=[s_token])
        release_k(p, count + 1)
        s, following = seen_scores(p, view, s, following, block, entry, count + 1)
    else:
        s = warpgroup_mma_wait(1, deps=[s_token])
        release(p.k, k_stage)
        if not p.V.SOFTCAP:
            s, following = seen_scores(p, view, s, following, block, entry, count + 1)
        o = collect_outputs(p, rows.o, rescale, weights, v_stage, tokens, 0)
        if p.V.SOFTCAP:
            s, following = seen_scores(p, view, s, following, block, entry, count + 1)
    return Rows(o, s, row_max, row_sum, following)


@gluon.jit
def advance_wide(p, q, view, rows, q_scale, k_scale_ptr, count, block, W: gl.constexpr):
    """`advance` where S has no registers beside a product with V: P V of the block before, then S of `block`."""
    entry = block
    if p.V.INTERVALS == 0:
        following = factor_of(p, q_scale, k_scale_ptr, block)
    weights, row_max, row_sum, rescale = softmax_step(p, rows.s, rows.factor, rows.row_max, rows.row_sum)
    wait_full(p.v, count)
    if p.V.PINGPONG:
        wait_turn(p, W)
    tokens = start_outputs(p, weights, ring_stage(p.v, count))
    o = collect_outputs(p, rows.o, rescale, weights, ring_stage(p.v, count), tokens, 0)
    wait_full(p.k, count + 1)
    if p.V.INTERVALS > 0:
        entry = entry_of(p, count + 1)
        block = entry // KINDS
        following = factor_of(p, q_scale, k_scale_ptr, block)
    s_token = start_scores(p, q, ring_stage(p.k, count + 1))
    if p.V.PINGPONG:
        hand_on_turn(p, W)
    s = warpgroup_mma_wait(0, deps=[s_token])
    release_k(p, count + 1)
    s, following = seen_scores(p, view, s, following, block, entry, count + 1)
    return Rows(o, s, row_max, row_sum, following)


@gluon.jit
def store_lse(p, row_max, row_sum, turn, W: gl.constexpr):
    """lse of a tile's rows to global memory. Returns what O is multiplied by, and where the rows are."""
    row_l: gl.constexpr = gl.SliceLayout(1, accumulator(p.V.BN))
    total = gl.convert_layout(gl.sum(row_sum, 1), row_l, assert_trivial=True)
    # read again: registers are short in the loops
    place = place_of(p, turn & 3, W)
    numbers = place.i0 + gl.arange(0, WM, row_l)
    at = place.head.to(gl.int64) * p.sq + place.q_start + numbers
    keep = numbers < place.sq
    offset = gl.load(p.scales.offset_ptr + at, mask=keep, other=0.0)
    exponent, rest = log2_of_sum(total)
    lse = (row_max + exponent - HEADROOM) * LN2 + rest * LN2 + offset
    if p.V.SINK:
        lse = gl.where(row_max == LARGEST, INF, lse)
    gl.store(p.lse_ptr + at, gl.where(total == 0.0, -INF, lse), mask=keep)
    return 1.0 / total, place


@gluon.jit
def write_piece(p, o, inverse, kv_head, turn, NUMBER: gl.constexpr, W: gl.constexpr):
    """Columns of O, divided by sums, scaled and gated, into the buffer that it leaves through."""
    WIDTH: gl.constexpr = o.shape[1]
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, o.type.layout))
    v_scale = gl.load(p.scales.v_ptr + kv_head * p.V.D + NUMBER * WIDTH + columns)
    inverse = gl.expand_dims(gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)
    o = o * inverse * gl.expand_dims(v_scale, 0)
    if p.V.MASKED or p.V.BIAS:
        # rows without a visible key: total is 0, and o may be 0 * inf
        o = gl.where(inverse == INF, 0.0, o)
    if NUMBER == 0:
        wait_gate(p, turn, W)
    tile = p.buffers.o.index(W).slice(NUMBER * WIDTH, WIDTH, 1)
    if p.V.GATE:
        o = o * sigmoid(tile.load(o.type.layout).to(gl.float32))
    tile.store(o.to(p.o_desc.dtype))


@gluon.jit
def finish(p, rows, kv_head, count, turn, W: gl.constexpr):
    """The softmax and P V of the first block, lse, and O on its way to global memory."""
    release_q(p, turn, W)
    weights, row_max, row_sum, rescale = softmax_step(p, rows.s, rows.factor, rows.row_max, rows.row_sum)
    wait_full(p.v, count)
    tokens = start_outputs(p, weights, ring_stage(p.v, count))
    inverse, place = store_lse(p, row_max, row_sum, turn, W)
    if not p.V.GATE:
        # the store of the tile before has left the buffer
        tma.store_wait(0)
    o = collect_outputs(p, rows.o, rescale, weights, ring_stage(p.v, count), tokens, 0)
    for i in gl.static_range(len(o)):
        write_piece(p, o[i], inverse, kv_head, turn, i, W)
    fence_async_shared()
    store_rows(p, p.o_desc, place, p.buffers.o.index(W))


@gluon.jit
def consumer(p, W: gl.constexpr):
    s_l: gl.constexpr = accumulator(p.V.BN)
    if p.V.PINGPONG and W == p.V.NC - 1:
        hand_on_turn(p, W)
    head = first_head(p, W)
    count = head * 0
    turn = head * 0
    while head != END:
        q = p.buffers.q.index(W)
        view = view_of(p, head, turn & 3, W, gl.SliceLayout(1, s_l))
        kv_head = head // p.heads * (p.heads // p.group) + head % p.heads // p.group
        before, keys_before = first_tiles(p, read_field(p, turn & 3, SEGMENT))
        block = before + read_field(p, turn & 3, BLOCK)
        q_scale = gl.load(p.scales.q_ptr + head * p.row_tiles + block) * p.unit_log2
        k_scale_ptr = p.scales.k_ptr + kv_head * p.key_tiles + keys_before
        if p.V.GATE:
            load_gate(p, W, turn)
        if p.V.HAS_RIGHT:
            count = skip_blocks(p, view.tile_end - view.end, count, W)
        rows = first_scores(p, q, view, head, q_scale, k_scale_ptr, count)
        for j in range(view.end - 1 - view.begin):
            if p.V.D > WHOLE:
                rows = advance_wide(p, q, view, rows, q_scale, k_scale_ptr, count, view.end - 2 - j, W)
            else:
                rows = advance(p, q, view, rows, q_scale, k_scale_ptr, count, view.end - 2 - j, W)
            count += 1
        finish(p, rows, kv_head, count, turn, W)
        count += 1
        if p.V.HAS_LEFT:
            count = skip_blocks(p, view.begin - view.tile_begin, count, W)
        turn += 1
        head = next_head(p, turn, W)
    tma.store_wait(0)
    if p.V.PINGPONG and W == 0:
        wait_turn(p, W)
