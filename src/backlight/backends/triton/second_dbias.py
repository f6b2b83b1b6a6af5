"""dbias of second derivatives: one program owns one offset between row tile and key tile and adds up the ds of eq. 58 there,
as `dbias.py` does with that of eq. 33."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from backlight.backends.triton.band import bias_tile, head_table, table_entry
from backlight.backends.triton.dbias import of_keys, parts_of, reaching_bias, store_diagonals, sum_of, tiles_at
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.loads import row_state
from backlight.backends.triton.moving import ds_of
from backlight.backends.triton.pair import pair_place, pair_tile
from backlight.backends.triton.primitives import LOG2E, one_segment
from backlight.backends.triton.second_rows import Prepared
from backlight.backends.triton.second_tile import recomputed, start_for_ds
from backlight.backends.triton.visits import intervals_of


@triton.jit(do_not_specialize=["splits", "pitch16", "sq", "sk", "n_segments"])
def _second_dbias_kernel(
    tensors, partial_ptr, splits, pitch16, frame, sq, sk, n_segments,
    V: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    geometry = frame.geometry
    split = tl.program_id(0) % splits
    batch = tl.program_id(1) // geometry.heads
    h = tl.program_id(1) % geometry.heads
    g = h // geometry.group
    column = tl.program_id(0) // splits * BN
    row_lanes = tl.arange(0, BM)
    key_lanes = tl.arange(0, BN)
    bias, _cut = reaching_bias(tensors.table_ptr, h, column, geometry, V, BM, BN)
    tbias = 0.0
    if T.BIAS:
        ttable_ptr = head_table(tensors.ttable_ptr, h, geometry, True)
        tbias = bias_tile(ttable_ptr, table_entry(column, geometry, True), geometry, V, BM, BN)
    total = tl.zeros([BM, BN], tl.float32)
    segments = 1
    if V.VARLEN:
        segments = n_segments
    for z in range(segments):
        segment = one_segment(z, frame.packing, sq, sk, V)
        intervals = intervals_of(frame.mask, batch, h, segment, sq, sk, n_segments, geometry, V, BN)
        ahead, first_tile, last_tile = tiles_at(segment, column, geometry, BM, BN)
        offset = row_state(batch, h, segment.q_start, pitch16, geometry)
        # this split's tiles are first_tile + split, and every splits-th after it
        if first_tile + split < last_tile:
            for tile in range(first_tile + split, last_tile, splits):
                i0 = tl.multiple_of(tile * BM, BM)
                j0 = i0 + ahead
                keys = (j0 + key_lanes)[None, :]
                rows_at = (batch, h, segment.q_start, i0, segment.sq)
                keys_at = (batch, g, segment.k_start, j0, segment.sk)
                s, ts, b, c, mu, eta, delta = recomputed(tensors, rows_at, keys_at, offset, bias, geometry, V, T, BM, BN)
                pair, tpair = tensors.pairs.pair, tensors.pairs.tpair
                place = pair_place(batch, h, i0, j0, segment, V)
                if V.PAIR > 0:
                    s += pair_tile(pair, pair.ptr, place, segment.sq, V, False, BM, BN, False, True) * LOG2E
                if T.PAIR:
                    ts += pair_tile(tpair, tpair.ptr, place, segment.sq, V, False, BM, BN, False, True)
                p = of_keys(tl.exp2(s), (i0 + row_lanes)[:, None], keys, j0, intervals, segment, V, BN)
                total += ds_of(p, p * (ts + tbias - mu), b, eta, c, delta)
    store_diagonals(partial_ptr, total, splits, BM, BN)


def second_dbias_of(launch: Launch, given: Prepared) -> Tensor:
    """[Hq, n] in the dtype of bias."""
    call = launch.call
    config = launch.config("second_dbias")
    parts = parts_of(launch, config)
    if parts is None:
        return torch.zeros_like(call.bias)
    start_for_ds(_second_dbias_kernel, parts.grid, launch, given, config, parts.partial, parts.splits, given.pitch16)
    return sum_of(launch, parts, config)
