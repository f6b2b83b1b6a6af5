"""Which stage an open finding accuses, and whether a hint survives what was read off the kernel.

Comparisons see outputs. Tomography and intermediates that the kernel returns see what lies between, and what was seen outranks
what the pattern of outputs suggests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from backlight.doctor.report.model import StageRow
from backlight.doctor.steps.compare import Comparison

WEIGHTS = "p (bwd)"
INTERNALS = ("s", "p", WEIGHTS, "delta", "dp", "ds")
FORWARD = ("s", "p", "lse", "o")
# what each pattern of (I1, I2, I3) accuses; None is a forward that is wrong while both directions agree
ACCUSED: dict[tuple[bool, bool, bool] | None, tuple[str, ...]] = {
    None: FORWARD,
    (True, True, True): ("delta", "dp", "ds"),
    (False, True, True): ("dq", "dk"),
    (False, True, False): ("dk",),
    (True, False, False): ("lse", WEIGHTS),
    (True, False, True): ("lse", WEIGHTS, "dp"),
    (True, True, False): ("delta", "dp", "ds"),
    (False, False, True): ("dq", "dk", "dv"),
    (False, False, False): ("dq", "dk", "dv"),
}
NEXT_CHECKS = {
    WEIGHTS: "Put the forward's p, exp(s - lse) under the forward's mask, into the backward: dq, dk and dv must turn healthy.",
    "ds": "Put delta, the row sum of dO * o computed outside, into the backward: dq and dk turn healthy, or dp is wrong.",
}


def stage(rows: Collection[StageRow], comparisons: Mapping[str, Comparison]) -> tuple[str, bool]:
    """(the first wrong stage, whether it stands alone as the culprit); 'dq' where nothing points anywhere."""
    culprit = next((r.name for r in rows if r.status == "culprit"), None)
    if _weights_suspected(rows, comparisons) and (culprit is None or culprit in ("dq", "dk", "dv")):
        return WEIGHTS, True
    wrong = next((r.name for r in rows if r.status in ("inherited", "suspect")), "dq")
    return culprit or wrong, culprit is not None


def _weights_suspected(rows: Collection[StageRow], comparisons: Mapping[str, Comparison]) -> bool:
    """dv = pT dO has no other stage in it: where dO arrives and the forward is right, a wrong dv speaks of the weights."""
    wrong = {name for name, c in comparisons.items() if c.bad}
    return "dv" in wrong and not wrong & {"o", "lse"} and not any(row.name in INTERNALS for row in rows)


def confirmed(pattern: tuple[bool, bool, bool] | None, rows: Collection[StageRow]) -> bool:
    """Whether nothing that was seen inside the kernel speaks against what the pattern accuses."""
    named = ACCUSED[pattern]
    inside = {row.name: row.status for row in rows if row.name in INTERNALS}
    guilty = [name for name, status in inside.items() if status == "culprit"]
    if guilty:
        return any(name in named for name in guilty)
    return not any(inside.get(name) == "ok" for name in named)


def next_check(accused: str, rows: Collection[StageRow]) -> str:
    """The experiment for a stage that was seen inside the kernel; '' for any other."""
    seen = any(row.name == accused and row.status == "culprit" for row in rows)
    return NEXT_CHECKS.get(accused, "") if seen else ""


def seen_inside(accused: str, rows: Collection[StageRow], comparisons: Mapping[str, Comparison]) -> list[str]:
    """Lines of evidence: what the accused stage looks like, which others are right, and whose copy of it is wrong."""
    row = next((row for row in rows if row.name == accused and row.name in INTERNALS and row.global_error is not None), None)
    if row is None:
        return []
    off = f"off by {100 * (row.global_error or 0.0):.3g} %"
    words = f"; {row.note}" if "cell" in row.note else ""
    before = [r.name for r in rows if r.name in INTERNALS and r.status == "ok"]
    fine = f"; right: {', '.join(before)}" if before else ""
    lines = [f"inside the kernel: {accused} is {off}{words}{fine}"]
    if accused in (WEIGHTS, "ds") and "dq" in comparisons and not comparisons["dq"].bad:
        lines.append(f"dq is right, so it is the {accused} of the kernel that writes dk and dv, or one of its sums")
    return lines
