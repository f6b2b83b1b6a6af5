"""Device code that every Hopper kernel shares: geometry, mask, softmax step, tile copies, barriers, fragment layouts.

Written once, used by both directions. Positions are i' of eq. 1. Logits are in base 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from backlight.backends.hopper.compat import smem_reinterpret, tma_load, tma_store

LN2 = gl.constexpr(0.6931471805599453)
INF = gl.constexpr(float("inf"))
# the first row that sees a key which does not exist
BEYOND_ALL_ROWS = gl.constexpr(1 << 30)
# rows of one warpgroup's matmul
WM = gl.constexpr(64)
# packed sequences: row coordinate of the end of every sequence in a ragged descriptor (launch.ragged)
RAGGED_END = gl.constexpr(1 << 30)


# --- geometry ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def clamp(x, low, high):
    return gl.minimum(gl.maximum(x, low), high)


@gluon.jit
def blocks(lo, hi, full_lo, full_hi, B: gl.constexpr):
    """(begin, plain_begin, plain_end, end) in blocks of B, from needed [lo, hi) and mask-free [full_lo, full_hi)."""
    begin = lo // B
    end = gl.maximum(gl.cdiv(hi, B), begin)
    plain_end = clamp(gl.maximum(full_hi, 0) // B, begin, end)
    plain_begin = clamp(gl.cdiv(gl.maximum(full_lo, 0), B), begin, plain_end)
    return begin, plain_begin, plain_end, end


@gluon.jit
def key_blocks(first, last, sk, left, right, BN: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Key blocks of rows at positions first .. last (eq. 30): `blocks`."""
    lo = sk * 0
    hi = sk
    full_lo = lo
    full_hi = sk
    if HAS_LEFT:
        lo = clamp(first - left, 0, sk)
        full_lo = last - left
    if HAS_RIGHT:
        hi = gl.maximum(gl.minimum(sk, last + right + 1), 0)
        full_hi = gl.minimum(sk, first + right + 1)
    return blocks(lo, hi, full_lo, full_hi, BN)


