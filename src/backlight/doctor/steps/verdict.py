"""From measurements to words: stage rows, findings, and the verdict of a report.

One primary finding names what is wrong. It is a mutant that reproduces the data, or else the probe that showed it, or else
`open` with the first stage whose own formula fails. Precision, test faults and notes are classes of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from backlight.doctor.defects.catalogue import BY_ID
from backlight.doctor.defects.constants import times
from backlight.doctor.defects.scale import GAIN_NEXT
from backlight.doctor.report.model import FORWARD_MODE, STAGE_ORDER, Confidence, Finding, Probe, StageRow, Where
from backlight.doctor.report.words import counted
from backlight.doctor.steps import accused
from backlight.doctor.steps.compare import RHO_B, RHO_B_WIDE, RHO_FAIL, TRUTH_OF, Comparison
from backlight.doctor.steps.explain import Explanation
from backlight.doctor.steps.invariants import Identity
from backlight.doctor.steps.localise import describe, local_ratio, worst_cell
from backlight.problems.problem import Problem, recast
from backlight.reference import Oracle
from backlight.reference.eager import UNROUNDED

# excess over a flash kernel in the backward alone, or in the forward too: 16-bit sums, or 16-bit scores
EXCESS = 1.15
# the few rounded scores behind an lse of 8 bits agree between two kernels in their size, and not in their mean
RHO_B_LSE = 3.0
WRONG = ("culprit", "inherited", "suspect")
ORDER = ("s", "p", "lse", "o", "p (bwd)", *STAGE_ORDER[4:], *FORWARD_MODE)


def precision_limit(problem: Problem, name: str = "o") -> float:
    """rho_B that counts as a loss of precision; lse and learned terms stay fp32 whatever the inputs are."""
    if problem.arithmetic is not None and name == "lse":
        return RHO_B_LSE
    return RHO_B if problem.sixteen_bit and name not in ("lse", "tlse") else RHO_B_WIDE


def stage_rows(
    problem: Problem, values: Mapping[str, Tensor], comparisons: Mapping[str, Comparison], local: Mapping[str, Tensor]
) -> list[StageRow]:
    """One row per observed quantity, in stage order; statuses follow from global and local errors."""
    rows, guilty = [], False
    for name in sorted(comparisons, key=ORDER.index):
        c = comparisons[name]
        row = StageRow(name, gain=c.gain, gains=c.gains, rho_a=c.rho_a, rho_b=c.rho_b, global_error=c.relative)
        if bool(c.nonfinite.all()) and c.nonfinite.numel():
            # no finite value is left to form a ratio of
            row = StageRow(name)
        row.nonfinite = 0 if c.misplaced else int(c.nonfinite.sum())
        row.ulp_max = float(c.ulp.max()) if c.ulp.numel() else 0.0
        row.worst = worst_cell(c)
        ratio = None
        if name in local:
            ratio, row.local_error = local_ratio(name, values[name], local[name], problem)
        if c.bad:
            clean = ratio is not None and ratio <= RHO_FAIL and not _gain_differs(c, values[name], local[name])
            if clean and not bool(c.nonfinite.any()):
                row.status, row.note = "inherited", "right, given what it was computed from"
            else:
                row.status = "suspect" if guilty else "culprit"
                guilty = True
            row.note = _note(c, problem) or row.note
        elif c.suspect:
            row.status, row.note = "suspect", f"worst cell {c.rho_a:.1f} x the error of plain PyTorch"
        elif not c.rho_b <= precision_limit(problem, name):
            row.status, row.note = "precision", f"{c.rho_b:.1f} x the error of a flash kernel"
        rows.append(row)
    return rows


def _gain_differs(c: Comparison, value: Tensor, local: Tensor) -> bool:
    """A constant hides inside the noise of cells: compare the gain against the local value too."""
    if not c.gains:
        return False
    x, y = value.detach().double(), local
    energy = float((y * y).sum())
    return energy > 0 and not abs(float((x * y).sum()) / energy - 1) <= max(c.gain_limit, 1e-12)


def _note(c: Comparison, problem: Problem) -> str:
    if bool(c.nonfinite.any()):
        return c.nonfinite_words
    if bool(c.stray_zeros.any()):
        count = int(c.stray_zeros.sum())
        return f"{counted(count, 'value')} must be exactly 0 and {'is' if count == 1 else 'are'} not"
    constant = abs(c.gain - 1) >= 0.5 * c.relative and not c.gain_ok
    if c.gains and constant and max(abs(g - c.gain) for g in c.gains) <= 0.02 * max(abs(c.gain), 0.05):
        return f"{times(c.gain, problem.call)}"
    if c.gains and len(c.gains) > 1 and max(c.gains) - min(c.gains) > 0.2:
        return "gains by head " + " ".join(f"{g:.2f}" for g in c.gains[:8])
    where = describe(c.energy, c.name, problem.call)
    return where.text if where is not None and where.text != "everywhere" else ""


# --- findings --------------------------------------------------------------------------------------------------------------


def evidence(comparisons: Mapping[str, Comparison], identities: list[Identity], bad_only: bool = True) -> list[str]:
    lines = []
    for c in comparisons.values():
        if bad_only and not c.bad:
            continue
        parts = [c.nonfinite_words] if bool(c.nonfinite.any()) else []
        if not bool(c.nonfinite.all()):
            rest = "the others " if parts else ""
            parts.append(f"{rest}off by {100 * c.relative:.3g} % (a correct kernel: {100 * c.noise_relative:.2g} %)")
            if c.gains:
                parts.append("gain per head " + " ".join(f"{g:.4g}" for g in c.gains[:8]))
        lines.append(f"{c.name}: {', '.join(parts)}")
    fine = [c.name for c in comparisons.values() if not c.bad]
    if fine:
        lines.append("right: " + ", ".join(fine))
    for i in identities:
        if not i.holds:
            if not math.isfinite(i.ratio):
                lines.append(f"identity {i.name} ({i.law}) fails: a side is not finite")
                continue
            # the sums of I3 are 0 in a correct kernel: their quotient means nothing
            factor = "" if i.name == "I3" else f"; sides differ by the factor {i.gain:.4g}"
            lines.append(f"identity {i.name} ({i.law}) fails at {i.ratio:.3g} x its floor{factor}")
    return lines


def from_explanation(
    best: Explanation,
    ranked: list[Explanation],
    problem: Problem,
    comparisons: Mapping[str, Comparison],
    identities: list[Identity],
) -> Finding:
    """The finding of a mutant that reproduces the data."""
    others = [e for e in ranked if e.defect.id != best.defect.id]
    second = others[0] if others else None
    lines = [f"a mutant of the oracle with exactly this defect reproduces the data to {best.average:.2f} x the noise"]
    if second is not None:
        lines.append(f"next best explanation: {second.defect.id} at {second.average:.3g} x the noise")
    rival = second is not None and second.fits and second.average <= 1.5 * best.average
    return Finding(
        best.defect.id,
        best.sentence,
        best.defect.severity,  # type: ignore[arg-type]
        best.defect.stage,
        where_of(comparisons, problem),
        lines + evidence(comparisons, identities),
        f"established (explains {100 * min(best.explained, 0.9999):.2f} % of the error energy)",
        "medium" if rival else "high",
        specific_check(best, comparisons),
        best.explained,
        100.0,
    )


def specific_check(best: Explanation, comparisons: Mapping[str, Comparison]) -> str:
    """The check of the catalogue; where it is about a constant, with the constant."""
    scaled = comparisons.get(best.defect.stage)
    if best.defect.next_check != GAIN_NEXT or scaled is None:
        return best.defect.next_check
    return f"Divide {scaled.name} by {scaled.gain:.4g} and run again: the whole comparison must turn healthy."


def where_of(comparisons: Mapping[str, Comparison], problem: Problem) -> Where | None:
    """The place of the first bad quantity that is narrower than everywhere."""
    bad = [c for c in comparisons.values() if c.bad]
    places = [describe(c.energy, c.name, problem.call) for c in sorted(bad, key=lambda c: ORDER.index(c.name))]
    found = [w for w in places if w is not None]
    return next((w for w in found if w.text != "everywhere"), found[0] if found else None)


def open_finding(
    rows: list[StageRow],
    problem: Problem,
    comparisons: Mapping[str, Comparison],
    identities: list[Identity],
    ranked: list[Explanation],
) -> Finding:
    """Something is wrong and no entry of the catalogue reproduces it: say where, and what class the identities point to."""
    stage, alone = accused.stage(rows, comparisons)
    lines = accused.seen_inside(stage, rows, comparisons) + evidence(comparisons, identities)
    reading = decision(comparisons, identities)
    if reading and accused.confirmed(pattern_of(comparisons, identities), rows):
        lines.insert(0, f"the pattern of identities and gains reads: {reading}")
    if ranked:
        lines.append(f"closest known defect: {ranked[0].defect.id}, explains {100 * max(0.0, ranked[0].explained):.0f} %")
    title = f"{stage} is wrong, by a mechanism the catalogue does not know"
    score = 50.0
    if not any(c.bad for c in comparisons.values()):
        laws = ", ".join(f"{i.name} ({i.law})" for i in identities if not i.holds)
        title, score = f"identity {laws} fails although every tensor is within noise of the oracle", 20.0
    check = accused.next_check(stage, rows) or next_check(comparisons, identities)
    where = where_of(comparisons, problem)
    return Finding("open", title, "defect", stage, where, lines, "open", "medium" if alone else "low", check, None, score)


def pattern_of(comparisons: Mapping[str, Comparison], identities: list[Identity]) -> tuple[bool, bool, bool] | None:
    """Which of I1 to I3 hold; None where the forward is wrong and I1 and I2 hold: both directions agree on something else."""
    holds = {i.name: i.holds for i in identities}
    pattern = (holds.get("I1", True), holds.get("I2", True), holds.get("I3", True))
    return None if "o" in comparisons and comparisons["o"].bad and pattern[:2] == (True, True) else pattern


def next_check(comparisons: Mapping[str, Comparison], identities: list[Identity]) -> str:
    """An experiment that would prove the reading of `decision` false."""
    if "o" in comparisons and comparisons["o"].bad:
        agree = all(i.holds for i in identities if i.name in ("I1", "I2"))
        return FORWARD_CHECKS[agree]
    holds = {i.name: i.holds for i in identities}
    wrong = {name for name, c in comparisons.items() if c.bad}
    if not {"I1", "I2"} <= set(holds) or not wrong:
        return HALVE
    pattern = (holds["I1"], holds["I2"], holds.get("I3", True))
    return HALVE if pattern == (True, True, True) and not {"dq", "dk"} <= wrong else CHECKS[pattern]


HALVE = "Halve the problem (batch, heads, length, width) while the error persists; the smallest shape shows the pattern."
FORWARD_CHECKS = {
    True: "Leave out causal, window and scale, one at a time: the comparison must turn healthy with one of them.",
    False: "Run with one query and one key (--shape 1,1,1,D): o must then be v; if it is, the softmax or the mask is at fault.",
}
CHECKS = {
    (True, True, True): "Divide dq and dk by the gain in the table: both must turn healthy, since ds enters both.",
    (
        False,
        True,
        True,
    ): "Run with one head and one tile of rows (--shape 1,1,64,D): a lost tile or wrong head must go away.",
    (
        False,
        True,
        False,
    ): "Look for the rows of dk among the oracle's rows of other keys: they must be there, in another place.",
    (True, False, False): "Return p from the backward, or run --level full: its cells must differ from the forward's p.",
    (
        True,
        False,
        True,
    ): "Divide dv by the oracle's dv: a ratio that is constant in a row of p must be exp of an error of its lse.",
    (True, True, False): "Return delta from the backward: it must differ from the row sum of dO * o.",
    (False, False, True): "Run with as many key/value heads as query heads (--kv-heads): the error must go away.",
    (False, False, False): "Swap two of the returned gradients, then two of the arguments: one swap must make it healthy.",
}


def decision(comparisons: Mapping[str, Comparison], identities: list[Identity]) -> str:
    """What the pattern of identities and wrong tensors points to, in words; empty when it points nowhere."""
    holds = {i.name: i.holds for i in identities}
    bad = {name for name, c in comparisons.items() if c.bad}
    if not {"I1", "I2"} <= set(holds):
        return ""
    i1, i2, i3 = holds["I1"], holds["I2"], holds.get("I3", True)
    if "o" in bad and i1 and i2:
        return "forward and backward agree with each other and not with the spec: another mask, scale or layout"
    table = {
        (True, True, True): "ds scaled as a whole" if {"dq", "dk"} <= bad else "",
        (False, True, True): "the assembly of dq or dk: a constant, a lost tile, a subset of heads, or a race",
        (False, True, False): "dk: transposed, uninitialised or written to the wrong rows",
        (True, False, False): "the weights of the backward are not those of the forward: mask, window, scores or lse",
        (True, False, True): "lse wrong by an additive amount, or dO not read for some heads",
        (True, True, False): "delta or dp: missing, shifted, of the wrong sign, or incomplete",
        (False, False, True): "a sum over the query heads of a group, or the head map",
        (False, False, False): "outputs or arguments swapped, or a wrong head map in the backward",
    }
    return table[(i1, i2, i3)]


def precision_finding(problem: Problem, comparisons: Mapping[str, Comparison], probes: list[Probe]) -> Finding | None:
    """A correct algorithm that rounds where it should not: below yardstick A, above yardstick B.

    Either the ratio to yardstick B says so by itself, or the exact-arithmetic probe does. The ratio allows for one more
    rounding of the output, which hides the 16-bit sum of a few hundred numbers; the probe does not depend on how many there
    are: a kernel with fp32 sums passes it whatever their order, and partial sums that do not fit 16 bits come out wrong.
    """
    if problem.arithmetic is not None:
        return None
    exact = next((p for p in probes if p.name == "exact arithmetic" and p.passed is False), None)
    inexact = exact.data["wrong"] if exact is not None and problem.sixteen_bit else {}
    low = [c for c in comparisons.values() if not c.bad and not c.rho_b <= precision_limit(problem, c.name)]
    confirmed = [c for c in comparisons.values() if c.name in inexact and not c.bad]
    if not low and not confirmed:
        return None
    # sums of the backward do not reach o; rounded scores do
    forward_too = "o" in comparisons and comparisons["o"].versus_flash > EXCESS
    identifier = "precision-scores" if low and forward_too and not confirmed else "precision-accumulation"
    shown = confirmed or low
    names = ", ".join(c.name for c in shown)
    lines = [_coarseness(c) for c in shown]
    if exact is not None:
        lines.append(f"exact-arithmetic probe: {exact.detail}")
    defect = BY_ID[identifier]
    title = (
        defect.title
        if identifier == "precision-scores"
        else f"{names}: accumulated in 16 bits, errors grow with the number of tiles"
    )
    worst = max(shown, key=lambda c: c.versus_flash)
    place = worst_cell(worst)
    mechanism = "established (exact inputs do not come out exact)" if confirmed else "open"
    confidence: Confidence = "high" if confirmed else "medium"
    return Finding(
        identifier, title, "precision", worst.name, place, lines, mechanism, confidence, defect.next_check, None, 30.0
    )  # fmt: skip


def _coarseness(c: Comparison) -> str:
    return f"{c.name}: {c.versus_flash:.2f} x the error of a flash kernel, worst cell {c.rho_a:.2f} x plain PyTorch"


def coarse_tangents(problem: Problem, tangents: Mapping[str, Comparison]) -> Finding | None:
    """Tangents below yardstick A and above yardstick B."""
    low = [c for c in tangents.values() if not c.bad and not c.rho_b <= precision_limit(problem, c.name)]
    if not low:
        return None
    worst = max(low, key=lambda c: c.versus_flash)
    title = f"forward mode: {', '.join(c.name for c in low)} right, with less precision than the algorithm allows"
    lines = [_coarseness(c) for c in low]
    check = (
        "Run with --level full: it tells whether what the tangents of a row's scores have in common is rounded with the rest."
    )
    return Finding("open", title, "precision", worst.name, worst_cell(worst), lines, "open", "medium", check, None, 30.0)


def precision_hint(problem: Problem, comparisons: Mapping[str, Comparison]) -> str:
    """A sentence for `quick`, which has no exact-arithmetic probe: the backward is coarser than a flash kernel's, o is not."""
    if (
        not problem.sixteen_bit
        or problem.arithmetic is not None
        or "o" not in comparisons
        or not comparisons["o"].versus_flash <= EXCESS
    ):
        return ""
    coarse = [c for c in comparisons.values() if c.name in ("dq", "dk", "dv") and not c.versus_flash <= RHO_B]
    if not coarse:
        return ""
    errors = ", ".join(f"{c.name} {c.versus_flash:.2f} x" for c in coarse)
    return f"against a flash kernel's error: {errors}, and o is fine; --level full tells whether sums are kept in 16 bits"


