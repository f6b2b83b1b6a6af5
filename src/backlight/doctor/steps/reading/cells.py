"""A set of wrong cells as a shape: a triangle, a band, a rectangle, or tiles with their size and period.

A shape is tried as a rule for the whole matrix and kept when it agrees with every cell that was read and could show it, so a
matrix of which only blocks are known is described like a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SIZES = (8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 176, 192, 256)
# wrong cells that a rule may leave over, or take too many: weights that are 0 by chance
SPARE = 0.005
MOST_PERIOD = 8


@dataclass(frozen=True)
class Shape:
    """Cells [Sq, Sk] that a rule marks. rows, keys: half-open ranges; tile: rows and keys of one; period: in tiles of rows."""

    text: str
    cells: Tensor
    cause: str = ""
    rows: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None
    tile: tuple[int, int] | None = None
    period: int | None = None

    def at(self, sq: int, sk: int, device: torch.device) -> Tensor:
        """The cells of a matrix that has the first rows and keys of this one."""
        found = torch.zeros(sq, sk, dtype=torch.bool, device=device)
        part = self.cells[:sq, :sk].to(device)
        found[: part.shape[0], : part.shape[1]] = part
        return found


@dataclass(frozen=True)
class Seen:
    """Wrong cells of one head, among those of `domain` that could be; lost cells must be filled, leaked ones must not."""

    wrong: Tensor
    domain: Tensor
    lost: bool

    @property
    def distance(self) -> Tensor:
        """Row minus key of each cell, rows counted so that the last one stands beside the last key."""
        sq, sk = self.wrong.shape
        i = torch.arange(sq, device=self.wrong.device) + sk - sq
        return i[:, None] - torch.arange(sk, device=self.wrong.device)

    def fits(self, cells: Tensor) -> bool:
        off = int(((cells & self.domain) != self.wrong).sum())
        return off <= SPARE * int(self.wrong.sum())

    @property
    def verb(self) -> str:
        return "are lost" if self.lost else "are seen and must not be"


def describe(seen: Seen, left: int | None = None, right: int | None = None) -> Shape | None:
    """The plainest shape that fits; `left` and `right` are the window of the mask. None where nothing is wrong."""
    if not bool(seen.wrong.any()):
        return None
    for rule in (_everything, _beyond_an_edge, _band, _rectangle, _tiles):
        found = rule(seen, left, right)
        if found is not None:
            return found
    rows, keys = _box(seen.wrong)
    count = int(seen.wrong.sum())
    text = f"{count} cells between {_span('rows', rows)} and {_span('keys', keys)} {seen.verb}, in no shape that has a name"
    return Shape(text, seen.wrong, "", rows, keys)


# --- shapes ------------------------------------------------------------------------------------------------------------------


def _everything(seen: Seen, left: int | None, right: int | None) -> Shape | None:
    every = torch.ones_like(seen.wrong)
    if not seen.fits(every):
        return None
    if seen.lost:
        return Shape("all cells are lost", every, "no weight is stored, or every key is masked")
    shape = "the triangle above the diagonal is filled" if right == 0 and left is None else "all hidden cells are filled"
    return Shape(shape, every, "the mask is not applied")


def _beyond_an_edge(seen: Seen, left: int | None, right: int | None) -> Shape | None:
    """One side of a window that has two."""
    if seen.lost or left is None:
        return None
    sides = {"left": seen.distance > left, "right": seen.distance < -(right or 0)}
    for side, cells in sides.items():
        if seen.fits(cells):
            text = f"the triangle beyond the {side} edge of the window is filled"
            return Shape(text, cells, f"the {side} edge of the mask is not applied")
    return None


def _band(seen: Seen, left: int | None, right: int | None) -> Shape | None:
    distance = seen.distance
    values = distance[seen.wrong]
    first, last = int(values.min()), int(values.max())
    cells = (distance >= first) & (distance <= last)
    if last - first > max(seen.wrong.shape) // 4 or not seen.fits(cells):
        return None
    if first == last:
        edge = {left: "left", -right if right is not None else None: "right"}.get(first if seen.lost else first - 1)
        edge = edge or {-right - 1 if right is not None else None: "right"}.get(first)
        cause = f"the {edge} edge of the mask is one too {'narrow' if seen.lost else 'wide'}" if edge else ""
        return Shape(f"the diagonal i-j = {first} {'is lost' if seen.lost else 'is seen and must not be'}", cells, cause)
    return Shape(f"the band i-j = {first} to {last} {'is lost' if seen.lost else 'is seen and must not be'}", cells)


def _rectangle(seen: Seen, left: int | None, right: int | None) -> Shape | None:
    rows, keys = _box(seen.wrong)
    cells = torch.zeros_like(seen.wrong)
    cells[slice(*rows), slice(*keys)] = True
    if not seen.fits(cells):
        return None
    sq, sk = seen.wrong.shape
    all_rows = not bool((seen.domain[:, slice(*keys)].any(dim=1) & ~cells[:, keys[0]]).any())
    all_keys = not bool((seen.domain[slice(*rows)].any(dim=0) & ~cells[rows[0]]).any())
    if all_rows:
        text = f"{_span('keys', keys)} {seen.verb} in every row"
        cause = "the loop over keys stops too early" if seen.lost and keys[1] == sk else ""
        cause = cause or ("a tile of the loop over keys is skipped" if seen.lost else "")
    elif all_keys:
        text, cause = f"all keys of {_span('rows', rows)} {seen.verb}", ""
        if seen.lost:
            cause = "these rows are never processed" if rows[1] == sq else "a tile of rows is skipped"
    else:
        text, cause = f"{_span('keys', keys)} of {_span('rows', rows)} {seen.verb}", ""
        cause = "one tile is skipped" if seen.lost else "one tile is not masked"
    return Shape(text, cells, cause, rows, keys, (rows[1] - rows[0], keys[1] - keys[0]))


# --- tiles -------------------------------------------------------------------------------------------------------------------


def _tiles(seen: Seen, left: int | None, right: int | None) -> Shape | None:
    """The largest tiles of which the wrong cells are a union, and which tiles they are."""
    for rows, keys in _sizes(seen.wrong.shape):
        wrong, possible = (_sums(x, rows, keys) for x in (seen.wrong, seen.domain))
        partly = (wrong > 0) & (wrong < possible)
        if int(torch.minimum(wrong, possible - wrong)[partly].sum()) <= SPARE * int(seen.wrong.sum()):
            marked, could = wrong * 2 > possible, possible > 0
            cells = marked.repeat_interleave(rows, 0).repeat_interleave(keys, 1)
            cells = cells[: seen.wrong.shape[0], : seen.wrong.shape[1]]
            return _which(seen, cells, marked & could, could, (rows, keys), right)
    return None


def _sizes(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Pairs of tile sizes, larger areas first, squares before others of the same area."""
    usual = [(m, n) for m in SIZES for n in SIZES if m < shape[0] and n < shape[1]]
    yield from sorted(usual, key=lambda tile: (-tile[0] * tile[1], abs(tile[0] - tile[1])))


