"""What attention does with its keys: density, surviving mass, dead rows and live tiles, head by head.

Weights are formed for a few rows at a time, without gradients, so that a long sequence costs time and not memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from backlight import running
from backlight.api import call_of
from backlight.call import Call
from backlight.spec import Segment

# weights held at a time
WEIGHTS = 2**22
TILE = (128, 128)


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """Per query head [Hq], over all rows that see at least one key.

    density:    share of visible keys that keep a weight above zero (1 without tau).
    mass:       mean sum of a row's weights (1 for plain softmax; less with a sink or a negative tau, more with a positive one).
    dead_rows:  share of rows that keep no key at all.
    live_tiles: share of tiles with a visible key that keep one: what a kernel that skips dead tiles would still compute.
    """

    density: Tensor
    mass: Tensor
    dead_rows: Tensor
    live_tiles: Tensor


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
    _, lse, _ = running.forward(call, backend, False)
    sums = torch.zeros(6, call.q.shape[1], dtype=torch.float64, device=call.q.device)
    for z in call.segments():
        for kv_head in range(call.k.shape[1]):
            heads = slice(kv_head * call.group, (kv_head + 1) * call.group)
            step = max(1, WEIGHTS // max(1, call.group * z.sk * tile[0])) * tile[0]
            for i0 in range(0, z.sq, step):
                sums[:, heads] += _count(call, lse, z, kv_head, i0, min(i0 + step, z.sq), tile)
    alive, pairs, mass, dead, live, rows = sums
    return AttentionStatistics(
        density=alive / pairs.clamp(min=1),
        mass=mass / rows.clamp(min=1),
        dead_rows=dead / rows.clamp(min=1),
        live_tiles=live / max(1, _visible_tiles(call, tile)),
    )


def _visible_tiles(call: Call, tile: tuple[int, int]) -> int:
    """Tiles of one head with a visible key."""
    spec, total = call.spec, 0
    for z in call.segments():
        for i0 in range(0, z.sq, tile[0]):
            j0, j1 = spec.key_range(i0, min(i0 + tile[0], z.sq), z.sq, z.sk)
            total += -(-j1 // tile[1]) - j0 // tile[1] if j1 > j0 else 0
    return total


def _count(call: Call, lse: Tensor, z: Segment, kv_head: int, i0: int, i1: int, tile: tuple[int, int]) -> Tensor:
    """[6, group] over rows [i0, i1) of a segment and the query heads of one key head: weights above zero, visible pairs, the
    sum of weights, rows without one, live tiles, rows that see a key."""
    spec, group = call.spec, call.group
    heads, here = slice(kv_head * group, (kv_head + 1) * group), slice(z.q0 + i0, z.q0 + i1)
    j0, j1 = spec.key_range(i0, i1, z.sq, z.sk)
    s = call.q[z.batch, heads, here].to(lse.dtype) @ call.k[z.batch, kv_head, z.k0 + j0 : z.k0 + j1].to(lse.dtype).mT
    s = s * call.scale
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    distance = spec.distance(i0, i1, j0, j1, z.sq, z.sk, call.q.device)
    if call.bias is not None:
        column = distance + spec.bias_origin
        inside = (column >= 0) & (column < call.bias.shape[1])
        s = s + (call.bias[heads][:, column.clamp(0, call.bias.shape[1] - 1)] * inside).to(lse.dtype)
    visible = spec.allowed_distance(distance).expand(group, -1, -1)
    weight = torch.exp(s - lse[z.batch, heads, here, None])
    n = spec.visible_counts(z.sq, z.sk, call.q.device, i0, i1)
    if call.sink is None:
        # the kink of eq. 10 is judged with p exactly 1 where one key is visible
        weight = weight.masked_fill((n == 1)[:, None], 1)
    alive = visible
    if call.tau is not None:
        tau = call.tau[heads, None, None].to(lse.dtype)
        weight = weight + tau / n.clamp(min=1)[:, None]
        alive = visible & ((weight > 0) | (tau >= 0))
    weight = weight.masked_fill(~alive, 0)
    survivors, sees = alive.sum(dim=-1), (n > 0).expand(group, -1)
    counts = (survivors, visible.sum(dim=-1), weight.sum(dim=-1), (survivors == 0) & sees, sees)
    sums = [count.to(torch.float64).sum(dim=-1) for count in counts]
    return torch.stack([*sums[:4], _live(alive, j0, tile), sums[4]])


def _live(alive: Tensor, j0: int, tile: tuple[int, int]) -> Tensor:
    """[group]: tiles of `alive` [group, rows, keys from j0] in which anything is; rows start on a tile."""
    rows, keys = alive.shape[1:]
    before = j0 % tile[1]
    padded = F.pad(alive, (before, -(keys + before) % tile[1], 0, -rows % tile[0]))
    tiles = padded.unflatten(2, (-1, tile[1])).unflatten(1, (-1, tile[0]))
    return tiles.any(dim=4).any(dim=2).sum(dim=(1, 2)).to(torch.float64)
