"""What attention does with its keys: density, surviving mass, dead rows and live tiles, head by head.

A module named `statistics` would hide the function `backlight.statistics` from whoever imports the module first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight import running
from backlight.api import call_of

TILE = (128, 128)
# products of tiles in a training step with entmax (eq. 95): of scores that are formed at all, once in either direction, and
# those of live tiles alone: two steps, three of the last sweep, and seven of the backward
FORMED_PRODUCTS, LIVE_PRODUCTS = 2, 12


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """Per query head [Hq], over all rows that see at least one key.

    density:    share of visible keys that keep a weight above zero (1 without tau and entmax).
    mass:       mean sum of a row's weights (1 for plain softmax; less with a sink or a negative tau, more with a positive one).
    dead_rows:  share of rows that keep no key at all.
    live_tiles: share of tiles with a visible key that keep one: what a kernel that skips dead tiles would still compute.
    empty_tiles, full_tiles, partial_tiles: shares of all tiles in which no pair of row and key is visible, every pair, or some.
    support:    mean number of keys of a row that keep a weight above zero.
    formed_tiles: share of tiles with a visible key whose scores are formed at all: less than 1 where norms of rows and keys and
                a bias that falls with distance keep the rest below the thresholds of entmax.
    saved:      with entmax, the share of a training step's products that `triton` leaves out (docs/entmax.md); else 0.
    """

    density: Tensor
    mass: Tensor
    dead_rows: Tensor
    live_tiles: Tensor
    empty_tiles: Tensor
    full_tiles: Tensor
    partial_tiles: Tensor
    support: Tensor
    formed_tiles: Tensor
    saved: Tensor


@torch.no_grad()
def statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    tile: tuple[int, int] = TILE,
    backend: str | None = None,
    **options: Any,
) -> AttentionStatistics:
    """Statistics of the call that `attention` (or, with cu_seqlens_q, `attention_varlen`) makes of the same arguments.

    tile: rows and keys of the tiles that `live_tiles` counts; they start at the first row and key of a sequence.
    """
    whole = isinstance(tile, (tuple, list)) and all(isinstance(size, int) and not isinstance(size, bool) for size in tile)
    if not (whole and len(tile) == 2 and min(tile) > 0):
        raise ValueError(f"tile must be two positive sizes (rows, keys), got {tile!r}")
    call = call_of(q, k, v, cu_seqlens_q, cu_seqlens_k, backend=backend, **options)
    _, lse, *_ = running.forward(call, backend, False)
    # `import backlight` loads no backend
    from backlight.backends.tiled.counting import count

    alive, pairs, mass, dead, live, rows, seen, full, formed = count(call, lse, tile)
    tiles = max(1, sum(-(-z.sq // tile[0]) * -(-z.sk // tile[1]) for z in call.segments()))
    tried, lives = formed / seen.clamp(min=1), live / seen.clamp(min=1)
    made = (FORMED_PRODUCTS * tried + LIVE_PRODUCTS * lives) / (FORMED_PRODUCTS + LIVE_PRODUCTS)
    return AttentionStatistics(
        density=alive / pairs.clamp(min=1),
        mass=mass / rows.clamp(min=1),
        dead_rows=dead / rows.clamp(min=1),
        live_tiles=lives,
        empty_tiles=1 - seen / tiles,
        full_tiles=full / tiles,
        partial_tiles=(seen - full) / tiles,
        support=alive / rows.clamp(min=1),
        formed_tiles=tried,
        saved=torch.zeros_like(made) if call.entmax is None else 1 - made,
    )
