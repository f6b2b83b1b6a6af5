"""The tile that a CTA works on: drawn and published by the producer, read by the consumers; what their rows see of it.

`p` is the argument class of the kernel (arguments.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.compat import Maybe, arguments
from backlight.backends.hopper.forward.ring import ring_stage, wait_empty
from backlight.backends.hopper.primitives import WM, clamp, key_blocks, locate, phase_of
from backlight.backends.hopper.terms import TABLE_PAD

# a published tile: batch * heads + head (END when there is none left), packed sequence, row block; four slots, because a
# consumer reads its tile once more at the end of it, when the producer may be two tiles ahead
END = gl.constexpr(-1)
HEAD = gl.constexpr(0)
SEGMENT = gl.constexpr(1)
BLOCK = gl.constexpr(2)
# number of the tile, or -1 - (8 * number + warpgroups) when it is done again for some warpgroups (a bit for each)
TICKET = gl.constexpr(3)
# with a mask by row intervals: key blocks to visit, and how many of them, the first ones, have to be masked
LIVE = gl.constexpr(4)
CUT = gl.constexpr(5)


@gluon.constexpr_function
def slot_size(INTERVALS):
    """Numbers of a published tile."""
    return 8 if INTERVALS else 4


@gluon.jit
def memory_of_intervals(V: gl.constexpr):
    """(row intervals of the keys of tiles of K, what the list of tiles to visit says of those)."""
    rows_l: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    intervals = gl.allocate_shared_memory(gl.int32, [V.PLACES * 2 * V.INTERVALS, V.BN], rows_l)
    return intervals, gl.allocate_shared_memory(gl.int32, [V.PLACES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def draw(p, tile):
    """The tile that comes after a CTA's tile: later tiles have higher numbers."""
    next_tile = tile + gl.num_programs(0)
    if p.dynamic != 0:
        next_tile = gl.atomic_add(p.counter_ptr, 1, sem="relaxed") + gl.num_programs(0)
    return next_tile


@gluon.jit
def locate_tile(p, tile):
    """(batch * heads + head, packed sequence, row block, whether it exists).

    `together` heads advance side by side, their row blocks from the last (longest under a causal mask) to the first.
    """
    section = tile // (p.row_tiles * p.together)
    rank = tile % (p.row_tiles * p.together)
    head = section * p.together + rank % p.together
    block = p.row_tiles - 1 - rank // p.together
    z = tile * 0
    exists = tile >= 0
    if p.V.VARLEN:
        z, first = locate(block, p.packing.cu_tiles_ptr, p.n_segments)
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
    if p.V.VARLEN:
        q_start = gl.load(p.packing.cu_q_ptr + z)
        k_start = gl.load(p.packing.cu_k_ptr + z)
        sq = gl.load(p.packing.cu_q_ptr + z + 1) - q_start
        sk = gl.load(p.packing.cu_k_ptr + z + 1) - k_start
    return q_start, k_start, sq, sk


@gluon.jit
def tile_blocks(p, i0, rows, sq, sk):
    """`key_blocks` of rows [i0, i0 + rows), at least one block."""
    shift = sk - sq
    first = i0 + shift
    last = gl.minimum(i0 + rows, sq) - 1 + shift
    begin, plain_begin, plain_end, end = key_blocks(first, last, sk, p.left, p.right, p.V.BN, p.V.HAS_LEFT, p.V.HAS_RIGHT)
    return begin, plain_begin, plain_end, gl.maximum(end, begin + 1)


