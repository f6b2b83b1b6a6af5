"""From recovered matrices to sentences, and to mutants that have exactly what was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from backlight import intervals
from backlight.doctor.defects import elastic
from backlight.doctor.defects import read as names
from backlight.doctor.defects.defect import Defect
from backlight.doctor.defects.layouts import read_backward
from backlight.doctor.defects.mutants import Mutant
from backlight.doctor.report.model import Reading, ReadingKind, Where
from backlight.doctor.steps.reading import scores
from backlight.doctor.steps.reading.cells import Seen, Shape, describe
from backlight.doctor.steps.reading.deltas import Given, deltas
from backlight.doctor.steps.reading.factors import factors
from backlight.doctor.steps.reading.operands import elsewhere, solved
from backlight.doctor.steps.reading.places import Place
from backlight.doctor.steps.reading.seers import seers
from backlight.doctor.steps.tomography import FAINT, Block, Recovered, score_gradient_by_rows
from backlight.doctor.subject.subject import Subject
from backlight.problems.problem import Problem
from backlight.reference import oracle

# ds is solved for, not read: what is this much smaller than it should be is lost
LOST = 0.05


@dataclass
class Read:
    """Sentences, and entries of `defects.read` with mutants to try on the data."""

    readings: list[Reading] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)

    def say(self, stage: str, kind: ReadingKind, text: str, cause: str = "", **numbers: Any) -> Reading:
        found = Reading(stage, kind, text, cause, **numbers)
        self.readings.append(found)
        return found

    def about(self, stage: str) -> list[Reading]:
        return [reading for reading in self.readings if reading.stage == stage]


def read(recovered: Sequence[tuple[Recovered, bool]], problem: Problem, subject: Subject) -> Read:
    """What the matrices that are `wrong` (the second of each pair) show; the subject is asked again about delta."""
    found = Read()
    by_name = {matrix.name: (matrix, wrong) for matrix, wrong in recovered}
    for name in ("p", "p (bwd)"):
        matrix, wrong = by_name.get(name, (None, False))
        if matrix is not None and wrong:
            _weights(matrix, problem, found, forward_right=name == "p (bwd)" and not by_name["p"][1])
    weights_right = not any(by_name.get(name, (None, True))[1] for name in ("p", "p (bwd)"))
    for name in ("ds", "ds (dq)"):
        matrix, wrong = by_name.get(name, (None, False))
        if matrix is not None and wrong and weights_right:
            _score_gradient(matrix, problem, subject, found)
    return found


# --- weights -----------------------------------------------------------------------------------------------------------------

CELL_NAMES: dict[tuple[str, bool], tuple[str, Callable[..., list[Mutant]]]] = {
    ("p", True): ("cells-lost", names.lost_forward),
    ("p", False): ("cells-leaked", names.leaked_forward),
    ("p (bwd)", True): ("cells-lost-backward", names.lost_backward),
    ("p (bwd)", False): ("cells-leaked-backward", names.leaked_backward),
    ("ds", True): ("cells-lost-dk", names.lost_of_dk),
    ("ds (dq)", True): ("cells-lost-dq", names.lost_of_dq),
}


def _weights(matrix: Recovered, problem: Problem, found: Read, forward_right: bool) -> None:
    hidden = ~intervals.visible_whole(matrix.call).to(matrix.truth.device).expand_as(matrix.truth)
    could_be_lost = ~hidden & (matrix.truth > FAINT) & matrix.known
    if _other_rows(matrix, could_be_lost, hidden & matrix.known, found):
        return
    lost = _cells(matrix, matrix.holes, could_be_lost, True, found, problem)
    leaked = _cells(matrix, matrix.leaks, hidden & matrix.known, False, found, problem)
    if lost is not None and leaked is not None and not matrix.call.varlen:
        name = "mask-read" if matrix.name == "p" else "mask-read-backward"
        words = "; ".join(reading.text for reading in found.about(matrix.name))
        found.defects.append(names.named(name, names.other_mask(lost.at, leaked.at, words, matrix.name == "p")))
    usable = could_be_lost & ~matrix.holes
    in_cells = bool(matrix.holes.any() or matrix.leaks.any())
    if forward_right if matrix.name == "p (bwd)" else not in_cells:
        # the lse of a forward that is wrong is wrong too
        _rows(matrix, problem, usable, found)
    if not found.about(matrix.name) and matrix.name == "p":
        _function(matrix, usable, found)
    if not found.about(matrix.name) and forward_right:
        _keys(matrix, usable, found)


def _other_rows(matrix: Recovered, could_be_lost: Tensor, could_leak: Tensor, found: Read) -> bool:
    """Whether every row has the mask of another by one rule."""
    rule = seers(matrix, could_be_lost, could_leak)
    if rule is None:
        return False
    kind: ReadingKind = "leaked" if bool(matrix.leaks.any()) else "lost"
    reading = found.say(matrix.name, kind, rule.text, rule.cause, cells=int((matrix.holes | matrix.leaks).sum()))
    name = "mask-read" if matrix.name == "p" else "mask-read-backward"
    found.defects.append(names.named(name, names.other_mask(rule.lost, rule.seen, reading.sentence, matrix.name == "p")))
    return True


def _cells(matrix: Recovered, wrong: Tensor, domain: Tensor, lost: bool, found: Read, problem: Problem) -> Shape | None:
    """The shape of the wrong cells of the worst head, and of which other heads it is the shape too."""
    counts = wrong.sum((2, 3))
    if not bool(counts.any()):
        return None
    b, h = divmod(int(counts.argmax()), counts.shape[1])
    spec = matrix.call.spec
    shape = describe(Seen(wrong[b, h], domain[b, h], lost), spec.left, spec.right)
    assert shape is not None
    concerned = [(i, j) for i, j in counts.nonzero().tolist()]
    same = [at for at in concerned if Seen(wrong[at], domain[at], lost).fits(shape.cells)]
    everywhere = [(i, j) for i in range(counts.shape[0]) for j in range(counts.shape[1]) if bool(domain[i, j].any())]
    heads = sorted({j for _, j in same})
    words = "" if same == everywhere else f" in head{'s' if len(heads) > 1 else ''} {', '.join(map(str, heads))}"
    if len(same) < len(concerned):
        words += "; other heads differ"
    where = Where(heads=tuple(heads) if words else None, rows=shape.rows, keys=shape.keys, text=shape.text + words)
    numbers = {"cells": int(wrong.sum()), "tile": list(shape.tile or ()), "period": shape.period, "where": where}
    by_tau = not lost and _given_by_tau(matrix, problem)
    cause = "they weigh tau / n, which is not masked" if by_tau else shape.cause
    reading = found.say(matrix.name, "lost" if lost else "leaked", shape.text + words, cause, **numbers)
    if by_tau:
        found.defects.append(elastic.of_cells(shape.at, reading.sentence))
        return shape
    name, make = CELL_NAMES.get((matrix.name, lost), ("", None))
    if make is not None and not matrix.call.varlen:
        _name(found, name, make, shape, reading, heads if same != everywhere else None)
    return shape


def _given_by_tau(matrix: Recovered, problem: Problem) -> bool:
    """Whether hidden keys weigh tau / n of the elastic softmax, and no more."""
    call = matrix.call
    if call.tau is None or call.varlen:
        return False
    n = intervals.visible_whole(call).sum(dim=-1, keepdim=True).clamp(min=1).to(matrix.value.device)
    given = (call.tau.double()[:, None, None] / n).expand_as(matrix.value)[matrix.leaks]
    return bool(((matrix.value[matrix.leaks] - given).abs() <= 4 * problem.eps * given).all())


def _name(
    found: Read, name: str, make: Callable[..., list[Mutant]], shape: Shape, reading: Reading, heads: list[int] | None
) -> None:
    mutants = make(shape.at, reading.sentence)
    found.defects.append(names.named(name, mutants if heads is None else [names.in_heads(each, heads) for each in mutants]))


def _rows(matrix: Recovered, problem: Problem, usable: Tensor, found: Read) -> None:
    lse = oracle(matrix.call, keep=("lse",)).lse
    rows = factors(matrix.value, matrix.truth, lse, usable, problem.eps)
    if rows is None or matrix.call.tau is not None:
        return
    sizes, cells = rows.factor[rows.wrong], int((rows.wrong[..., None] & usable).sum())
    span = f"by factors from {float(sizes.min()):.3g} to {float(sizes.max()):.3g}"
    words = f"{int(rows.wrong.sum())} rows are off by one factor along the row, {span}"
    if matrix.name == "p":
        found.say("p", "row factor", words, "the sum that divides the row is not its own", cells=cells)
        return
    lse_words = rows.place.words if rows.place is not None else rows.part
    text = f"{words}: their lse is wrong" + (f", it is {lse_words}" if lse_words else " and no other row's")
    found.say("p (bwd)", "row factor", text, cells=cells)
    detail = lse_words or f"off by up to {float((rows.lse - lse)[rows.wrong].abs().max()):.3g}"
    take = _taken(rows.lse, rows.place.take if rows.place is not None else None)
    found.defects.append(names.named("lse-read", names.other_lse(take, detail)))


def _taken(read_rows: Tensor, take: Callable[[Tensor], Tensor] | None) -> Callable[[Tensor], Tensor]:
    """Rows moved as a place says; what comes from outside, or from no place, is what was read, where it was read."""

    def change(x: Tensor) -> Tensor:
        fits = read_rows.shape == x.shape
        moved = take(x) if take is not None else torch.full_like(x, torch.nan)
        other = torch.where(torch.isfinite(read_rows), read_rows, x) if fits else x
        return torch.where(torch.isfinite(moved), moved, other)

    return change


def _function(matrix: Recovered, usable: Tensor, found: Read) -> None:
    fitted = scores.function_of(matrix.value, matrix.call, usable)
    if fitted is not None:
        found.say("p", "scores", fitted.text, fitted.cause, cells=int(usable.sum()))
        found.defects.append(fitted.defect)


def _keys(matrix: Recovered, usable: Tensor, found: Read) -> None:
    """k as the backward's scores have it: log p + lse = scale q k."""
    call = matrix.call
    if call.spec.softcap is not None or call.bias is not None or call.pair_bias is not None or call.tau is not None:
        return
    seen = usable & (matrix.value > FAINT)
    s = torch.log(matrix.value.clamp(min=1e-300)) + oracle(call, keep=("lse",)).lse[..., None]
    rows, known = solved((s / call.scale).masked_fill(~seen, 0), call.q, seen)
    _operand("p (bwd)", "k", rows, known, call.k, call.group, found)