@gluon.jit
def row_blocks(first, last, sq, sk, left, right, BM: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Row blocks that see keys first .. last: `key_blocks` the other way round. Rows beyond sq need no mask: their p is 0."""
    shift = sk - sq
    lo = sq * 0
    hi = sq
    full_lo = lo
    full_hi = gl.cdiv(sq, BM) * BM
    if HAS_RIGHT:
        lo = clamp(first - right - shift, 0, sq)
        full_lo = last - right - shift
    if HAS_LEFT:
        hi = gl.maximum(gl.minimum(sq, last + left - shift + 1), 0)
        full_hi = gl.minimum(full_hi, first + left - shift + 1)
    return blocks(lo, hi, full_lo, full_hi, BM)


@gluon.jit
def key_limits(position, sk, left, right, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """Eq. 2: the keys [first, end) that rows at `position` see."""
    first = position * 0
    end = first + sk
    if HAS_LEFT:
        first = position - left
    if HAS_RIGHT:
        end = gl.minimum(position + right + 1, end)
    return first, end


@gluon.jit
def between(first, end, columns):
    """first <= column < end as a tile [rows, columns].

    A wgmma fragment holds columns 8 c + (what depends on the thread): the sum is split so that c stays an immediate operand and
    no register is spent on it.
    """
    thread = gl.expand_dims(columns % 8, 0)
    fixed = gl.expand_dims(columns // 8 * 8, 0)
    return (fixed >= gl.expand_dims(first, 1) - thread) & (fixed < gl.expand_dims(end, 1) - thread)


@gluon.jit
def before(end, columns):
    """`between` without a first column."""
    return gl.expand_dims(columns // 8 * 8, 0) < gl.expand_dims(end, 1) - gl.expand_dims(columns % 8, 0)


@gluon.jit
def locate(tile, cu_tiles_ptr, n_segments):
    """Packed sequences: the segment a tile belongs to (n_segments when there is none) and the segment's first tile."""
    low = n_segments * 0
    high = n_segments
    while low < high:
        middle = (low + high) // 2
        if gl.load(cu_tiles_ptr + middle + 1) <= tile:
            low = middle + 1
        else:
            high = middle
    return low, gl.load(cu_tiles_ptr + low)


# --- softmax -----------------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def row_sum_layout(BN):
    """[64, 8] per-thread partial row sums of a wgmma accumulator [64, BN]: lanes are added up once, at the end of the row."""
    registers = [[0, 0, 1], [8, 0, 0]]
    column = 1
    while column < BN // 8:
        registers.append([0, column, 0])
        column *= 2
    lanes = [[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    warps = [[16, 0, 0], [32, 0, 0]]
    return gl.SliceLayout(1, gl.DistributedLinearLayout(registers, lanes, warps, [], [64, BN // 8, 8]))


@gluon.jit
def softmax_step(s, row_max, row_sum, scale_log2, MASKED: gl.constexpr):
    """Online softmax over one block (eq. 31): p, the new row maximum and partial sums, and the factor for what came before."""
    new_max = gl.maximum(row_max, gl.max(s, 1))
    top = new_max * scale_log2
    if MASKED:
        # a row that has not met a visible key yet
        top = gl.where(new_max == -INF, 0.0, top)
    rescale = gl.exp2(row_max * scale_log2 - top)
    p = gl.exp2(s * scale_log2 - gl.expand_dims(top, 1))
    factor = gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout), assert_trivial=True)
    return p, new_max, row_sum * gl.expand_dims(factor, 1) + partial_sums(p, row_sum), rescale


@gluon.jit
def partial_sums(p, row_sum):
    """What a block adds to the partial sums of its rows (`row_sum_layout`)."""
    sums = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    return gl.convert_layout(sums, row_sum.type.layout, assert_trivial=True)


@gluon.jit
def as_weights(p32, o, dtype: gl.constexpr):
    """P as the register operand of the second matmul."""
    return gl.convert_layout(p32.to(dtype), gl.DotOperandLayout(0, o.type.layout, 2), assert_trivial=True)


@gluon.jit
def rescaled(o, factor):
    return o * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, o.type.layout), assert_trivial=True), 1)


@gluon.jit
def log2_of_sum(total):
    """log2 of what is positive, as accurate for large sums as for small ones: exponent and fraction by themselves."""
    number = total.to(gl.int32, bitcast=True)
    exponent = (number >> 23) - 127
    fraction = ((number & 0x7FFFFF) | 0x3F800000).to(gl.float32, bitcast=True)
    return gl.where(total < INF, exponent.to(gl.float32), total), gl.log2(fraction)


# --- copies and matmuls ------------------------------------------------------------------------------------------------------


@gluon.jit
def tiles_of(dtype: gl.constexpr, N: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Shared memory for N tiles [ROWS, COLUMNS]."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [N, ROWS, COLUMNS], layout)


@gluon.jit
def load_tile(desc, b, h, start, length, row, bar, dst, VARLEN: gl.constexpr):
    """TMA rows [row, row + R) of head h into dst [R, D]; zeros beyond the last row of the batch entry or of the sequence."""
    view = smem_reinterpret(dst, desc.dtype, desc.block_type.shape, desc.layout)
    if VARLEN:
        tma_load(desc, [RAGGED_END, start + length, h, RAGGED_END - length + row, 0], bar, view)
    else:
        tma_load(desc, [b, h, row, 0], bar, view)


@gluon.jit
def store_tile(desc, b, h, start, length, row, src, VARLEN: gl.constexpr):
    """The way back: rows that do not exist are not written."""
    view = smem_reinterpret(src, desc.dtype, desc.block_type.shape, desc.layout)
    if VARLEN:
        tma_store(desc, [RAGGED_END, start + length, h, RAGGED_END - length + row, 0], view)
    else:
        tma_store(desc, [b, h, row, 0], view)


@gluon.constexpr_function
def pieces(D, BD):
    """(start, width) of the columns a product over D <= BD has to read: powers of two, cut where shared memory can be cut."""
    width = max(16, 1 << (D - 1).bit_length())
    whole = width // 2
    rest = max(16, 1 << max(0, D - whole - 1).bit_length())
    if whole < 64 or whole + rest >= BD:
        return ((0, BD),)
    return ((0, whole), (whole, rest))


@gluon.constexpr_function
def columns_beyond(D, BD):
    """Columns of a second accumulator, 0 where the first has all BD: 192 columns are 128 and 64, which tiles hold in 256."""
    return 64 if BD == 256 and D <= 192 else 0


@gluon.jit
def first_columns(tile, BEYOND: gl.constexpr):
    """The columns of a tile in shared memory that go with the first accumulator."""
    return tile.slice(0, 2 * BEYOND, 1) if BEYOND > 0 else tile


@gluon.jit
def mma_over_columns(a, b, acc, D: gl.constexpr, ONTO: gl.constexpr = False):
    """a [R, BD] times b [C, BD] transposed, both in shared memory, columns beyond D (zeros) left out; ONTO adds acc to it."""
    BD: gl.constexpr = a.shape[1]
    PIECES: gl.constexpr = pieces(D, BD)
    for i in gl.static_range(len(PIECES)):
        left = a.slice(PIECES[i][0], PIECES[i][1], 1)
        right = b.slice(PIECES[i][0], PIECES[i][1], 1)
        acc = warpgroup_mma(left, right.permute((1, 0)), acc, use_acc=ONTO or i > 0, is_async=True)
    return acc


@gluon.jit
def rematerialised(tile, count):
    """A tile in shared memory whose place is worked out in every round `count`, which is below 2^30.

    As a constant of the loop it would be held in registers, or spilled where those are short.
    """
    slots = smem_reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout)
    return slots.index(count >> 30)


# --- barriers ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N mbarriers that complete after COUNT arrivals."""
    SIZE: gl.constexpr = 4 if N == 3 else N
    bars = gl.allocate_shared_memory(gl.int64, [SIZE, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.constexpr_function
def log2_of(ST):
    return ST.bit_length() - 1


@gluon.jit
def stage_of(count, ST: gl.constexpr):
    """Where use number `count` of a ring with ST stages (a power of two, or 3) takes place."""
    if ST == 3:
        return count % 3
    return count & (ST - 1)


@gluon.jit
def phase_of(count, ST: gl.constexpr):
    """Parity of the round that use number `count` belongs to."""
    if ST == 3:
        return (count // 3) & 1
    return (count >> log2_of(ST)) & 1


@gluon.jit
def named_barrier(CODE: gl.constexpr, number, THREADS: gl.constexpr):
    """An instruction at a named hardware barrier of THREADS threads. Numbers: `barriers.py`."""
    gl.inline_asm_elementwise(
        f"{CODE} $1, {THREADS}; mov.b32 $0, $1;",
        "=r,r,~{memory}",
        [gl.to_tensor(number)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def bar_sync(number, THREADS: gl.constexpr):
    """Wait at a named barrier until THREADS threads have come, these included.

    Unlike an mbarrier's arrive, `bar_arrive` needs no barrier of the whole partition in front of it: each warp comes by itself.
    """
    named_barrier("bar.sync", number, THREADS)


@gluon.jit
def bar_arrive(number, THREADS: gl.constexpr):
    """Come to a named barrier without waiting."""
    named_barrier("bar.arrive", number, THREADS)


@gluon.constexpr_function
def per_thread(shape, layout):
    """Elements of a tile that a thread holds."""
    return shape[0] * shape[1] // (32 * layout.warps_per_cta[0] * layout.warps_per_cta[1])


@gluon.constexpr_function
def _branch_between(n):
    """Assembly that passes n values on, and branches before it does."""
    copies = " ".join(f"mov.f32 ${i}, ${n + i};" for i in range(n))
    return (
        "{ .reg .pred never; .reg .b32 now; AGAIN: mov.u32 now, %clock; setp.eq.u32 never, now, 7; @never bra AGAIN; "
        f"{copies} }}"
    )


@gluon.constexpr_function
def _in_and_out(n):
    return ",".join(["=&f"] * n + ["f"] * n + ["~{memory}"])


@gluon.jit
def end_block(tile):
    """The tile, in a new basic block.

    ptxas moves a wait for wgmma up to the start of its block, above work that should run under the matmul. The branch is hardly
    ever taken, and does no harm when it is: the clock is then read again. All of the tile goes through it, so that the compiler
    cannot leave for later what makes the tile.
    """
    N: gl.constexpr = min(32, per_thread(tile.shape, tile.type.layout))
    return gl.inline_asm_elementwise(_branch_between(N), _in_and_out(N), [tile], dtype=gl.float32, is_pure=False, pack=N)


@gluon.jit
def opaque(number):
    """The number, of which the compiler then knows nothing: addresses made of it are worked out here, not kept over loops."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [gl.to_tensor(number)], dtype=gl.int32, is_pure=False, pack=1)
