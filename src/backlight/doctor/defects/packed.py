"""Packed sequences: boundaries that are ignored or off."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, permutations
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.borrowed import delta_from, lse_from
from backlight.doctor.defects.defect import Defect, always, both, masked, packed
from backlight.doctor.defects.mutants import Mutant, Outputs, in_both_halves, shifted_rows, showing, with_call, zeroed
from backlight.doctor.defects.tails import TILES
from backlight.problems.axes import KEY_GRADIENTS, ROW_GRADIENTS
from backlight.reference import STAGES

PACKED = {"spec": {"causal": True}, "cu_seqlens": (0, 50, 121, 136)}
View = Callable[[Call], Call]
one_sequence = with_call(cu_seqlens_q=lambda call: None, cu_seqlens_k=lambda call: None)


def _last_segment(call: Call) -> list[Mutant]:
    """Everything of the last sequence is 0; its lse is 0 too, or right because something else computes it."""
    last = call.segments()[-1]

    def finish(outputs: Outputs, _: Call) -> Outputs:
        rows = {n: zeroed(outputs[n], slice(last.q0, None)) for n in ("y", *ROW_GRADIENTS) if n in outputs}
        return outputs | rows | {n: zeroed(outputs[n], slice(last.k0, None)) for n in KEY_GRADIENTS if n in outputs}

    def finish_lse(outputs: Outputs, call: Call) -> Outputs:
        lse = outputs["lse"].clone()
        lse[..., last.q0 :] = 0
        return finish(outputs, call) | {"lse": lse}

    return [Mutant(finish=finish_lse), Mutant(finish=finish)]


def _short_segments(capped, bias, column, pair_bias, visible):
    last = torch.arange(visible.shape[1], device=visible.device) == visible.shape[1] - 1
    return STAGES["s"].compute(capped, bias, column, pair_bias, visible & ~last)


_packed = partial(Defect, family="varlen", needs=packed, demo=PACKED)


def _boundaries(call: Call) -> Iterator[tuple[View, str]]:
    """The call with some of its boundaries."""
    yield one_sequence, "the boundaries are ignored"
    kept = {"only the first boundary is heeded": (0, 1, -1), "only the last boundary is heeded": (0, -2, -1)}
    for words, numbers in kept.items() if len(call.segments()) > 2 else ():
        yield with_call(cu_seqlens_q=partial(_some, "q", numbers), cu_seqlens_k=partial(_some, "k", numbers)), words


def _some(side: str, numbers: tuple[int, ...], call: Call) -> Tensor:
    return getattr(call, f"cu_seqlens_{side}")[list(numbers)]


def _diagonals(call: Call) -> list[Mutant]:
    """The last row of each sequence beside the key where other lengths than its own have it."""
    rows, keys = ([getattr(z, name) for z in call.segments()] for name in ("sq", "sk"))
    offsets: dict[str, Callable[[int, int], int]] = {
        "that of the longest ones": lambda sq, sk: max(keys) - max(rows),
        "their keys less the rows of all": lambda sq, sk: sk - sum(rows),
        "the keys of all less their rows": lambda sq, sk: sum(keys) - sq,
        "the keys less the rows of all": lambda sq, sk: sum(keys) - sum(rows),
        "that of the first one": lambda sq, sk: keys[0] - rows[0],
    }
    found = []
    for words, offset in offsets.items():
        s = showing(shifted_rows(call.spec, offset))
        found += [
            Mutant(forward=s, backward=s, detail=words),
            Mutant(forward=s, detail=f"{words}, in the forward alone"),
            Mutant(backward=s, detail=f"{words}, in the backward alone"),
        ]
    return found


def _places(call: Call) -> Iterator[tuple[Callable[[Tensor], Tensor], str]]:
    """lse or delta [1, H, T] written in one layout and read in another; 0 where nothing was written."""
    heads, rows = call.q.shape[1:3]
    segments = call.segments()
    longest, room = max(z.sq for z in segments), rows + (len(segments) + 1) * max(TILES)
    known = set()
    for starts in (_by_number, _one_after_the_other):
        at = {tile: tuple(starts(call, tile)) for tile in TILES}
        for stored, read in permutations(TILES, 2):
            if at[stored] != at[read] and (at[stored], at[read]) not in known:
                known.add((at[stored], at[read]))
                written, taken = _rows(call, at[stored], room), _rows(call, at[read], room)
                small, large = sorted((stored, read))
                words = f"one kernel pads sequences to tiles of {small} rows, the other to tiles of {large}"
                yield partial(_moved, written, taken, heads * room), words
    packed_rows = _rows(call, [z.q0 for z in segments], rows)
    by_batch = _rows(call, [n * heads * longest for n, _ in enumerate(segments)], longest)
    size = heads * longest * len(segments)
    yield partial(_moved, by_batch, packed_rows, size), f"memory in the order [B, H, {longest}], read as [H, {rows}]"
    yield partial(_moved, packed_rows, by_batch, size), f"memory in the order [H, {rows}], read as [B, H, {longest}]"


def _by_number(call: Call, tile: int) -> Iterator[int]:
    """A sequence begins a tile later for each that is before it, at whole tiles."""
    yield from ((z.q0 + n * tile) // tile * tile for n, z in enumerate(call.segments()))


def _one_after_the_other(call: Call, tile: int) -> Iterator[int]:
    """A sequence begins where the whole tiles of the one before it end."""
    yield from accumulate((-(-z.sq // tile) * tile for z in call.segments()[:-1]), initial=0)


def _rows(call: Call, starts: Iterable[int], stride: int) -> Tensor:
    """Offsets [H, T] of rows whose sequences begin at `starts`, heads `stride` apart."""
    at = torch.cat([torch.arange(z.sq) + start for z, start in zip(call.segments(), starts, strict=True)])
    return (torch.arange(call.q.shape[1])[:, None] * stride + at).to(call.q.device)


def _moved(stored: Tensor, read: Tensor, size: int, x: Tensor) -> Tensor:
    memory = x.new_zeros(size)
    memory[stored] = x[0]
    return memory[read][None]


def _rows_elsewhere(call: Call) -> list[Mutant]:
    """Of lse and delta, or of lse alone."""
    found = []
    for lse, delta in zip(lse_from(_places)(call), delta_from(_places)(call), strict=True):
        both_rows = replace(lse, borrowed=delta.borrowed, backward=delta.backward)
        found += [both_rows, replace(lse, detail=f"{lse.detail}; delta is read right")]
    return found


def _leak(name: str, title: str, does: str, stage: str, signal: str, confirm: str, direction: str) -> Defect:
    """Boundaries that are not there; a pair bias has no rows and keys of all sequences together."""
    next_check = "Pack a single sequence: the comparison must turn healthy."

    def variants(call: Call) -> list[Mutant]:
        seen: list[tuple[dict[str, Any], str]] = [({direction: view}, words) for view, words in _boundaries(call)]
        return [Mutant(detail=words, **view) for view, words in seen]

    needs = both(packed, lambda call: call.pair_bias is None)
    return _packed(name, title, does, stage, signal, next_check, confirm=f"mutant; {confirm}", variants=variants, needs=needs)


DEFECTS = [
    _leak(
        "varlen-leak",
        "packed sequences see each other: {detail}",
        "cu_seqlens is not applied in forward and backward",
        "s",
        "o is wrong from the second sequence on",
        "large values in one sequence change the others",
        "sees",
    ),
    _leak(
        "varlen-leak-backward",
        "packed sequences see each other in the backward: {detail}",
        "cu_seqlens is applied in the forward only",
        "p (bwd)",
        "I2 and I3 fail per segment; o is fine",
        "support crosses the boundary",
        "sees_backward",
    ),
    _packed(
        "varlen-last-segment",
        "the last packed sequence is not processed",
        "the loop over sequences ends one too early",
        "o",
        "o and gradients are 0 beyond the last but one boundary",
        "Append an empty sequence: the comparison must turn healthy.",
        variants=_last_segment,
    ),
    _packed(
        "varlen-short",
        "each packed sequence loses its last key",
        "the end of a segment is taken as its last valid index",
        "s",
        "o is wrong in the last row of each segment (causal) or everywhere",
        "Pad every sequence by one key: only the padding may be lost.",
        variants=always(in_both_halves(s=_short_segments)),
    ),
    _packed(
        "varlen-align",
        "packed sequences are masked with another offset than their own Sk - Sq: {detail}",
        "the offset between rows and keys is made of max_seqlen_q and max_seqlen_k, or of the lengths of the whole batch",
        "s",
        "o is wrong where rows and keys of a sequence differ by another number than the one that is used",
        "Pack sequences that all have the same lengths: the comparison must turn healthy.",
        needs=both(packed, masked),
        variants=_diagonals,
        demo={"spec": {"causal": True}, "cu_seqlens": ((0, 50, 121, 136), (0, 70, 150, 180)), "sk": 180},
    ),
    _packed(
        "varlen-rows",
        "the backward reads lse and delta of packed sequences at other places than they were written to: {detail}",
        "two kernels pad sequences to tiles of different sizes, or one does not pad them",
        "p (bwd)",
        "I2 and I3 fail, mostly from the second sequence on; o is fine",
        "Pack a single sequence: the comparison must turn healthy.",
        needs=both(packed, lambda call: call.tau is None and call.entmax is None),
        variants=_rows_elsewhere,
    ),
]
