"""Tiles that are done again because their sums overflowed.

With `keep_first_max`, blocks without a mask are weighed relative to the maximum of the blocks before them. Scores that rise far
above it make weights and sums too large, which the sums show at the end of a row (`overflowed`). The warpgroup does not store
such a tile but puts it on a list. After the CTA's last tile, those on the lists are done again with a maximum for every block,
for the warpgroups on whose lists they are. The link from one tile of a list to the next is kept in the tile's lse, which is
still to be written. Only scores decide what is done again: the result does not depend on the order in which tiles are drawn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.forward.tiles import TICKET, lengths, read_field
from backlight.backends.hopper.primitives import WM


@gluon.jit
def ticket_of(p, slot):
    ticket = p.sq * 0
    if p.V.KEEP_FIRST_MAX:
        ticket = read_field(p, slot, TICKET)
    return ticket


@gluon.jit
def first_overflows(p):
    """The first tile on the list of each of three warpgroups, -1 for an empty list."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = gl.max(p.buffers.overflow.index(0).load(one), 0)
    second = gl.max(p.buffers.overflow.index(1).load(one), 0)
    third = first * 0 - 1
    if p.V.NC == 3:
        third = gl.max(p.buffers.overflow.index(2).load(one), 0)
    return first, second, third


@gluon.jit
def next_overflows(p, tiles, tile, head, z, block):
    """(`first_overflows` after `tile` is taken from the lists that it heads, a bit for each warpgroup whose list that is).

    What comes next on a list is the link that `remember_overflow` left.
    """
    first, second, third = tiles
    q_start, _, _, _ = lengths(p, z)
    links = p.lse_ptr + head.to(gl.int64) * p.sq + q_start + block * (p.V.NC * WM)
    owners = tile * 0
    if first == tile:
        first = gl.load(links).to(gl.int32)
        owners += 1
    if second == tile:
        second = gl.load(links + WM).to(gl.int32)
        owners += 2
    if third == tile:
        third = gl.load(links + 2 * WM).to(gl.int32)
        owners += 4
    return (first, second, third), owners


# the largest sum for which a row's first maximum is good enough (44 nats above it). O has as much room again before it
# overflows, and an exponent of 64 is rounded no more than an lse of 44
LARGEST_SUM = gl.constexpr(2.0**64)


@gluon.constexpr_function
def largest_sum(dtype):
    """LARGEST_SUM, or less where weights of `dtype` would overflow."""
    return LARGEST_SUM.value if dtype == gl.bfloat16 else 2.0**15


@gluon.jit
def overflowed(total, rows, sq, ticket, LARGEST: gl.constexpr):
    """Whether a warpgroup's sums say that its tile has to be done again."""
    return (gl.max(gl.where((rows < sq) & ((total < LARGEST) == 0), 1, 0), 0) != 0) & (ticket >= 0)


@gluon.jit
def remember_overflow(p, ticket, lse_row, i0, W: gl.constexpr):
    """Put a tile at the front of this warpgroup's list; the link to the next one is kept in the tile's own lse."""
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(p.lse_ptr + lse_row + i0, gl.max(p.buffers.overflow.index(W).load(four), 0).to(gl.float32))
    p.buffers.overflow.index(W).store(gl.full([1], ticket, gl.int32, four))


@gluon.jit
def stores_tile(p, ticket, W: gl.constexpr):
    """Whether this warpgroup stores a tile: it did not overflow just now, or it is done again for this warpgroup."""
    stores: gl.constexpr = True
    if p.V.KEEP_FIRST_MAX:
        four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        newest = gl.max(p.buffers.overflow.index(W).load(four), 0)
        stores = ((ticket >= 0) & (newest != ticket)) | ((ticket < 0) & (((-1 - ticket) & (1 << W)) != 0))
    return stores


@gluon.jit
def rows_to_store(p, total, rows, sq, ticket, lse_row, i0, LARGEST: gl.constexpr, W: gl.constexpr):
    """Rows whose lse is stored: none of a tile that has to be done again, which is remembered here."""
    keep = rows < sq
    if p.V.KEEP_FIRST_MAX:
        if overflowed(total, rows, sq, ticket, LARGEST):
            remember_overflow(p, ticket, lse_row, i0, W)
        keep = keep & stores_tile(p, ticket, W)
    return keep
