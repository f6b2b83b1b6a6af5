"""Tiles that are done again.

With `trust`, blocks without a mask are weighed relative to the maximum of the blocks before them. Scores that rise far
above it make weights and sums too large, which the sums tell at the end of a row (`doubtful`). Such a tile is not stored but
remembered, and done again with care, for the warpgroups whose rows they were, after the CTA's last tile. Each warpgroup has a
list of them; the link from one to the next waits in the lse that is still to be written. What is done again depends on the
scores alone, so that the result does not depend on the order in which tiles are drawn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.forward.tiles import TICKET, lengths, published
from backlight.backends.hopper.primitives import WM


@gluon.jit
def ticket_of(p, slot):
    ticket = p.sq * 0
    if p.TRUST:
        ticket = published(p, slot, TICKET)
    return ticket


@gluon.jit
def first_again(p):
    """The last tile that each of three warpgroups has to do again, -1 for none."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    first = gl.max(p.again_s.index(0).load(one), 0)
    second = gl.max(p.again_s.index(1).load(one), 0)
    third = first * 0 - 1
    if p.NC == 3:
        third = gl.max(p.again_s.index(2).load(one), 0)
    return first, second, third


@gluon.jit
def next_again(p, tiles, tile, head, z, block):
    """`first_again` without `tile`, which heads some lists: the links that `remember` left; and whose lists those are."""
    first, second, third = tiles
    q_start, _, _, _ = lengths(p, z)
    links = p.lse_ptr + head.to(gl.int64) * p.sq + q_start + block * (p.NC * WM)
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


# up to which sum a row's first maximum is good enough (44 nats above it): O has as much room again before it overflows, and an
# exponent of 64 is rounded as an lse of 44 is
LARGEST_SUM = gl.constexpr(2.0**64)


@gluon.constexpr_function
def largest_sum(dtype):
    """LARGEST_SUM, or less where weights of `dtype` would overflow."""
    return LARGEST_SUM.value if dtype == gl.bfloat16 else 2.0**15


@gluon.jit
def doubtful(total, rows, sq, ticket, LARGEST: gl.constexpr):
    """Whether a warpgroup's sums say that its tile has to be done again."""
    return (gl.max(gl.where((rows < sq) & ((total < LARGEST) == 0), 1, 0), 0) != 0) & (ticket >= 0)


@gluon.jit
def remember(p, ticket, lse_row, i0, W: gl.constexpr):
    """Put a tile in front of those that this warpgroup will do again; the link waits in the tile's own lse."""
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.store(p.lse_ptr + lse_row + i0, gl.max(p.again_s.index(W).load(four), 0).to(gl.float32))
    p.again_s.index(W).store(gl.full([1], ticket, gl.int32, four))


@gluon.jit
def valid(p, ticket, W: gl.constexpr):
    """Whether this warpgroup stores a tile: it was not remembered just now, or it is done again for it and maybe others."""
    stores: gl.constexpr = True
    if p.TRUST:
        four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        newest = gl.max(p.again_s.index(W).load(four), 0)
        stores = ((ticket >= 0) & (newest != ticket)) | ((ticket < 0) & (((-1 - ticket) & (1 << W)) != 0))
    return stores


@gluon.jit
def kept(p, total, rows, sq, ticket, lse_row, i0, LARGEST: gl.constexpr, W: gl.constexpr):
    """Rows whose lse is stored; a tile that has to be done again is remembered and keeps none."""
    keep = rows < sq
    if p.TRUST:
        if doubtful(total, rows, sq, ticket, LARGEST):
            remember(p, ticket, lse_row, i0, W)
        keep = keep & valid(p, ticket, W)
    return keep
