"""Causal masks, and rows that see no key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, CAUSAL_TILES, Defect, always, causal, empty_rows, lengths_differ, masked
from backlight.doctor.defects.mutants import Mutant, in_both_halves, other_spec
from backlight.doctor.defects.tails import TILES
from backlight.reference import STAGES

NO_KEYS = CAUSAL | {"sk": 100}


def hide(extra: Callable[[Tensor, int], Tensor], origin: int) -> Callable[..., Tensor]:
    """Stage s with more keys hidden: `extra(distance, sk)` is true where a key disappears."""

    def s(capped, bias, column, pair_bias, visible):
        return STAGES["s"].compute(capped, bias, column, pair_bias, visible & ~extra(column - origin, visible.shape[1]))

    return s


def _strict(call: Call) -> Callable[..., Tensor]:
    return hide(lambda distance, sk: distance == 0, call.spec.bias_origin)


def without_causal(call: Call) -> Callable[[Call], Call]:
    return other_spec(causal=False, window=(call.spec.left, None))


def own_mask(call: Call) -> Callable[[Call], Call]:
    """The mask as it is: for changes that only the forward sees."""
    return other_spec(causal=call.spec.causal, window=call.spec.window)


def _own_softmax(visible_to_it: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Weights that the backward normalises itself, over keys of its own choice: `(visible, column) -> visible`."""

    def p(capped, bias, column, pair_bias, visible, sink, entmax):
        s = STAGES["s"].compute(capped, bias, column, pair_bias, visible_to_it(visible, column))
        return STAGES["p"].compute(s, STAGES["lse"].compute(s, sink, entmax), entmax)

    return p


def own_softmaxes(call: Call) -> list[Mutant]:
    """Under no mask, or one without the diagonal; delta from the saved o, or from these weights."""
    origin, everything = call.spec.bias_origin, other_spec(causal=False, window=(None, None))
    p = _own_softmax(lambda visible, column: visible)
    found = [("no mask", Mutant(sees_backward=everything, backward={"p": p}))]
    if causal(call):
        p = _own_softmax(lambda visible, column: visible & (column != origin))
        found.append(("a mask without the diagonal", Mutant(backward={"p": p})))
    own_delta = [
        (f"{words}, and takes delta from them", replace(mutant, backward={**mutant.backward, "delta": STAGES["delta"].compute}))
        for words, mutant in found
    ]
    return [replace(mutant, detail=words) for words, mutant in (*found, *own_delta)]


def _masks_added(call: Call) -> list[Mutant]:
    """Aligned to the last key, or to the first where that differs."""
    added = [Mutant(sees_backward=other_spec(causal=True, window=(call.spec.left, None)))]
    if lengths_differ(call):
        added.append(Mutant(backward={"s": hide(lambda distance, sk: distance < sk - call.q.shape[2], call.spec.bias_origin)}))
    return added


def one_future(call: Call) -> Callable[[Call], Call]:
    return other_spec(causal=False, window=(call.spec.left, 1))


def _unmasked_lse(capped, bias, column, pair_bias, visible, sink, entmax):
    s = STAGES["s"].compute(capped, bias, column, pair_bias, torch.ones_like(visible))
    return STAGES["lse"].compute(s, sink, entmax)


def _finite_fill(capped, bias, column, pair_bias, visible):
    return STAGES["s"].compute(capped, bias, column, pair_bias, torch.ones_like(visible)).masked_fill(~visible, -1e4)


def _unmasked_where_empty(capped, bias, column, pair_bias, visible, n):
    return STAGES["s"].compute(capped, bias, column, pair_bias, visible | (n == 0))


def _ones_where_empty(s, lse, n):
    """A fill value so large that adding log(Sk) to it changes nothing: recomputed weights are 1, not 1/Sk."""
    return torch.where(n == 0, 1.0, STAGES["p"].compute(s, lse))


def _all_where_empty(p, tau, n, visible):
    """Where a row sees nothing, the fill makes every key a survivor, and its dp counts."""
    return STAGES["m"].compute(p, tau, n, visible | (n == 0))


def _unguarded(s, lse):
    return torch.exp(s - lse[:, None])


