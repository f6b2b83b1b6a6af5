"""Sums over tiles of keys that are divided by the running sum of weights more often than once, or not at all."""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect, plain_softmax
from backlight.doctor.defects.mutants import Mutant

# keys of a tile: 1 is a loop over single keys
TILES = (1, 8, 16, 32, 64, 128)
# rows that visit the same tiles of keys; 0: all tiles are visited
ROWS = (0, 1, 16, 32, 64, 128)


def _visited(part: Tensor, rows: int) -> Tensor:
    """Rows [S] whose tile of `rows` rows has something to see in a tile of keys; 0: every tile of keys is visited."""
    if not rows:
        return part.new_ones(part.shape[:1], dtype=torch.bool)
    seen = (part > -torch.inf).any(dim=1)
    tiles = torch.nn.functional.pad(seen, (0, -len(seen) % rows)).unflatten(0, (-1, rows)).any(dim=1)
    return tiles.repeat_interleave(rows)[: len(seen)]


def _weights(s: Tensor, tile: int, rows: int, from_last: bool) -> Tensor:
    """Weights of an online softmax whose accumulator is divided after every tile that it visits."""
    m = s.new_full(s.shape[:1], -torch.inf)
    total, weights = torch.zeros_like(m), torch.zeros_like(s)
    starts = range(0, s.shape[1], tile)
    for j0 in reversed(starts) if from_last else starts:
        part = s[:, j0 : j0 + tile]
        new = torch.maximum(m, part.amax(dim=1))
        fade = torch.exp(torch.where(m == -torch.inf, 0, m - new))
        w = torch.exp(part - new.masked_fill(new == -torch.inf, 0)[:, None])
        total, m = total * fade + w.sum(dim=1), new
        weights *= fade[:, None]
        weights[:, j0 : j0 + tile] = w
        weights /= total.masked_fill((total == 0) | ~_visited(part, rows), 1)[:, None]
    return weights


def divided(tile: int, rows: int, from_last: bool, detail: str) -> Mutant:
    def p(s: Tensor) -> Tensor:
        return _weights(s, tile, rows, from_last)

    return Mutant(forward={"p": p}, detail=detail)


def _undivided() -> Mutant:
    """Weights relative to the row's maximum."""

    def p(s: Tensor) -> Tensor:
        m = s.amax(dim=1, keepdim=True)
        return torch.exp(s - m.masked_fill(m == -torch.inf, 0))

    return Mutant(forward={"p": p}, detail="never, and is o as it stands")


def _variants(call: Call) -> list[Mutant]:
    found = []
    for tile in TILES:
        if tile >= call.k.shape[2]:
            break
        words = f"after every tile of {tile} keys" if tile > 1 else "after every key"
        for rows in ROWS if call.spec.masked else ROWS[:1]:
            found += [divided(tile, rows, from_last, words) for from_last in ((False, True) if tile > 1 else (False,))]
    return [*found, _undivided()]


DEFECTS = [
    Defect(
        "divided-per-tile",
        "the sum for o is divided by the running sum of weights {detail}; it must be once, after all keys",
        "the division that ends a row stands inside of the loop over keys, or nowhere",
        "p",
        "lse is right; o is wrong in rows that need more than one tile, most in their first keys",
        "Run with one tile for all keys: the comparison must turn healthy.",
        family="lse",
        needs=plain_softmax,
        of_forward=True,
        variants=_variants,
        demo=CAUSAL | {"shape": (1, 2, 128, 32)},
    ),
]