def _operand(stage: str, name: str, rows: Tensor, known: Tensor, tensor: Tensor, group: int, found: Read) -> None:
    place = elsewhere(name, rows, known, tensor, group)
    if place is None:
        return
    found.say(stage, "keys" if name == "k" else "values", f"the backward's {place.text}", place.cause, cells=int(known.sum()))
    found.defects.append(read_backward((name,), place.take, place.text))
    if name == "k":
        # whoever looks for k there looks for v there too, and weights that are wrong hide where it comes from
        found.defects.append(read_backward(("k", "v"), place.take, place.text.replace("k is", "k and v are")))


# --- ds ----------------------------------------------------------------------------------------------------------------------


def _score_gradient(matrix: Recovered, problem: Problem, subject: Subject, found: Read) -> None:
    size = matrix.truth.abs()
    domain = (size > 0.3 * size.pow(2).mean(dim=(-2, -1), keepdim=True).sqrt()) & matrix.known
    lost = domain & (matrix.value.abs() < LOST * size)
    right = (matrix.value - matrix.truth).abs() <= 2 * LOST * size
    if bool(lost.any()) and int((domain & ~lost & ~right).sum()) <= 0.02 * int(domain.sum()):
        _cells(matrix, lost, domain, True, found, problem)
        if found.about(matrix.name) and "no shape" not in found.about(matrix.name)[-1].text:
            return
        found.readings = [reading for reading in found.readings if reading.stage != matrix.name]
    plain = matrix.call.tau is None and matrix.call.spec.softcap is None and not matrix.call.varlen
    if matrix.name == "ds" and plain and problem.call.gate is None:
        _delta(score_gradient_by_rows(subject, problem), problem, found)


