"""The last, partial tile, and tiles that a loop skips."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, Defect
from backlight.doctor.defects.mutants import Mutant, Outputs, in_both_halves, zeroed
from backlight.reference import STAGES

TILES = (16, 32, 64, 128)
WHOLE_TILES = "Choose a length that is a multiple of the tile: the comparison must turn healthy."


def tails(length: int) -> list[int]:
    """First position of the last, partial tile for the usual tile sizes, each once."""
    return sorted({length // tile * tile for tile in TILES if length % tile and length > tile})


def keys_beyond(start: int) -> Callable[..., Tensor]:
    def s(capped, bias, column, pair_bias, visible):
        beyond = torch.arange(visible.shape[1], device=visible.device) >= start
        return STAGES["s"].compute(capped, bias, column, pair_bias, visible & ~beyond)

    return s


def tail_keys(call: Call) -> list[Mutant]:
    stages = [(start, keys_beyond(start)) for start in tails(call.k.shape[2])]
    return [in_both_halves(s=s, detail=f"keys from {start} on") for start, s in stages]


def padded_keys(call: Call) -> list[Mutant]:
    def counted(pad: int) -> Callable[..., Tensor]:
        def lse(s, sink, entmax):
            return STAGES["lse"].compute(torch.cat([s, s.new_zeros(s.shape[0], pad)], dim=-1), sink, entmax)

        return lse

    length = call.k.shape[2]
    pads = sorted({-length % tile for tile in TILES if length % tile})
    return [Mutant(forward={"lse": counted(pad)}, detail=f"{pad} padding keys") for pad in pads]


def _zero_tail(names: tuple[str, ...], start: int) -> Callable[[Outputs, Call], Outputs]:
    def finish(outputs: Outputs, call: Call) -> Outputs:
        return outputs | {name: zeroed(outputs[name], slice(start, None)) for name in names if name in outputs}

    return finish


def tail_rows(call: Call) -> list[Mutant]:
    return [Mutant(finish=_zero_tail(("dq",), t), detail=f"rows from {t} on") for t in tails(call.q.shape[2])]


def tail_gradients(call: Call) -> list[Mutant]:
    return [Mutant(finish=_zero_tail(("dk", "dv"), t), detail=f"keys from {t} on") for t in tails(call.k.shape[2])]


def spans(length: int) -> list[tuple[int, int]]:
    found = {(a, min(a + t, length)) for t in (32, 64, 128) if length > t for a in range(0, length, t) if length // t <= 16}
    return sorted(found, key=lambda span: (-(span[1] - span[0]), span))


def lost_key_tile(call: Call) -> list[Mutant]:
    def without(j0: int, j1: int) -> Callable[..., Tensor]:
        def dq(dx, k, scale):
            dx = dx.clone()
            dx[:, j0:j1] = 0
            return scale * (dx @ k)

        return dq

    return [
        Mutant(backward={"dq": without(*span)}, detail=f"keys {span[0]} to {span[1] - 1}") for span in spans(call.k.shape[2])
    ]


def lost_row_tile(call: Call) -> list[Mutant]:
    def without(i0: int, i1: int, value: str) -> Callable[..., Tensor]:
        def dk(dx, q, scale):
            dx = dx.clone()
            dx[i0:i1] = 0
            return scale * (dx.mT @ q)

        def dv(a, do):
            a = a.clone()
            a[i0:i1] = 0
            return a.mT @ do

        return dk if value == "dk" else dv

    found = []
    for span in spans(call.q.shape[2]):
        detail = f"rows {span[0]} to {span[1] - 1}"
        found.append(Mutant(backward={n: without(*span, n) for n in ("dk", "dv")}, detail=f"{detail} from dk and dv"))
        found.append(Mutant(backward={"dk": without(*span, "dk")}, detail=f"{detail} from dk"))
    return found


def unpacked(parts: Callable[[int], list], tensor: str) -> Callable[[Call], bool]:
    """Calls that are not packed and have such parts among their rows ("q") or keys ("k")."""
    return lambda call: not call.varlen and bool(parts(getattr(call, tensor).shape[2]))


_forward = partial(Defect, family="tails")
_backward = partial(_forward, demo=CAUSAL)
_lost_tile = partial(_backward, confirm="mutant; the exact probe is off by whole tiles")

DEFECTS = [
    _forward(
        "tail-keys",
        "{detail} are never read: the loop over keys stops at the last full tile",
        "the number of key tiles is rounded down",
        "s",
        "o is wrong; dk and dv are 0 for the last keys",
        WHOLE_TILES,
        needs=unpacked(tails, "k"),
        variants=tail_keys,
    ),
    _forward(
        "tail-padding",
        "{detail} count in the softmax: the last tile is not masked beyond the end of the keys",
        "keys beyond the end are loaded as zeros and their scores, 0, enter the denominator",
        "lse",
        "o is too small everywhere; lse is too large",
        WHOLE_TILES,
        needs=lambda call: not call.varlen and call.spec.right is None and bool(call.k.shape[2] % 128),
        variants=padded_keys,
    ),
    _backward(
        "tail-rows-dq",
        "dq is zero for {detail}: the last, partial tile of rows is not processed",
        "the number of row tiles is rounded down in the dq kernel, or its store is masked too strictly",
        "dq",
        "dq is 0 in the tail rows",
        WHOLE_TILES,
        needs=unpacked(tails, "q"),
        variants=tail_rows,
    ),
    _backward(
        "tail-keys-dkdv",
        "dk and dv are zero for {detail}: the last, partial tile of keys is not processed",
        "the number of key tiles is rounded down in the dk/dv kernel, or its store is masked too strictly",
        "dk",
        "dk and dv are 0 for the tail keys",
        WHOLE_TILES,
        needs=unpacked(tails, "k"),
        variants=tail_gradients,
    ),
    _lost_tile(
        "tile-lost-dq",
        "dq misses the contribution of {detail}: one tile of the loop over keys is skipped",
        "a loop bound is off by one tile",
        "dq",
        "I1 fails with residual, I3 holds, dk and dv are fine",
        "Change the tile size: the missing keys must move with it.",
        needs=unpacked(spans, "k"),
        variants=lost_key_tile,
    ),
    _lost_tile(
        "tile-lost-dk",
        "the contribution of {detail} is missing: one tile of the loop over rows is skipped",
        "a loop bound is off by one tile in the dk/dv kernel",
        "dk",
        "I1 and I2 fail with residual, dq is fine",
        "Change the tile size: the missing rows must move with it.",
        needs=unpacked(spans, "q"),
        variants=lost_row_tile,
    ),
]
