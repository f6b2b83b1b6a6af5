"""What the backward kernels share: the key tiles that a CTA works on, one after the other.

A tile has a number. Tiles of `together` key heads lie side by side, those of the first keys (which most rows see under a causal
mask) first. With fewer programs than tiles, programs draw numbers from a counter, which the pre-pass has set to 0 (a float: it
lies behind the vector of delta). The loader draws, works out where a tile lies and publishes it in shared memory; partitions
that have no register to spare read from there what they need when they need it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backlight.backends.hopper.barriers import BOTH_GROUPS_AND_WARP
from backlight.backends.hopper.compat import arguments, tma_load
from backlight.backends.hopper.primitives import (
    BEYOND_ALL_ROWS,
    bar_sync,
    barriers,
    clamp,
    load_tile,
    locate,
    opaque,
    row_blocks,
    stage_of,
    store_tile,
)
from backlight.backends.hopper.scores import rows_before, rows_from, rows_inside
from backlight.backends.hopper.terms import row_band

# rows of a block that may not see a key: none, those before its first row, those from its end on, both
PLAIN = gl.constexpr(0)
FIRST_ROWS = gl.constexpr(1)
LAST_ROWS = gl.constexpr(2)
BOTH_ENDS = gl.constexpr(3)
# those outside of the keys' row intervals
OUTSIDE = gl.constexpr(4)
# what is published of a tile; a number below 0 ends the work
SLOT = gl.constexpr(32)
NUMBER = gl.constexpr(0)
VISIT = gl.constexpr(1)
BATCH = gl.constexpr(2)
KV_HEAD = gl.constexpr(3)
K_START = gl.constexpr(4)
SQ = gl.constexpr(5)
SK = gl.constexpr(6)
J0 = gl.constexpr(7)
FIRST_TILE = gl.constexpr(8)
BEGIN = gl.constexpr(9)
CAREFUL_END = gl.constexpr(10)
PLAIN_BEGIN = gl.constexpr(11)
BAND_BEGIN = gl.constexpr(12)
BAND_END = gl.constexpr(13)
PLAIN_END = gl.constexpr(14)
END = gl.constexpr(15)
# the rows [first, end) that see key j0, and how many keys there are from j0 on
FIRST_ROW = gl.constexpr(16)
END_ROW = gl.constexpr(17)
KEYS = gl.constexpr(18)
# under a mask by row intervals: the number of the tile in the mask of the first query head
OWNER = gl.constexpr(19)


@arguments
class KeyTile:
    """Keys [j0, j0 + BN) of a key head, and the row blocks that see them.

    begin <= careful_end <= plain_begin <= band_begin <= band_end <= plain_end <= end: blocks that need both limits of a mask,
    the first, none, the last; within the band those that meet the bias table. Under a mask by row intervals lists say which
    blocks those are (visits.py), and end is how many there are for all query heads.
    """

    b: gl.tensor
    kv_head: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    j0: gl.tensor
    first_tile: gl.tensor
    begin: gl.tensor
    careful_end: gl.tensor
    plain_begin: gl.tensor
    band_begin: gl.tensor
    band_end: gl.tensor
    plain_end: gl.tensor
    end: gl.tensor
    owner: gl.tensor


@gluon.jit
def published_memory(READERS: gl.constexpr):
    """Two slots for published tiles, which READERS partitions of one warp release; the barriers of full and of empty ones."""
    tile = gl.allocate_shared_memory(gl.int32, [2 * SLOT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return tile, barriers(2, 1), barriers(2, READERS)


@gluon.jit
def drawn(p):
    """The number that this program takes next; n_tiles or more when nothing is left.

    `dynamic`: how many programs share the counter, 0 where each has one tile.
    """
    number = p.n_tiles
    if p.dynamic != 0:
        number = gl.atomic_add(p.counter_ptr + opaque(p.counter), 1.0, sem="relaxed").to(gl.int32) + p.dynamic
    return number


@gluon.jit
def write_field(p, turn, FIELD: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    p.buffers.tile.index((turn & 1) * SLOT + FIELD).store(gl.full([1], value, gl.int32, one))


@gluon.jit
def read_field(p, turn, FIELD: gl.constexpr, WARPS: gl.constexpr):
    """What `publish` said of this program's tile number `turn`, in a partition of WARPS warps."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.max(p.buffers.tile.index((turn & 1) * SLOT + FIELD).load(layout), 0)


