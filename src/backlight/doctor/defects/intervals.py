"""Masks by row intervals: ends off by one, intervals that are forgotten, and those of somebody else."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from backlight import intervals
from backlight.call import Call
from backlight.doctor.defects.defect import Defect, always, both, has
from backlight.doctor.defects.mutants import Mutant, with_call
from backlight.reference import STAGES

DEMO = {"spec": {"rows": True}}
ELASTIC = {"spec": {"rows": True, "tau": True}}


def _rows(call: Call) -> Tensor:
    assert call.rows is not None
    return call.rows


def moved(first: int = 0, end: int = 0, joined: bool = False) -> Callable[[Call], Call]:
    """The call with all ends moved by some rows; `joined`: those of disjoint intervals (eq. 61), empty ones not."""

    def rows(call: Call) -> Tensor:
        given = intervals.disjoint(_rows(call)) if joined else _rows(call)
        by = torch.tensor([first, end], dtype=torch.int32, device=given.device).repeat(given.shape[2] // 2)[:, None]
        if not joined:
            return given + by
        starts, ends = intervals.pairs(given)
        return torch.where((starts < ends).repeat_interleave(2, dim=2), given + by, given)

    return with_call(rows=rows)


def without_second() -> Callable[[Call], Call]:
    return with_call(rows=lambda call: _rows(call)[:, :, :2])


def everything() -> Callable[[Call], Call]:
    """The mask hides nothing."""

    def rows(call: Call) -> Tensor:
        ends = torch.tensor([0, call.q.shape[2]], dtype=torch.int32, device=call.q.device)
        return ends[None, None, :, None].expand(1, 1, 2, call.k.shape[2])

    return with_call(rows=rows, pos=lambda call: None)


def of_the_first(axis: int) -> Callable[[Call], Call]:
    """Every batch entry, or every head, reads the mask of the first."""
    return with_call(rows=lambda call: _rows(call).narrow(axis, 0, 1).expand_as(_rows(call)))


def of_the_next(axis: int) -> Callable[[Call], Call]:
    return with_call(rows=lambda call: _rows(call).roll(-1, dims=axis))


def two_intervals(call: Call) -> bool:
    return call.rows is not None and call.rows.shape[2] == 4


def several(axis: int) -> Callable[[Call], bool]:
    return lambda call: call.rows is not None and call.rows.shape[axis] > 1


def _m_counting_hidden(p, tau, own, visible):
    return STAGES["m"].compute(p, tau, own.sum(dim=-1, keepdim=True), visible)


def _a_counting_hidden(p, m, tau, own):
    return STAGES["a"].compute(p, m, tau, own.sum(dim=-1, keepdim=True))


def _u_counting_hidden(m, v, own):
    return STAGES["u"].compute(m, v, own.sum(dim=-1, keepdim=True))


_interval = partial(Defect, family="masks", needs=has("rows"), demo=DEMO)


def _elsewhere(axis: int, name: str, title: str, does: str, signal: str, next_check: str) -> Defect:
    """A mask read at another place along an axis."""
    mutants = always(Mutant(sees=of_the_first(axis)), Mutant(sees=of_the_next(axis)))
    return _interval(name, title, does, "s", signal, next_check, needs=several(axis), variants=mutants)


DEFECTS = [
    _interval(
        "interval-end-inclusive",
        "the mask's intervals are read one row too far: the row at which a key ends still sees it",
        "the comparison is i <= end where it must be i < end",
        "s",
        "o is wrong in single rows, those at the end of an interval; identities hold",
        "Lower every end by one: the comparison must turn healthy.",
        variants=always(Mutant(sees=moved(end=1)), Mutant(sees=moved(end=1, joined=True))),
    ),
    _interval(
        "interval-first-exclusive",
        "the mask's intervals begin one row too late: the first row that may see a key does not",
        "the comparison is first < i where it must be first <= i",
        "s",
        "o is wrong in single rows, those at the beginning of an interval; identities hold",
        "Lower every first by one: the comparison must turn healthy.",
        variants=always(Mutant(sees=moved(first=1)), Mutant(sees=moved(first=1, joined=True))),
    ),
    _interval(
        "interval-second-forgotten",
        "of a key's two intervals only the first is read",
        "the kernel was written for masks of one interval",
        "s",
        "o is wrong in all rows of a second interval; identities hold",
        "Pass a mask of one interval: the comparison must turn healthy.",
        needs=two_intervals,
        variants=always(Mutant(sees=without_second())),
    ),
    _elsewhere(
        1,
        "interval-other-head",
        "heads read the mask of another head",
        "the stride of heads is left out of the mask's address, or another head's index is in it",
        "o is wrong in some heads; identities hold",
        "Give all heads the same mask: the comparison must turn healthy.",
    ),
    _elsewhere(
        0,
        "interval-other-batch",
        "batch entries read the mask of another entry",
        "the stride of the batch is left out of the mask's address",
        "o is wrong in all batch entries but one; identities hold",
        "Examine the first batch entry by itself: the comparison must turn healthy.",
    ),
    _interval(
        "interval-backward",
        "the backward ignores the mask: gradients flow through keys the forward could not see",
        "the mask is applied in the forward only",
        "p (bwd)",
        "I2 and I3 fail, I1 holds; weights of hidden keys in the backward",
        "Change a key that no row may see: dq must change too.",
        confirm="mutant; tomography of the backward's weights",
        variants=always(Mutant(sees_backward=everything())),
    ),
    _interval(
        "interval-count",
        "the elastic softmax divides tau by keys that the mask hides",
        "n is counted from causal and window, and not from the mask",
        "m",
        "o and lse: lse is right, o is wrong wherever the mask hides a key",
        "Set tau to 0: the comparison must turn healthy.",
        needs=both(has("rows"), has("tau")),
        variants=always(
            Mutant(
                forward={"m": _m_counting_hidden, "a": _a_counting_hidden, "u": _u_counting_hidden},
                backward={"m": _m_counting_hidden, "a": _a_counting_hidden},
            )
        ),
        demo=ELASTIC,
    ),
]
