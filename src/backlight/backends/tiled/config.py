"""How large the tiles of the tiled backend are, and how a call is cut into slabs of heads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from backlight.call import Call
from backlight.config import Config, resolve
from backlight.spec import AttentionSpec, Segment

# elements of one score tile over all heads of a slab: large enough that a torch call does real work, small enough for the
# last-level cache of a CPU (2 buffers of 32 MiB in fp32)
CPU_TILE_ELEMENTS = 1 << 23
GPU_TILE_ELEMENTS = 1 << 25
# keys of a tile under a mask by intervals: what is empty is left out, and what is full not masked, by whole tiles
MASKED_KEYS = 512
# of a sequence whose length must not count: from here on a tile is as large as any
LONG = 4096
# elements of k and v that a slab holds in fp32 (several times, with their gradients): bounds the memory of long sequences
SLAB_KEY_ELEMENTS = 1 << 23


def heuristic(group: int, sq: int, sk: int, width: int, heads: int, device: torch.device) -> Config:
    """256 rows x 4096 keys, shrunk to the problem; as many (batch, kv head) pairs side by side as the budgets hold.

    width: D + Dv; heads: (batch, kv head) pairs of the call.
    """
    on_cpu = device.type == "cpu"
    block_m = max(1, min(sq, max(32, (256 if on_cpu else 512) // group)))
    block_n = max(1, min(sk, 4096))
    budget = CPU_TILE_ELEMENTS if on_cpu else GPU_TILE_ELEMENTS
    return Config(
        block_m=block_m,
        block_n=block_n,
        edge=max(1, (block_m + 1) // 2) if block_m >= 64 else block_m,
        heads=max(1, min(heads, budget // (group * block_m * block_n), SLAB_KEY_ELEMENTS // max(1, sk * width))),
    )


def config_of(call: Call) -> Config:
    """Of a batch-invariant call: by one sequence where all have one length, and by none of the lengths where they do not."""
    batch, kv_heads, sk, _ = call.k.shape
    sq = call.q.shape[2]
    if call.batch_invariant:
        batch = 1
    if call.batch_invariant and call.varlen:
        sq = sk = LONG
    elif call.varlen:
        segments = call.segments()
        batch = 1
        sq, sk = max((z.sq for z in segments), default=0), max((z.sk for z in segments), default=0)
    width = call.q.shape[-1] + call.v.shape[-1]
    return resolve("tiled", lambda: _heuristic_of(call, sq, sk, width, batch * kv_heads))


def _heuristic_of(call: Call, sq: int, sk: int, width: int, heads: int) -> Config:
    found = heuristic(call.group, sq, sk, width, heads, call.q.device)
    # tiles that entmax leaves out, too
    leaves_out = call.rows is not None or (call.entmax is not None and call.bias is not None)
    return replace(found, block_n=min(found.block_n, MASKED_KEYS)) if leaves_out else found


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows [i0, i1) against keys [j0, j1) of one segment."""

    i0: int
    i1: int
    j0: int
    j1: int


def row_blocks(sq: int, config: Config) -> Iterator[tuple[int, int]]:
    for i0 in range(0, sq, config.block_m):
        yield i0, min(i0 + config.block_m, sq)


def tiles(spec: AttentionSpec, i0: int, i1: int, sq: int, sk: int, config: Config) -> list[Tile]:
    """The tiles of a row block, in key order: every visible pair once, excluded keys and rows left out (eq. 30).

    Keys are cut where every `edge`-th row's range begins or ends, and each piece is visited only by the rows that see it, so a
    causal block wastes half an `edge x edge` square per step of the diagonal instead of half of the block.
    """
    first, end = spec.key_range(i0, i1, sq, sk)
    cuts = {first, end}
    for i in range(i0 + config.edge, i1, config.edge):
        cuts |= {spec.first_key(i, sq, sk), spec.last_key(i - 1, sq, sk) + 1}
    edges = sorted(cut for cut in cuts if first <= cut <= end)
    out = []
    for a, b in pairwise(edges):
        r0, r1 = spec.row_range(a, b, sq, sk)
        r0, r1 = max(r0, i0), min(r1, i1)
        if r0 < r1:
            out += [Tile(r0, r1, j0, min(j0 + config.block_n, b)) for j0 in range(a, b, config.block_n)]
    return out


@dataclass(frozen=True, slots=True)
class Slab:
    """(batch, kv head) pairs handled together: batches [b0, b1), kv heads [g0, g1), all with the lengths of `segment`."""

    b0: int
    b1: int
    g0: int
    g1: int
    segment: Segment


def slabs(call: Call, config: Config) -> Iterator[Slab]:
    """Every (segment, kv head) of the call, grouped so that a slab's score tile stays within the configured width."""
    kv_heads = call.k.shape[1]
    segments = call.segments()
    if not call.varlen and config.heads >= kv_heads:
        step = config.heads // kv_heads
        for b0 in range(0, len(segments), step):
            yield Slab(b0, min(b0 + step, len(segments)), 0, kv_heads, segments[b0])
        return
    for segment in segments:
        for g0 in range(0, kv_heads, config.heads):
            yield Slab(segment.batch, segment.batch + 1, g0, min(g0 + config.heads, kv_heads), segment)