@gluon.jit
def publish(p, turn, number, visit, t):
    """Tell the other partitions about a tile, as soon as they have done with the one before last."""
    mbarrier.wait(p.buffers.tile_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    write_field(p, turn, NUMBER, number)
    write_field(p, turn, VISIT, visit)
    write_field(p, turn, BATCH, t.b)
    write_field(p, turn, KV_HEAD, t.kv_head)
    write_field(p, turn, K_START, t.k_start)
    write_field(p, turn, SQ, t.sq)
    write_field(p, turn, SK, t.sk)
    write_field(p, turn, J0, t.j0)
    write_field(p, turn, FIRST_TILE, t.first_tile)
    write_field(p, turn, BEGIN, t.begin)
    write_field(p, turn, CAREFUL_END, t.careful_end)
    write_field(p, turn, PLAIN_BEGIN, t.plain_begin)
    write_field(p, turn, BAND_BEGIN, t.band_begin)
    write_field(p, turn, BAND_END, t.band_end)
    write_field(p, turn, PLAIN_END, t.plain_end)
    write_field(p, turn, END, t.end)
    write_field(p, turn, FIRST_ROW, t.j0 - p.right - (t.sk - t.sq))
    write_field(p, turn, END_ROW, t.j0 + p.left - (t.sk - t.sq) + 1)
    write_field(p, turn, KEYS, t.sk - t.j0)
    if p.V.INTERVALS > 0:
        write_field(p, turn, OWNER, t.owner)
    mbarrier.arrive(p.buffers.tile_full.index(turn & 1), count=1)


@gluon.jit
def publish_end(p, turn):
    mbarrier.wait(p.buffers.tile_empty.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    write_field(p, turn, NUMBER, -1)
    mbarrier.arrive(p.buffers.tile_full.index(turn & 1), count=1)


@gluon.jit
def published(p, turn, WARPS: gl.constexpr):
    """Wait for `publish`; the number of the tile."""
    mbarrier.wait(p.buffers.tile_full.index(turn & 1), (turn >> 1) & 1)
    return read_field(p, turn, NUMBER, WARPS)


@gluon.jit
def published_tile(p, turn):
    """All that is published, for a partition of one warp; the others read what they need when they need it."""
    b = read_field(p, turn, BATCH, 1)
    kv_head = read_field(p, turn, KV_HEAD, 1)
    q_start = p.sq * 0
    k_start = read_field(p, turn, K_START, 1)
    sq = read_field(p, turn, SQ, 1)
    sk = read_field(p, turn, SK, 1)
    j0 = read_field(p, turn, J0, 1)
    first_tile = read_field(p, turn, FIRST_TILE, 1)
    begin, careful_end = read_field(p, turn, BEGIN, 1), read_field(p, turn, CAREFUL_END, 1)
    plain_begin, band_begin = read_field(p, turn, PLAIN_BEGIN, 1), read_field(p, turn, BAND_BEGIN, 1)
    band_end, plain_end = read_field(p, turn, BAND_END, 1), read_field(p, turn, PLAIN_END, 1)
    end = read_field(p, turn, END, 1)
    owner = read_field(p, turn, OWNER, 1) if p.V.INTERVALS > 0 else p.sq * 0
    return KeyTile(
        b, kv_head, q_start, k_start, sq, sk, j0, first_tile,
        begin, careful_end, plain_begin, band_begin, band_end, plain_end, end, owner,
    )  # fmt: skip


@gluon.jit
def side_by_side(p):
    """Key heads whose tiles lie side by side. Lists of few row blocks differ more in length: more heads even them out."""
    together = p.together
    # the loader of wide heads has no register left for it with Triton 3.9
    if p.V.INTERVALS > 0 and not p.V.WIDE:
        live = gl.load(p.counter_ptr + opaque(p.counter) + 1)
        together = gl.where(live.to(gl.int32) < p.few, p.together_if_few, together)
    return together


@gluon.jit
def key_tile(p, number, together):
    """The tile of a number. Beyond the last packed sequence are no keys and no rows."""
    kv_heads = p.heads // p.group
    section = number // (p.key_tiles * together)
    rank = number % (p.key_tiles * together)
    head = section * together + rank % together
    tile = rank // together
    owner = tile
    q_start = tile * 0
    k_start = tile * 0
    first_tile = tile * 0
    sq = p.sq
    sk = p.sk
    if p.V.VARLEN:
        z, earlier = locate(tile, p.packing.cu_tiles_ptr, p.n_segments)
        tile = tile - earlier
        last = gl.minimum(z, p.n_segments - 1)
        q_start = gl.load(p.packing.cu_q_ptr + last)
        k_start = gl.load(p.packing.cu_k_ptr + last)
        sq = gl.load(p.packing.cu_q_ptr + last + 1) - q_start
        sk = gl.where(z < p.n_segments, gl.load(p.packing.cu_k_ptr + last + 1) - k_start, 0)
        first_tile = gl.load(p.packing.cu_row_tiles_ptr + last)
    j0 = tile * p.V.BN
    last_key = gl.minimum(j0 + p.V.BN, sk) - 1
    begin, plain_begin, plain_end, end = row_blocks(j0, last_key, sq, sk, p.left, p.right, p.V.BM, p.V.HAS_LEFT, p.V.HAS_RIGHT)
    if p.V.VARLEN:
        end = gl.where(sk > 0, end, begin)
    b = head // kv_heads
    kv_head = head % kv_heads
    if p.V.INTERVALS > 0:
        owner = owner + b * p.mask_batch + kv_head * p.group * p.mask_head
        begin = tile * 0
        end = tile * 0
        for member in range(gl.where(p.mask_head == 0, 1, p.group)):
            counts_ptr = p.mask.counts_ptr + 2 * (owner + member * p.mask_head)
            end = end + gl.load(counts_ptr) + gl.load(counts_ptr + 1)
    careful_end = begin
    ragged = j0 + p.V.BN > sk
    if p.V.HAS_LEFT:
        # blocks before the plain ones need a look at their first rows only, blocks after them at their last ones
        if ragged | (plain_begin >= plain_end):
            careful_end = end
            plain_begin = end
            plain_end = end
    elif ragged:
        plain_begin = end
        plain_end = end
    band_begin = plain_begin
    band_end = plain_begin
    if p.V.BIAS:
        band_begin, band_end = row_band(j0, last_key, sk - sq, p.origin, p.n_bias, p.V.BM)
        band_begin = clamp(band_begin, plain_begin, plain_end)
        band_end = clamp(band_end, band_begin, plain_end)
    return KeyTile(
        b, kv_head, q_start, k_start, sq, sk, j0, first_tile,
        begin, careful_end, plain_begin, band_begin, band_end, plain_end, end, owner,
    )  # fmt: skip


@gluon.jit
def row_limits(p, turn, offset, member, key_l: gl.constexpr, KEYS: gl.constexpr):
    """The row intervals of the keys from j0 + offset on, in flight: first, end, and those of a hole if there may be one."""
    owner = read_field(p, turn, OWNER, p.V.WARPS) + member * p.mask_head
    first_ptr = p.mask.folded_ptr + owner.to(gl.int64) * (2 * p.V.INTERVALS * p.V.BN) + offset
    keys = first_ptr + gl.arange(0, KEYS, key_l)
    first = gl.load(keys)
    end = gl.load(keys + p.V.BN)
    hole = first
    hole_end = end
    if p.V.INTERVALS == 2:
        hole = gl.load(keys + 2 * p.V.BN)
        hole_end = gl.load(keys + 3 * p.V.BN)
    return first, end, hole, hole_end


@gluon.jit
def rows_within(p, s, limits, i):
    """Which rows of block i lie in row intervals: a tile like s [keys, rows]."""
    HELD: gl.constexpr = p.V.BM // 2 if p.V.WIDE else p.V.BM
    begin = i * p.V.BM
    seen = rows_inside(s, limits[0] - begin, limits[1] - begin, HELD)
    if p.V.INTERVALS == 2:
        seen = seen & (rows_before(s, limits[2] - begin, HELD, True) | rows_from(s, limits[3] - begin, HELD, True))
    return seen


@gluon.jit
def seen_rows(p, turn, s, offset, i, MASK: gl.constexpr):
    """Which rows of block i see the keys from j0 + offset on: a tile like s [keys, rows]."""
    HELD: gl.constexpr = p.V.BM // 2 if p.V.WIDE else p.V.BM
    key = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
    if MASK != LAST_ROWS:
        first = key * 0
        if p.V.HAS_RIGHT:
            first = key + (read_field(p, turn, FIRST_ROW, p.V.WARPS) + offset - i * p.V.BM)
        if MASK == BOTH_ENDS or not p.V.HAS_LEFT:
            # the tile may end beyond the last key
            first = gl.where(key < read_field(p, turn, KEYS, p.V.WARPS) - offset, first, BEYOND_ALL_ROWS)
        seen = rows_from(s, first, HELD, p.V.HAS_LEFT)
    if MASK != FIRST_ROWS:
        end = key + (read_field(p, turn, END_ROW, p.V.WARPS) + offset - i * p.V.BM)
        early = rows_before(s, end, HELD, p.V.HAS_LEFT)
        seen = early if MASK == LAST_ROWS else seen & early
    return seen


@gluon.jit
def tile_row(p, t, member, i):
    """First row of a row block in the padded fp32 tensors lse, delta and dq accumulator."""
    head = t.b * p.heads + t.kv_head * p.group + member
    return (head * p.row_tiles + t.first_tile + i) * p.V.BM


@gluon.jit
def load_keys(p, t, desc, offset, bar, dst):
    """Rows of K or V from key j0 + offset on."""
    load_tile(desc, t.b, t.kv_head, t.k_start, t.sk, t.j0 + offset, bar, dst, p.V.VARLEN)


@gluon.jit
def store_keys(p, t, desc, offset, src):
    """Rows of dk or dv, the way back."""
    store_tile(desc, t.b, t.kv_head, t.k_start, t.sk, t.j0 + offset, src, p.V.VARLEN)


@gluon.jit
def load_rows(p, t, member, i, count):
    """Row block i of a query head into the next stage of the rings: q with lse, do with delta (and tau / n)."""
    stage = stage_of(count, p.V.ST)
    q_full = p.buffers.q_full.index(stage)
    do_full = p.buffers.do_full.index(stage)
    h = t.kv_head * p.group + member
    row = tile_row(p, t, member, i)
    if count >= p.V.ST:
        bar_sync(p.Q_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    mbarrier.expect(q_full, p.q_desc.block_type.nbytes + p.V.BM * 4)
    load_tile(p.q_desc, t.b, h, t.q_start, t.sq, i * p.V.BM, q_full, p.buffers.q.index(stage), p.V.VARLEN)
    tma_load(p.lse_desc, [row], q_full, p.buffers.lse.index(stage))
    if count >= p.V.ST:
        bar_sync(p.DO_EMPTY + stage, BOTH_GROUPS_AND_WARP)
    mbarrier.expect(do_full, p.do_desc.block_type.nbytes + (p.V.BM * 8 if p.V.TAU else p.V.BM * 4))
    load_tile(p.do_desc, t.b, h, t.q_start, t.sq, i * p.V.BM, do_full, p.buffers.do.index(stage), p.V.VARLEN)
    tma_load(p.delta_desc, [row], do_full, p.buffers.delta.index(stage))
    if p.V.TAU:
        tma_load(p.share_desc, [row], do_full, p.buffers.share.index(stage))


@gluon.jit
def meet_arrivals(p, count):
    """Every arrival at a named barrier is met, those of the last round included."""
    ST: gl.constexpr = p.V.ST
    for i in gl.static_range(ST):
        if count >= ST - i:
            bar_sync(p.Q_EMPTY + stage_of(count + i, p.V.ST), BOTH_GROUPS_AND_WARP)
            bar_sync(p.DO_EMPTY + stage_of(count + i, p.V.ST), BOTH_GROUPS_AND_WARP)
