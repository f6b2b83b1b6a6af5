"""Sums over tiles or parts of the keys that are not brought to a common maximum, or merged by the wrong weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect, plain_softmax
from backlight.doctor.defects.mutants import Mutant
from backlight.spec import LN2, LOG2E

TILES = (16, 32, 64, 128, 256)
PARTS = (2, 3, 4, 8)
# where a maximum that moves by less stays: 8 in base 2, and in base e
LAZY = (8 * LN2, 8.0)
# what becomes of (maximum that is kept, factor of the accumulator, factor of the sum) where the maximum moves from old to new
Move = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _fade(old: Tensor, new: Tensor) -> Tensor:
    """exp(old - new), 1 where nothing was seen yet."""
    return torch.exp(torch.where(old == -torch.inf, 0, old - new))


def _lazy(limit: float) -> Move:
    def move(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        stays = (new - old < limit) & (old > -torch.inf)
        fade = _fade(old, new).masked_fill(stays, 1)
        return torch.where(stays, old, new), fade, fade

    return move


def _moved(acc: Callable[[Tensor], Tensor], total: Callable[[Tensor], Tensor]) -> Move:
    """The maximum moves; accumulator and sum take functions of the right factor."""

    def move(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fade = _fade(old, new)
        return new, acc(fade), total(fade)

    return move


def _right(fade: Tensor) -> Tensor:
    return fade


MOVES: dict[str, Move] = {
    "the accumulator keeps its scale and the sum does not": _moved(torch.ones_like, _right),
    "the sum keeps its scale and the accumulator does not": _moved(_right, torch.ones_like),
    "sum and accumulator keep their scale": _moved(torch.ones_like, torch.ones_like),
    "the accumulator is rescaled twice": _moved(torch.square, _right),
    "the sum is rescaled twice": _moved(_right, torch.square),
    "the accumulator is rescaled to a power of 2 where weights are powers of e": _moved(lambda f: f**LN2, _right),
    "the factors are powers of 2 where weights are powers of e": _moved(lambda f: f**LN2, lambda f: f**LN2),
    "the factors are powers of e where weights are powers of 2": _moved(lambda f: f**LOG2E, lambda f: f**LOG2E),
} | {
    f"where the maximum moves by less than {limit:.3g} the old one is kept, and the weights have the new one": _lazy(limit)
    for limit in LAZY
}


def swept(move: Move, tile: int, first_last: bool, detail: str) -> Mutant:
    """An online softmax over tiles of keys, in their order or from the last to the first."""

    def sweep(s: Tensor) -> tuple[Tensor, Tensor]:
        kept = s.new_full(s.shape[:1], -torch.inf)
        total, weights = torch.zeros_like(kept), torch.zeros_like(s)
        starts = range(0, s.shape[1], tile)
        for j0 in starts if first_last else reversed(starts):
            part = s[:, j0 : j0 + tile]
            new = torch.maximum(kept, part.amax(dim=1))
            kept, of_acc, of_sum = move(kept, new)
            w = torch.exp(part - new.masked_fill(new == -torch.inf, 0)[:, None])
            weights *= of_acc[:, None]
            weights[:, j0 : j0 + tile] = w
            total = total * of_sum + w.sum(dim=1)
        return weights / total.masked_fill(total == 0, 1)[:, None], kept + torch.log(total)

    return _forward_of(sweep, detail)


def _forward_of(both: Callable[[Tensor], tuple[Tensor, Tensor]], detail: str) -> Mutant:
    """A forward with these weights and this lse; a backward takes its weights from the lse, as kernels do."""

    def lse(s):
        return both(s)[1]

    def p(s):
        return both(s)[0]

    return Mutant(forward={"lse": lse, "p": p}, detail=detail)


def _sweeps(call: Call) -> list[Mutant]:
    found = []
    for tile in TILES:
        if tile >= call.k.shape[2]:
            break
        for words, move in MOVES.items():
            for first_last in (True, False):
                order = f"tiles of {tile} keys" if first_last else f"tiles of {tile} keys, from the last to the first"
                found.append(swept(move, tile, first_last, f"{words} ({order})"))
    return found


# --- merging -----------------------------------------------------------------------------------------------------------------

# what takes the place of the lse of a part, from its largest score, the log of its sum, and the scale
STATES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "with the softmax scale once more on their maximum": lambda m, log, scale: m * scale + log,
    "with the softmax scale once more on it": lambda m, log, scale: (m + log) * scale,
    "in base 2, merged as if it were natural": lambda m, log, scale: (m + log) * LOG2E,
    "natural, merged as if it were in base 2": lambda m, log, scale: (m + log) * LN2,
    "without the log of their sum": lambda m, log, scale: m,
    "without their maximum": lambda m, log, scale: log,
    "with the wrong sign": lambda m, log, scale: -(m + log),
    "that is not used: all parts count the same": lambda m, log, scale: torch.zeros_like(m).masked_fill(
        m == -torch.inf, -torch.inf
    ),
}


def merged(state: Callable[[Tensor, Tensor, float], Tensor], length: int, own_lse: bool, scale: float, detail: str) -> Mutant:
    """Parts of `length` keys with a softmax each, weighted by what stands for their lse; `own_lse` returns the right one."""

    def merge(s: Tensor) -> tuple[Tensor, Tensor]:
        parts = s.split(length, dim=1)
        m = torch.stack([x.amax(dim=1) for x in parts])
        true = torch.stack([torch.logsumexp(x, dim=1) for x in parts])
        log = torch.where(m == -torch.inf, 0, true - m)
        states = state(m, log, scale).masked_fill(m == -torch.inf, -torch.inf)
        whole = torch.logsumexp(states, dim=0)
        share = torch.exp(states - whole.masked_fill(whole == -torch.inf, 0))
        lse = torch.where(true == -torch.inf, 0, true)
        weights = [torch.exp(x - each[:, None]) * w[:, None] for x, each, w in zip(parts, lse, share, strict=True)]
        return torch.cat(weights, dim=1), torch.logsumexp(s, dim=1) if own_lse else whole

    return _forward_of(merge, detail)


def lengths_of_parts(call: Call) -> Iterator[tuple[int, str]]:
    """Lengths of parts: whole shares of the keys, and tiles."""
    sk, seen = call.k.shape[2], set()
    shares = {-(-sk // count): f"{count} parts" for count in reversed(PARTS)}
    for length, words in ({tile: f"parts of {tile} keys" for tile in TILES} | shares).items():
        if 0 < length < sk and length not in seen:
            seen.add(length)
            yield length, words


def _merges(call: Call) -> list[Mutant]:
    found = [
        merged(state, length, own_lse, call.scale, f"{words} ({parts})")
        for length, parts in lengths_of_parts(call)
        for words, state in STATES.items()
        for own_lse in (False, True)
    ]
    if call.spec.softcap is None:
        found += [centred(length, f"of keys less the mean of their part ({parts})") for length, parts in lengths_of_parts(call)]
    return found


def centred(length: int, detail: str) -> Mutant:
    """Keys of a part less their mean, which moves no weight of the part and its lse; nobody gives that back to the lse."""

    def states(s: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """What weighs each key's part, and the whole, both without the means."""
        shifts = [part.mean(dim=1, keepdim=True).expand_as(part) for part in x.split(length, dim=1)]
        shifted = s - torch.cat(shifts, dim=1)
        return shifted, torch.logsumexp(shifted, dim=1)

    def lse(s: Tensor, x: Tensor) -> Tensor:
        return states(s, x)[1]

    def p(s: Tensor, x: Tensor) -> Tensor:
        shifted, whole = states(s, x)
        return torch.exp(shifted - whole.masked_fill(whole == -torch.inf, 0)[:, None])

    return Mutant(forward={"lse": lse, "p": p}, detail=detail)


_rescaling = partial(Defect, family="lse", needs=plain_softmax, of_forward=True)
DEFECTS = [
    _rescaling(
        "rescale-missing",
        "sums over tiles of keys are not brought to the new maximum of the row: {detail}",
        "acc and l are multiplied by exp(m_old - m_new) at every tile; one of them is not, or by another number",
        "p",
        "o is wrong in rows whose maximum moves after the first tile; weights of one tile keep their ratios",
        "Run with one tile for all keys: the comparison must turn healthy.",
        variants=_sweeps,
        demo=CAUSAL | {"shape": (1, 2, 128, 32)},
    ),
    _rescaling(
        "merge-weights",
        "parts of the keys are merged by the wrong weights: by an lse {detail}",
        "o = sum of exp(lse_i - lse) o_i needs the lse of every part; what stands for it has another base, scale or meaning",
        "p",
        "o is wrong; weights of one part keep their ratios",
        "Run with one part: the comparison must turn healthy.",
        variants=_merges,
        demo=CAUSAL | {"shape": (1, 2, 128, 32)},
    ),
]
