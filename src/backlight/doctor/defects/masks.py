"""Masks, windows, alignment, tails and packed sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import Defect, always, causal, empty_rows, lengths_differ, packed, windowed
from backlight.doctor.defects.mutants import Mutant, Outputs, other_spec, top_left, with_call, zeroed
from backlight.reference import STAGES

TILES = (16, 32, 64, 128)


def hide(extra: Callable[[Tensor, int], Tensor], origin: int) -> Callable[..., Tensor]:
    """Stage s with more keys hidden: `extra(distance, sk)` is true where a key disappears."""

    def s(capped, bias, column, visible):
        return STAGES["s"].compute(capped, bias, column, visible & ~extra(column - origin, visible.shape[1]))

    return s


def _strict(call: Call) -> Callable[..., Tensor]:
    return hide(lambda distance, sk: distance == 0, call.spec.bias_origin)


def without_causal(call: Call) -> Callable[[Call], Call]:
    return other_spec(causal=False, window=(call.spec.left, None))


def one_future(call: Call) -> Callable[[Call], Call]:
    return other_spec(causal=False, window=(call.spec.left, 1))


def reach(call: Call, step: int) -> Callable[[Call], Call] | None:
    """The window with its left side moved by `step`."""
    left = call.spec.left
    return None if left is None or left + step < 0 else other_spec(window=(left + step, call.spec.window[1]))


def reach_right(call: Call, step: int) -> Callable[[Call], Call] | None:
    right = call.spec.window[1]
    if right is None or call.spec.causal or right + step < 0:
        return None
    return other_spec(window=(call.spec.left, right + step))


def back(call: Call) -> Callable[[Call], Call]:
    """The original spec again: for changes that only the forward sees."""
    return other_spec(causal=call.spec.causal, window=call.spec.window)


def window_edges(steps: tuple[int, ...], place: str) -> Callable[[Call], list[Mutant]]:
    """Windows off by a step: place is 'backward', 'forward' or 'both'."""

    def variants(call: Call) -> list[Mutant]:
        found = []
        for step in steps:
            for side, change in (("left", reach(call, step)), ("right", reach_right(call, step))):
                if change is None:
                    continue
                count = "one key" if abs(step) == 1 else f"{abs(step)} keys"
                detail = f"{count} too {'wide' if step > 0 else 'narrow'} on the {side}"
                if place == "backward":
                    found.append(Mutant(sees_backward=change, detail=detail))
                elif place == "forward":
                    found.append(Mutant(sees=change, sees_backward=back(call), detail=detail))
                else:
                    found.append(Mutant(sees=change, detail=detail))
        return found

    return variants


def _unmasked_lse(capped, bias, column, visible, sink):
    return STAGES["lse"].compute(STAGES["s"].compute(capped, bias, column, torch.ones_like(visible)), sink)


def _finite_fill(capped, bias, column, visible):
    return STAGES["s"].compute(capped, bias, column, torch.ones_like(visible)).masked_fill(~visible, -1e4)


def _unmasked_where_empty(capped, bias, column, visible, n):
    return STAGES["s"].compute(capped, bias, column, visible | (n == 0))


def _ones_where_empty(s, lse, n):
    """A fill value so large that adding log(Sk) to it changes nothing: recomputed weights are 1, not 1/Sk."""
    return torch.where(n == 0, 1.0, STAGES["p"].compute(s, lse))


def _all_where_empty(p, tau, n, visible):
    """Where a row sees nothing, the fill makes every key a survivor, and its dp counts."""
    return STAGES["m"].compute(p, tau, n, visible | (n == 0))


def _unguarded(s, lse):
    return torch.exp(s - lse[:, None])


# --- tails -----------------------------------------------------------------------------------------------------------------


def tails(length: int) -> list[int]:
    """First position of the last, partial tile for the usual tile sizes, each once."""
    return sorted({length // tile * tile for tile in TILES if length % tile and length > tile})


def _keys_beyond(start: int) -> Callable[..., Tensor]:
    def s(capped, bias, column, visible):
        beyond = torch.arange(visible.shape[1], device=visible.device) >= start
        return STAGES["s"].compute(capped, bias, column, visible & ~beyond)

    return s


def tail_keys(call: Call) -> list[Mutant]:
    stages = [(start, _keys_beyond(start)) for start in tails(call.k.shape[2])]
    return [Mutant(forward={"s": s}, backward={"s": s}, detail=f"keys from {start} on") for start, s in stages]


def padded_keys(call: Call) -> list[Mutant]:
    def counted(pad: int) -> Callable[..., Tensor]:
        def lse(s, sink):
            return STAGES["lse"].compute(torch.cat([s, s.new_zeros(s.shape[0], pad)], dim=-1), sink)

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


# --- packed ----------------------------------------------------------------------------------------------------------------

one_sequence = with_call(cu_seqlens_q=lambda call: None, cu_seqlens_k=lambda call: None)


def _leak_backward(call: Call) -> list[Mutant]:
    return [Mutant(sees_backward=one_sequence)]


def _last_segment(call: Call) -> list[Mutant]:
    """lse of the sequence is 0 with the rest, or comes from somewhere else and is right."""
    last = call.segments()[-1]

    def finish(outputs: Outputs, _: Call) -> Outputs:
        rows = {n: zeroed(outputs[n], slice(last.q0, None)) for n in ("y", "dq", "dgate") if n in outputs}
        return outputs | rows | {n: zeroed(outputs[n], slice(last.k0, None)) for n in ("dk", "dv") if n in outputs}

    def finish_lse(outputs: Outputs, call: Call) -> Outputs:
        lse = outputs["lse"].clone()
        lse[..., last.q0 :] = 0
        return finish(outputs, call) | {"lse": lse}

    return [Mutant(finish=finish_lse), Mutant(finish=finish)]


def _short_segments(capped, bias, column, visible):
    last = torch.arange(visible.shape[1], device=visible.device) == visible.shape[1] - 1
    return STAGES["s"].compute(capped, bias, column, visible & ~last)


CAUSAL = {"spec": {"causal": True}}
WINDOW = {"spec": {"causal": True, "window": (40, 0)}}
PACKED = {"spec": {"causal": True}, "cu_seqlens": (0, 50, 121, 136)}

DEFECTS = [
    Defect(
        "mask-causal-backward",
        "the backward ignores the causal mask: gradients flow through keys the forward could not see",
        "the mask is applied in the forward only",
        "masks",
        "p (bwd)",
        "I2 and I3 fail, I1 holds; weights above the diagonal in the backward",
        "mutant; tomography of the backward's weights",
        "Change the last key: dq of the first rows, which cannot see it, must change too.",
        needs=causal,
        variants=lambda call: [Mutant(sees_backward=without_causal(call))],
        demo=CAUSAL,
    ),
    Defect(
        "mask-strict-backward",
        "the backward's causal mask excludes the diagonal: each row loses its own key",
        "the comparison is i > j where it must be i >= j",
        "masks",
        "p (bwd)",
        "I2 and I3 fail; holes at i - j = 0 in the backward's weights",
        "mutant",
        "Turn > into >= in the backward's mask: the comparison must turn healthy.",
        needs=causal,
        variants=lambda call: [Mutant(backward={"s": _strict(call)})],
        demo=CAUSAL,
    ),
    Defect(
        "mask-strict",
        "the causal mask excludes the diagonal in forward and backward: each row loses its own key",
        "the comparison is i > j where it must be i >= j",
        "masks",
        "s",
        "o is wrong from row 0 on; identities hold",
        "mutant",
        "Row 0 must equal v[0]: it sees exactly one key.",
        needs=causal,
        variants=lambda call: [Mutant(forward={"s": _strict(call)}, backward={"s": _strict(call)})],
        demo=CAUSAL,
    ),
    Defect(
        "mask-future",
        "the causal mask lets each row see one key of the future",
        "the comparison is off by one in forward and backward",
        "masks",
        "s",
        "o is wrong from row 0 on; identities hold; leak at i - j = -1",
        "mutant",
        "Row 0 must equal v[0]: it sees exactly one key.",
        needs=causal,
        variants=lambda call: [Mutant(sees=one_future(call))],
        demo=CAUSAL,
    ),
    Defect(
        "mask-future-backward",
        "the backward's causal mask lets each row see one key of the future",
        "the comparison is off by one in the backward only",
        "masks",
        "p (bwd)",
        "I2 and I3 fail; leak at i - j = -1",
        "mutant",
        "Change the backward's comparison by one: the leak must disappear.",
        needs=causal,
        variants=lambda call: [Mutant(sees_backward=one_future(call))],
        demo=CAUSAL,
    ),
    Defect(
        "mask-after-softmax",
        "the mask is applied after the softmax: hidden keys still count in the denominator",
        "scores are normalised over all keys, then the weights of hidden keys are dropped",
        "masks",
        "lse",
        "o is too small in early rows; I3 fails",
        "mutant",
        "Sum the weights of row 0: the sum must be 1, and is not.",
        needs=lambda call: call.spec.masked,
        variants=always(Mutant(forward={"lse": _unmasked_lse})),
        demo=CAUSAL,
    ),
    Defect(
        "empty-rows-mean",
        "rows that see no key return the average of v instead of 0",
        "hidden scores are filled with a large negative number, and a row of nothing but fill becomes uniform",
        "masks",
        "o",
        "errors only in rows without visible keys",
        "spec law: o = 0, lse = -inf, gradients 0 there",
        "Add 1 to every v: the wrong rows must move by 1.",
        needs=empty_rows,
        variants=always(
            Mutant(forward={"s": _finite_fill}, backward={"s": _finite_fill, "m": _all_where_empty}),
            Mutant(forward={"s": _finite_fill}, backward={"p": _ones_where_empty, "m": _all_where_empty}),
        ),
        demo=CAUSAL | {"sk": 100},
    ),
    Defect(
        "empty-rows-all",
        "rows that see no key attend to every key, as if nothing were hidden from them",
        "a mask that hides a whole row is dropped for it, or taken for no mask at all",
        "masks",
        "o",
        "errors only in rows without visible keys, where o is attention over all keys",
        "spec law: o = 0, lse = -inf, gradients 0 there",
        "Run the same call without its mask: the wrong rows must not change.",
        needs=empty_rows,
        variants=always(
            Mutant(forward={"s": _unmasked_where_empty}, backward={"s": _unmasked_where_empty, "m": _all_where_empty}),
        ),
        demo=CAUSAL | {"sk": 100},
    ),
    Defect(
        "empty-rows-lse",
        "lse of rows that see no key is {detail}, not -inf: who merges partial results by lse has to know",
        "a convention; the maximum and the sum of an empty row are stored as they were initialised, or lse is clamped",
        "masks",
        "lse",
        "lse is not -inf in rows without visible keys; everything else is right",
        "spec law: o = 0, lse = -inf, gradients 0 there",
        "Give those rows one visible key: the comparison must turn healthy.",
        needs=empty_rows,
        broken="empty_lse",
        severity="note",
        demo=CAUSAL | {"sk": 100},
    ),
    Defect(
        "empty-rows-nan",
        "rows that see no key produce NaN",
        "-inf minus -inf is formed for a row whose maximum is -inf",
        "masks",
        "p",
        "non-finite values that begin in rows without visible keys",
        "spec law: o = 0, lse = -inf, gradients 0 there",
        "Give those rows one visible key: the NaN must go.",
        needs=empty_rows,
        variants=always(Mutant(forward={"p": _unguarded}, backward={"p": _unguarded})),
        demo=CAUSAL | {"sk": 100},
    ),
    Defect(
        "window+1",
        "the backward's window is {detail}",
        "the window's edge is off in the backward's mask or loop bound",
        "windows",
        "p (bwd)",
        "I2 and I3 fail; a leak on one diagonal that moves with the window, not with the tile",
        "mutant",
        "Widen the window by one: the leak must move by one diagonal.",
        needs=lambda call: call.spec.window != (None, None),
        variants=window_edges((1, 2), "backward"),
        demo=WINDOW,
    ),
    Defect(
        "window-1",
        "the backward's window is {detail}",
        "the window's edge is off in the backward's mask or loop bound",
        "windows",
        "p (bwd)",
        "I2 and I3 fail; holes on one diagonal that move with the window, not with the tile",
        "mutant",
        "Widen the window by one: the holes must move by one diagonal.",
        needs=lambda call: call.spec.window != (None, None),
        variants=window_edges((-1, -2), "backward"),
        demo=WINDOW,
    ),
    Defect(
        "window-forward+1",
        "the forward's window is {detail}, the backward's is right",
        "the window's edge is off in the forward's mask or loop bound",
        "windows",
        "p",
        "o is wrong; forward weights leak on one diagonal, backward weights do not",
        "mutant",
        "Widen the window by one: the leak must move by one diagonal.",
        needs=lambda call: call.spec.window != (None, None),
        variants=window_edges((1, 2), "forward"),
        demo=WINDOW,
    ),
    Defect(
        "window-forward-1",
        "the forward's window is {detail}, the backward's is right",
        "the window's edge is off in the forward's mask or loop bound",
        "windows",
        "p",
        "o is wrong; forward weights have holes on one diagonal, backward weights do not",
        "mutant",
        "Widen the window by one: the holes must move by one diagonal.",
        needs=lambda call: call.spec.window != (None, None),
        variants=window_edges((-1, -2), "forward"),
        demo=WINDOW,
    ),
    Defect(
        "window-missing-backward",
        "the backward ignores the window: gradients flow through keys the forward could not see",
        "the window is applied in the forward only",
        "windows",
        "p (bwd)",
        "I2 and I3 fail",
        "mutant",
        "Make the window longer than the sequence: the comparison must turn healthy.",
        needs=windowed,
        variants=lambda call: [Mutant(sees_backward=other_spec(window=(None, call.spec.window[1])))],
        demo=WINDOW,
    ),
    Defect(
        "align-backward",
        "the backward aligns the mask to the first key, the forward to the last",
        "the offset Sk - Sq is missing in the backward's mask",
        "alignment",
        "p (bwd)",
        "I2 fails, and only when Sq and Sk differ",
        "mutant",
        "Run with Sq = Sk: the comparison must turn healthy.",
        needs=lengths_differ,
        variants=lambda call: [Mutant(backward={"s": top_left(call.spec)})],
        demo=CAUSAL | {"sk": 180},
    ),
    Defect(
        "tail-keys",
        "{detail} are never read: the loop over keys stops at the last full tile",
        "the number of key tiles is rounded down",
        "tails",
        "s",
        "o is wrong; dk and dv are 0 for the last keys",
        "mutant",
        "Choose a length that is a multiple of the tile: the comparison must turn healthy.",
        needs=lambda call: not call.varlen and bool(tails(call.k.shape[2])),
        variants=tail_keys,
    ),
    Defect(
        "tail-padding",
        "{detail} count in the softmax: the last tile is not masked beyond the end of the keys",
        "keys beyond the end are loaded as zeros and their scores, 0, enter the denominator",
        "tails",
        "lse",
        "o is too small everywhere; lse is too large",
        "mutant",
        "Choose a length that is a multiple of the tile: the comparison must turn healthy.",
        needs=lambda call: not call.varlen and call.spec.right is None and bool(call.k.shape[2] % 128),
        variants=padded_keys,
    ),
    Defect(
        "tail-rows-dq",
        "dq is zero for {detail}: the last, partial tile of rows is not processed",
        "the number of row tiles is rounded down in the dq kernel, or its store is masked too strictly",
        "tails",
        "dq",
        "dq is 0 in the tail rows",
        "mutant",
        "Choose a length that is a multiple of the tile: the comparison must turn healthy.",
        needs=lambda call: not call.varlen and bool(tails(call.q.shape[2])),
        variants=tail_rows,
        demo=CAUSAL,
    ),
    Defect(
        "tail-keys-dkdv",
        "dk and dv are zero for {detail}: the last, partial tile of keys is not processed",
        "the number of key tiles is rounded down in the dk/dv kernel, or its store is masked too strictly",
        "tails",
        "dk",
        "dk and dv are 0 for the tail keys",
        "mutant",
        "Choose a length that is a multiple of the tile: the comparison must turn healthy.",
        needs=lambda call: not call.varlen and bool(tails(call.k.shape[2])),
        variants=tail_gradients,
        demo=CAUSAL,
    ),
    Defect(
        "tile-lost-dq",
        "dq misses the contribution of {detail}: one tile of the loop over keys is skipped",
        "a loop bound is off by one tile",
        "tails",
        "dq",
        "I1 fails with residual, I3 holds, dk and dv are fine",
        "mutant; the exact probe is off by whole tiles",
        "Change the tile size: the missing keys must move with it.",
        needs=lambda call: not call.varlen and bool(spans(call.k.shape[2])),
        variants=lost_key_tile,
        demo=CAUSAL,
    ),
    Defect(
        "tile-lost-dk",
        "the contribution of {detail} is missing: one tile of the loop over rows is skipped",
        "a loop bound is off by one tile in the dk/dv kernel",
        "tails",
        "dk",
        "I1 and I2 fail with residual, dq is fine",
        "mutant; the exact probe is off by whole tiles",
        "Change the tile size: the missing rows must move with it.",
        needs=lambda call: not call.varlen and bool(spans(call.q.shape[2])),
        variants=lost_row_tile,
        demo=CAUSAL,
    ),
    Defect(
        "varlen-leak",
        "packed sequences see each other: the boundaries are ignored",
        "cu_seqlens is not applied in forward and backward",
        "varlen",
        "s",
        "o is wrong from the second sequence on",
        "mutant; large values in one sequence change the others",
        "Pack a single sequence: the comparison must turn healthy.",
        needs=packed,
        variants=always(Mutant(sees=one_sequence)),
        demo=PACKED,
    ),
    Defect(
        "varlen-leak-backward",
        "the backward ignores the boundaries between packed sequences",
        "cu_seqlens is applied in the forward only",
        "varlen",
        "p (bwd)",
        "I2 and I3 fail per segment; o is fine",
        "mutant; support crosses the boundary",
        "Pack a single sequence: the comparison must turn healthy.",
        needs=packed,
        variants=_leak_backward,
        demo=PACKED,
    ),
    Defect(
        "varlen-last-segment",
        "the last packed sequence is not processed",
        "the loop over sequences ends one too early",
        "varlen",
        "o",
        "o and gradients are 0 beyond the last but one boundary",
        "mutant",
        "Append an empty sequence: the comparison must turn healthy.",
        needs=packed,
        variants=_last_segment,
        demo=PACKED,
    ),
    Defect(
        "varlen-short",
        "each packed sequence loses its last key",
        "the end of a segment is taken as its last valid index",
        "varlen",
        "s",
        "o is wrong in the last row of each segment (causal) or everywhere",
        "mutant",
        "Pad every sequence by one key: only the padding may be lost.",
        needs=packed,
        variants=always(Mutant(forward={"s": _short_segments}, backward={"s": _short_segments})),
        demo=PACKED,
    ),
]
