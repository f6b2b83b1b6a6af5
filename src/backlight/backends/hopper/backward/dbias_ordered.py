"""dbias in a fixed order: one CTA owns one offset between row tile and key tile, and recomputes ds of all tiles at that offset.

Tiles at one offset carry the same bias, the same distances and the same mask, so ds [128 keys, 64 rows] is summed element by
element in registers; its diagonals are left once, as `dbias.py` describes, in a place of their own, and
`_dbias_ordered_sum_kernel` adds them up in ascending order. Two products more than the main kernel needs, over the band only:
for deterministic calls, and for heads wider than 128.
"""

# device code: compiled by Triton from its own types, never run by Python

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from backlight.backends.hopper.arguments import Head, Packing, Sizes
from backlight.backends.hopper.backward.arguments import Terms, table_numbers, units_of
from backlight.backends.hopper.backward.dbias import CELLS, GROUPS, parts_of
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.compat import Maybe, arguments, warpgroup_mma_wait
from backlight.backends.hopper.launch import Launch
from backlight.backends.hopper.primitives import barriers, load_tile, mma_over_columns, phase_of, stage_of, tiles_of
from backlight.backends.hopper.scores import gradient, hidden_out, of_rows, seen_at, weights
from backlight.backends.hopper.terms import TABLE_PAD, bias_tile, capped, threshold

# rows and keys of a tile, eight-row groups of it
ROWS = gl.constexpr(64)
KEYS = gl.constexpr(16 * 8)
BLOCKS = gl.constexpr(8)
# columns of a program that adds up
BLOCK = gl.constexpr(64)
# what a tile leaves, in cells: BLOCKS row groups and, behind them, the edge that belongs to the group before the first
GROUP_CELLS = gl.constexpr(GROUPS.value * CELLS.value)
EDGE = gl.constexpr(BLOCKS.value * GROUP_CELLS.value)
TILE_CELLS = gl.constexpr(EDGE.value + GROUP_CELLS.value)


@gluon.jit
def leave(pointer, value):
    """Write [key groups, cells] to memory."""
    cells = gl.reshape(value, [GROUPS, CELLS])
    group = gl.arange(0, GROUPS, gl.SliceLayout(1, cells.type.layout))
    cell = gl.arange(0, CELLS, gl.SliceLayout(0, cells.type.layout))
    gl.store(pointer + gl.expand_dims(group * CELLS, 1) + gl.expand_dims(cell, 0), cells)


class Variant(NamedTuple):
    """What is compiled in. PAD: rows of a block of the padded vectors; ST: stages of the rings."""

    D: int
    DV: int
    BD: int
    BDV: int
    PAD: int
    ST: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    VARLEN: bool


@arguments
class Ordered(Sizes):
    """Sizes, and the kernel's other arguments in their order."""

    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    rows: Maybe
    terms: Maybe
    partial_ptr: gl.tensor
    packing: Maybe
    padded_rows: gl.tensor
    units: Maybe
    n_bias: gl.tensor
    origin: gl.tensor
    V: gl.constexpr


@arguments
class Offset(Head):
    """Tiles of a head whose rows begin `gap` after their keys."""

    padded_row: gl.tensor
    gap: gl.tensor


