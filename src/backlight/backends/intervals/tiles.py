"""The host's side of masks by row intervals: what is prepared for one kernel of a call (kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.backends.intervals import trial
from backlight.backends.intervals.kernels import (
    Packing,
    _fold_kernel,
    _key_lists_kernel,
    _live_kernel,
    _order_kernel,
    _row_lists_kernel,
)
from backlight.call import Call

# tiles that a program of `_live_kernel` looks at in one go
CHUNK = 128
# key tiles whose intervals a program of `_row_lists_kernel` looks at in one go, and pairs of row tile and key for which it pays
WIDE_CHUNK = 32
FEW_PAIRS = 1 << 22
# (kernel, grid, arguments, constants, which of its launches)
Start = Callable[[Any, tuple[int, ...], list[Any], dict[str, Any], str], None]


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tiles of a kernel: their sizes, how many there are, and where packed sequences begin (None without any)."""

    block_m: int
    block_n: int
    row_tiles: int
    key_tiles: int
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    first_row_tiles: Tensor | None = None
    first_key_tiles: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LiveTiles:
    """What a kernel reads of a mask (kernels.py).

    The mask of head h of batch entry b is number b * batch_step + h * head_step.
    pos: [B|1, Sq], contiguous and held within the range of kernels; `rows` where there is none.
    """

    folded: Tensor
    live: Tensor
    counts: Tensor
    first_key_tiles: Tensor
    pos: Tensor
    batch_step: int
    head_step: int

    @property
    def most(self) -> int:
        """Entries of a list."""
        return self.live.shape[-1]


def mask_steps(call: Call) -> tuple[int, int]:
    """(batch step, head step) of `LiveTiles`: 0 where all batch entries, or all heads, have one mask."""
    if call.rows is None:
        return 0, 0
    batch, heads = _masks_of(call.rows, call.pos)
    return 0 if batch == 1 else heads, 0 if heads == 1 else 1


def _masks_of(rows: Tensor, pos: Tensor | None) -> tuple[int, int]:
    """How many masks there are: of batch entries, of heads."""
    return max(rows.shape[0], 1 if pos is None else pos.shape[0]), rows.shape[1]


def lists_in_one(call: Call, row_tiles: int, varlen: bool) -> bool:
    """Whether one launch makes the lists of row tiles."""
    return call.rows is not None and call.pos is None and not varlen and row_tiles * call.k.shape[2] <= FEW_PAIRS


def live_tiles(start: Start, call: Call, tiling: Tiling, of_rows: bool, counter: Tensor | None = None) -> LiveTiles:
    """The tiles that a kernel visits whose programs own row tiles (`of_rows`) or key tiles.

    counter: set to 0 by the way; None where there is none.
    With pos, causal and window are not folded into the intervals: entries say where they have to be compared as well.
    """
    rows, pos, spec = call.rows, call.pos, call.spec
    assert rows is not None
    batch, heads = _masks_of(rows, pos)
    intervals = rows.shape[2] // 2
    # a list for each key tile of `folded`
    owned, most = (tiling.row_tiles, tiling.key_tiles) if of_rows else (tiling.key_tiles + 1, tiling.row_tiles)
    masks, ends = batch * heads, (tiling.key_tiles + 1) * intervals
    folded, extremes, live, counts = (
        torch.empty(shape, dtype=torch.int32, device=rows.device)
        for shape in (
            (masks, 2 * ends, tiling.block_n),
            (masks, 4 * ends),
            (masks, owned, max(most, 1)),
            (masks, owned, 2),
        )
    )
    borders = (tiling.cu_q, tiling.cu_k, tiling.first_row_tiles, tiling.first_key_tiles)
    packing = Packing(*(rows if each is None else each for each in borders))
    varlen = tiling.cu_q is not None
    lengths = [call.q.shape[2], call.k.shape[2], 0 if tiling.cu_q is None else tiling.cu_q.shape[0] - 1]
    reach = [spec.left or 0, spec.right or 0]
    flags = {"LEFT": spec.left is not None, "RIGHT": spec.right is not None, "VARLEN": varlen, "POS": pos is not None}
    steps = [0 if size == 1 else step for size, step in zip(rows.shape[:2], rows.stride()[:2], strict=True)]
    side = "rows" if of_rows else "keys"
    given = [rows, *steps, *rows.stride()[2:], folded]
    if not of_rows and pos is None and "one_launch" in trial.ON:
        del flags["POS"]
        start(
            _key_lists_kernel,
            (owned, masks),
            [*given, live, counts, packing, *lengths, heads, *reach, live.shape[-1]],
            {"W": intervals, **flags, "BM": tiling.block_m, "BN": tiling.block_n, "CHUNK": CHUNK},
            side,
        )
        return LiveTiles(folded, live, counts, packing.cu_key_tiles, rows, *mask_steps(call))
    if of_rows and "one_launch" in trial.ON and lists_in_one(call, tiling.row_tiles, varlen):
        zeroed = counts if counter is None else counter
        start(
            _row_lists_kernel,
            (max(tiling.row_tiles, tiling.key_tiles + 1), masks),
            [
                *given,
                live,
                counts,
                zeroed,
                packing,
                *lengths[:2],
                heads,
                *reach,
                live.shape[-1],
                tiling.key_tiles,
                tiling.row_tiles,
            ],
            {
                "W": intervals,
                "LEFT": flags["LEFT"],
                "RIGHT": flags["RIGHT"],
                "COUNTER": counter is not None,
                "BM": tiling.block_m,
                "BN": tiling.block_n,
                "CHUNK": WIDE_CHUNK,
            },
            side,
        )
        return LiveTiles(folded, live, counts, packing.cu_key_tiles, rows, *mask_steps(call))
    start(
        _fold_kernel,
        (tiling.key_tiles + 1, masks),
        [*given, extremes, packing, *lengths, heads, *reach],
        {"W": intervals, **flags, "BN": tiling.block_n},
        side,
    )
    sizes = [tiling.key_tiles, tiling.row_tiles, live.shape[-1]]
    order, order_step, held = rows, 0, rows
    if pos is not None:
        held = torch.empty(pos.shape, dtype=torch.int32, device=rows.device)
        order = torch.empty((pos.shape[0], tiling.row_tiles, 2), dtype=torch.int32, device=rows.device)
        order_step = 0 if pos.shape[0] == 1 else order.stride(0)
        start(
            _order_kernel,
            (tiling.row_tiles, pos.shape[0]),
            [pos, *pos.stride(), held, order, packing, *lengths],
            {"VARLEN": varlen, "BM": tiling.block_m},
            side,
        )
    start(
        _live_kernel,
        (owned, masks),
        [extremes, order, order_step, live, counts, packing, *lengths, heads, *reach, *sizes],
        {"W": intervals, **flags, "OF_ROWS": of_rows, "BM": tiling.block_m, "BN": tiling.block_n, "CHUNK": CHUNK},
        side,
    )
    return LiveTiles(folded, live, counts, packing.cu_key_tiles, held, *mask_steps(call))
