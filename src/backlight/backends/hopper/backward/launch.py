"""Launches of the two main kernels: tiles as they read them, numbers, what is compiled in."""

from typing import Any, Protocol

import torch
from torch import Tensor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.backward.alive import Tiles, alive_tiles
from backlight.backends.hopper.backward.arguments import Mask, Terms, Variant, table_numbers, units_of
from backlight.backends.hopper.backward.dbias import Diagonals
from backlight.backends.hopper.backward.kernel import _bwd_kernel
from backlight.backends.hopper.backward.narrow.kernel import ROWS, STAGES, _bwd_narrow_kernel
from backlight.backends.hopper.backward.prepass import Rows
from backlight.backends.hopper.compat import LATE_ADDRESSES, OWN_REGISTERS
from backlight.backends.hopper.config import (
    FEW,
    BackwardConfig,
    SecondConfig,
    exponent_of,
    intervals_of,
    keys_together,
    room_for_dv,
)
from backlight.backends.hopper.launch import Launch, multiprocessors
from backlight.backends.hopper.primitives import WM
from backlight.backends.intervals.tiles import LiveTiles, Tiling, live_tiles


def tiles(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor, block_m: int, block_n: int) -> list[Any]:
    """What TMA moves, by `block_m` rows and `block_n` keys."""
    call, bd, bdv = launch.call, launch.bd, launch.bdv
    return [
        launch.rows(call.q, block_m, bd),
        launch.rows(rows.do, block_m, bdv),
        launch.rows(call.k, block_n, bd),
        launch.rows(call.v, block_n, bdv),
        launch.rows(dk, block_n, bd),
        launch.rows(dv, block_n, bdv),
        rows.vector(rows.lse2),
        rows.vector(rows.delta),
    ]


class Counted(Protocol):
    """What is counted of rows: their blocks; where the counter of tiles lies."""

    @property
    def config(self) -> BackwardConfig | SecondConfig: ...

    @property
    def counter(self) -> int: ...

    @property
    def tiles(self) -> int: ...


def numbers(launch: Launch, rows: Counted, n_segments: int, block_n: int) -> tuple[int, list[int]]:
    """CTAs, and the integers of a kernel with key tiles of `block_n` (arguments.NUMBERS)."""
    call, config = launch.call, rows.config
    key_tiles = launch.key_tiles(block_n)
    n_tiles = key_tiles * launch.batch * launch.kv_heads
    programs = min(n_tiles, multiprocessors(call.q.device)) if config.persistent else n_tiles
    dynamic = programs if programs < n_tiles else 0
    together = keys_together(call, config)
    return programs, [dynamic, rows.counter, n_segments, n_tiles, key_tiles, rows.tiles, together, *launch.geometry]


def visiting_rows(launch: Launch, rows: Rows, packing: Packing, block_m: int, block_n: int) -> LiveTiles | None:
    """The row blocks that see each key tile, under a mask by row intervals."""
    call = launch.call
    if launch.alive is not None:
        return alive_tiles(launch, launch.alive, packing, Tiles(block_m, block_n, rows.tiles), (rows.delta, rows.counter + 1))
    if call.rows is None:
        return None
    borders = (packing.cu_q_ptr, packing.cu_k_ptr, packing.cu_row_tiles_ptr, packing.cu_tiles_ptr) if call.varlen else ()
    tiling = Tiling(block_m, block_n, rows.tiles, launch.key_tiles(block_n), *borders)
    return live_tiles(launch.start_beside, call, tiling, of_rows=False, total=(rows.delta, rows.counter + 1))


def mask_arguments(launch: Launch, rows: Rows, tiles: LiveTiles | None) -> tuple[Any, ...]:
    """mask, mask_batch, mask_head, most, few, together_if_few."""
    if tiles is None:
        return (None,) * 6
    # steps from mask to mask in key tiles, of which `folded` has one more than there are
    owned = tiles.counts.shape[1]
    mask = Mask(tiles.folded, tiles.live, tiles.counts)
    few = int(FEW * tiles.counts.shape[0] * (owned - 1) * rows.tiles)
    together = keys_together(launch.call, rows.config, few=True)
    return mask, tiles.batch_step * owned, tiles.head_step * owned, tiles.most, few, together


def visiting_flags(launch: Launch) -> dict[str, Any]:
    """What of mask and entmax is compiled in; with entmax there are lists, in which causal and window are."""
    call = launch.call
    if call.entmax is None:
        return {**launch.flags, "INTERVALS": intervals_of(call)}
    return {"HAS_LEFT": False, "HAS_RIGHT": False, "VARLEN": call.varlen, "INTERVALS": 1, "ENTMAX": exponent_of(call)}


