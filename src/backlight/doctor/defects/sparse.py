"""alpha-entmax: how far the threshold is stepped, what the mean of delta weighs with, which tiles are dead, and d alpha."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, always, has
from backlight.doctor.defects.mutants import Mutant
from backlight.doctor.defects.tails import TILES
from backlight.reference import STAGES
from backlight.reference.entmax import exponent, lse, slopes, weight

# sorted rows have a threshold in closed form, which keeps the search short
DEMO: dict[str, Any] = {"spec": {"entmax": True}, "entmax": 1.5, "shape": (1, 2, 48, 32)}
MOST_STEPS = 4


def _entries(s: Tensor, sink: Tensor | None) -> Tensor:
    return s if sink is None else torch.cat([s, sink.expand(s.shape[0], 1)], dim=-1)


# --- the threshold -----------------------------------------------------------------------------------------------------------


def _stepped(s: Tensor, sink: Tensor | None, alpha: Tensor, steps: int) -> Tensor:
    """lse of the threshold after some steps of eq. 81 from 1 below the largest entry."""
    z, e = (alpha - 1) * _entries(s, sink), exponent(alpha)
    largest = z.amax(dim=-1)
    usual = torch.isfinite(largest)
    theta = largest.masked_fill(~usual, 0) - 1
    z = z.masked_fill(~usual[:, None], 0)
    for _ in range(steps):
        u = (z - theta[:, None]).clamp(min=0)
        total, slopes = u.pow(e).sum(dim=-1), torch.where(u > 0, u.pow(e - 1), 0).sum(dim=-1)
        theta = theta + (total - total.pow(1 - 1 / e)) / slopes
    return torch.where(usual, (theta + 1) / (alpha - 1), largest)


def _words(steps: int) -> str:
    return f"{steps} Newton step{'' if steps == 1 else 's'} below its largest score"


def _unfinished(steps: int) -> Mutant:
    def stopped(s, sink, entmax):
        return _stepped(s, sink, entmax, steps)

    return Mutant(forward={"lse": stopped}, detail=_words(steps))


def _uncorrected(steps: int) -> Mutant:
    """o and u at the threshold before the last step, lse after it."""

    def after_it(s, sink, entmax):
        return _stepped(s, sink, entmax, steps + 1)

    def a(s, sink, entmax):
        return weight(s, _stepped(s, sink, entmax, steps)[:, None], entmax)

    def u(s, sink, v, entmax):
        before = _stepped(s, sink, entmax, steps)
        w, total = slopes(a(s, sink, entmax), STAGES["p_sink"].compute(before, sink, entmax), entmax)
        return w @ v / total[:, None]

    return Mutant(forward={"lse": after_it, "a": a, "u": u}, detail=_words(steps))


def _one_key_fewer(s, sink, entmax):
    """The threshold of all entries that weigh anything but the smallest of them; a row keeps its last one."""
    right = lse(s, sink, entmax)
    if not s.shape[1]:
        return right
    entries = _entries(s, sink)
    p = weight(entries, right[:, None], entmax)
    alive = p > 0
    last = torch.where(alive, p, torch.inf).argmin(dim=-1, keepdim=True)
    kept = alive.scatter(1, last, alive.sum(dim=-1, keepdim=True) == 1)
    return lse(entries.masked_fill(~kept, -torch.inf), None, entmax)


# --- backward ----------------------------------------------------------------------------------------------------------------


def _mean_by_p(dy, y, dlse, p, p_sink, entmax):
    delta = (dy * y).sum(dim=-1)
    return delta if dlse is None else delta - dlse / slopes(p, p_sink, entmax)[1]


def _judged_by(row: int, rows: int, keys: int, words: str) -> Mutant:
    """The backward without tiles in which one of their rows has no weight left."""

    def p(s, lse, entmax):
        right = STAGES["p"].compute(s, lse, entmax).clone()
        for i, j in product(range(0, right.shape[0], rows), range(0, right.shape[1], keys)):
            tile = right[i : i + rows, j : j + keys]
            if not bool((tile[row] > 0).any()):
                tile.zero_()
        return right

    return Mutant(backward={"p": p}, detail=f"{words} row of a tile of {rows} rows and {keys} keys")


def _dead_tiles(call: Call) -> list[Mutant]:
    sizes = [tile for tile in TILES if tile < call.k.shape[2]]
    ends = ((0, "first"), (-1, "last"))
    return [_judged_by(row, m, n, words) for row, words in ends for n in sizes for m in TILES if n // 2 <= m <= 2 * n]


def _by_alpha(of_row: Callable[..., Tensor], detail: str, power: int = 1) -> Mutant:
    """Eq. 89 with another eta, or with another power of e in front."""

    def dentmax(p, p_sink, dp, entmax):
        e = exponent(entmax)
        w, total = slopes(p, p_sink, entmax)
        entropy = torch.xlogy(p, p).sum(dim=-1) + torch.xlogy(p_sink, p_sink)
        eta = of_row(e, entropy, total)
        return e**power * ((p * e - torch.xlogy(p, p) - w * eta[:, None]) * dp).sum()

    return Mutant(backward={"dentmax": dentmax}, detail=detail)


def _eta(e: Tensor, entropy: Tensor, total: Tensor) -> Tensor:
    return (e - entropy) / total


_entmax = partial(Defect, family="terms", needs=has("entmax"), demo=DEMO)

DEFECTS = [
    _entmax(
        "entmax-not-converged",
        "entmax: the threshold is not converged, it is that of {detail}",
        "the search for the threshold ends after a fixed number of steps, too few for these rows",
        "lse",
        "weights of a row do not sum to 1: o and lse are wrong, most in rows with many keys",
        "Double the number of steps: the comparison must turn healthy.",
        variants=always(*map(_unfinished, range(MOST_STEPS))),
    ),
    _entmax(
        "entmax-support",
        "entmax: the support is off by one, the threshold is that of one key too few",
        "the number of keys above the threshold is counted from 0 where it must be from 1, or < stands for <=",
        "lse",
        "weights of a row sum to more than 1, by what its last key weighs; rows with a single key are right",
        "Give a row one key: it must be right, and wrong with two that have the same score.",
        variants=always(Mutant(forward={"lse": _one_key_fewer})),
        demo=DEMO | {"entmax": 2.0},
    ),
    _entmax(
        "entmax-last-step",
        "entmax: the last step moves lse and not o, whose weights are those of {detail}",
        "o = P V - f O2 of eq. 86 lacks its second term, so o belongs to the threshold before the step",
        "o",
        "lse is right, or nearly; o is too large by what the weights sum to beyond 1",
        "Set v to 1: o must be 1 in every row, and is larger.",
        variants=always(*map(_uncorrected, range(MOST_STEPS))),
    ),
    _entmax(
        "entmax-delta",
        "entmax: delta is the mean of dp by p (delta = dO.o), where it must be the mean by slopes (dO.O2)",
        "delta is taken from y as a softmax does; O2, the mean of v by slopes, is not saved or not read",
        "delta",
        "dq and dk are wrong; o, lse and dv are right",
        "Take alpha near 1: slopes become weights, and the comparison must turn healthy.",
        variants=always(Mutant(backward={"delta": _mean_by_p})),
    ),
    _entmax(
        "entmax-dead-tile",
        "entmax: the backward skips tiles that still weigh something: it asks the {detail}",
        "a tile is dead when no row of it has a weight left, and only one of them is asked",
        "p (bwd)",
        "dq, dk and dv lack the share of whole tiles; o and lse are right",
        "Visit every tile: the comparison must turn healthy.",
        variants=_dead_tiles,
        demo=DEMO | {"recipe": "peaky"},
    ),
    _entmax(
        "entmax-dalpha",
        "entmax: the gradient by alpha {detail}",
        "alpha moves the exponent, the scores and the threshold (eq. 89), and one of them is forgotten",
        "dentmax",
        "dentmax wrong, everything else right",
        "Compare with a difference quotient in alpha, all else fixed.",
        needs=has("entmax"),
        variants=always(
            _by_alpha(lambda e, entropy, total: torch.zeros_like(total), "holds the threshold fixed"),
            _by_alpha(lambda e, entropy, total: e / total, "leaves the entropy of the row out"),
            _by_alpha(lambda e, entropy, total: -entropy / total, "leaves out how the threshold follows the scores"),
            _by_alpha(_eta, "lacks the factor 1/(alpha - 1)", power=0),
            _by_alpha(_eta, "has the factor 1/(alpha - 1) twice", power=2),
        ),
    ),
]
