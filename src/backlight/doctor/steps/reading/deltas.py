"""ds beside right weights: dp - ds / p is the delta that the kernel used, by row or by key range, or shows channels of dp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.doctor.steps.reading.cells import SIZES
from backlight.doctor.steps.reading.places import AGREE, Place, place_of

# weights below this say too little about dp - delta
FAINT = 1e-3


@dataclass(frozen=True)
class Deltas:
    """delta [B, H, S] that ds speaks of, and what it is; `by`: keys of one range, where it differs from range to range."""

    text: str
    delta: Tensor | None = None
    place: Place | None = None
    channels: tuple[int, ...] | None = None
    by: int | None = None
    cause: str = ""


@dataclass(frozen=True)
class Given:
    """What the probe's own call has: weights, dp and delta [B, H, Sq, (Sk)], dO [B, H, Sq, Dv], v by query head.

    taken: the rows of delta that a place takes.
    """

    p: Tensor
    dp: Tensor
    delta: Tensor
    do: Tensor
    v: Tensor
    taken: Callable[[Place], Tensor] | None = None


def deltas(ds: Tensor, given: Given, rows: Tensor, eps: float) -> Deltas | None:
    """What the ds of the `rows` that were read says; None where it says nothing plain."""
    usable = (given.p > FAINT) & rows[..., None]
    if not bool(usable.any()):
        return None
    implied = (given.dp - ds / given.p.clamp(min=1e-300)).masked_fill(~usable, 0)
    weight = (given.p * usable) ** 2
    # errors of ds, seen through the division by p, in units of p
    noise = (8 * eps + 1e-5) * (given.p * given.dp.abs().clamp(min=1.0)).pow(2).sum(-1).sqrt().clamp(min=1e-12)
    one = _mean(implied, weight)
    if _left(implied - one[..., None], weight, noise, rows):
        return _by_row(one, given, rows, noise, weight)
    for found in (_channels(implied, given, usable), _by_keys(implied, weight, noise, given, rows)):
        if found is not None:
            return found
    return None


def _mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1) / weight.sum(-1).clamp(min=1e-300)


def _left(rest: Tensor, weight: Tensor, noise: Tensor, rows: Tensor) -> bool:
    """Whether nothing but noise is left in nearly all rows."""
    good = (rest * rest * weight).sum(-1).sqrt() <= noise
    return float((good & rows).sum()) >= AGREE * int(rows.sum())


def _by_row(one: Tensor, given: Given, rows: Tensor, noise: Tensor, weight: Tensor) -> Deltas | None:
    close = 4 * noise / weight.sum(-1).sqrt().clamp(min=1e-12)
    wrong = rows & ~((one - given.delta).abs() <= close)
    if float((wrong & rows).sum()) < (1 - AGREE) * int(rows.sum()):
        return None
    place = place_of(one, given.delta, close, rows, given.taken)
    if place is not None:
        cause = "delta is not subtracted" if place.words == "0" else ""
        return Deltas(f"the delta that ds speaks of is {place.words}", one, place, cause=cause)
    both = (one * given.delta)[rows].sum() / (given.delta**2)[rows].sum().clamp(min=1e-300)
    scaled = float(((one - both * given.delta).abs() <= close)[rows].double().mean()) >= AGREE
    words = f"{float(both):.4g} times its own" if scaled else "one number along each row, and not the row sum of dO * o"
    return Deltas(f"the delta that ds speaks of is {words}", one)


def _by_keys(implied: Tensor, weight: Tensor, noise: Tensor, given: Given, rows: Tensor) -> Deltas | None:
    """delta that changes from one range of keys to the next."""
    for size in sorted((size for size in SIZES if size < implied.shape[-1]), reverse=True):
        parts = [(implied[..., j : j + size], weight[..., j : j + size]) for j in range(0, implied.shape[-1], size)]
        means = [_mean(x, w) for x, w in parts]
        rest = torch.cat([x - mean[..., None] for (x, _), mean in zip(parts, means, strict=True)], dim=-1)
        if _left(rest, weight, noise, rows):
            weighed = (given.p * given.dp).masked_fill(~torch.isfinite(given.p * given.dp), 0)
            words, cause = _ranges(means, weighed, size, rows, 8 * noise / weight.sum(-1).sqrt().clamp(min=1e-12))
            return Deltas(f"delta differs from one range of {size} keys to the next{words}", by=size, cause=cause)
    return None


def _ranges(means: list[Tensor], weighed: Tensor, size: int, rows: Tensor, close: Tensor) -> tuple[str, str]:
    sums = [weighed[..., t * size : (t + 1) * size].sum(-1) for t in range(len(means))]
    so_far = torch.stack(sums).cumsum(0)
    for words, expected in (("that of the range alone", sums), ("that of the keys so far", list(so_far))):
        good = [((mean - right).abs() <= close) | (mean == 0) for mean, right in zip(means, expected, strict=True)]
        if float(torch.stack(good)[:, rows].double().mean()) >= AGREE:
            return f": it is {words}", "delta is formed inside the loop over key tiles"
    return "", "delta is formed, or read, once for each tile of keys"


def _channels(implied: Tensor, given: Given, usable: Tensor) -> Deltas | None:
    """Channels of dO and v that dp leaves out: implied = delta + their products."""
    missing = []
    for b, h in ((b, h) for b in range(implied.shape[0]) for h in range(implied.shape[1])):
        i, j = usable[b, h].nonzero(as_tuple=True)
        if len(i) < 4 * given.v.shape[-1]:
            continue
        weight = given.p[b, h, i, j]
        products = given.do[b, h, i] * given.v[b, h, j] * weight[:, None]
        rest = (implied[b, h, i, j] - given.delta[b, h, i]) * weight
        found = torch.linalg.lstsq(products, rest[:, None]).solution[:, 0]
        left = (rest - products @ found).norm() / rest.norm().clamp(min=1e-300)
        if not float(left) <= 0.1 or not bool(((found.abs() < 0.15) | ((found - 1).abs() < 0.15)).all()):
            return None
        missing.append(tuple((found > 0.5).nonzero().flatten().tolist()))
    if not missing or len(set(missing)) != 1 or not missing[0]:
        return None
    first, last = missing[0][0], missing[0][-1]
    whole = list(missing[0]) == list(range(first, last + 1))
    words = f"channels {first}-{last}" if whole else f"{len(missing[0])} channels"
    return Deltas(f"dp leaves out {words} of dO and v", channels=missing[0], cause="part of v is never multiplied")
