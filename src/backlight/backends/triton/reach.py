"""Which key tiles scores cannot carry above a threshold, by norms alone (eq. 85): they are left out before q.k.

A score is at most |scale| times the largest norms of its tiles' rows and keys, plus the largest bias of their distances. That
says something where a bias falls with distance, so calls with another have no `Reach`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from backlight.backends.triton.config import KernelConfig, padded
from backlight.backends.triton.launch import Launch, compact, rows_of
from backlight.backends.triton.loads import at, load_tile

# tiles that are decided upon together, by the bound that there is then
TOGETHER = tl.constexpr(8)
# what rounding may add to a bound
MARGIN = tl.constexpr(2.0**-12)


class Reach(NamedTuple):
    """Largest norms of keys by tiles [B * Hkv, key tiles], largest bias by blocks of as many distances [Hq, blocks], and room
    for tile numbers of every program."""

    norms: Any
    tops: Any
    list: Any


class Candidates(NamedTuple):
    """`Reach` of a program. norm: the largest norm of its rows, times (alpha - 1) |scale|; rate: alpha - 1."""

    norms: Any
    tops: Any
    norm: Any
    rate: Any


@triton.jit
def candidates_of(reach, q, block, alpha, key_tiles, geometry, BN: tl.constexpr):
    norm = tl.sqrt(tl.max(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1), 0))
    rate = alpha - 1
    # unit * factor is the scale in base 2, with a softcap too
    norm *= rate * geometry.unit * tl.abs(geometry.factor) * 0.6931471805599453
    kv_head = block.b * (geometry.heads // geometry.group) + block.g
    norms = reach.norms + tl.cast(kv_head, tl.int64) * key_tiles
    return Candidates(norms, reach.tops + block.h * tl.cdiv(geometry.n_bias, BN), norm, rate)


@triton.jit
def reached(list_ptr, candidates, chunk, low, work, BM: tl.constexpr, BN: tl.constexpr):
    """How many of the tiles from step `chunk` on may reach above `low`; their numbers go to the list. Steps count from the last
    tile to the first: near keys, whose bias is high, raise the bounds of thresholds before far ones are asked."""
    block = work.place.block
    geometry = work.geometry
    lanes = tl.arange(0, TOGETHER)
    step = chunk + lanes * BN
    exists = step < work.visits.stop
    j0 = work.visits.start + work.visits.stop - BN - step
    first = block.first_position - (j0 + BN - 1) + geometry.bias_origin
    last = block.last_position - j0 + geometry.bias_origin
    # outside of the table the bias is 0
    top = tl.where((first < 0) | (last >= geometry.n_bias), 0.0, float("-inf"))
    first_block = tl.maximum(first, 0) // BN
    for i in tl.static_range((BM + BN - 2) // BN + 2):
        inside = exists & ((first_block + i) * BN <= tl.minimum(last, geometry.n_bias - 1))
        top = tl.maximum(top, tl.load(candidates.tops + first_block + i, mask=inside, other=float("-inf")))
    product = candidates.norm * tl.load(candidates.norms + j0 // BN, mask=exists, other=0.0)
    addend = candidates.rate * top
    most = product + addend + MARGIN * (product + tl.abs(addend))
    alive = (exists & (most > low)).to(tl.int32)
    tl.debug_barrier()
    tl.store(list_ptr + tl.cumsum(alive, 0) - alive, (j0 // BN).to(tl.int16), mask=alive > 0)
    tl.debug_barrier()
    return tl.sum(alive, 0)


@triton.jit(do_not_specialize=["sk"])
def _key_norms_kernel(k, norms_ptr, heads, sk, D: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr):
    b = tl.program_id(1) // heads
    h = tl.program_id(1) % heads
    tile = load_tile(at(k, b, h, 0), k.row, tl.program_id(0) * BN, sk, BN, D, BD).to(tl.float32)
    norm = tl.sqrt(tl.max(tl.sum(tile * tile, 1), 0))
    tl.store(norms_ptr + tl.cast(tl.program_id(1), tl.int64) * tl.num_programs(0) + tl.program_id(0), norm)


@triton.jit(do_not_specialize=["n"])
def _bias_tops_kernel(bias_ptr, tops_ptr, n, BN: tl.constexpr):
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    entries = tl.load(bias_ptr + tl.program_id(1) * n + columns, mask=columns < n, other=float("-inf"))
    tl.store(tops_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.max(entries.to(tl.float32), 0))


def reach_of(launch: Launch, config: KernelConfig) -> Reach | None:
    """None where nothing is left out by norms."""
    call = launch.call
    if not launch.skips or call.bias is None or call.pair_bias is not None or not call.bias.numel() or not call.k.shape[2]:
        return None
    device, (batch, kv_heads, sk, d) = call.q.device, call.k.shape
    heads, n = call.bias.shape
    key_tiles, blocks = -(-sk // config.block_n), -(-n // config.block_n)
    norms = torch.empty(batch * kv_heads * key_tiles, dtype=torch.float32, device=device)
    tops = torch.empty(heads * blocks, dtype=torch.float32, device=device)
    common = {"BN": config.block_n, "num_warps": 4, "enable_fp_fusion": True}
    if batch * kv_heads:
        sizes = {"D": d, "BD": padded(d)}
        launch.start(
            _key_norms_kernel, (key_tiles, batch * kv_heads), rows_of(launch.k), norms, kv_heads, sk, **sizes, **common
        )
    if heads:
        launch.start(_bias_tops_kernel, (blocks, heads), compact(call.bias), tops, n, **common)
    tiles, programs = launch.row_grid(config.block_m)
    listed = torch.empty(tiles * programs * key_tiles, dtype=torch.int16, device=device)
    return Reach(norms, tops, listed)
