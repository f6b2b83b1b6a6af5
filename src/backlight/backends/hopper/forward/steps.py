"""Steps that consumers share, with tau and without: the next tile, products with K, lse, the gate, stores."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from backlight.backends.hopper.compat import warpgroup_mma_wait
from backlight.backends.hopper.forward.overflow import rows_to_store
from backlight.backends.hopper.forward.ring import hand_on_turn, release, ring_stage, wait_full
from backlight.backends.hopper.forward.tiles import HEAD, place_of, q_buffer, q_phase, read_field
from backlight.backends.hopper.primitives import WM, load_tile, mma_over_columns, store_tile
from backlight.backends.hopper.terms import sigmoid


@gluon.constexpr_function
def accumulator(columns):
    """The layout of a warpgroup's products [64, columns]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def no_products(COLUMNS: gl.constexpr):
    """Zeros, as a warpgroup's products [64, COLUMNS] begin."""
    return gl.zeros([WM, COLUMNS], gl.float32, accumulator(COLUMNS))


@gluon.jit
def first_head(p, W: gl.constexpr):
    """`next_head` of the CTA's first tile."""
    mbarrier.wait(p.buffers.q_full.index(W), 0)
    return read_field(p, 0, HEAD)


@gluon.jit
def next_head(p, turn, W: gl.constexpr):
    """batch * heads + head of the CTA's tile number `turn`, once its Q has arrived; END when there is none."""
    mbarrier.wait(p.buffers.q_full.index(q_buffer(p, turn, W)), q_phase(p, turn))
    return read_field(p, turn & 3, HEAD)


@gluon.jit
def first_turn(p, W: gl.constexpr):
    """(`first_head`, blocks before it, tiles before it): none yet. The last warpgroup gives the first one its turn."""
    if p.V.PINGPONG and W == p.V.NC - 1:
        hand_on_turn(p, W)
    head = first_head(p, W)
    return head, head * 0, head * 0


@gluon.jit
def release_q(p, turn, W: gl.constexpr):
    mbarrier.arrive(p.buffers.q_empty.index(q_buffer(p, turn, W)), count=1)


@gluon.jit
def start_scores(p, q, stage):
    """Q K^T of a stage of the ring, in flight."""
    return mma_over_columns(q, p.k.tiles.index(stage), no_products(p.V.BN), p.V.D)


@gluon.jit
def scores_of(p, q, count):
    """Q K^T of tile number `count` of the ring."""
    wait_full(p.k, count)
    return warpgroup_mma_wait(0, deps=[start_scores(p, q, ring_stage(p.k, count))])


@gluon.jit
def take_scores(p, q, count):
    """Q K^T of tile number `count` of the ring, which is released."""
    s = scores_of(p, q, count)
    release(p.k, ring_stage(p.k, count))
    return s


@gluon.jit
def row_totals(row_sum, s_l: gl.constexpr):
    """Sums of rows from their partial sums (`row_sum_layout`)."""
    return gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_l), assert_trivial=True)


@gluon.jit
def lse_target(p, place, total, ticket, LARGEST: gl.constexpr, W: gl.constexpr):
    """(where a warpgroup's rows stand among all of lse, which of them are stored)."""
    numbers = place.i0 + gl.arange(0, WM, total.type.layout)
    lse_row = place.head.to(gl.int64) * p.sq + place.q_start
    keep = rows_to_store(p, total, numbers, place.sq, ticket, lse_row, place.i0, LARGEST, W)
    return lse_row + numbers, keep


@gluon.jit
def load_gate(p, W: gl.constexpr, turn):
    """The gate's tile into the buffer that O will leave through."""
    tma.store_wait(0)
    place = place_of(p, turn & 3, W)
    full = p.buffers.gate_full.index(W)
    mbarrier.expect(full, p.gate_desc.block_type.nbytes)
    tile = p.buffers.o.index(W)
    load_tile(p.gate_desc, place.b, place.h, place.q_start, place.sq, place.i0, full, tile, p.V.VARLEN)


@gluon.jit
def wait_gate(p, turn, W: gl.constexpr):
    """Until the gate's tile has arrived, where there is one."""
    if p.V.GATE:
        mbarrier.wait(p.buffers.gate_full.index(W), turn & 1)


@gluon.jit
def write_o(p, o, turn, W: gl.constexpr):
    """O, gated, into the buffer that it leaves through; returned as it was before it was rounded."""
    wait_gate(p, turn, W)
    if p.V.GATE:
        o = o * sigmoid(p.buffers.o.index(W).load(o.type.layout).to(gl.float32))
    p.buffers.o.index(W).store(o.to(p.q_desc.dtype))
    return o


@gluon.jit
def low_half(p, o):
    """What rounding takes from O (eq. 103)."""
    dtype: gl.constexpr = p.q_desc.dtype
    return (o - o.to(dtype).to(gl.float32)).to(dtype)


@gluon.jit
def store_low(p, o, FIRST: gl.constexpr, place):
    """The low half of columns of O from FIRST on, from registers, where shared memory has no room."""
    if p.V.LOW > 0 and not p.V.LOW_SHARED:
        rows = place.i0 + gl.arange(0, WM, gl.SliceLayout(1, o.type.layout))
        columns = FIRST + gl.expand_dims(gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout)), 0)
        first = place.b.to(gl.int64) * p.low_stride_b + place.h.to(gl.int64) * p.low_stride_h
        row = gl.expand_dims(first + (place.q_start + rows).to(gl.int64) * p.low_stride_s, 1)
        seen = gl.expand_dims(rows < place.sq, 1)
        if p.V.LOW != p.V.BDV:
            seen = seen & (columns < p.V.LOW)
        gl.store(p.extras.low_ptr + row + columns, low_half(p, o), mask=seen)


@gluon.jit
def write_columns(p, o, FIRST: gl.constexpr, W: gl.constexpr):
    """Columns of O from FIRST on, gated, into the buffer that it leaves through; returned as they were before."""
    tile = p.buffers.o.index(W).slice(FIRST, o.shape[1], 1)
    if p.V.GATE:
        o = o * sigmoid(tile.load(o.type.layout).to(gl.float32))
    tile.store(o.to(p.q_desc.dtype))
    return o


@gluon.jit
def store_rows(p, desc, place, tile):
    """A tile of a warpgroup's rows from shared memory, in flight."""
    store_tile(desc, place.b, place.h, place.q_start, place.sq, place.i0, tile, p.V.VARLEN)