def _sums(x: Tensor, rows: int, keys: int) -> Tensor:
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % keys, 0, -x.shape[0] % rows))
    return padded.unflatten(1, (-1, keys)).unflatten(0, (-1, rows)).sum(dim=(1, 3))


def _which(seen: Seen, cells: Tensor, marked: Tensor, could: Tensor, tile: tuple[int, int], right: int | None) -> Shape:
    rows, keys = tile
    size = f"tiles of {rows} x {keys}"
    those = marked.any(dim=1)[:, None]

    def shape(possible: Tensor, text: str, cause: str, rounded: str = "", **place: Any) -> Shape:
        """The text with the tiles of rows it is true of, among those where it could be; `rounded` is the cause of a period."""
        every, period = _every_tile(marked.any(dim=1), possible.any(dim=1), rows, seen.wrong.shape[0])
        why = rounded.format(max(keys, period * rows)) if period is not None and rounded else cause
        return Shape(text + every, cells, why, tile=tile, period=period, **place)

    diagonal, columns = _on_diagonal(seen, rows, keys) & could, marked.any(dim=0)
    if torch.equal(marked, diagonal & those) and right == 0 and seen.lost:
        cause = "a loop ends before the tile on the diagonal, or begins after it"
        return shape(
            diagonal, f"the {size} on the diagonal {seen.verb}", cause, "a loop bound rounded down to whole tiles of {} keys"
        )
    if torch.equal(marked, diagonal & those) and right == 0:
        text = f"triangles beyond the diagonal, to the end of each of the {size} that it crosses, {seen.verb}"
        return shape(diagonal, text, "the tiles on the diagonal are not masked")
    if torch.equal(marked, columns[None, :] & those & could):
        span = _box(seen.wrong)[1]
        which = _members(columns, keys, "keys", seen.wrong.shape[1]) or _span("keys", span)
        cause = "a loop bound rounded down" if seen.lost else "a tile is not masked"
        return shape(could & columns, f"{which} {seen.verb}", cause, keys=span)
    for word, part in (("last", _last), ("first", _first)):
        if torch.equal(marked, part(could & those)):
            text = f"the {word} {keys} keys that a tile of {rows} rows {'sees' if seen.lost else 'must not see'} {seen.verb}"
            cause = {"last": "a loop bound rounded down", "first": "a loop that begins a tile late"}[word] if seen.lost else ""
            return shape(could, text, cause)
    box = _box(seen.wrong)
    text = f"{int(marked.sum())} {size} {seen.verb}, between {_span('rows', box[0])} and {_span('keys', box[1])}"
    return Shape(text, cells, "tiles are skipped" if seen.lost else "tiles are not masked", *box, tile=tile)