@arguments
class Ring:
    """Shared memory of a CTA and its mbarriers."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def offset_of(p):
    z = gl.program_id(1) // p.heads
    h = gl.program_id(1) % p.heads
    kv_head = h // p.group
    b = z
    q_start = z * 0
    k_start = z * 0
    sq = p.sq
    sk = p.sk
    padded_row = gl.program_id(1) * p.padded_rows
    if p.V.VARLEN:
        b = z * 0
        q_start = gl.load(p.packing.cu_q_ptr + z)
        k_start = gl.load(p.packing.cu_k_ptr + z)
        sq = gl.load(p.packing.cu_q_ptr + z + 1) - q_start
        sk = gl.load(p.packing.cu_k_ptr + z + 1) - k_start
        padded_row = h * p.padded_rows + gl.load(p.packing.cu_row_tiles_ptr + z) * p.V.PAD
    offset = sk - sq + p.origin
    gap = (gl.program_id(0) - ((offset + ROWS - 1) >> 6)) * ROWS
    return Offset(b, h, kv_head, q_start, k_start, sq, sk, padded_row, gap)


@gluon.jit
def common_bias(p, t, zero):
    """The bias of all tiles, -inf where a pair is not seen."""
    # where the first row and key of a tile lie in the table
    column = t.gap + (t.sk - t.sq + p.origin)
    key = gl.arange(0, KEYS, gl.SliceLayout(1, zero.type.layout))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, zero.type.layout))
    distance = gl.expand_dims(row, 0) - gl.expand_dims(key, 1) + t.gap + t.sk - t.sq
    bias = bias_tile(p.terms.table_ptr + t.h.to(gl.int64) * (p.n_bias + 2 * TABLE_PAD), column, p.n_bias, zero, True)
    return seen_at(bias, distance, p.left, p.right, p.V.HAS_LEFT, p.V.HAS_RIGHT)


@gluon.jit
def ring_of(p):
    dtype: gl.constexpr = p.q_desc.dtype
    q = tiles_of(dtype, p.V.ST, ROWS, p.V.BD)
    do = tiles_of(dtype, p.V.ST, ROWS, p.V.BDV)
    k = tiles_of(dtype, p.V.ST, KEYS, p.V.BD)
    v = tiles_of(dtype, p.V.ST, KEYS, p.V.BDV)
    return Ring(q, do, k, v, barriers(p.V.ST, 1), barriers(p.V.ST, 1))


@gluon.jit
def load_step(p, t, ring, step, count):
    """The tiles of a step into the next stage, once it is free."""
    SIZE: gl.constexpr = (
        p.q_desc.block_type.nbytes + p.do_desc.block_type.nbytes + p.k_desc.block_type.nbytes + p.v_desc.block_type.nbytes
    )
    stage = stage_of(count, p.V.ST)
    bar = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), phase_of(count, p.V.ST) ^ 1)
    mbarrier.expect(bar, SIZE)
    load_tile(p.q_desc, t.b, t.h, t.q_start, t.sq, step * KEYS + t.gap, bar, ring.q.index(stage), p.V.VARLEN)
    load_tile(p.do_desc, t.b, t.h, t.q_start, t.sq, step * KEYS + t.gap, bar, ring.do.index(stage), p.V.VARLEN)
    load_tile(p.k_desc, t.b, t.kv_head, t.k_start, t.sk, step * KEYS, bar, ring.k.index(stage), p.V.VARLEN)
    load_tile(p.v_desc, t.b, t.kv_head, t.k_start, t.sk, step * KEYS, bar, ring.v.index(stage), p.V.VARLEN)


@gluon.jit
def ds_of_step(p, t, ring, bias, zero, limit, step, count):
    """ds [128 keys, 64 rows] of the tiles of a step."""
    key = gl.arange(0, KEYS, gl.SliceLayout(1, zero.type.layout))
    row = gl.arange(0, ROWS, gl.SliceLayout(0, zero.type.layout))
    stage = stage_of(count, p.V.ST)
    mbarrier.wait(ring.full.index(stage), phase_of(count, p.V.ST))
    # products 1 and 2
    s_token = mma_over_columns(ring.k.index(stage), ring.q.index(stage), zero, p.V.D)
    dp_token = mma_over_columns(ring.v.index(stage), ring.do.index(stage), zero, p.V.DV)
    rows = t.padded_row + step * KEYS + t.gap + row
    lse = gl.load(p.rows.lse_ptr + rows)
    delta = gl.load(p.rows.delta_ptr + rows)
    s, dp = warpgroup_mma_wait(0, deps=[s_token, dp_token])
    mbarrier.arrive(ring.empty.index(stage), count=1)
    if p.units.cap is not None:
        s = capped(s, p.units.cap)
    pt = weights(s + bias, lse, p.units.scale_log2, True)
    # with tau, too: the gradient of a hidden key has p, which is 0, as a factor
    pt = hidden_out(pt, gl.expand_dims(step * KEYS + key < t.sk, 1), False)
    if p.terms.tau_ptr is not None:
        # not `surviving`: a shorter loop, but ten more registers
        dp = gl.where(pt + of_rows(gl.load(p.rows.share_ptr + rows), True) > limit, dp, 0.0)
    return gradient(pt, dp, delta, True)


@gluon.jit
def leave_sums(p, total):
    """The diagonals of ds in a place of their own."""
    near, far = gl.split(gl.permute(gl.reshape(total, [GROUPS, 2, 8, BLOCKS, 8]), (0, 2, 4, 3, 1)))
    near = parts_of(near, BLOCKS)
    far = parts_of(far, BLOCKS)
    place = gl.program_id(1).to(gl.int64) * gl.num_programs(0) + gl.program_id(0)
    partial_ptr = p.partial_ptr + place * TILE_CELLS
    for c in gl.static_range(BLOCKS):
        value = near[c]
        if c + 1 < BLOCKS:
            value = value + far[c + 1]
        leave(partial_ptr + c * GROUP_CELLS, value)
    leave(partial_ptr + EDGE, far[0])


@gluon.jit(do_not_specialize=["padded_rows", "heads", "group", "sq", "sk", "left", "right", "n_bias", "origin"])
def _dbias_ordered_kernel(
    q_desc, do_desc, k_desc, v_desc, rows, terms, partial_ptr, packing,
    padded_rows, heads, group, sq, sk, left, right, units, n_bias, origin, V: gl.constexpr,
):  # fmt: skip
    p = Ordered(
        heads, group, sq, sk, left, right, q_desc, do_desc, k_desc, v_desc, rows, terms, partial_ptr, packing,
        padded_rows, units, n_bias, origin, V,
    )  # fmt: skip
    ST: gl.constexpr = V.ST
    t = offset_of(p)
    zero = gl.zeros([KEYS, ROWS], gl.float32, gl.NVMMADistributedLayout([3, 0], [8, 1], [16, ROWS, 16]))
    bias = common_bias(p, t, zero)
    limit = 0.0
    if terms.tau_ptr is not None:
        limit = threshold(gl.load(terms.tau_ptr + t.h).to(gl.float32))
    ring = ring_of(p)
    fence_async_shared()
    # key tiles whose rows exist
    first = gl.cdiv(gl.maximum(-t.gap, 0), KEYS)
    last = gl.maximum(gl.minimum(gl.cdiv(t.sk, KEYS), gl.cdiv(gl.maximum(t.sq - t.gap, 0), KEYS)), first)
    total = zero
    for step in range(first - (ST - 1), last):
        ahead = step + ST - 1
        if ahead < last:
            load_step(p, t, ring, ahead, ahead - first)
        if step >= first:
            total = total + ds_of_step(p, t, ring, bias, zero, limit, step, step - first)
    leave_sums(p, total)


class Out(NamedTuple):
    """dbias, and the borders of packed sequences."""

    dbias_ptr: Any
    cu_q_ptr: Any
    cu_k_ptr: Any


@triton.jit(do_not_specialize=["segments", "heads", "n", "offsets", "sq", "sk", "origin"])
def _dbias_ordered_sum_kernel(partial_ptr, out, segments, heads, n, offsets, sq, sk, origin, VARLEN: tl.constexpr):
    """Column = 64 offset + rest + 8 c + x - b - 16 w; c = -1 stands last."""
    h = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = column < n
    total = tl.zeros([BLOCK], tl.float32)
    for z in range(segments):
        if VARLEN:
            sq = tl.load(out.cu_q_ptr + z + 1) - tl.load(out.cu_q_ptr + z)
            sk = tl.load(out.cu_k_ptr + z + 1) - tl.load(out.cu_k_ptr + z)
        gap = sk - sq + origin
        rest = gap - ((gap + 63) >> 6) * 64
        base = (z * heads + h).to(tl.int64) * offsets * TILE_CELLS
        for cell in range(64):
            w = cell // 8
            b = cell % 8
            place = column - rest + b + 16 * w
            block = place // 8
            inner = w * 64 + b * 8 + place % 8
            at = block // 8 * TILE_CELLS + block % 8 * GROUP_CELLS + inner
            total += tl.load(partial_ptr + base + at, mask=exists & (block // 8 < offsets), other=0.0)
            edge = (block + 1) // 8
            at = edge * TILE_CELLS + EDGE + inner
            total += tl.load(partial_ptr + base + at, mask=exists & ((block + 1) % 8 == 0) & (edge < offsets), other=0.0)
    tl.store(out.dbias_ptr + h * n + column, total.to(out.dbias_ptr.dtype.element_ty), mask=exists)


def ordered_dbias(launch: Launch, rows: Rows) -> Tensor:
    """[Hq, n] in the dtype of bias, bitwise repeatable."""
    call = launch.call
    assert call.bias is not None
    n = call.bias.shape[1]
    segments = launch.batch if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1
    # multiples of 64 whose tile, 128 keys x 64 rows, can meet a column of the table
    offsets = (n + 189) // 64 + 1
    partial = torch.empty(segments, launch.heads, offsets, TILE_CELLS.value, dtype=torch.float32, device=call.q.device)
    out = torch.empty(launch.heads, n, dtype=call.bias.dtype, device=call.q.device)
    packing, terms = Packing(rows.cu_q, rows.cu_k, None, rows.first_tiles), Terms(launch.table, launch.tau)
    diagonals = Out(out, rows.cu_q, rows.cu_k)

    def describe_tiles() -> dict[str, Any]:
        args = [
            launch.rows(call.q, ROWS.value, launch.bd),
            launch.rows(rows.do, ROWS.value, launch.bdv),
            launch.rows(call.k, KEYS.value, launch.bd),
            launch.rows(call.v, KEYS.value, launch.bdv),
            rows.state,
            terms,
            partial,
            packing,
            rows.tiles * rows.config.block_m,
            *launch.geometry,
            units_of(call)._replace(scale=None),
            *table_numbers(call),
        ]
        stages = 2 if max(launch.bd, launch.bdv) <= 128 else 1
        variant = Variant(**launch.widths, PAD=rows.config.block_m, ST=stages, **launch.flags)
        return {"grid": (offsets, segments * launch.heads), "args": args, "constants": {"V": variant}, "num_warps": 8}

    def describe_sum() -> dict[str, Any]:
        args = [partial, diagonals, segments, launch.heads, n, offsets, launch.sq, launch.sk, call.spec.bias_origin]
        grid = (-(-n // BLOCK.value), launch.heads)
        return {"grid": grid, "args": args, "constants": {"VARLEN": call.varlen}, "num_warps": 1}

    tensors = (call.q, rows.do, call.k, call.v, *rows.state, *terms, partial, *packing)
    launch.start(_dbias_ordered_kernel, tensors, describe_tiles)
    launch.start(_dbias_ordered_sum_kernel, (partial, *diagonals), describe_sum)
    return out
