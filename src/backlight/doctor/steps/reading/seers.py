"""Whose mask a row has: a kernel that masks once for several rows, or counts rows in other units, uses another row's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.steps.tomography import Recovered

SHARED = (2, 4, 8, 16, 32, 64)
# rows of the smallest tile: whose rows all have the mask of the last is a diagonal that goes unmasked, which cells say plainer
TILE = 16
# wrong cells that a rule may leave over or take too many, of those that are wrong
SPARE = 0.02


@dataclass(frozen=True)
class Seers:
    """rows: the row whose mask each row has, [Sq], perhaps beyond the last."""

    text: str
    cause: str
    rows: Tensor
    call: Call

    def seen(self, sq: int, sk: int, device: torch.device) -> Tensor:
        """What the first rows of these see, [Sq,Sk]."""
        rows = self.rows[:sq].to(device)
        return _of_rows(self.call, torch.cat([rows, rows.new_full((sq - len(rows),), -1)]), sk)

    def lost(self, sq: int, sk: int, device: torch.device) -> Tensor:
        return ~self.seen(sq, sk, device)


def _of_rows(call: Call, rows: Tensor, sk: int) -> Tensor:
    distance = rows[:, None] + (call.k.shape[2] - call.q.shape[2]) - torch.arange(sk, device=rows.device)
    return call.spec.allowed_distance(distance)


def seers(matrix: Recovered, could_be_lost: Tensor, could_leak: Tensor) -> Seers | None:
    """The row whose mask each row has, where that makes all cells that are lost and all that are leaked."""
    call, spec = matrix.call, matrix.call.spec
    plain = not call.varlen and call.rows is None and (spec.left, spec.right) != (None, None)
    wrong = int(matrix.holes.sum() + matrix.leaks.sum())
    if not plain or not wrong:
        return None
    sq, sk = matrix.truth.shape[-2:]
    for text, cause, rows in _rules(torch.arange(sq, device=matrix.truth.device), call.group):
        seen = _of_rows(call, rows, sk)
        off = (could_be_lost & ~seen) != matrix.holes
        off |= (could_leak & seen) != matrix.leaks
        if int(off.sum()) <= SPARE * wrong:
            return Seers(text, cause, rows, call)
    return None


def _rules(i: Tensor, group: int) -> Iterator[tuple[str, str, Tensor]]:
    for count in (count for count in SHARED if count < len(i)):
        blocks, cause = i // count * count, f"the mask is made once for {count} rows"
        if count < TILE:
            yield f"each of {count} rows has the mask of their last", cause, blocks + count - 1
        yield f"each of {count} rows has the mask of their first", cause, blocks
    for count in sorted({group, 2, 4, 8} - {1}):
        packed = "rows are counted as if the heads of a group were packed into them" if count == group else ""
        yield f"row i has the mask of row i // {count}", packed, i // count
        yield f"row i has the mask of row {count} i", packed, i * count