def main_variant(launch: Launch, rows: Rows, diagonals: Diagonals | None, split: bool, ordered: bool) -> Variant:
    call, config, spec = launch.call, rows.config, launch.call.spec
    return Variant(
        **launch.widths,
        BM=config.block_m,
        BN=config.block_n,
        ST=config.stages,
        WARPS=8,
        **visiting_flags(launch),
        SPLIT=split,
        WIDE=config.wide,
        DQ_TILES=not (split or config.wide),
        OVERLAP=config.overlap,
        EARLY=not split and room_for_dv(config, launch.bd, launch.bdv, diagonals is not None),
        BIAS=call.bias is not None,
        DBIAS=diagonals is not None,
        SOFTCAP=spec.softcap is not None,
        TAU=call.tau is not None,
        BAND_FIRST=call.bias is not None and spec.right is not None and spec.bias_origin >= spec.right,
        SLOTS=1 if diagonals is None else diagonals.acc.shape[0],
        ORDERED=ordered,
    )


def main_dk_dv(
    launch: Launch, rows: Rows, dk: Tensor, dv: Tensor, diagonals: Diagonals | None, split: bool, ordered: bool = False
) -> None:
    """dk and dv, and unless `split` the accumulated dq; sums of ds where there are `diagonals`."""
    call, config, share = launch.call, rows.config, rows.share
    heads = launch.batch * launch.heads
    order = torch.zeros(1 + heads * rows.tiles, dtype=torch.int32, device=call.q.device) if ordered else None
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, config.block_n)
    packing = Packing(cu_q, cu_k, cu_tiles, rows.first_tiles)
    terms = Terms(launch.table, launch.tau)
    acc = None if config.wide and split else rows.accumulator
    visiting = visiting_rows(launch, rows, packing, config.block_m, config.block_n)

    def describe() -> dict[str, Any]:
        programs, integers = numbers(launch, rows, n_segments, config.block_n)
        args = [
            *tiles(launch, rows, dk, dv, config.block_m, config.block_n),
            None if config.wide else rows.tiles_of_dq(launch.bd, config.block_m),
            acc if config.wide else None,
            None if share is None else rows.vector(share),
            None if diagonals is None else diagonals.boxes,
            terms,
            packing,
            rows.delta,
            *integers,
            units_of(call),
            *table_numbers(call),
            *mask_arguments(launch, rows, visiting),
            order,
        ]
        constants = {"V": main_variant(launch, rows, diagonals, split, ordered)}
        return {"grid": (programs,), "args": args, "constants": constants, "num_warps": 8, "maxnreg": 168, **LATE_ADDRESSES}

    sums = None if diagonals is None else diagonals.acc
    mask = () if visiting is None else (visiting.folded, visiting.live, visiting.counts)
    state = (rows.lse2, rows.delta, acc, share, sums)
    tensors = (call.q, rows.do, call.k, call.v, dk, dv, *state, *terms, *packing, rows.delta, *mask, order)
    launch.start(_bwd_kernel, tensors, describe)


def narrow_dk_dv(launch: Launch, rows: Rows, dk: Tensor, dv: Tensor) -> None:
    """dk, dv and the accumulated dq of a call without learned terms, heads up to 64."""
    call, block_n = launch.call, 2 * WM.value
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, block_n)
    packing = Packing(cu_q, cu_k, cu_tiles, rows.first_tiles)
    visiting = visiting_rows(launch, rows, packing, ROWS, block_n)

    def describe() -> dict[str, Any]:
        programs, integers = numbers(launch, rows, n_segments, block_n)
        args = [
            *tiles(launch, rows, dk, dv, ROWS, WM.value),
            rows.tiles_of_dq(launch.bd, WM.value),
            packing,
            rows.delta,
            *integers,
            units_of(call),
            *mask_arguments(launch, rows, visiting),
        ]
        variant = Variant(**launch.widths, BM=ROWS, BN=block_n, ST=STAGES, WARPS=4, **visiting_flags(launch))
        options = {"num_warps": 4, "maxnreg": 168, **LATE_ADDRESSES, **OWN_REGISTERS}
        return {"grid": (programs,), "args": args, "constants": {"V": variant}, **options}

    state = (rows.lse2, rows.delta, rows.accumulator)
    mask = () if visiting is None else (visiting.folded, visiting.live, visiting.counts)
    tensors = (call.q, rows.do, call.k, call.v, dk, dv, *state, *packing, rows.delta, *mask)
    launch.start(_bwd_narrow_kernel, tensors, describe)
