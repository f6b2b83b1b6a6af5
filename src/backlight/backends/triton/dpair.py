"""dpair_bias (eq. 68). Where each pair has an entry of its own, the kernel of dq stores ds; a bias by key is the column sums of
ds, which the kernel of dk makes. Otherwise a program owns a tile of rows and keys, recomputes ds for one batch entry and head
after the other that share it, and adds up in registers (eq. 69). All sums have a fixed order.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import key_tile, load_vector, row_state, stream_tile
from backlight.backends.triton.pair import Pair, pair_start, pair_tile, store_pair
from backlight.backends.triton.powers import alpha_of
from backlight.backends.triton.primitives import (
    LOG2E,
    Block,
    Frame,
    Segment,
    Sight,
    key_span,
    logits_of,
    nth_segment,
    tile_gradient,
    tile_weights,
)
from backlight.backends.triton.visits import intervals_of
from backlight.call import Call

# programs that a large card should have to choose from, and members that are worth a partial sum
PROGRAMS = 1056
FEWEST_MEMBERS = 8
COLUMNS = 128


@triton.jit
def row_vectors(tensors, b, h, pitch16, i0, geometry, BM: tl.constexpr):
    """minus_lse2 and delta [BM, 1] of the rows of a head."""
    offset = row_state(b, h, 0, pitch16, geometry) + i0 + tl.arange(0, BM)
    return tl.load(tensors.minus_lse2_ptr + offset)[:, None], tl.load(tensors.delta_ptr + offset)[:, None]


@triton.jit
def member_of(number, entry_b, entry_h, own_heads, pair):
    """(batch entry, head) of a member of an entry of the bias."""
    return entry_b * pair.sharing + number // own_heads, entry_h + number % own_heads


@triton.jit
def member_ds(
    tensors, descriptors, block, tile, values, frame, lengths, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """ds of the rows of a block and a tile of keys: the first of them, what the rows span, whether the mask cuts it.

    values: pair bias less lse, in base 2, and delta; lengths: of whole tensors.
    """
    geometry = frame.geometry
    segment = block.segment
    q_desc, do_desc, k_desc, v_desc = descriptors
    TMA: tl.constexpr = q_desc is not None
    j0, span, at_edge = tile
    addend, delta = values
    sq, sk, n_segments = lengths
    i0 = block.row - segment.q_start
    rows_place = (block.b, block.h, segment.q_start)
    q = stream_tile(tensors.q, q_desc, rows_place, i0, segment.sq, BM, V.D, V.BD, TMA)
    k = key_tile(tensors.k, k_desc, block, j0, BN, V.D, V.BD, TMA)
    do = stream_tile(tensors.do, do_desc, rows_place, i0, segment.sq, BM, V.DV, V.BDV, TMA)
    v = key_tile(tensors.v, v_desc, block, j0, BN, V.DV, V.BDV, TMA)
    t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
    s, _ = logits_of(t, geometry.unit, addend, geometry, V, "none")
    if V.BIAS:
        entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
        table = head_table(tensors.table_ptr, block.h, geometry, True)
        s = add_bias(s, geometry.unit, table, entry, j0, span, geometry, V, BM, BN)
    dp = tl.dot(do, tl.trans(v), input_precision=V.PRECISION)
    intervals = intervals_of(frame.mask, block.b, block.h, segment, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, segment, frame.packing)
    keys = (j0 + tl.arange(0, BN))[None, :]
    p, _ = tile_weights(s, alpha_of(block.h, geometry, V), 0.0, block.position, keys, at_edge, sight, geometry, V, BN)
    ds, _ = tile_gradient(p, p, dp, delta, t, V)
    return ds


class Tensors(NamedTuple):
    """What `_dpair_kernel` reads in place and, last, what it makes."""

    q: Any
    k: Any
    v: Any
    do: Any
    minus_lse2_ptr: Any
    delta_ptr: Any
    table_ptr: Any
    pair: Any
    dpair: Any


@triton.jit(do_not_specialize=["members", "each", "groups", "bias_heads", "pitch16", "sq", "sk", "n_segments"])
def _dpair_kernel(
    tensors, q_desc, do_desc, k_desc, v_desc, members, each, groups, own_heads, bias_heads, pitch16, frame, sq, sk, n_segments,
    V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Program (tile, entry of the bias * groups + group) adds up `each` of the members of its entry. own_heads: how many query
    heads share a head of the bias, of which there are bias_heads. dpair: [groups,Bb,Hb,Sq,Sk], its batch the first two axes."""
    pair = tensors.pair
    geometry = frame.geometry
    key_tiles = tl.cdiv(sk, BN)
    i0, j0 = tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    group = tl.program_id(1) % groups
    entry_b, entry_h = tl.program_id(1) // groups // bias_heads, tl.program_id(1) // groups % bias_heads
    segment = Segment(0, 0, sq, sk, 0)
    shift = sk - sq
    position = (i0 + shift + tl.arange(0, BM))[:, None]
    last_position = tl.minimum(i0 + BM, sq) - 1 + shift
    block = Block(segment, 0, 0, 0, 0, i0, sq - i0, i0 + shift, last_position, position)
    span = key_span(block, geometry, V, BN)
    # keys beyond the end are not stored: they need no mask
    at_edge = V.INTERVALS > 0
    if V.LEFT or V.RIGHT:
        at_edge = at_edge | (j0 < span.low) | (j0 > span.high)
    bias = pair_tile(pair, pair.ptr, (entry_b * pair.sharing, entry_h, i0, j0), sq, V, False, BM, BN, False) * LOG2E
    total = tl.zeros([BM, BN], tl.float32)
    first = group * each
    stop = tl.minimum(first + each, members)
    if (j0 < span.start) | (j0 >= span.stop):
        stop = first
    if first < stop:
        # one member ahead: nothing else waits for memory
        first_b, first_h = member_of(first, entry_b, entry_h, own_heads, pair)
        next_lse2, next_delta = row_vectors(tensors, first_b, first_h, pitch16, i0, geometry, BM)
        for member in range(first, stop):
            b, h = member_of(member, entry_b, entry_h, own_heads, pair)
            own = Block(segment, 0, b, h, h // geometry.group, i0, sq - i0, i0 + shift, last_position, position)
            minus_lse2, delta = next_lse2, next_delta
            next_b, next_h = member_of(tl.minimum(member + 1, stop - 1), entry_b, entry_h, own_heads, pair)
            next_lse2, next_delta = row_vectors(tensors, next_b, next_h, pitch16, i0, geometry, BM)
            total += member_ds(
                tensors, (q_desc, do_desc, k_desc, v_desc), own, (j0, span, at_edge), (bias + minus_lse2, delta), frame,
                (sq, sk, n_segments), V, BM, BN,
            )  # fmt: skip
    entries = tl.num_programs(1) // groups // bias_heads
    store_pair(tensors.dpair, (group * entries + entry_b, entry_h, i0, j0), sq, total, BM, BN)


@triton.jit(do_not_specialize=["members", "each", "groups", "bias_heads", "pitch16", "sq", "sk", "n_segments"])
def _packed_dpair_kernel(
    tensors, q_desc, do_desc, k_desc, v_desc, members, each, groups, own_heads, bias_heads, pitch16, frame, sq, sk, n_segments,
    V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """`_dpair_kernel` of packed sequences, whose rows and keys are counted in each of them. No descriptors."""
    pair = tensors.pair
    geometry = frame.geometry
    key_tiles = tl.cdiv(pair.keys, BN)
    i0, j0 = tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    group = tl.program_id(1) % groups
    entry_b, entry_h = tl.program_id(1) // groups // bias_heads, tl.program_id(1) // groups % bias_heads
    place = (entry_b * pair.sharing, entry_h, i0, j0)
    bias = pair_tile(pair, pair.ptr, place, i0 + BM, V, False, BM, BN, False) * LOG2E
    rows = (i0 + tl.arange(0, BM))[:, None]
    total = tl.zeros([BM, BN], tl.float32)
    for member in range(group * each, tl.minimum(group * each + each, members)):
        number, h = member_of(member, entry_b, entry_h, own_heads, pair)
        segment = nth_segment(number, frame.packing)
        shift = segment.sk - segment.sq
        n_rows = segment.sq - i0
        last_position = tl.minimum(i0 + BM, segment.sq) - 1 + shift
        block = Block(
            segment, 0, 0, h, h // geometry.group, segment.q_start + i0, n_rows, i0 + shift, last_position, rows + shift
        )
        span = key_span(block, geometry, V, BN)
        if (n_rows > 0) & (j0 < segment.sk) & (j0 >= span.start) & (j0 < span.stop):
            offset = row_state(0, h, segment.q_start + i0, pitch16, geometry)
            minus_lse2 = load_vector(tensors.minus_lse2_ptr + offset, 0, n_rows, float("-inf"), BM, True)[:, None]
            delta = load_vector(tensors.delta_ptr + offset, 0, n_rows, 0.0, BM, True)[:, None]
            at_edge = (j0 < span.low) | (j0 > span.high) | (V.INTERVALS > 0)
            ds = member_ds(
                tensors, (q_desc, do_desc, k_desc, v_desc), block, (j0, span, at_edge), (bias + minus_lse2, delta), frame,
                (sq, sk, n_segments), V, BM, BN,
            )  # fmt: skip
            # other sequences may have these rows
            total += tl.where(rows < segment.sq, ds, 0.0)
    entries = tl.num_programs(1) // groups // bias_heads
    store_pair(tensors.dpair, (group * entries + entry_b, entry_h, i0, j0), i0 + BM, total, BM, BN)


class Parts(NamedTuple):
    """fp32 parts of dpair_bias in memory: pointer and strides. Member m is number m // own_heads and, of query heads that share
    one of the bias, m % own_heads."""

    ptr: Any
    batch: Any
    head: Any
    member: Any
    own_head: Any
    own_heads: Any


@triton.jit(do_not_specialize=["members", "rows", "bias_heads"])
def _pair_sums_kernel(parts, dpair, members, rows, bias_heads, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """dpair [Bb,Hb,rows,Sk]: sums over members of their parts, always in the same order."""
    b = tl.program_id(1) // bias_heads
    h = tl.program_id(1) % bias_heads
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    exists = at < tl.cast(rows, tl.int64) * dpair.keys
    parts_ptr = parts.ptr + (tl.cast(b, tl.int64) * parts.batch + tl.cast(h, tl.int64) * parts.head)
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, members, PARTS):
        member = first + tl.arange(0, PARTS)[:, None]
        part = (member // parts.own_heads).to(tl.int64) * parts.member
        part += (member % parts.own_heads).to(tl.int64) * parts.own_head
        total += tl.load(parts_ptr + part + at[None, :], mask=exists[None, :] & (member < members), other=0.0)
    pointers = pair_start(dpair, b * dpair.sharing, h, 0, 0) + at // dpair.keys * dpair.row + at % dpair.keys * dpair.key
    tl.store(pointers, tl.sum(total, 0).to(dpair.ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["members", "bias_heads", "sk"])
def _packed_columns_kernel(columns_ptr, cu_k_ptr, dpair, members, own_heads, bias_heads, sk, COLUMNS: tl.constexpr):
    """dpair [Zb,Hb,1,Sk] of the column sums [Hq,Tk] of packed sequences, always in the same order."""
    b = tl.program_id(1) // bias_heads
    h = tl.program_id(1) % bias_heads
    key = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for member in range(members):
        number, own = member_of(member, b, h, own_heads, dpair)
        start = tl.load(cu_k_ptr + number)
        n_keys = tl.load(cu_k_ptr + number + 1) - start
        total += tl.load(columns_ptr + tl.cast(own, tl.int64) * sk + start + key, mask=key < n_keys, other=0.0)
    pointers = pair_start(dpair, b * dpair.sharing, h, 0, 0) + key * dpair.key
    tl.store(pointers, total.to(dpair.ptr.dtype.element_ty), mask=key < dpair.keys)


def way_of(call: Call) -> str:
    """How dpair_bias is made: "tiles" of the dq kernel, "columns" of the dk kernel, or by an "owner" of each tile."""
    assert call.pair_bias is not None
    if call.pair_bias.shape[2] == 1:
        return "columns"
    return "tiles" if call.owns_pairs else "owner"


def empty_tiles(launch: Launch) -> Tensor:
    """For the dq kernel to fill: zeros where there are tiles that it does not visit."""
    call = launch.call
    assert call.pair_bias is not None
    if call.spec.masked or call.spec.rows or call.spec.entmax or call.varlen or not call.q.numel():
        return torch.zeros(call.pair_bias.shape, dtype=call.pair_bias.dtype, device=call.q.device)
    return torch.empty_like(call.pair_bias)


def empty_columns(launch: Launch) -> Tensor:
    """For the dk kernel to fill: [B,Hq,Sk]."""
    batch, heads = launch.call.q.shape[:2]
    return torch.empty(batch, heads, launch.call.k.shape[2], dtype=torch.float32, device=launch.call.q.device)


def dpair_of_columns(launch: Launch, columns: Tensor) -> Tensor:
    """[Bb,Hb,1,Sk] in the dtype of the bias."""
    call = launch.call
    assert call.pair_bias is not None
    _, heads, keys = columns.shape
    own_heads = heads // call.pair_bias.shape[1]
    if call.varlen:
        return packed_dpair_of_columns(launch, columns, call.sharing * own_heads, own_heads)
    parts = Parts(columns, call.sharing * heads * keys, keys, heads * keys, keys, own_heads)
    return summed(launch, parts, call.sharing * own_heads, 32)


def packed_dpair_of_columns(launch: Launch, columns: Tensor, members: int, own_heads: int) -> Tensor:
    pair_bias = launch.call.pair_bias
    assert pair_bias is not None
    dpair = torch.empty_like(pair_bias)
    entries, bias_heads, _, keys = pair_bias.shape
    grid = (triton.cdiv(keys, COLUMNS), entries * bias_heads)
    if grid[0] and grid[1]:
        cu_k = launch.borders(launch.call.cu_seqlens_k, COLUMNS)
        sizes = (members, own_heads, bias_heads, columns.shape[-1])
        constants = {"COLUMNS": COLUMNS, "num_warps": 4, "enable_fp_fusion": True}
        launch.start(_packed_columns_kernel, grid, columns, cu_k, launch.pair_of(dpair), *sizes, **constants)
    return dpair


class Owners(NamedTuple):
    """Programs that own tiles of the bias: tiles of an entry, numbers as in `_dpair_kernel`, what they fill, where it lies."""

    tiles: int
    members: int
    each: int
    groups: int
    own_heads: int
    bias_heads: int
    made: Tensor
    target: Pair

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.members, self.each, self.groups, self.own_heads, self.bias_heads


def owners_of(launch: Launch, config: KernelConfig) -> Owners:
    call = launch.call
    assert call.pair_bias is not None
    entries, bias_heads, sq, sk = call.pair_bias.shape
    own_heads = call.q.shape[1] // bias_heads
    members = call.sharing * own_heads
    tiles = triton.cdiv(sq, config.block_m) * triton.cdiv(sk, config.block_n)
    each, groups = groups_of(members, tiles * entries * bias_heads)
    if groups == 1:
        made = torch.empty_like(call.pair_bias)
        target = launch.pair_of(made)._replace(sharing=1)
    else:
        made = torch.empty(groups, entries, bias_heads, sq, sk, dtype=torch.float32, device=call.q.device)
        target = Pair(made, bias_heads * sq * sk, sq * sk, sk, 1, 1, sq, sk)
    return Owners(tiles, members, each, groups, own_heads, bias_heads, made, target)


def sum_of_owners(launch: Launch, owners: Owners) -> Tensor:
    """What they filled, in the dtype of the bias."""
    if owners.groups == 1:
        return owners.made
    _, entries, bias_heads, sq, sk = owners.made.shape
    pairs = sq * sk
    return summed(launch, Parts(owners.made, bias_heads * pairs, pairs, entries * bias_heads * pairs, 0, 1), owners.groups, 4)


def no_pairs(call: Call) -> Tensor | None:
    """dpair_bias of calls without a pair."""
    if call.q.numel() and call.k.numel():
        return None
    assert call.pair_bias is not None
    return torch.zeros(call.pair_bias.shape, dtype=call.pair_bias.dtype, device=call.q.device)


def dpair_by_owner(launch: Launch, rows: RowState) -> Tensor:
    call = launch.call
    assert call.pair_bias is not None
    nothing = no_pairs(call)
    if nothing is not None:
        return nothing
    config = launch.config("dpair")
    owners = owners_of(launch, config)
    own = (rows_of(x) for x in (launch.q, launch.k, launch.v, rows.do))
    state = rows.minus_lse2, rows.delta, launch.table
    packing, geometry, *lengths = launch.shared(call.cu_seqlens_q, config.block_m)
    launch.start(
        _packed_dpair_kernel if call.varlen else _dpair_kernel,
        (owners.tiles, call.pair_bias.shape[0] * owners.bias_heads * owners.groups),
        Tensors(*own, *state, launch.pair_of(call.pair_bias), owners.target),
        *launch.all_described(config, (launch.q, rows.do), (launch.k, launch.v)),
        *owners.numbers,
        rows.pitch16,
        Frame(launch.mask(config, of_rows=True), packing, geometry),
        *lengths,
        V=launch.variant,
        **config.launch,
    )
    return sum_of_owners(launch, owners)


def groups_of(members: int, tiles: int) -> tuple[int, int]:
    """(members to a group, groups): few tiles are shared by several programs, each with a part of the members."""
    groups = max(1, min(PROGRAMS // tiles, members // FEWEST_MEMBERS))
    each = triton.cdiv(members, groups)
    return each, triton.cdiv(members, each)


def summed(launch: Launch, parts: Parts, members: int, at_once: int) -> Tensor:
    """`_pair_sums_kernel`, `at_once` members at a time."""
    pair_bias = launch.call.pair_bias
    assert pair_bias is not None
    dpair = torch.empty_like(pair_bias)
    entries, bias_heads, rows, keys = pair_bias.shape
    grid = (triton.cdiv(rows * keys, COLUMNS), entries * bias_heads)
    if grid[0] and grid[1]:
        launch.start(
            _pair_sums_kernel,
            grid,
            parts,
            launch.pair_of(dpair),
            *(members, rows, bias_heads),
            PARTS=at_once,
            COLUMNS=COLUMNS,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return dpair
