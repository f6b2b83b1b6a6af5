"""dbias: one program owns one offset between row tile and key tile, and adds up ds of all tiles at that offset (eq. 22).

Tiles at one offset carry the same bias, the same distances and the same mask, so ds is summed element by element in registers
and its diagonals only once, at the end. Keys start wherever the offset puts them, so offsets are multiples of BN for any
lengths, and segments of different lengths share their programs. Partial sums are added up in fixed order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton import small
from backlight.backends.triton.band import bias_tile, head_table, table_entry
from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, rows_of
from backlight.backends.triton.loads import load_vector, row_state, stream_tile
from backlight.backends.triton.pair import pair_place, pair_tile
from backlight.backends.triton.powers import above, alpha_of, raised
from backlight.backends.triton.primitives import (
    LOG2E,
    logits_of,
    one_segment,
    own_counts,
    surviving,
    tile_gradient,
    visible_count,
)
from backlight.backends.triton.visits import in_intervals, intervals_of

# enough programs to fill a large card a few times over, whatever the number of heads
PROGRAMS = 1024


@triton.jit
def reaching_bias(table_ptr, h, column, geometry, V: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """(the base-2 bias of a tile whose first pair has table column `column`, -inf out of reach; whether reach or a mask may cut
    such a tile)."""
    skew = tl.arange(0, BM)[:, None] - tl.arange(0, BN)[None, :]
    bias = bias_tile(head_table(table_ptr, h, geometry, True), table_entry(column, geometry, True), geometry, V, BM, BN)
    distance = column + skew - geometry.bias_origin
    cut = False
    if V.LEFT:
        bias = tl.where(distance <= geometry.left, bias, float("-inf"))
        cut = column + BM - 1 - geometry.bias_origin > geometry.left
    if V.RIGHT:
        bias = tl.where(-distance <= geometry.right, bias, float("-inf"))
        cut = cut | (BN - 1 - column + geometry.bias_origin > geometry.right)
    if V.INTERVALS > 0:
        cut = True
    return bias * geometry.unit, cut


@triton.jit
def tiles_at(segment, column, geometry, BM: tl.constexpr, BN: tl.constexpr):
    """(ahead: row i0 meets key i0 + ahead at this offset; first and last tile of rows that meet keys there)."""
    ahead = segment.sk - segment.sq + geometry.bias_origin - column
    first_tile = tl.maximum(1 - BN - ahead, 0) // BM
    last_tile = tl.cdiv(tl.maximum(tl.minimum(segment.sq, segment.sk - ahead), 0), BM)
    return ahead, first_tile, last_tile


@triton.jit
def of_keys(p, rows, keys, j0, intervals, segment, V: tl.constexpr, BN: tl.constexpr):
    """p of keys, from j0 on, that exist and that a mask by intervals shows: other masks are in the bias."""
    if (j0 < 0) | (j0 + BN > segment.sk):
        p = tl.where((keys >= 0) & (keys < segment.sk), p, 0.0)
    if V.INTERVALS > 0:
        held = tl.maximum(tl.minimum(keys, segment.sk - 1), 0)
        seen = in_intervals(rows, held, intervals, segment.sq, V, BN)
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def store_diagonals(partial_ptr, total, splits, BM: tl.constexpr, BN: tl.constexpr):
    """Sums of the diagonals of a program's tile, where `_dbias_sums_kernel` looks for them."""
    offset_index = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    row_lanes = tl.arange(0, BM)
    key_lanes = tl.arange(0, BN)
    # cell (i, j) lies on diagonal x = turn_i + j, whose column is `column + BM - 1 - x`; rotated, x mod BN is its lane
    turn = (BM - 1 - row_lanes)[:, None]
    rotated = tl.gather(total, (key_lanes[None, :] - turn + BN) % BN, 1)
    first_half = key_lanes[None, :] >= turn
    partial_ptr += (
        tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + split * (tl.num_programs(0) // splits) + offset_index
    ) * (2 * BN)
    place = BM + BN - 2 - key_lanes
    tl.store(partial_ptr + place, tl.sum(tl.where(first_half, rotated, 0.0), 0))
    tl.store(partial_ptr + place - BN, tl.sum(tl.where(first_half, 0.0, rotated), 0), mask=place >= BN)


@triton.jit
def weights_of(s, alpha, V: tl.constexpr):
    """p, or what ds has in its place under entmax, of scores that the mask has not touched yet."""
    if V.ENTMAX != 0:
        p = raised(above(s, alpha), 1 / (alpha - 1), V, 1)
    else:
        p = tl.exp2(s)
    return p


@triton.jit(do_not_specialize=["splits", "pitch16", "sq", "sk", "n_segments"])
def _dbias_kernel(
    q_rows, k_rows, v_rows, do_rows, q_desc, k_desc, v_desc, do_desc, minus_lse2_ptr, delta_ptr, share_ptr, table_ptr,
    partial_ptr, splits, pitch16, pair, mask, packing, geometry, sq, sk, n_segments,
    V: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    offset_index = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    b = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    g = h // geometry.group
    column = offset_index * BN
    row_lanes = tl.arange(0, BM)
    key_lanes = tl.arange(0, BN)
    bias, cut = reaching_bias(table_ptr, h, column, geometry, V, BM, BN)
    total = tl.zeros([BM, BN], tl.float32)
    alpha = alpha_of(h, geometry, V)
    packing = own_counts(packing, b, h, sq, geometry, V)
    segments = 1
    if V.VARLEN:
        segments = n_segments
    for z in range(segments):
        segment = one_segment(z, packing, sq, sk, V)
        intervals = intervals_of(mask, b, h, segment, sq, sk, n_segments, geometry, V, BN)
        place = (b, h, segment.q_start)
        key_place = (b, g, segment.k_start)
        ahead, first_tile, last_tile = tiles_at(segment, column, geometry, BM, BN)
        row_offset = row_state(b, h, segment.q_start, pitch16, geometry)
        # this split's tiles are first_tile + split, and every splits-th after it
        if first_tile + split < last_tile:
            for tile in range(first_tile + split, last_tile, splits):
                i0 = tl.multiple_of(tile * BM, BM)
                j0 = i0 + ahead
                keys = (j0 + key_lanes)[None, :]
                q = stream_tile(q_rows, q_desc, place, i0, segment.sq, BM, V.D, V.BD, TMA)
                k = stream_tile(k_rows, k_desc, key_place, j0, segment.sk, BN, V.D, V.BD, TMA)
                do = stream_tile(do_rows, do_desc, place, i0, segment.sq, BM, V.DV, V.BDV, TMA)
                v = stream_tile(v_rows, v_desc, key_place, j0, segment.sk, BN, V.DV, V.BDV, TMA)
                minus_lse2 = load_vector(minus_lse2_ptr + row_offset, i0, segment.sq, float("-inf"), BM, V.VARLEN)[:, None]
                delta = load_vector(delta_ptr + row_offset, i0, segment.sq, 0.0, BM, V.VARLEN)[:, None]
                t = tl.dot(q, tl.trans(k), input_precision=V.PRECISION)
                dp = tl.dot(do, tl.trans(v), input_precision=V.PRECISION)
                s, _ = logits_of(t, geometry.unit, bias + minus_lse2, geometry, V, "none")
                if V.PAIR > 0:
                    here = pair_place(b, h, i0, j0, segment, V)
                    s += pair_tile(pair, pair.ptr, here, segment.sq, V, False, BM, BN, False, True) * LOG2E
                p = weights_of(s, alpha, V)
                p = of_keys(p, (i0 + row_lanes)[:, None], keys, j0, intervals, segment, V, BN)
                share = minus_lse2
                if V.TAU:
                    share = load_vector(share_ptr + row_offset, i0, segment.sq, 0.0, BM, V.VARLEN)[:, None]
                    if not V.SINK:
                        position = (i0 + segment.sk - segment.sq + row_lanes)[:, None]
                        if cut | (segment.sk == 1):
                            alone = visible_count(position, segment, packing, geometry, V) == 1
                            p = tl.where(alone & (p > 0), 1.0, p)
                ds, _ = tile_gradient(p, surviving(p, share, V), dp, delta, t, V)
                total += ds
    store_diagonals(partial_ptr, total, splits, BM, BN)


def dbias_of(launch: Launch, rows: RowState) -> Tensor:
    """[Hq, n] in the dtype of bias."""
    config = launch.config("dbias")
    parts = parts_of(launch, config)
    if parts is None:
        return torch.zeros_like(launch.call.bias)
    tma, (q_desc, do_desc) = launch.descriptors(config, config.block_m, launch.q, rows.do)
    tma_keys, (k_desc, v_desc) = launch.descriptors(config, config.block_n, launch.k, launch.v)
    launch.start(
        _dbias_kernel,
        parts.grid,
        *(rows_of(x) for x in (launch.q, launch.k, launch.v, rows.do)),
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        rows.minus_lse2,
        rows.delta,
        rows.share,
        launch.table,
        parts.partial,
        parts.splits,
        rows.pitch16,
        launch.pair_of(launch.call.pair_bias),
        # offsets lie across key tiles: intervals are compared in all tiles, and no list is followed
        launch.given_mask(config, of_rows=True),
        *launch.shared(launch.call.cu_seqlens_q, config.block_m),
        V=launch.variant,
        TMA=tma and tma_keys,
        **config.launch,
    )
    return sum_of(launch, parts, config)


class Parts(NamedTuple):
    """Room for the partial sums of programs, and how many there are of an offset."""

    partial: Tensor
    splits: int

    @property
    def grid(self) -> tuple[int, int]:
        batch, heads, splits, offsets, *_ = self.partial.shape
        return offsets * splits, batch * heads


def parts_of(launch: Launch, config: KernelConfig) -> Parts | None:
    """None where nothing is to be summed."""
    call = launch.call
    assert call.bias is not None
    assert config.block_m <= config.block_n, "a diagonal must end within two neighbouring tiles"
    batch, heads, sq, _ = call.q.shape
    n, block = call.bias.shape[1], config.block_n
    if not (batch and heads and sq and call.k.shape[2] and n):
        return None
    # multiples of block within [x - i, x - i + block) for a column x < n and a row i of the tile
    offsets = (n + block - 2) // block + 1
    row_tiles = launch.tiles(sq, call.cu_seqlens_q, config.block_m)
    splits = max(1, min(row_tiles, PROGRAMS // (offsets * batch * heads)))
    return Parts(torch.empty(batch, heads, splits, offsets, 2, block, dtype=torch.float32, device=call.q.device), splits)


def sum_of(launch: Launch, parts: Parts, config: KernelConfig) -> Tensor:
    """[Hq, n] in the dtype of bias."""
    bias = launch.call.bias
    assert bias is not None
    batch, heads, splits, offsets, *_ = parts.partial.shape
    n = bias.shape[1]
    dbias = torch.empty(heads, n, dtype=bias.dtype, device=bias.device)
    launch.start(
        small._dbias_sums_kernel,
        (triton.cdiv(n, small.COLUMNS.value), heads),
        *(parts.partial, dbias, batch, heads, splits, offsets, n),
        BM=config.block_m,
        BN=config.block_n,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return dbias
