"""The host's side of masks by row intervals: what is prepared for one kernel of a call (kernels.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from backlight.backends.intervals.arguments import Packing, Positions, Sizes, Variant
from backlight.backends.intervals.kernels import _fold_kernel, _key_lists_kernel, _live_kernel, _order_kernel
from backlight.call import Call

# tiles that a program which makes a list looks at in one go
CHUNK = 128
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


def live_tiles(start: Start, call: Call, tiling: Tiling, of_rows: bool, total: tuple[Tensor, int] | None = None) -> LiveTiles:
    """The tiles that a kernel visits whose programs own row tiles (`of_rows`) or key tiles.

    total: a float tensor and the place in it to which their number is added; for key tiles without pos only.
    With pos, causal and window are not folded into the intervals: entries say where they have to be compared as well.
    """
    rows, pos = call.rows, call.pos
    assert rows is not None
    batch, heads = _masks_of(rows, pos)
    # a list for each key tile of `folded`
    owned, most = (tiling.row_tiles, tiling.key_tiles) if of_rows else (tiling.key_tiles + 1, tiling.row_tiles)
    masks, ends = batch * heads, (tiling.key_tiles + 1) * (rows.shape[2] // 2)
    new = partial(torch.empty, dtype=torch.int32, device=rows.device)
    folded, live, counts = new((masks, 2 * ends, tiling.block_n)), new((masks, owned, max(most, 1))), new((masks, owned, 2))
    borders = (tiling.cu_q, tiling.cu_k, tiling.first_row_tiles, tiling.first_key_tiles)
    packing = Packing(*(rows if each is None else each for each in borders))
    sizes, variant = _sizes_of(call, tiling), _variant_of(call, tiling)
    strides = [0 if size == 1 else step for size, step in zip(rows.shape[:2], rows.stride()[:2], strict=True)]
    given = [rows, *strides, *rows.stride()[2:], folded]
    side = "rows" if of_rows else "keys"
    blocks = {"BM": tiling.block_m, "BN": tiling.block_n, "CHUNK": CHUNK}
    if not of_rows and pos is None:
        args = [*given, live, counts, packing, *sizes, live.shape[-1], *(total or (counts, 0))]
        start(_key_lists_kernel, (owned, masks), args, {"V": variant, "TOTAL": total is not None, **blocks}, side)
        return LiveTiles(folded, live, counts, packing.cu_key_tiles, rows, *mask_steps(call))
    extremes = new((masks, 4 * ends))
    args = [*given, extremes, packing, *sizes]
    start(_fold_kernel, (tiling.key_tiles + 1, masks), args, {"V": variant, "BN": tiling.block_n}, side)
    made, order_step = Positions(rows, rows), 0
    if pos is not None:
        made = Positions(new(pos.shape), new((pos.shape[0], tiling.row_tiles, 2)))
        order_step = 0 if pos.shape[0] == 1 else made.order_ptr.stride(0)
        args = [pos, *pos.stride(), made, packing, sizes.sq, sizes.sk, sizes.n_segments]
        constants = {"VARLEN": variant.VARLEN, "BM": tiling.block_m}
        start(_order_kernel, (tiling.row_tiles, pos.shape[0]), args, constants, side)
    args = [extremes, made.order_ptr, order_step, live, counts, packing, *sizes, tiling.key_tiles, live.shape[-1]]
    start(_live_kernel, (owned, masks), args, {"V": variant, "OF_ROWS": of_rows, **blocks}, side)
    return LiveTiles(folded, live, counts, packing.cu_key_tiles, made.held_ptr, *mask_steps(call))


def _sizes_of(call: Call, tiling: Tiling) -> Sizes:
    assert call.rows is not None
    n_segments = 0 if tiling.cu_q is None else tiling.cu_q.shape[0] - 1
    reach = call.spec.left or 0, call.spec.right or 0
    return Sizes(call.q.shape[2], call.k.shape[2], n_segments, call.rows.shape[1], *reach)


def _variant_of(call: Call, tiling: Tiling) -> Variant:
    assert call.rows is not None
    return Variant(
        W=call.rows.shape[2] // 2,
        LEFT=call.spec.left is not None,
        RIGHT=call.spec.right is not None,
        VARLEN=tiling.cu_q is not None,
        POS=call.pos is not None,
    )
