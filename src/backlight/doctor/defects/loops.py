"""Loops over tiles whose bounds are off beside the mask's edge: tiles that are lost there, and tiles that go unmasked.

The forward and the dq kernel own a tile of rows and loop over keys; the dk/dv kernel owns a tile of keys and loops over rows.
So a wrong bound has a shape of its own in each: a staircase, cut at the owner's tiles and the loop's steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, causal, masked, square
from backlight.doctor.defects.mutants import Mutant, in_both_halves, showing
from backlight.doctor.defects.tails import TILES
from backlight.reference import STAGES

# rows whose tile loses its diagonal see other keys still: a kernel need not divide by zero to show the defect
DEMO = CAUSAL_TILES | {"sk": 100}
# cells of a head's matrix, from the numbers of its rows and keys
Cells = Callable[[int, int, torch.device], Tensor]
MOST_TILES = 16


def _up(x: Tensor, step: int) -> Tensor:
    return -(-x // step) * step


def _down(x: Tensor, step: int) -> Tensor:
    return x // step * step


def shapes(call: Call) -> Iterator[tuple[int, int]]:
    """(rows, keys) of tiles worth a try: square, or one side twice the other."""
    longest = max(call.q.shape[2], call.k.shape[2])
    usual = [tile for tile in TILES if tile < longest <= MOST_TILES * tile]
    for rows in usual:
        yield from ((rows, keys) for keys in (rows, 2 * rows, rows // 2) if keys in usual)


def _positions(sq: int, sk: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.arange(sq, device=device)[:, None], torch.arange(sk, device=device)[None, :]


def by_row_tiles(rows: int, keys: int, call: Call) -> Iterator[tuple[Cells, str]]:
    """Cells that a loop over key tiles misses in a tile of rows."""
    left, right, size = call.spec.left, call.spec.right, f"{rows} x {keys}"

    def diagonal(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return j >= _up(_down(i, rows) + sk - sq, keys)

    def rounded(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return j >= _down(_down(i, rows) + rows + sk - sq, keys)

    def beginning(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return j < _up(_down(i, rows) + sk - sq - (left or 0), keys)

    if right == 0:
        yield diagonal, f"ends before the tile on the diagonal (tiles of {size})"
        yield rounded, f"has its end rounded down to whole tiles (of {size})"
    if left is not None:
        yield beginning, f"has its beginning, the window's edge, rounded up to whole tiles (of {size})"


def by_key_tiles(rows: int, keys: int, call: Call) -> Iterator[tuple[Cells, str]]:
    """Cells that a loop over row tiles misses in a tile of keys."""
    left, right, size = call.spec.left, call.spec.right, f"{rows} x {keys}"

    def diagonal(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return i < _down(_down(j, keys) + keys + sq - sk, rows)

    def rounded(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return i < _up(_down(j, keys) + sq - sk, rows)

    def end(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return i >= _down(_down(j, keys) + keys + sq - sk + (left or 0), rows)

    if right == 0:
        yield diagonal, f"begins after the tile on the diagonal (tiles of {size})"
        yield rounded, f"has its beginning rounded up to whole tiles (of {size})"
    if left is not None:
        yield end, f"has its end, the window's edge, rounded down to whole tiles (of {size})"


def different(call: Call, cells: Iterable[tuple[Cells, str]]) -> list[tuple[Cells, str]]:
    """Those that change something, each once."""
    segment, device, seen = max(call.segments(), key=lambda z: z.sq), call.q.device, set()
    allowed = call.spec.allowed(segment.sq, segment.sk, device)
    found = []
    for these, words in cells:
        lost = (these(segment.sq, segment.sk, device) & allowed).cpu().numpy().tobytes()
        if any(lost) and lost not in seen:
            seen.add(lost)
            found.append((these, words))
    return found


def lost(call: Call, parts: Callable[[int, int, Call], Iterator[tuple[Cells, str]]]) -> list[tuple[Cells, str]]:
    return different(call, (each for shape in shapes(call) for each in parts(*shape, call)))


def without(cells: Cells) -> Callable[..., Tensor]:
    def s(capped, bias, column, pair_bias, visible):
        rows, keys = visible.shape
        hidden = cells(rows, keys, visible.device)
        return STAGES["s"].compute(capped, bias, column, pair_bias, visible & ~hidden)

    return s


def _cut(x: Tensor, cells: Cells) -> Tensor:
    rows, keys = x.shape
    return x.masked_fill(cells(rows, keys, x.device), 0)


def dq_without(cells: Cells) -> Callable[..., Tensor]:
    return lambda dx, k, scale: STAGES["dq"].compute(_cut(dx, cells), k, scale)


def dk_without(cells: Cells) -> Callable[..., Tensor]:
    return lambda dx, q, scale: STAGES["dk"].compute(_cut(dx, cells), q, scale)


def dv_without(cells: Cells) -> Callable[..., Tensor]:
    return lambda a, do: STAGES["dv"].compute(_cut(a, cells), do)


def forward_bounds(call: Call) -> list[Mutant]:
    found = []
    for cells, words in lost(call, by_row_tiles):
        s = without(cells)
        found.append(Mutant(forward={"s": s}, detail=words))
        found.append(replace(in_both_halves(s=s), detail=f"{words}, in the backward too"))
    return found


def dq_bounds(call: Call) -> list[Mutant]:
    return [Mutant(backward={"dq": dq_without(cells)}, detail=words) for cells, words in lost(call, by_row_tiles)]


def key_bounds(call: Call) -> list[Mutant]:
    return [
        Mutant(backward={"dk": dk_without(cells), "dv": dv_without(cells)}, detail=words)
        for cells, words in lost(call, by_key_tiles)
    ]


def _revealed(rows: int, keys: int) -> Cells:
    """Cells beyond the diagonal in tiles that it crosses."""

    def cells(sq: int, sk: int, device: torch.device) -> Tensor:
        i, j = _positions(sq, sk, device)
        return (j > i + sk - sq) & (j < _up(_down(i, rows) + rows + sk - sq, keys))

    return cells


def shown(cells: Cells) -> Callable[..., Tensor]:
    def s(capped, bias, column, pair_bias, visible):
        rows, keys = visible.shape
        more = cells(rows, keys, visible.device)
        return STAGES["s"].compute(capped, bias, column, pair_bias, visible | more)

    return s


def unmasked(direction: str) -> Callable[[Call], list[Mutant]]:
    def variants(call: Call) -> list[Mutant]:
        found = []
        for rows, keys in shapes(call):
            stages, size = showing(shown(_revealed(rows, keys))), f"tiles of {rows} x {keys}"
            if direction == "backward":
                found.append(Mutant(backward=stages, detail=size))
            else:
                found.append(Mutant(forward=stages, detail=size))
                found.append(Mutant(forward=stages, backward=stages, detail=f"{size}, in the backward too"))
        return found

    return variants


def local_chunks(call: Call) -> list[Mutant]:
    """A backward of context parallelism that sees the keys of its own process alone."""

    def elsewhere(size: int) -> Cells:
        def cells(sq: int, sk: int, device: torch.device) -> Tensor:
            i, j = _positions(sq, sk, device)
            return i // size != j // size

        return cells

    sizes = {-(-call.q.shape[2] // world): world for world in (8, 4, 2)}
    return [
        Mutant(backward={"s": without(elsewhere(size))}, detail=f"{world} chunks of {size}") for size, world in sizes.items()
    ]


_bound = partial(Defect, family="loops", confirm="mutant; the lost cells are steps as long as a tile", demo=DEMO)
_unmasked = partial(Defect, family="loops", needs=causal, demo=DEMO, confirm="mutant; the leak is made of triangles")
OTHER_TILE = "Change the tile size: what is lost must change with it."
NO_MASK = "Run without the mask: the loop has no bound to get wrong, and the comparison must turn healthy."


def unpacked_mask(call: Call) -> bool:
    return masked(call) and not call.varlen


DEFECTS = [
    _bound(
        "bound-forward",
        "the forward's loop over keys {detail}: visible keys are never read",
        "the number of key tiles of a tile of rows is computed without the tile that the mask cuts",
        "s",
        "o and lse are wrong; the weights lack a staircase of cells along the mask's edge",
        NO_MASK,
        needs=unpacked_mask,
        variants=forward_bounds,
    ),
    _bound(
        "bound-dq",
        "the dq kernel's loop over keys {detail}",
        "the number of key tiles of a tile of rows is computed without the tile that the mask cuts, in the dq kernel alone",
        "dq",
        "I1 fails with residual; o, dk and dv are right",
        OTHER_TILE,
        needs=unpacked_mask,
        variants=dq_bounds,
    ),
    _bound(
        "bound-dkdv",
        "the dk/dv kernel's loop over rows {detail}",
        "the first tile of rows that sees a tile of keys is computed too late, in the dk/dv kernel alone",
        "dk",
        "I1 and I2 fail with residual; o and dq are right",
        OTHER_TILE,
        needs=unpacked_mask,
        variants=key_bounds,
    ),
    _unmasked(
        "diagonal-unmasked",
        "the forward does not mask the tiles that the diagonal crosses ({detail}): rows see keys to the end of the tile",
        "a tile is taken for fully visible by its last row, or the bound is rounded up and nothing masks the rest",
        "s",
        "o and lse are wrong; the weights have triangles beyond the diagonal",
        "Change the tile size: the keys that leak must change with it.",
        variants=unmasked("forward"),
    ),
    _unmasked(
        "diagonal-unmasked-backward",
        "the backward does not mask the tiles that the diagonal crosses ({detail})",
        "a tile is taken for fully visible by its last row, in the backward alone",
        "p (bwd)",
        "I2 and I3 fail; the backward's weights have triangles beyond the diagonal",
        "Change the tile size: the keys that leak must change with it.",
        variants=unmasked("backward"),
    ),
    Defect(
        "chunk-backward",
        "the backward sees the keys of the row's own chunk only ({detail}), the forward sees all",
        "each process of a ring, or each split of the keys, runs its backward on what it holds and passes nothing round",
        "p (bwd)",
        "I2 and I3 fail; o is fine; the backward's weights are blocks on the diagonal",
        "Run in one process, or with one split: the comparison must turn healthy.",
        family="loops",
        confirm="mutant; tomography of the backward's weights",
        needs=lambda call: square(call) and not call.varlen and call.q.shape[2] > 1,
        variants=local_chunks,
        demo=CAUSAL_TILES,
    ),
]
