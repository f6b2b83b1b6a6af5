"""The forward of e4m3 tensors in plain PyTorch, rounding where the kernel of Hopper GPUs rounds (eq. 96-98).

Scores, terms and masks are those of the tiled backend; key blocks come from right to left, as in the kernel.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from backlight.backends.tiled.config import Slab, Tile, row_blocks, slabs
from backlight.backends.tiled.primitives import Block, Scores, Workspace, heads_of, keys_of
from backlight.call import Call
from backlight.config import Config
from backlight.quantising import BLOCK, Quantised, dequantized
from backlight.spec import LN2, LOG2E

# 2^8 times the weights: e4m3 reaches 448
HEADROOM = 8.0
# of a sink, in the place of +inf where it stands in a difference
LARGEST = 1e30
ELEMENTS = 1 << 22


def forward(call: Call, given: Quantised) -> tuple[Tensor, Tensor]:
    """(y, lse); memory linear in Sq and Sk. q, k and v of the call are not read."""
    q, k, v = dequantized(given)
    call = replace(call, q=q, k=k, v=v, spec=call.spec.replace(scale=given.scale))
    y = torch.empty(*q.shape[:3], v.shape[-1], dtype=given.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    heads = max(1, min(q.shape[0] * k.shape[1], ELEMENTS // (call.group * 4 * BLOCK * BLOCK)))
    config = Config(block_m=4 * BLOCK, block_n=BLOCK, edge=4 * BLOCK, heads=heads)
    workspace = Workspace(heads * call.group * config.block_m * BLOCK, q, torch.float32)
    for slab in slabs(call, config):
        _slab(call, slab, config, workspace, given.offset, (y, lse))
    return y, lse


def _slab(call: Call, slab: Slab, config: Config, workspace: Workspace, offset: Tensor, results: tuple[Tensor, Tensor]) -> None:
    y, lse = results
    z = slab.segment
    scores = Scores(call, slab, workspace)
    v = keys_of(call.v, slab)
    sink = None if call.sink is None else heads_of(call.sink, slab, call.group, torch.float32)
    for i0, i1 in row_blocks(z.sq, config):
        block = Block(slab, call.group, i0, i1)
        scores.start(block)
        shift = block.rows_of(offset[..., None])
        first, end = call.spec.key_range(i0, i1, z.sq, z.sk)
        begins = range(first // BLOCK * BLOCK, end, BLOCK) if first < end else ()
        tiles = scores.visited([Tile(i0, i1, j, min(j + BLOCK, z.sk)) for j in begins])
        # eq. 97: the sink stands beside scores that lack their row's offset
        sink2 = None if sink is None else ((block.repeat_positions(sink) - shift) * LOG2E).clamp(max=LARGEST)
        o, top, total = _sweep(scores, v, sink2, tiles)
        o = (o / total).masked_fill_(total == 0, 0.0)
        if call.gate is not None:
            o = o * torch.sigmoid(block.rows_of(call.gate).float())
        found = ((top + torch.log2(total) - HEADROOM) * LN2 + shift).masked_fill_(total == 0, -math.inf)
        if sink is not None:
            found.masked_fill_(block.repeat_positions(sink) == math.inf, math.inf)
        block.put_rows(y, o)
        block.put_rows(lse[..., None], found)


def _sweep(scores: Scores, v: Tensor, sink2: Tensor | None, tiles: list[Tile]) -> tuple[Tensor, Tensor, Tensor]:
    """(sum of p v, maximum, sum of p) of the started block's rows (eq. 98)."""
    n, rows = scores.q.shape[:2]
    o = v.new_zeros(n, rows, v.shape[-1])
    if sink2 is None:
        top = v.new_full((n, rows, 1), -math.inf)
        total = torch.zeros_like(top)
    else:
        top = sink2.ceil()
        total = torch.exp2(sink2 - top + HEADROOM).masked_fill_(top == -math.inf, 0.0)
    for tile in reversed(tiles):
        s = scores.tile(tile)
        highest = torch.maximum(top, s.amax(-1, keepdim=True).ceil())
        from_here = highest.clamp(min=-LARGEST)
        p = torch.exp2(s - from_here + HEADROOM).to(torch.float8_e4m3fn).float()
        rescale = torch.exp2(top - from_here)
        o = o * rescale + p @ v[:, tile.j0 : tile.j1]
        total = total * rescale + p.sum(-1, keepdim=True)
        top = highest
    return o, top, total