def lower_precision(problem: Problem, comparisons: Mapping[str, Comparison]) -> Finding | None:
    """fp32 in, but the errors of a narrower format throughout: TF32 or 16-bit arithmetic, and nothing else wrong."""
    if (
        problem.call.q.dtype != torch.float32
        or problem.arithmetic is not None
        or any(bool(c.nonfinite.any() or c.stray_zeros.any()) for c in comparisons.values())
    ):
        return None
    for format_, words in ((torch.float16, "TF32 or fp16"), (torch.bfloat16, "bf16")):
        storage: torch.dtype = format_

        def rounded(name: str, value: Tensor, storage: torch.dtype = storage) -> Tensor:
            return value if name in UNROUNDED else value.to(storage).to(value.dtype)

        inputs_too = recast(recast(problem.call, storage), torch.float32)
        yardstick = Oracle(dtype=torch.float32, round=rounded)(inputs_too, problem.dy.to(storage).float(), problem.dlse)
        ratios = {}
        for name, c in comparisons.items():
            if name != "lse":
                error = (yardstick[TRUTH_OF.get(name, name)].double() - c.truth).norm()
                ratios[name] = float((c.x - c.truth).norm() / error.clamp(min=1e-300))
        if ratios and all(r <= 1.5 for r in ratios.values()) and max(ratios.values()) > 0.05:
            defect = BY_ID["precision-narrow"]
            lines = [f"{name}: {r:.2f} x the error of {words} arithmetic" for name, r in ratios.items()]
            title = defect.title.replace("{detail}", words)
            return Finding(
                defect.id, title, "precision", "s", None, lines, "open", "medium", defect.next_check, None, 40.0
            )  # fmt: skip
    return None
