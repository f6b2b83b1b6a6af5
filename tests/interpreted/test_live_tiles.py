"""What kernels are told of a mask by row intervals, against the pairs that it shows (math.md section 12)."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

from backlight.backends.intervals import tiles
from backlight.backends.intervals.kernels import END, FIRST, GEOMETRY, HOLE, KINDS
from backlight.backends.intervals.tiles import LiveTiles, Tiling, live_tiles
from backlight.spec import AttentionSpec

BM, BN, HEADS = 16, 16, 2


def start(kernel: Any, grid: tuple[int, ...], args: list[Any], constants: dict[str, Any], _which: str) -> None:
    kernel[grid](*args, **constants)


def problem(
    generator: torch.Generator, lengths: list[tuple[int, int]], batch: int, heads: int, intervals: int, pos: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """(rows, pos, borders of rows, borders of keys) with intervals of every kind, some out of range, some empty."""
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor([pair[side] for pair in lengths]).cumsum(0)], dtype=torch.int32) for side in (0, 1)
    )
    sq, sk = int(cu_q[-1]), int(cu_k[-1])
    first = torch.randint(-9, sq + 9, (batch, heads, intervals, 1, sk), generator=generator)
    size = torch.randint(-5, sq, (batch, heads, intervals, 1, sk), generator=generator)
    # runs of keys with one interval, so that tiles are full and empty too
    same = torch.arange(sk) // 20 * 20
    ends = torch.cat([first, first + size], 3)[..., same].reshape(batch, heads, 2 * intervals, sk).to(torch.int32)
    ends[..., sk // 2] = torch.tensor([-(2**31), 2**31 - 1] * intervals, dtype=torch.int32)
    order = torch.stack([torch.randperm(sq, generator=generator) for _ in range(batch)]).to(torch.int32) if pos else None
    return ends, order, cu_q, cu_k


def shown(rows: Tensor, pos: Tensor | None, spec: AttentionSpec, cu_q: Tensor, cu_k: Tensor, m: tuple[int, int]) -> Tensor:
    """[Sq, Sk]: which pairs are visible."""
    sq, sk = int(cu_q[-1]), int(cu_k[-1])
    i = torch.arange(sq) if pos is None else pos[min(m[0], pos.shape[0] - 1)]
    ends = rows[min(m[0], rows.shape[0] - 1), m[1]].long()
    seen = torch.zeros(sq, sk, dtype=torch.bool)
    for first, end in ends.unflatten(0, (-1, 2)):
        seen |= (i[:, None] >= first) & (i[:, None] < end)
    near = torch.zeros_like(seen)
    for z in range(cu_q.shape[0] - 1):
        q0, q1, k0, k1 = (int(x) for x in (cu_q[z], cu_q[z + 1], cu_k[z], cu_k[z + 1]))
        near[q0:q1, k0:k1] = spec.allowed(q1 - q0, k1 - k0)
    return seen & near


def told(tiles: LiveTiles, m: int, owner: int) -> list[tuple[int, int]]:
    """(other tile, what to compare) of a list, as kernels read it."""
    partial, full = tiles.counts[m, owner].tolist()
    entries = tiles.live[m, owner].tolist()
    assert partial + full <= max(len(entries), 1)
    read = [*entries[:partial], *[entries[tiles.most - 1 - t] for t in range(full)]]
    kinds = [entry % KINDS.value for entry in read]
    assert all(kinds[:partial])
    assert not any(kinds[partial:])
    return [(entry // KINDS.value, entry % KINDS.value) for entry in read]


@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("pos", [False, True])
@pytest.mark.parametrize("intervals", [1, 2])
@pytest.mark.parametrize("masks", [(2, 1)])
@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(causal=True), AttentionSpec(window=(20, 9))])
@pytest.mark.parametrize("lengths", [[(33, 50)], [(33, 20), (0, 9), (5, 0), (15, 34)]])
def test_every_visible_pair_is_visited(
    lengths: list[tuple[int, int]], spec: AttentionSpec, masks: tuple[int, int], intervals: int, pos: bool, of_rows: bool
) -> None:
    generator = torch.Generator().manual_seed(intervals)
    rows, order, cu_q, cu_k = problem(generator, lengths, *masks, intervals, pos)
    sq, sk = int(cu_q[-1]), int(cu_k[-1])
    packed = len(lengths) > 1
    row_counts, key_counts = ([-(-pair[side] // size) for pair in lengths] for side, size in ((0, BM), (1, BN)))
    row_starts, key_starts = (
        torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32) for counts in (row_counts, key_counts)
    )
    # as launches do, more tiles than there are
    row_tiles, key_tiles = (sq // BM + len(lengths), sk // BN + len(lengths)) if packed else (row_counts[0], key_counts[0])
    borders = (cu_q, cu_k, row_starts, key_starts) if packed else ()
    call: Any = SimpleNamespace(
        rows=rows, pos=order, spec=spec, q=torch.empty(masks[0], HEADS, sq, 8), k=torch.empty(masks[0], HEADS, sk, 8)
    )
    tiles = live_tiles(start, call, Tiling(BM, BN, row_tiles, key_tiles, *borders), of_rows)
    assert (tiles.batch_step, tiles.head_step) == (0 if masks[0] == 1 else masks[1], 0 if masks[1] == 1 else 1)
    folded = tiles.folded.unflatten(1, (key_tiles + 1, intervals, 2))
    for m in range(masks[0] * masks[1]):
        visible = shown(rows, order, spec, cu_q, cu_k, divmod(m, masks[1]))
        for z, (own_sq, own_sk) in enumerate(lengths):
            q0, k0, r0, t0 = (int(x[z]) for x in (cu_q, cu_k, row_starts, key_starts))
            own = visible[q0 : q0 + own_sq, k0 : k0 + own_sk]
            position = torch.arange(own_sq) if order is None else order[m // masks[1], q0 : q0 + own_sq]
            for owner in range(row_counts[z] if of_rows else key_counts[z]):
                found = torch.zeros_like(own)
                for other, kind in told(tiles, m, (r0 if of_rows else t0) + owner):
                    row, key = (owner, other) if of_rows else (other, owner)
                    i, j = slice(row * BM, (row + 1) * BM), slice(key * BN, (key + 1) * BN)
                    first, end, *hole = folded[m, t0 + key].flatten(0, 1)
                    at = position[i, None]
                    seen = torch.ones(at.shape[0], BN, dtype=torch.bool)
                    if kind & FIRST.value:
                        seen &= at >= first
                    if kind & END.value:
                        seen &= at < end
                    if kind & HOLE.value:
                        seen &= (at < hole[0]) | (at >= hole[1])
                    if kind & GEOMETRY.value:
                        seen = seen[:, : own[i, j].shape[1]] & spec.allowed(own_sq, own_sk)[i, j]
                    assert not seen[:, own[i, j].shape[1] :].any(), "a key that does not exist"
                    assert not found[i, j].any(), "visited twice"
                    found[i, j] = seen[:, : own[i, j].shape[1]]
                strip = slice(owner * BM, (owner + 1) * BM) if of_rows else slice(owner * BN, (owner + 1) * BN)
                where = (strip, slice(None)) if of_rows else (slice(None), strip)
                torch.testing.assert_close(found[where], own[where])


@pytest.mark.parametrize("intervals", [1, 2])
def test_lists_of_key_tiles(intervals: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same however many row tiles are looked at in one go; their number is added to what was there, and to nothing else."""
    rows, _, cu_q, cu_k = problem(torch.Generator().manual_seed(3), [(150, 70)], 2, 2, intervals, False)
    sq, sk = int(cu_q[-1]), int(cu_k[-1])
    call: Any = SimpleNamespace(
        rows=rows, pos=None, spec=AttentionSpec(causal=True), q=torch.empty(2, 2, sq, 8), k=torch.empty(2, 2, sk, 8)
    )
    lists = []
    total = torch.full((4,), 7.0)
    for chunk in (128, 2):
        monkeypatch.setattr(tiles, "CHUNK", chunk)
        made = tiles.live_tiles(start, call, Tiling(BM, BN, -(-sq // BM), -(-sk // BN)), False, (total, 2))
        lists.append([told(made, m, owner) for m in range(4) for owner in range(made.counts.shape[1])])
    assert lists[0] == lists[1]
    assert total.tolist() == [7.0, 7.0, 7.0 + 2 * sum(map(len, lists[0])), 7.0]
    assert not any(lists[0][made.counts.shape[1] - 1 :: made.counts.shape[1]]), "the tile without keys"


def test_a_full_tile_compares_nothing_and_an_empty_one_is_not_visited() -> None:
    """Documents of 32 and 64 rows in tiles of 16: no tile is cut, and as many are visited as the documents hold."""
    ends = torch.tensor([[0, 32]] * 32 + [[32, 96]] * 64, dtype=torch.int32).T.reshape(1, 1, 2, 96).contiguous()
    call: Any = SimpleNamespace(
        rows=ends, pos=None, spec=AttentionSpec(), q=torch.empty(1, 1, 96, 8), k=torch.empty(1, 1, 96, 8)
    )
    for of_rows in (True, False):
        tiles = live_tiles(start, call, Tiling(BM, BN, 6, 6), of_rows)
        assert tiles.counts[0, :6].tolist() == [[0, 2]] * 2 + [[0, 4]] * 4