@gluon.jit
def write_field(p, slot, FIELD: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    p.buffers.tile.index(slot * slot_size(p.V.INTERVALS) + FIELD).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def publish(p, slot, head, z, block, ticket):
    write_field(p, slot, HEAD, head)
    write_field(p, slot, SEGMENT, z)
    write_field(p, slot, BLOCK, block)
    if p.V.KEEP_FIRST_MAX:
        write_field(p, slot, TICKET, ticket)


@gluon.jit
def read_field(p, slot, FIELD: gl.constexpr):
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(p.buffers.tile.index(slot * slot_size(p.V.INTERVALS) + FIELD).load(four), 0)


@gluon.jit
def q_buffer(p, turn, W: gl.constexpr):
    """Where Q of a warpgroup lies in the CTA's tile number `turn`, and its two barriers."""
    if p.V.QB == 1:
        return W
    return (turn & (p.V.QB - 1)) * (p.buffers.q.shape[0] // p.V.QB) + W


@gluon.jit
def q_phase(p, turn):
    """Parity of the round of Q's buffers that the CTA's tile number `turn` belongs to."""
    return phase_of(turn, p.V.QB)


@gluon.jit
def dismiss(p, count, turn):
    """The producer's end: every arrival of the consumers is met, those of the last round included; there is no tile more."""
    ST: gl.constexpr = p.V.ST
    for i in gl.static_range(ST):
        if count >= ST - i:
            wait_empty(p.k, ring_stage(p.k, count + i))
            wait_empty(p.v, ring_stage(p.v, count + i))
    publish_end(p, turn)


@gluon.jit
def dismiss_apart(p, k_count, v_count, turn):
    """`dismiss` of rings that have sent different numbers of blocks."""
    ST: gl.constexpr = p.V.ST
    for i in gl.static_range(ST):
        if k_count >= ST - i:
            wait_empty(p.k, ring_stage(p.k, k_count + i))
        if v_count >= ST - i:
            wait_empty(p.v, ring_stage(p.v, v_count + i))
    publish_end(p, turn)


@gluon.jit
def publish_end(p, turn):
    NC: gl.constexpr = p.V.NC
    publish(p, turn & 3, END, 0, 0, 0)
    for w in gl.static_range(NC):
        mbarrier.wait(p.buffers.q_empty.index(q_buffer(p, turn, w)), q_phase(p, turn) ^ 1)
        mbarrier.arrive(p.buffers.q_full.index(q_buffer(p, turn, w)), count=1)


@arguments
class Place:
    """Where a warpgroup's rows of a published tile are.

    head: b * heads + h; i0: the first row; q_start: the first row of the sequence, which has sq rows and sk keys.
    """

    head: gl.tensor
    b: gl.tensor
    h: gl.tensor
    i0: gl.tensor
    q_start: gl.tensor
    sq: gl.tensor
    sk: gl.tensor


@gluon.jit
def place_of(p, slot, W: gl.constexpr):
    head = read_field(p, slot, HEAD)
    i0 = read_field(p, slot, BLOCK) * (p.V.NC * WM) + W * WM
    q_start, _, sq, sk = lengths(p, read_field(p, slot, SEGMENT))
    return Place(head, head // p.heads, head % p.heads, i0, q_start, sq, sk)


@arguments
class View:
    """What the 64 rows of a warpgroup see of their tile.

    Rows from i0 on, at positions `position`; key blocks [tile_begin, tile_end) of the whole tile, [begin, end) of these rows,
    [plain_begin, plain_end) without a mask; column: entry of the head's bias table for the first row and key 0. Under a mask by
    row intervals blocks are counted down in the order in which they are visited, those to be masked first.
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
    tile = read_field(p, slot, BLOCK) * (p.V.NC * WM)
    q_start, _, sq, sk = lengths(p, read_field(p, slot, SEGMENT))
    i0 = tile + W * WM
    position = i0 + sk - sq + gl.arange(0, WM, row_l)
    if p.V.INTERVALS > 0:
        tile_begin, tile_end = i0 * 0, read_field(p, slot, LIVE)
        begin, end = tile_begin, tile_end
        if p.V.FULL_FIRST:
            plain_begin = read_field(p, slot, CUT)
            plain_end = end
        else:
            plain_begin = begin
            plain_end = end - read_field(p, slot, CUT)
    else:
        tile_begin, _, _, tile_end = tile_blocks(p, tile, p.V.NC * WM, sq, sk)
        begin, plain_begin, plain_end, end = tile_blocks(p, i0, WM, sq, sk)
        begin = gl.minimum(begin, tile_end - 1)
        end = clamp(end, begin + 1, tile_end)
    table_ptr = p.terms.table_ptr
    column = i0
    if p.V.BIAS:
        table_ptr = head_table(p, head)
        column = i0 + sk - sq + p.bias_origin
    return View(i0, q_start, sq, sk, position, tile_begin, begin, plain_begin, plain_end, end, tile_end, table_ptr, column)


@gluon.jit
def head_table(p, head):
    """The padded bias table of a head."""
    return p.terms.table_ptr + (head % p.heads).to(gl.int64) * (p.n_bias + 2 * TABLE_PAD)
