"""An examination of a kernel of 8 bits: whether it is one, what explains it, and what probes say of its scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from backlight.doctor.defects.catalogue import about
from backlight.doctor.defects.e4m3 import E4M3, PRECISIONS, REFUSED
from backlight.doctor.report.model import Finding, Probe
from backlight.doctor.steps import convention
from backlight.doctor.steps.bench import Bench
from backlight.doctor.steps.compare import RHO_PASS, Comparison
from backlight.doctor.steps.eight_bits import hard, naming
from backlight.doctor.steps.eight_bits.format import FORMATS, WIDER, format_of_v
from backlight.doctor.steps.eight_bits.scales import scale_group, static_scales
from backlight.doctor.steps.eight_bits.underflow import underflow
from backlight.doctor.steps.look import Look, look
from backlight.doctor.steps.sheet import Sheet
from backlight.doctor.steps.verdict import WRONG
from backlight.doctor.subject.subject import Observed
from backlight.doctor.subject.trouble import DeviceLost
from backlight.problems.problem import Problem

LEVELS_WITH_ALL = ("full", "forensic")
# what an 8-bit kernel has of its own, and where it is examined
FORM = "format of v"


def judged_as(problem: Problem, precision: str | None) -> Problem:
    """The problem with the yardsticks of a precision."""
    if precision is None:
        return problem
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, or None, got {precision!r}")
    refused = next((name for name in REFUSED if getattr(problem.call, name) is not None), None)
    if refused is not None:
        raise ValueError(f"precision={precision!r} has no yardstick for {refused}: leave one of the two out")
    return problem.replace(arithmetic=PRECISIONS[precision])


def recognised(sheet: Sheet, observed: Observed, first: Look, values: Mapping[str, Tensor]) -> Look:
    """A kernel that is off as 8 bits are and has 8-bit values is judged as what it is: another look at its first answer."""
    found = _format_of_the_wrong(sheet, observed, first)
    if found not in FORMATS:
        return first
    sheet.problem = sheet.problem.replace(arithmetic=E4M3)
    entry, o = about("eight-bits"), first.comparisons["o"]
    line = f"values of v in one octave come back as few different ones as {found} has"
    said = f"o: off by {100 * o.relative:.3g} % ({o.rho_a:.2g} x the error of plain PyTorch in its dtype)"
    lines = [said, line, "all else in this report is judged by what 8 bits can do, as with that option"]
    sheet.add(
        Finding(
            entry.id,
            entry.title.replace("{detail}", found),
            "precision",
            entry.stage,
            evidence=lines,
            mechanism="established (the probe shows it directly)",
            confidence="high",
            next_check=entry.next_check,
            score=35.0,
        )
    )
    return look(sheet.problem, values)


def _format_of_the_wrong(sheet: Sheet, observed: Observed, first: Look) -> str:
    """The format of v of a kernel whose o is off; '' where it is not, or cannot be asked."""
    problem, o = sheet.problem, first.comparisons.get("o")
    if problem.arithmetic is not None or o is None or o.rho_a <= RHO_PASS or bool(o.nonfinite.any()):
        return ""
    if any(getattr(problem.call, name) is not None for name in REFUSED):
        return ""
    try:
        return format_of_v(Bench(sheet.subject, problem, observed))
    except convention.REFUSALS:
        return ""


def explained(sheet: Sheet, values: Mapping[str, Tensor], comparisons: Mapping[str, Comparison]) -> bool:
    """Puts the defect of 8-bit kernels on the sheet that has these numbers, if there is one."""
    if sheet.problem.arithmetic is None or "o" not in comparisons:
        return False
    found = naming.finding(sheet.problem, values, comparisons)
    if found is not None:
        sheet.add(found)
    return found is not None


def run(sheet: Sheet, bench: Bench) -> None:
    """Probes of scales and of the format; at `full` also inputs on which ways of scaling differ."""
    if any(f.severity in ("defect", "test-fault") for f in sheet.findings):
        sheet.probes.append(Probe("8 bits", None, "wrong in a way that scales have no part in, or that is named already"))
        return
    steps: list[Callable[[], None]] = [lambda: _probed(sheet, bench, (_form, static_scales))]
    if sheet.level in LEVELS_WITH_ALL:
        steps += [lambda: _probed(sheet, bench, (scale_group, underflow)), lambda: hard.run(sheet, bench)]
    for step in steps:
        try:
            step()
        except DeviceLost:
            raise
        except convention.REFUSALS as error:
            first = str(error).splitlines()[0][:200] if str(error) else repr(error)
            sheet.probes.append(Probe("8 bits", None, f"the subject refused: {first}"))


def _probed(sheet: Sheet, bench: Bench, chosen: Iterable[Callable[[Bench], Probe]]) -> None:
    for each in chosen:
        found = each(bench)
        sheet.probes.append(found)
        if found.passed is False and not any(row.status in WRONG for row in sheet.rows):
            sheet.named(found.data["finding"], [f"{found.name}: {found.detail}"])


def _form(bench: Bench) -> Probe:
    found = format_of_v(bench)
    words = {"": "has no answer for this call", WIDER: f"{WIDER}: this kernel does not compute all of attention in 8 bits"}
    return Probe(FORM, True if found else None, words.get(found, found), data={"format": found})
