"""Row blocks that see a key tile under a mask by row intervals: the lists of `intervals/kernels.py` as partitions read them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.backward.key_tiles import OWNER, load_rows, read_field
from backlight.backends.hopper.compat import arguments
from backlight.backends.intervals.kernels import KINDS


@arguments
class Visits:
    """The list of a query head: how many blocks have to be masked, which come first, and how many not."""

    live_ptr: gl.tensor
    cut: gl.tensor
    full: gl.tensor


@gluon.jit
def visits_of(p, t, member):
    owner = t.owner + member * p.mask_head
    cut = gl.load(p.mask.counts_ptr + 2 * owner)
    full = gl.load(p.mask.counts_ptr + 2 * owner + 1)
    return Visits(p.mask.live_ptr + owner.to(gl.int64) * p.most, cut, full)


@gluon.jit
def published_count(p, turn, member, FULL: gl.constexpr):
    """How many row blocks of the published tile have to be masked (0), or not (1)."""
    owner = read_field(p, turn, OWNER, p.V.WARPS) + member * p.mask_head
    return gl.load(p.mask.counts_ptr + 2 * owner + FULL)


@gluon.jit
def published_visit(p, turn, member, j, FULL: gl.constexpr):
    """Row block number j of those that have to be masked (0), or not (1).

    Partitions that multiply have no registers in which to keep `Visits`.
    """
    owner = read_field(p, turn, OWNER, p.V.WARPS) + member * p.mask_head
    at = p.most - 1 - j if FULL else j
    return gl.load(p.mask.live_ptr + owner.to(gl.int64) * p.most + at) // KINDS


@gluon.jit
def visited(p, visits, j):
    """The row block that is visited as number j; anything beyond the last one."""
    at = gl.where(j < visits.cut, j, p.most - 1 - (j - visits.cut))
    return gl.load(visits.live_ptr + gl.maximum(at, 0)) // KINDS


@gluon.jit
def first_row_block(p, t):
    """The row block that is visited first, asked for before it is needed; anything where there is none."""
    i = t.begin
    if p.V.INTERVALS > 0:
        i = visited(p, visits_of(p, t, 0), 0)
    return i


@gluon.jit
def load_every_row(p, t, count, first):
    """The row blocks of all query heads that see a key tile into the rings; how many were loaded so far.

    first: `first_row_block`, where K and V had to be waited for.
    """
    for member in range(p.group):
        if p.V.INTERVALS > 0:
            visits = visits_of(p, t, member)
            i = first
            if member > 0:
                i = visited(p, visits, 0)
            for j in range(visits.cut + visits.full):
                # asked for while this block waits for its stage
                following = visited(p, visits, j + 1)
                load_rows(p, t, member, i, count)
                i = following
                count += 1
        else:
            for i in range(t.begin, t.end):
                load_rows(p, t, member, i, count)
                count += 1
    return count
