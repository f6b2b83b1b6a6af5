"""Windows that are off, and masks aligned to the other end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL, CAUSAL_TILES, FEW_TILES, Defect, lengths_differ, windowed
from backlight.doctor.defects.masks import own_mask
from backlight.doctor.defects.mutants import Mutant, bottom_left, in_both_halves, other_spec, showing, top_left
from backlight.doctor.defects.tails import keys_beyond

WINDOW = {"spec": {"causal": True, "window": (40, 0)}}


def reach(call: Call, step: int) -> Callable[[Call], Call] | None:
    """The window with its left side moved by `step`."""
    left = call.spec.left
    return None if left is None or left + step < 0 else other_spec(window=(left + step, call.spec.window[1]))


def reach_right(call: Call, step: int) -> Callable[[Call], Call] | None:
    right = call.spec.window[1]
    if right is None or call.spec.causal or right + step < 0:
        return None
    return other_spec(window=(call.spec.left, right + step))


def without_window(call: Call) -> Callable[[Call], Call]:
    """The window open to the left."""
    return other_spec(window=(None, call.spec.window[1]))


def _window_missing(call: Call) -> list[Mutant]:
    found = [Mutant(sees_backward=without_window(call))]
    if call.spec.right is not None:
        everything = other_spec(window=(None, None), causal=False)
        found.append(Mutant(sees_backward=everything, detail=" and the mask of later keys"))
    return found


def _wrong_sign(call: Call) -> list[Mutant]:
    stages = showing(bottom_left(call.spec))
    return [
        Mutant(forward=stages, backward=stages),
        Mutant(forward=stages, detail=", in the forward alone"),
        Mutant(backward=stages, detail=", in the backward alone"),
    ]


def _keys_by_rows(call: Call) -> list[Mutant]:
    s = keys_beyond(call.q.shape[2])
    return [
        in_both_halves(s=s),
        Mutant(forward={"s": s}, detail=" in the forward"),
        Mutant(backward={"s": s}, detail=" in the backward"),
    ]


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
                    found.append(Mutant(sees=change, sees_backward=own_mask(call), detail=detail))
                else:
                    found.append(Mutant(sees=change, detail=detail))
        return found

    return variants


def _edge(name: str, where: str, wide: bool, title: str, signal: str) -> Defect:
    """A window whose edge is off by one or two keys in one direction of the kernel."""
    return _window(
        name,
        title,
        f"the window's edge is off in the {where}'s mask or loop bound",
        "p (bwd)" if where == "backward" else "p",
        signal,
        f"Widen the window by one: the {'leak' if wide else 'holes'} must move by one diagonal.",
        needs=lambda call: call.spec.window != (None, None),
        variants=window_edges((1, 2) if wide else (-1, -2), where),
    )


BACKWARD_OFF = "the backward's window is {detail}"
FORWARD_OFF = "the forward's window is {detail}, the backward's is right"

_window = partial(Defect, family="windows", demo=WINDOW)

DEFECTS = [
    _edge(
        "window+1",
        "backward",
        True,
        BACKWARD_OFF,
        "I2 and I3 fail; a leak on one diagonal that moves with the window, not with the tile",
    ),
    _edge(
        "window-1",
        "backward",
        False,
        BACKWARD_OFF,
        "I2 and I3 fail; holes on one diagonal that move with the window, not with the tile",
    ),
    _edge(
        "window-forward+1",
        "forward",
        True,
        FORWARD_OFF,
        "o is wrong; forward weights leak on one diagonal, backward weights do not",
    ),
    _edge(
        "window-forward-1",
        "forward",
        False,
        FORWARD_OFF,
        "o is wrong; forward weights have holes on one diagonal, backward weights do not",
    ),
    _window(
        "window-missing-backward",
        "the backward ignores the window{detail}: gradients flow through keys the forward could not see",
        "the window is applied in the forward only",
        "p (bwd)",
        "I2 and I3 fail",
        "Make the window longer than the sequence: the comparison must turn healthy.",
        needs=windowed,
        variants=_window_missing,
    ),
    _window(
        "window-missing-forward",
        "the forward ignores the window, the backward applies it",
        "the window is applied in the backward only",
        "s",
        "o and lse are wrong in rows that reach beyond the window; no such weights in the backward",
        "Make the window longer than the sequence: the comparison must turn healthy.",
        needs=windowed,
        variants=lambda call: [Mutant(sees=without_window(call), sees_backward=own_mask(call))],
        demo=WINDOW | FEW_TILES,
    ),
    Defect(
        "align-backward",
        "the backward aligns the mask to the first key, the forward to the last",
        "the offset Sk - Sq is missing in the backward's mask",
        "p (bwd)",
        "I2 fails, and only when Sq and Sk differ",
        "Run with Sq = Sk: the comparison must turn healthy.",
        family="alignment",
        needs=lengths_differ,
        variants=lambda call: [Mutant(backward={"s": top_left(call.spec)})],
        demo=CAUSAL | {"sk": 180},
    ),
    Defect(
        "align-forward",
        "the forward aligns the mask to the first key, the backward to the last",
        "the offset Sk - Sq is missing in the forward's mask",
        "s",
        "o and lse are wrong, and only when Sq and Sk differ; the backward's weights do not sum to one",
        "Run with Sq = Sk: the comparison must turn healthy.",
        family="alignment",
        needs=lengths_differ,
        variants=lambda call: [Mutant(forward=showing(top_left(call.spec)))],
        demo=CAUSAL_TILES | {"sk": 100},
    ),
    Defect(
        "align-sign",
        "the mask is shifted by Sq - Sk where it must be Sk - Sq{detail}",
        "the sign of the offset between rows and keys is wrong",
        "s",
        "o is wrong, and only when Sq and Sk differ",
        "Run with Sq = Sk: the comparison must turn healthy.",
        family="alignment",
        needs=lengths_differ,
        variants=_wrong_sign,
        demo=CAUSAL_TILES | {"sk": 100},
    ),
    Defect(
        "keys-by-rows",
        "keys from the number of rows on are never read{detail}: the length of the keys is taken from q",
        "the loop over keys, or the check of its last tile, ends at Sq where it must end at Sk",
        "s",
        "o is wrong, and only when Sk is larger than Sq; dk and dv are 0 for the last keys",
        "Run with Sq = Sk: the comparison must turn healthy.",
        family="alignment",
        needs=lambda call: call.k.shape[2] > call.q.shape[2] and not call.varlen,
        variants=_keys_by_rows,
        demo=FEW_TILES | {"sk": 100},
    ),
]