def _on_diagonal(seen: Seen, rows: int, keys: int) -> Tensor:
    return _sums(seen.distance == 0, rows, keys) > 0


def _last(could: Tensor) -> Tensor:
    """The last tile of those that a tile of rows could show."""
    return could & (could.long().flip(1).cumsum(1).flip(1) == 1)


def _first(could: Tensor) -> Tensor:
    return could & (could.long().cumsum(1) == 1)


def _every_tile(chosen: Tensor, could: Tensor, size: int, length: int) -> tuple[str, int | None]:
    """Words for the tiles of rows that are concerned, and their period; '' for all of them."""
    at, all_at = chosen.nonzero().flatten().tolist(), could.nonzero().flatten().tolist()
    if at == all_at:
        return "", None
    for period in range(2, MOST_PERIOD + 1):
        if len(at) > 1 and at == [tile for tile in all_at if (tile - at[0]) % period == 0]:
            number = {2: "second", 3: "third", 4: "fourth"}.get(period, f"{period}th")
            return f", in every {number} tile of {size} rows from row {at[0] * size} on", period
    return f", in {_members(chosen, size, 'rows', length) or f'{len(at)} tiles of {size} rows'}", None


def _members(chosen: Tensor, size: int, word: str, length: int) -> str:
    """'keys 64-127', of tiles that follow each other; else ''."""
    at = chosen.nonzero().flatten().tolist()
    return _span(word, (at[0] * size, min((at[-1] + 1) * size, length))) if at == list(range(at[0], at[-1] + 1)) else ""


# --- words -------------------------------------------------------------------------------------------------------------------


def _box(cells: Tensor) -> tuple[tuple[int, int], tuple[int, int]]:
    rows, keys = (cells.any(dim=axis).nonzero().flatten() for axis in (1, 0))
    return (int(rows[0]), int(rows[-1]) + 1), (int(keys[0]), int(keys[-1]) + 1)


def _span(word: str, span: tuple[int, int]) -> str:
    return f"{word[:-1]} {span[0]}" if span[1] - span[0] == 1 else f"{word} {span[0]}-{span[1] - 1}"
