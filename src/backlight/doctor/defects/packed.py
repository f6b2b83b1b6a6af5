"""Packed sequences: boundaries that are ignored or off."""

from __future__ import annotations

from functools import partial

import torch

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, always, both, packed
from backlight.doctor.defects.mutants import Mutant, Outputs, in_both_halves, with_call, zeroed
from backlight.problems.axes import KEY_GRADIENTS, ROW_GRADIENTS
from backlight.reference import STAGES

PACKED = {"spec": {"causal": True}, "cu_seqlens": (0, 50, 121, 136)}
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


def _leak(name: str, title: str, does: str, stage: str, signal: str, confirm: str, mutant: Mutant) -> Defect:
    """Boundaries that are not there; a pair bias has no rows and keys of all sequences together."""
    next_check = "Pack a single sequence: the comparison must turn healthy."
    variants = always(mutant)
    needs = both(packed, lambda call: call.pair_bias is None)
    return _packed(name, title, does, stage, signal, next_check, confirm=f"mutant; {confirm}", variants=variants, needs=needs)


DEFECTS = [
    _leak(
        "varlen-leak",
        "packed sequences see each other: the boundaries are ignored",
        "cu_seqlens is not applied in forward and backward",
        "s",
        "o is wrong from the second sequence on",
        "large values in one sequence change the others",
        Mutant(sees=one_sequence),
    ),
    _leak(
        "varlen-leak-backward",
        "the backward ignores the boundaries between packed sequences",
        "cu_seqlens is applied in the forward only",
        "p (bwd)",
        "I2 and I3 fail per segment; o is fine",
        "support crosses the boundary",
        Mutant(sees_backward=one_sequence),
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
]
