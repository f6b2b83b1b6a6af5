"""Additions to dq in a fixed order (eq. 75): five products and the same bits in every run.

Each row block of a query head has a counter of the key tiles that have added to it. A tile adds when all those before it have
added, and counts itself when its addition has arrived. Tiles are drawn in that order, a program's first one too: the first
unfinished one never waits, and none waits for a program that has not begun, for want of a multiprocessor.
Under a causal mask the last keys come first: a tile begins at its diagonal, where it is the first to add, and comes to rows of
which others have done before. The other way round every tile would begin where the longest of waits is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper.backward.key_tiles import drawn
from backlight.call import Call


@gluon.jit
def arrived():
    """Wait until what TMA adds for this partition is in global memory: `store_wait` is for what it reads."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; fence.acq_rel.gpu; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [gl.to_tensor(0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def next_in_order(p):
    return gl.atomic_add(p.order_ptr, 1, sem="relaxed")


@gluon.jit
def first_number(p):
    """The number of the tile that a program begins with."""
    if p.V.ORDERED:
        number = next_in_order(p)
    else:
        number = gl.program_id(0)
    return number


@gluon.jit
def next_number(p):
    """The number that a program takes next; as many tiles as there are programs are left to those that begin late."""
    number = drawn(p)
    if p.V.ORDERED:  # noqa: SIM102 (known to the compiler)
        if number < p.n_tiles:
            number = next_in_order(p)
    return number


@gluon.jit
def drawn_in_turn(p, number, together):
    """The number of the tile to be drawn as `number`: under a causal mask the last keys come first."""
    if p.V.ORDERED and p.V.HAS_RIGHT:
        rank = number % (p.key_tiles * together)
        tile = rank // together
        number = number + (p.key_tiles - 1 - 2 * tile) * together
    return number


@gluon.jit
def turn_of(p, t, i):
    """How many key tiles add to row block i of a head before this one."""
    tile = t.j0 // p.V.BN
    if p.V.HAS_RIGHT:
        last_row = gl.minimum((i + 1) * p.V.BM, t.sq) - 1
        last_key = gl.minimum(last_row + t.sk - t.sq + p.right, t.sk - 1)
        tile = last_key // p.V.BN - tile
    return tile


@gluon.jit
def counter_of(p, t, member, i):
    head = t.b * p.heads + t.kv_head * p.group + member
    return p.order_ptr + (1 + head * p.row_tiles + i)


@gluon.jit
def acquired(counter_ptr):
    """What a counter says now, and all that was added before it said so."""
    asm: gl.constexpr = "ld.acquire.gpu.global.s32 $0, [$1];"
    return gl.inline_asm_elementwise(asm, "=r,l,~{memory}", [counter_ptr], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_turn(counter_ptr, turn):
    seen = acquired(counter_ptr)
    while seen < turn:
        seen = acquired(counter_ptr)


@gluon.jit
def count_itself(counter_ptr):
    arrived()
    gl.atomic_add(counter_ptr, 1, sem="release")


def can_be_ordered(call: Call, wide: bool) -> bool:
    """Whether the tiles that see a row block are all from one on: no window cuts the first keys, no border and no interval."""
    return not (wide or call.varlen or call.spec.left is not None or call.rows is not None)
