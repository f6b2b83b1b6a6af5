"""What the partitions of the forward share: the tile a CTA works on, named barriers, masks and terms of a block, the gate.

`p` is the argument class of the kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backlight.backends.hopper.barriers import FORWARD_K_EMPTY
from backlight.backends.hopper.compat import Maybe, arguments
from backlight.backends.hopper.primitives import (
    INF,
    LN2,
    WM,
    before,
    between,
    clamp,
    key_blocks,
    key_limits,
    load_tile,
    locate,
    log2_of_sum,
    partial_sums,
    phase_of,
    row_sum_layout,
)
from backlight.backends.hopper.terms import TABLE_PAD, bias_tile, cap_ratio, cap_whole, sink_sums

# in the place of +inf where it stands in a difference: 2^127, which fp32 holds exactly
LARGEST = gl.constexpr(1.7014118346046923e38)
K_EMPTY = FORWARD_K_EMPTY
# a published tile: batch * heads + head (END when there is none left), packed sequence, row block; four slots, because a
# consumer reads its tile once more at the end of it, when the producer may be two tiles ahead
SLOT = gl.constexpr(4)
END = gl.constexpr(-1)
HEAD = gl.constexpr(0)
SEGMENT = gl.constexpr(1)
BLOCK = gl.constexpr(2)
# number of the tile, or -1 - (8 * number + warpgroups) when it is done again, with care, for some warpgroups (a bit for each)
TICKET = gl.constexpr(3)


@gluon.jit
def draw(p, tile):
    """The tile that comes after a CTA's tile: later tiles have higher numbers."""
    next_tile = tile + gl.num_programs(0)
    if p.dynamic != 0:
        next_tile = gl.atomic_add(p.counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
    return next_tile


@gluon.jit
def place(p, tile):
    """(batch * heads + head, packed sequence, row block, whether it exists).

    `together` heads advance side by side, their row blocks from the last (longest under a causal mask) to the first.
    """
    section = tile // (p.row_tiles * p.together)
    rank = tile % (p.row_tiles * p.together)
    head = section * p.together + rank % p.together
    block = p.row_tiles - 1 - rank // p.together
    z = tile * 0
    exists = tile >= 0
    if p.VARLEN:
        z, first = locate(block, p.cu_tiles_ptr, p.n_segments)
        block -= first
        exists = z < p.n_segments
    return head, z, block, exists


@gluon.jit
def lengths(p, z):
    """(first row, first key, rows, keys) of a packed sequence, or of the whole batch entry."""
    q_start = p.sq * 0
    k_start = q_start
    sq = p.sq
    sk = p.sk
    if p.VARLEN:
        q_start = gl.load(p.cu_q_ptr + z)
        k_start = gl.load(p.cu_k_ptr + z)
        sq = gl.load(p.cu_q_ptr + z + 1) - q_start
        sk = gl.load(p.cu_k_ptr + z + 1) - k_start
    return q_start, k_start, sq, sk


@gluon.jit
def tile_blocks(p, i0, rows, sq, sk):
    """`key_blocks` of rows [i0, i0 + rows), at least one block."""
    shift = sk - sq
    first = i0 + shift
    last = gl.minimum(i0 + rows, sq) - 1 + shift
    begin, plain_begin, plain_end, end = key_blocks(first, last, sk, p.left, p.right, p.BN, p.HAS_LEFT, p.HAS_RIGHT)
    return begin, plain_begin, plain_end, gl.maximum(end, begin + 1)


@gluon.jit
def publish(p, slot, head, z, block, ticket):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    p.tile_s.index(slot * SLOT + HEAD).store(gl.full([1], head, gl.int32, one))
    p.tile_s.index(slot * SLOT + SEGMENT).store(gl.full([1], z, gl.int32, one))
    p.tile_s.index(slot * SLOT + BLOCK).store(gl.full([1], block, gl.int32, one))
    if p.TRUST:
        p.tile_s.index(slot * SLOT + TICKET).store(gl.full([1], ticket, gl.int32, one))


@gluon.jit
def q_buffer(p, turn, W: gl.constexpr):
    """Where Q of a warpgroup lies in the CTA's tile number `turn`, and its two barriers."""
    if p.QB == 1:
        return W
    return (turn & (p.QB - 1)) * (p.q_s.shape[0] // p.QB) + W


@gluon.jit
def q_phase(p, turn):
    """Parity of the round of Q's buffers that the CTA's tile number `turn` belongs to."""
    return phase_of(turn, p.QB)


@gluon.jit
def published(p, slot, FIELD: gl.constexpr):
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(p.tile_s.index(slot * SLOT + FIELD).load(four), 0)


@gluon.jit
def place_of(p, slot, W: gl.constexpr):
    """(batch * heads + head, the warpgroup's first row, first row of the sequence, its rows and keys) of a published tile."""
    head = published(p, slot, HEAD)
    i0 = published(p, slot, BLOCK) * (p.NC * WM) + W * WM
    q_start, _, sq, sk = lengths(p, published(p, slot, SEGMENT))
    return head, i0, q_start, sq, sk


@arguments
class View:
    """What the 64 rows of a warpgroup see of their tile.

    Rows from i0 on, at positions `position`; key blocks [tile_begin, tile_end) of the whole tile, [begin, end) of these rows,
    [plain_begin, plain_end) without a mask; column: entry of the head's bias table for the first row and key 0.
    """

    i0: gl.tensor
    q_start: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    position: gl.tensor
    tile_begin: gl.tensor
    begin: gl.tensor
    plain_begin: gl.tensor
    plain_end: gl.tensor
    end: gl.tensor
    tile_end: gl.tensor
    table_ptr: Maybe
    column: gl.tensor


@gluon.jit
def view_of(p, head, slot, W: gl.constexpr, row_l: gl.constexpr):
    tile = published(p, slot, BLOCK) * (p.NC * WM)
    q_start, _, sq, sk = lengths(p, published(p, slot, SEGMENT))
    i0 = tile + W * WM
    position = i0 + sk - sq + gl.arange(0, WM, row_l)
    tile_begin, _, _, tile_end = tile_blocks(p, tile, p.NC * WM, sq, sk)
    begin, plain_begin, plain_end, end = tile_blocks(p, i0, WM, sq, sk)
    begin = gl.minimum(begin, tile_end - 1)
    end = clamp(end, begin + 1, tile_end)
    table_ptr = p.table_ptr
    column = i0
    if p.BIAS:
        table_ptr = head_table(p, head)
        column = i0 + sk - sq + p.bias_origin
    return View(i0, q_start, sq, sk, position, tile_begin, begin, plain_begin, plain_end, end, tile_end, table_ptr, column)


@gluon.jit
def first_sums(p, head, s_l: gl.constexpr):
    """(maximum, partial sums) of rows that have met no key: the sink, or nothing."""
    row_max = gl.full([WM], -INF, gl.float32, gl.SliceLayout(1, s_l))
    row_sum = gl.zeros([WM, 8], gl.float32, row_sum_layout(p.BN))
    if p.SINK:
        sink = gl.load(p.sink_ptr + head % p.heads).to(gl.float32)
        # kept finite, for what is subtracted from it (`lse_of`); below it every other weight is 0
        row_max = gl.full([WM], gl.minimum(sink / p.unit, LARGEST), gl.float32, gl.SliceLayout(1, s_l))
        row_sum = sink_sums(row_sum)
    return row_max, row_sum


@gluon.jit
def seen_in(p, s, position, block, sk):
    """Visible keys (eq. 2) of one key block: a tile like s."""
    B: gl.constexpr = s.shape[1]
    columns = gl.arange(0, B, gl.SliceLayout(0, s.type.layout))
    first, end = key_limits(position, sk, p.left, p.right, p.HAS_LEFT, p.HAS_RIGHT)
    if p.HAS_LEFT:
        seen = between(first - block * B, end - block * B, columns)
    else:
        seen = before(end - block * B, columns)
    return seen


@gluon.jit
def hide(p, s, position, block, sk):
    """Masked scores of one key block."""
    return gl.where(seen_in(p, s, position, block, sk), s, -INF)


@gluon.jit
def head_table(p, head):
    """The padded bias table of a head."""
    return p.table_ptr + (head % p.heads).to(gl.int64) * (p.n_bias + 2 * TABLE_PAD)


@gluon.jit
def nearest(p, view, careful, BEYOND_TABLE: gl.constexpr):
    """Blocks [begin, this) are free of masks (and of the bias), and every row has met a key before them; none if careful."""
    near = view.begin
    if p.FAR:
        near = view.plain_end - 1
        if p.BIAS and BEYOND_TABLE:
            near = gl.minimum(near, gl.maximum(view.column - p.n_bias + 1, 0) // p.BN)
        near = clamp(near, view.begin, view.end)
        if p.TRUST:
            near = gl.where(careful, view.begin, near)
    return near


@gluon.jit
def cap_of(p, s):
    """What makes scores of raw products under softcap (`scored`): a factor for each or, where O is wide, the scores."""
    y = s
    if p.SOFTCAP:
        if p.v_s.shape[2] <= 64:
            y = cap_ratio(s, p.cap_factor, p.cap_log2)
        else:
            # with tau there are u and two operands as well, with a bias its addresses
            y = cap_whole(s, p.cap_factor, p.cap_log2, 16 if p.TAU or p.BIAS else 32)
    return y


@gluon.jit
def scored(p, s, y):
    """Scores of a key block that does not meet the table."""
    if p.SOFTCAP:
        if p.v_s.shape[2] <= 64:
            # as assembly, or the compiler would move it before the branch to `trusting`, where it is part of a fused operation
            s = gl.inline_asm_elementwise("mul.f32 $0, $1, $2;", "=f,f,f", [s, y], dtype=gl.float32, is_pure=True, pack=1)
        else:
            s = y
    return s


@gluon.jit
def trusting(p, s, y, row_max, row_sum):
    """`softmax_step` of a block that needs no mask, without a look for a new maximum (`again.doubtful`)."""
    if p.SOFTCAP:
        top = gl.expand_dims(row_max, 1)
        if p.v_s.shape[2] <= 64:
            weights = gl.exp2(s * y - top)
        else:
            weights = gl.exp2(y - top)
    else:
        weights = gl.exp2(s * p.unit_log2 - gl.expand_dims(row_max * p.unit_log2, 1))
    return weights, row_sum + partial_sums(weights, row_sum)


@gluon.jit
def with_bias(p, view, s, block):
    """Scores of one key block, biased where the block meets the table."""
    if p.BIAS:
        here = view.column - block * s.shape[1]
        if (here > -s.shape[0]) & (here < p.n_bias + s.shape[1] - 1):
            if p.SOFTCAP:
                s += bias_tile(view.table_ptr, here, p.n_bias, s, False) * p.cap_log2
            else:
                s += bias_tile(view.table_ptr, here, p.n_bias, s, False)
    return s


@gluon.jit
def lse_of(p, row_max, total):
    """lse (natural) of rows from their maximum and the sum relative to it.

    unit_rest is what two rounded constants, in the exponent and here, differ by; it would show in the last bits.
    """
    exponent, rest = log2_of_sum(total)
    lse = row_max * p.unit + (row_max * p.unit_rest + rest * LN2 + exponent * LN2)
    if p.SINK:
        lse = gl.where(row_max == LARGEST, INF, lse)
    return lse


@gluon.jit
def load_gate(p, W: gl.constexpr, turn):
    """The gate's tile into the buffer that O will leave through."""
    tma.store_wait(0)
    head, i0, q_start, sq, _ = place_of(p, turn & 3, W)
    full = p.gate_full.index(W)
    mbarrier.expect(full, p.gate_desc.block_type.nbytes)
    load_tile(p.gate_desc, head // p.heads, head % p.heads, q_start, sq, i0, full, p.o_s.index(W), p.VARLEN)


@gluon.jit
def seen_scores(p, view, s, y, block):
    """Scores of one key block with terms and, where the block needs it, masked."""
    if not p.TRUST_BIAS:
        s = with_bias(p, view, scored(p, s, y), block)
    if p.HAS_LEFT or p.HAS_RIGHT:  # noqa: SIM102 - one test is the compiler's, the other the kernel's
        if (block >= view.plain_end) | (block < view.plain_begin):
            s = hide(p, s, view.position, block, view.sk)
    return s
