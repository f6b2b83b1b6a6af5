"""Rows of the backward that belong to somebody else: lse and delta of another row or head; and parts of delta and dp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, both, several_heads
from backlight.doctor.defects.mutants import Mutant, Outputs
from backlight.doctor.defects.rows import saved_lse
from backlight.doctor.defects.tails import TILES
from backlight.reference import STAGES

# [B, H, S] -> [B, H, S]
Rows = Callable[[Tensor], Tensor]
MOST_TILES = 16


def shifts(call: Call) -> Iterator[tuple[Rows, str]]:
    """Other rows of the same head: one row or one tile away, or those of the first tile over and over."""
    rows = call.q.shape[2]
    for step in [1, -1] + [sign * tile for tile in TILES if tile < rows for sign in (1, -1)]:
        yield partial(torch.roll, shifts=step, dims=2), f"{abs(step)} {'row' if abs(step) == 1 else 'rows'} away"
    for tile in (tile for tile in TILES if tile < rows):
        yield partial(_of_first_tile, tile=tile), f"in the first tile of {tile} rows"


def _of_first_tile(x: Tensor, tile: int) -> Tensor:
    return x[:, :, torch.arange(x.shape[2], device=x.device) % tile]


def other_heads(call: Call) -> Iterator[tuple[Rows, str]]:
    """Other heads, and flat memory read with the stride of another length."""
    if call.q.shape[1] > 1:
        yield lambda x: x[:, :1].expand_as(x), "head 0"
        yield partial(torch.roll, shifts=-1, dims=1), "the next head"
        yield partial(torch.roll, shifts=1, dims=1), "the head before"
        yield lambda x: x.transpose(1, 2).reshape(x.shape), "memory in the order [B, S, H], read as [B, H, S]"
        yield lambda x: x.reshape(len(x), x.shape[2], -1).transpose(1, 2), "memory in the order [B, H, S], read as [B, S, H]"
    heads, rows = call.q.shape[0] * call.q.shape[1], call.q.shape[2]
    for padded in sorted({-(-rows // tile) * tile for tile in TILES} - {rows}) if heads > 1 else ():
        yield partial(_unpadded, padded=padded), f"a place that is off by {padded - rows} per head (rows padded to {padded})"


def _unpadded(x: Tensor, padded: int) -> Tensor:
    """Memory with rows padded by zeros, read as if it were not."""
    memory = torch.nn.functional.pad(x, (0, padded - x.shape[2])).flatten()
    return memory[: x.numel()].reshape(x.shape)


def lse_from(places: Callable[[Call], Iterator[tuple[Rows, str]]]) -> Callable[[Call], list[Mutant]]:
    return lambda call: [saved_lse(place, words) for place, words in places(call)]


def delta_from(places: Callable[[Call], Iterator[tuple[Rows, str]]]) -> Callable[[Call], list[Mutant]]:
    def mutant(place: Rows, words: str) -> Mutant:
        def borrowed(saved: Outputs, dy: Tensor) -> Outputs:
            return {"other_delta": place((dy * saved["y"].to(dy.dtype)).sum(dim=-1))}

        def delta(other_delta, dlse):
            return other_delta if dlse is None else other_delta - dlse

        return Mutant(borrowed=borrowed, backward={"delta": delta}, detail=words)

    return lambda call: [mutant(place, words) for place, words in places(call)]


def _parts(keys: int) -> Iterator[tuple[Callable[[Tensor], Tensor], str]]:
    """[Sq, Sk] -> the part of its keys that is summed, for each key."""

    for tile in (tile for tile in TILES if tile < keys <= MOST_TILES * tile):
        yield partial(_whole_tiles, tile=tile), f"keys of whole tiles of {tile}"
        yield partial(_first_tile, tile=tile), f"the first {tile} keys"
        yield partial(_within, tile=tile), f"the {tile} keys of each tile by itself"
        yield partial(_so_far, tile=tile), f"the keys so far, in tiles of {tile}"


def _whole_tiles(x: Tensor, tile: int) -> Tensor:
    return x[:, : x.shape[1] // tile * tile].sum(dim=-1, keepdim=True)


def _first_tile(x: Tensor, tile: int) -> Tensor:
    return x[:, :tile].sum(dim=-1, keepdim=True)


def _tiled(x: Tensor, tile: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % tile)).unflatten(1, (-1, tile)).sum(dim=-1)


def _within(x: Tensor, tile: int) -> Tensor:
    return _tiled(x, tile).repeat_interleave(tile, dim=1)[:, : x.shape[1]]


def _so_far(x: Tensor, tile: int) -> Tensor:
    return _tiled(x, tile).cumsum(dim=1).repeat_interleave(tile, dim=1)[:, : x.shape[1]]


def partial_delta(call: Call) -> list[Mutant]:
    def mutant(part: Callable[[Tensor], Tensor], words: str) -> Mutant:
        def ds(p, m, dp):
            return p * (m * dp - part(p * m * dp))

        return Mutant(backward={"ds": ds}, detail=words)

    return [mutant(part, words) for part, words in _parts(call.k.shape[2])]


def one_kernel_dp(call: Call) -> list[Mutant]:
    """dp over half of the channels where dq, or dk, is formed."""

    def scores(half: slice) -> Callable[..., Tensor]:
        def dx(p, m, do, v, delta, capped, softcap, entmax):
            ds = STAGES["ds"].compute(p, m, do[:, half] @ v[:, half].mT, delta, entmax)
            return STAGES["dx"].compute(ds, capped, softcap)

        return dx

    def dq_of(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def dq(p, m, do, v, delta, capped, softcap, k, scale, entmax):
            return STAGES["dq"].compute(part(p, m, do, v, delta, capped, softcap, entmax), k, scale)

        return dq

    def dk_of(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def dk(p, m, do, v, delta, capped, softcap, q, scale, entmax):
            return STAGES["dk"].compute(part(p, m, do, v, delta, capped, softcap, entmax), q, scale)

        return dk

    middle = call.v.shape[-1] // 2
    found = []
    for half, word in ((slice(None, middle), "first"), (slice(middle, None), "second")):
        part = scores(half)
        found.append(Mutant(backward={"dq": dq_of(part)}, detail=f"the dq kernel sums only the {word} half"))
        found.append(Mutant(backward={"dk": dk_of(part)}, detail=f"the dk/dv kernel sums only the {word} half"))
    return found


def _plain(call: Call) -> bool:
    """delta is the row sum of dO * o and nothing else."""
    return call.tau is None


_lse = partial(Defect, family="lse", demo=CAUSAL_TILES, confirm="mutant over places")
_delta = partial(Defect, family="delta", demo=CAUSAL_TILES)
EQUAL_HEADS = "Make all heads equal: the comparison must turn healthy."

DEFECTS = [
    _lse(
        "lse-shifted",
        "the backward reads the lse of other rows ({detail})",
        "the row offset of lse is off, or a tile's offset is left out of it",
        "p (bwd)",
        "I2 fails; the backward's weights are wrong by one factor per row",
        "Make all rows of q equal and leave the mask out: the comparison must turn healthy.",
        variants=lse_from(shifts),
    ),
    _lse(
        "lse-other-head",
        "heads read the lse of {detail} in the backward",
        "the head's offset into lse is wrong: left out, another head's, or made for rows of another length",
        "p (bwd)",
        "I2 fails; the backward's weights are wrong by one factor per row; o is fine",
        EQUAL_HEADS,
        needs=lambda call: call.q.shape[0] * call.q.shape[1] > 1 and not call.varlen,
        variants=lse_from(other_heads),
    ),
    _delta(
        "delta-other-head",
        "heads read the delta of {detail}",
        "the head's offset into delta is wrong: left out, another head's, or made for rows of another length",
        "delta",
        "I3 only; dv is perfect",
        EQUAL_HEADS,
        needs=both(several_heads, _plain, lambda call: not call.varlen),
        variants=delta_from(other_heads),
    ),
    _delta(
        "delta-part",
        "delta, the row sum of p * dp, is summed over a part of the keys: {detail}",
        "delta is formed inside the loop over key tiles, before the loop has seen all keys",
        "delta",
        "I3 only; dv is perfect",
        "Make the tile as long as the keys: the comparison must turn healthy.",
        needs=lambda call: not call.varlen,
        variants=partial_delta,
    ),
    _delta(
        "dp-split-one",
        "dp = dO vT is incomplete in one kernel: {detail} of the columns of v",
        "v is processed in two parts and one of them is left out of dp, in one of the two backward kernels",
        "dp",
        "I1 fails; one of dq and dk is right",
        "Set the other half of v to zero: the comparison must turn healthy.",
        needs=lambda call: call.v.shape[-1] > 1,
        variants=one_kernel_dp,
    ),
]