def _delta(blocks: Sequence[Block], problem: Problem, found: Read) -> None:
    call, dy = problem.call, problem.dy
    delta = torch.zeros(call.q.shape[:3], dtype=torch.float64, device=call.q.device)
    ds = torch.zeros(*delta.shape, call.k.shape[2], dtype=torch.float64, device=call.q.device)
    p, dp, rows, right = torch.zeros_like(ds), torch.zeros_like(ds), torch.zeros_like(delta, dtype=torch.bool), []
    for block in blocks:
        # one at a time: of a long sequence each is large
        trace = oracle(block.call, dy, keep=("p", "dp", "delta"))
        right.append(trace.delta)
        ds[:, :, block.rows], rows[:, :, block.rows] = block.ds, True
        p[:, :, block.rows], dp[:, :, block.rows] = trace.p[:, :, block.rows], trace.dp[:, :, block.rows]
        delta[:, :, block.rows] = trace.delta[:, :, block.rows]
    rows &= torch.isfinite(delta)

    def taken(place: Place) -> Tensor:
        moved = torch.full_like(delta, torch.nan)
        for block, each in zip(blocks, right, strict=True):
            moved[:, :, block.rows] = place.take(each)[:, :, block.rows]
        return moved

    given = Given(p, dp, delta, dy.double(), call.v.double().repeat_interleave(call.group, dim=1), taken)
    read_off = deltas(ds, given, rows, problem.eps)
    if read_off is None:
        _values(ds, given, rows, problem, found)
        return
    if read_off.channels is not None:
        found.say("ds", "channels", read_off.text, read_off.cause)
        found.defects.append(names.named("dp-channels", names.without_channels(read_off.channels, read_off.text)))
        return
    found.say("ds", "delta", read_off.text, read_off.cause)
    if read_off.place is not None:
        take = _taken(torch.zeros(0), read_off.place.take)
        found.defects.append(names.named("delta-read", names.other_delta(take, read_off.text)))


def _values(ds: Tensor, given: Given, rows: Tensor, problem: Problem, found: Read) -> None:
    """v as the backward's dp has it: ds / p + delta = dO v."""
    seen = (given.p > FAINT * 10) & rows[..., None]
    dp = (ds / given.p.clamp(min=1e-300) + given.delta[..., None]).masked_fill(~seen, 0)
    values, known = solved(dp, given.do, seen)
    _operand("ds", "v", values, known, problem.call.v, problem.call.group, found)