def _mean_of_tiles(tile: int) -> Mutant:
    """The keys of the tiles that a row's tile visits, all with the weight of a fill value; the backward masks its weights."""

    def o(a, v, n):
        sq, sk = a.shape
        rows = torch.arange(sq, device=a.device)[:, None]
        end = -(-(rows // tile * tile + tile + sk - sq) // tile) * tile
        filled = (torch.arange(sk, device=a.device)[None, :] < end.clamp(max=sk)).to(a.dtype)
        return torch.where(n == 0, filled / filled.sum(dim=1, keepdim=True).clamp(min=1), a) @ v

    return Mutant(forward={"o": o})


def _means(call: Call) -> list[Mutant]:
    everywhere = [
        in_both_halves({"m": _all_where_empty}, s=_finite_fill),
        Mutant(forward={"s": _finite_fill}, backward={"p": _ones_where_empty, "m": _all_where_empty}),
    ]
    return everywhere + ([_mean_of_tiles(tile) for tile in TILES] if causal(call) and call.tau is None else [])


_causal = partial(Defect, family="masks", needs=causal, demo=CAUSAL)
_empty_rows = partial(
    Defect, family="masks", confirm="spec law: o = 0, lse = -inf, gradients 0 there", needs=empty_rows, demo=NO_KEYS
)

DEFECTS = [
    _causal(
        "mask-causal-backward",
        "the backward ignores the causal mask: gradients flow through keys the forward could not see",
        "the mask is applied in the forward only",
        "p (bwd)",
        "I2 and I3 fail, I1 holds; weights above the diagonal in the backward",
        "Change the last key: dq of the first rows, which cannot see it, must change too.",
        confirm="mutant; tomography of the backward's weights",
        variants=lambda call: [Mutant(sees_backward=without_causal(call))],
    ),
    _causal(
        "mask-causal-forward",
        "the forward ignores the causal mask, the backward applies it",
        "the mask is applied in the backward only",
        "s",
        "o and lse are wrong; weights above the diagonal in the forward, none in the backward",
        "Change the last key: o of the first rows, which cannot see it, must change too.",
        confirm="mutant; tomography of the forward's weights",
        variants=lambda call: [Mutant(sees=without_causal(call), sees_backward=own_mask(call))],
        demo=CAUSAL_TILES,
    ),
    _causal(
        "mask-added-backward",
        "the backward applies a causal mask that the call does not have",
        "the backward's kernels are written for causal attention and run for every call",
        "p (bwd)",
        "o is right; I2 and I3 fail; the backward's weights above the diagonal are 0",
        "Ask for a causal mask: the comparison must turn healthy.",
        confirm="mutant; tomography of the backward's weights",
        needs=lambda call: not causal(call) and call.rows is None,
        variants=_masks_added,
        demo={"spec": {}},
    ),
    _causal(
        "softmax-backward",
        "the backward has a softmax of its own, under {detail}",
        "the weights are not taken from the saved lse but normalised again, over other keys than in the forward",
        "p (bwd)",
        "I2 and I3 fail; the backward's weights sum to 1 in each row and are not those of the forward",
        "Run without the mask: both softmaxes are the same, and the comparison must turn healthy.",
        needs=masked,
        variants=own_softmaxes,
        demo=CAUSAL_TILES,
    ),
    _causal(
        "mask-strict-backward",
        "the backward's causal mask excludes the diagonal: each row loses its own key",
        "the comparison is i > j where it must be i >= j",
        "p (bwd)",
        "I2 and I3 fail; holes at i - j = 0 in the backward's weights",
        "Turn > into >= in the backward's mask: the comparison must turn healthy.",
        variants=lambda call: [Mutant(backward={"s": _strict(call)})],
    ),
    _causal(
        "mask-strict",
        "the causal mask excludes the diagonal in forward and backward: each row loses its own key",
        "the comparison is i > j where it must be i >= j",
        "s",
        "o is wrong from row 0 on; identities hold",
        "Row 0 must equal v[0]: it sees exactly one key.",
        variants=lambda call: [in_both_halves(s=_strict(call))],
    ),
    _causal(
        "mask-future",
        "the causal mask lets each row see one key of the future",
        "the comparison is off by one in forward and backward",
        "s",
        "o is wrong from row 0 on; identities hold; leak at i - j = -1",
        "Row 0 must equal v[0]: it sees exactly one key.",
        variants=lambda call: [Mutant(sees=one_future(call))],
    ),
    _causal(
        "mask-future-backward",
        "the backward's causal mask lets each row see one key of the future",
        "the comparison is off by one in the backward only",
        "p (bwd)",
        "I2 and I3 fail; leak at i - j = -1",
        "Change the backward's comparison by one: the leak must disappear.",
        variants=lambda call: [Mutant(sees_backward=one_future(call))],
    ),
    _causal(
        "mask-after-softmax",
        "the mask is applied after the softmax: hidden keys still count in the denominator",
        "scores are normalised over all keys, then the weights of hidden keys are dropped",
        "lse",
        "o is too small in early rows; I3 fails",
        "Sum the weights of row 0: the sum must be 1, and is not.",
        needs=masked,
        variants=always(Mutant(forward={"lse": _unmasked_lse})),
    ),
    _empty_rows(
        "empty-rows-mean",
        "rows that see no key return the average of v instead of 0",
        "hidden scores are filled with a large negative number, and a row of nothing but fill becomes uniform",
        "o",
        "errors only in rows without visible keys",
        "Add 1 to every v: the wrong rows must move by 1.",
        variants=_means,
    ),
    _empty_rows(
        "empty-rows-all",
        "rows that see no key attend to every key, as if nothing were hidden from them",
        "a mask that hides a whole row is dropped for it, or taken for no mask at all",
        "o",
        "errors only in rows without visible keys, where o is attention over all keys",
        "Run the same call without its mask: the wrong rows must not change.",
        variants=always(in_both_halves({"m": _all_where_empty}, s=_unmasked_where_empty)),
    ),
    _empty_rows(
        "empty-rows-lse",
        "lse of rows that see no key is {detail}, not -inf: who merges partial results by lse has to know",
        "a convention; the maximum and the sum of an empty row are stored as they were initialised, or lse is clamped",
        "lse",
        "lse is not -inf in rows without visible keys; everything else is right",
        "Give those rows one visible key: the comparison must turn healthy.",
        broken="empty_lse",
        severity="note",
    ),
    _empty_rows(
        "empty-rows-nan",
        "rows that see no key produce NaN",
        "-inf minus -inf is formed for a row whose maximum is -inf",
        "p",
        "non-finite values that begin in rows without visible keys",
        "Give those rows one visible key: the NaN must go.",
        variants=always(in_both_halves(p=_unguarded)),
    ),
]
