"""Tiles that are done again.

With `trust`, blocks without mask and bias are weighed relative to the maximum of the blocks before them. Scores that rise far
above it make weights and sums too large, which the sums tell at the end of a row (`doubtful`). Such a tile is not stored but
remembered, and done again with care, for the warpgroup whose rows it was, after the CTA's last tile. Each warpgroup has a list
of them; the link from one to the next waits in the lse that is still to be written. What is done again depends on the scores
alone, so that the result does not depend on the order in which tiles are drawn.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.primitives import WM
from backlight.backends.hopper.tiles import TICKET, lengths, published


@gluon.jit
def ticket_of(p, slot):
    ticket = p.sq * 0
    if p.TRUST:
        ticket = published(p, slot, TICKET)
    return ticket


@gluon.jit
def first_again(p, W: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    return gl.max(p.again_s.index(W).load(one), 0)


@gluon.jit
def next_again(p, head, z, block, W: gl.constexpr):
    """The link that `remember` left."""
    q_start, _, _, _ = lengths(p, z)
    row = head.to(gl.int64) * p.sq + q_start + block * (p.NC * WM) + W * WM
    return gl.load(p.lse_ptr + row).to(gl.int32)


# up to which sum a row's first maximum is good enough in fp32: far from where O could overflow
LARGEST_SUM = gl.constexpr(2.0**32)


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
    """Whether this warpgroup stores a tile: it was not remembered just now, or it is done again for this warpgroup."""
    four: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    newest = gl.max(p.again_s.index(W).load(four), 0)
    return ((ticket >= 0) & (newest != ticket)) | ((ticket < 0) & (((-1 - ticket) & 3) == W))
