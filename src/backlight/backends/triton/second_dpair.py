"""dpair_bias of second derivatives: the sums of the ds of eq. 58, in the three ways of `dpair.py`."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import add_bias, head_table, table_entry
from backlight.backends.triton.dpair import member_of, no_pairs, owners_of, sum_of_owners
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.loads import row_state
from backlight.backends.triton.moving import ds_of
from backlight.backends.triton.pair import pair_tile, store_pair
from backlight.backends.triton.primitives import LOG2E, Block, Segment, Sight, key_span, nth_segment, tile_weights
from backlight.backends.triton.second_rows import Prepared
from backlight.backends.triton.second_tile import recomputed, start_for_ds
from backlight.backends.triton.visits import intervals_of


class Sharing(NamedTuple):
    """Of an entry of the pair bias: how many batch entries and heads share it, how many of them a program adds up, how many are
    heads, of how many heads of the bias; and where programs store their sums [groups,Bb,Hb,Sq,Sk], the first two axes a batch.
    pitch16: of row buffers."""

    members: Any
    each: Any
    own_heads: Any
    bias_heads: Any
    dpair: Any
    pitch16: Any


@triton.jit
def member_block(number, h, i0, sq, sk, frame, V: tl.constexpr, BM: tl.constexpr):
    """The rows from i0 on of a head of a batch entry or packed sequence."""
    segment, b = Segment(0, 0, sq, sk, 0), number
    if V.VARLEN:
        segment, b = nth_segment(number, frame.packing), 0
    first = i0 + segment.sk - segment.sq
    last = tl.minimum(i0 + BM, segment.sq) - 1 + segment.sk - segment.sq
    position = (first + tl.arange(0, BM))[:, None]
    g = h // frame.geometry.group
    return Block(segment, 0, b, h, g, segment.q_start + i0, segment.sq - i0, first, last, position)


@triton.jit
def member_ds(
    tensors, block, j0, pitch16, biases, frame, lengths,
    V: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """ds of a block of rows and the keys from j0 on. biases: the tile of the pair bias in base 2, that of its tangent; lengths:
    of whole tensors."""
    bias, tbias = biases
    BM: tl.constexpr = block.position.shape[0]
    geometry, segment = frame.geometry, block.segment
    sq, sk, n_segments = lengths
    i0 = block.row - segment.q_start
    rows_at = (block.b, block.h, segment.q_start, i0, segment.sq)
    keys_at = (block.b, block.g, segment.k_start, j0, segment.sk)
    offset = row_state(block.b, block.h, segment.q_start, pitch16, geometry)
    s, ts, b, c, mu, eta, delta = recomputed(tensors, rows_at, keys_at, offset, bias, geometry, V, T, BM, BN)
    ts += tbias
    span = key_span(block, geometry, V, BN)
    entry = table_entry(block.first_position - j0 + geometry.bias_origin, geometry, True)
    if V.BIAS:
        table_ptr = head_table(tensors.table_ptr, block.h, geometry, True)
        s = add_bias(s, geometry.unit, table_ptr, entry, j0, span, geometry, V, BM, BN)
    if T.BIAS:
        ttable_ptr = head_table(tensors.ttable_ptr, block.h, geometry, True)
        ts = add_bias(ts, 1.0, ttable_ptr, entry, j0, span, geometry, V, BM, BN)
    intervals = intervals_of(frame.mask, block.b, block.h, segment, sq, sk, n_segments, geometry, V, BN)
    sight = Sight(intervals, segment, frame.packing)
    at_edge = (j0 < span.low) | (j0 > span.high) | (V.INTERVALS > 0)
    keys = (j0 + tl.arange(0, BN))[None, :]
    p, _ = tile_weights(s, 0.0, 0.0, block.position, keys, at_edge, sight, geometry, V, BN)
    return ds_of(p, p * (ts - mu), b, eta, c, delta)


@triton.jit(do_not_specialize=["sq", "sk", "n_segments"])
def _second_dpair_kernel(
    tensors, sharing, frame, sq, sk, n_segments, V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Program (tile, entry of the bias, group) adds up the members of its group, always in the same order."""
    pair, tpair = tensors.pairs.pair, tensors.pairs.tpair
    key_tiles = tl.cdiv(pair.keys, BN)
    i0, j0 = tl.program_id(0) // key_tiles * BM, tl.program_id(0) % key_tiles * BN
    entry_b, entry_h = tl.program_id(1) // sharing.bias_heads, tl.program_id(1) % sharing.bias_heads
    place = (entry_b * pair.sharing, entry_h, i0, j0)
    bias = pair_tile(pair, pair.ptr, place, i0 + BM, V, False, BM, BN, False) * LOG2E
    tbias = 0.0
    if T.PAIR:
        tbias = pair_tile(tpair, tpair.ptr, place, i0 + BM, V, False, BM, BN, False)
    total = tl.zeros([BM, BN], tl.float32)
    first = tl.program_id(2) * sharing.each
    stop = tl.minimum(first + sharing.each, sharing.members)
    if not V.VARLEN:
        span = key_span(member_block(0, 0, i0, sq, sk, frame, V, BM), frame.geometry, V, BN)
        if (j0 < span.start) | (j0 >= span.stop):
            stop = first
    if first < stop:
        for member in range(first, stop):
            number, h = member_of(member, entry_b, entry_h, sharing.own_heads, pair)
            block = member_block(number, h, i0, sq, sk, frame, V, BM)
            if V.VARLEN:
                # other sequences may have these rows and keys
                if (block.n_rows > 0) & (j0 < block.segment.sk):
                    ds = member_ds(
                        tensors, block, j0, sharing.pitch16, (bias, tbias), frame, (sq, sk, n_segments), V, T, BN
                    )  # fmt: skip
                    total += tl.where((i0 + tl.arange(0, BM))[:, None] < block.segment.sq, ds, 0.0)
            else:
                total += member_ds(tensors, block, j0, sharing.pitch16, (bias, tbias), frame, (sq, sk, n_segments), V, T, BN)
    entries = tl.num_programs(1) // sharing.bias_heads
    store_pair(sharing.dpair, (tl.program_id(2) * entries + entry_b, entry_h, i0, j0), i0 + BM, total, BM, BN)


def second_dpair_by_owner(launch: Launch, given: Prepared) -> Tensor:
    call = launch.call
    assert call.pair_bias is not None
    nothing = no_pairs(call)
    if nothing is not None:
        return nothing
    config = launch.config("second_dpair")
    owners = owners_of(launch, config)
    sharing = Sharing(owners.members, owners.each, owners.own_heads, owners.bias_heads, owners.target, given.pitch16)
    grid = (owners.tiles, call.pair_bias.shape[0] * owners.bias_heads, owners.groups)
    start_for_ds(_second_dpair_kernel, grid, launch, given, config, sharing)
    return sum_of_owners(launch, owners)
