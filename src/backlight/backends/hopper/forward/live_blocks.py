"""Key blocks in which entmax leaves a weight to some row of a tile: bytes that consumers write and all partitions read.

There is a byte for every 64 rows and block of keys. The sweep that bounds thresholds writes one set of them, the first that
steps to them another (eq. 85): each visits what the set before it leaves, and is followed by a meeting of all partitions.
Blocks are counted in the order in which they are visited, from the last of a tile; the first ones are visited in any case, so
that K is on its way before the meeting.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.barriers import FORWARD_MEETING
from backlight.backends.hopper.forward.tiles import TICKET, read_field
from backlight.backends.hopper.primitives import bar_sync, clamp

# blocks that are visited in any case: where a warpgroup's own rows begin to see keys is among them
ALWAYS = gl.constexpr(4)
# `bytes_at` of a published tile: nothing is done again with entmax
BYTES = TICKET
# blocks whose bytes are read together
CHUNK = gl.constexpr(16)


@gluon.jit
def meet(p):
    """Until all partitions are here: then they see what the others wrote."""
    bar_sync(FORWARD_MEETING, p.V.NC * 128 + 32)


@gluon.jit
def bytes_at(p, head, z, block):
    """Where the bytes of a tile begin, from those of the first one: [NC, key tiles]. Published with the tile."""
    tile = block
    if p.V.VARLEN:
        tile = block + gl.load(p.packing.cu_tiles_ptr + z)
    return (head * p.row_tiles + tile) * (p.V.NC * p.key_tiles)


@gluon.jit
def mark(p, ptr, slot, block, alive, W: gl.constexpr):
    """Write down that a block of keys lives if it does for any row; alive: [64]."""
    place = read_field(p, slot, BYTES) + W * p.key_tiles + block
    gl.store(ptr + place + alive.to(gl.int32) * 0, gl.full([alive.shape[0]], 1, gl.int8, alive.type.layout), mask=alive)


@gluon.jit
def step_byte(p, at, step):
    """Where a tile, whose bytes begin at `at`, says that a step was not the last one."""
    return p.entmax.unsettled_ptr + (at // (p.V.NC * p.key_tiles) * 4 + step)


@gluon.jit
def ask_for_more(p, slot, step, far):
    """Write down that another step has to follow where any row has moved far; far: [64]."""
    place = step_byte(p, read_field(p, slot, BYTES), step)
    gl.store(place + far.to(gl.int32) * 0, gl.full([far.shape[0]], 1, gl.int8, far.type.layout), mask=far)


@gluon.jit
def goes_on(p, at, step):
    """Whether another step follows after a meeting."""
    return (gl.load(step_byte(p, at, step)) != 0) & (step < p.V.STEPS - 1)


@gluon.jit
def live_chunk(p, ptr, at, tile_begin, tile_end, chunk, WARPS: gl.constexpr):
    """A bit for each of CHUNK blocks, the first visited the lowest, of which some row of the tile needs the keys.

    at: `bytes_at` of the tile.
    """
    NC: gl.constexpr = p.V.NC
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lane = gl.arange(0, CHUNK, layout)
    place = chunk * CHUNK + lane
    exists = place < tile_end - tile_begin
    alive = gl.where(place < ALWAYS, 1, 0)
    for w in gl.static_range(NC):
        alive = alive | gl.load(ptr + (at + w * p.key_tiles + tile_end - 1 - place), mask=exists, other=0).to(gl.int32)
    return gl.sum(gl.where(exists, alive << lane, 0), 0)


@gluon.jit
def chunks_of(tile_begin, tile_end):
    return (tile_end - tile_begin + (CHUNK - 1)) // CHUNK


@gluon.jit
def between_places(bits, chunk, first, end):
    """The bits of a chunk whose blocks are visited as numbers [first, end) of the tile."""
    low = clamp(first - chunk * CHUNK, 0, CHUNK)
    high = clamp(end - chunk * CHUNK, low, CHUNK)
    return bits & ((1 << high) - (1 << low))


@gluon.jit
def lowest(bits):
    """The number of the lowest bit."""
    return ((bits & -bits).to(gl.float32).to(gl.int32, bitcast=True) >> 23) - 127
