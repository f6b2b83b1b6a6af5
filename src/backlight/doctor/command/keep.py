"""Leave the evidence on disk: `report.html`, `report.json`, and a repro script that has been seen to work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from backlight.doctor.command import repro
from backlight.doctor.command.shrink import Shrunk, shrink
from backlight.doctor.report import json
from backlight.doctor.report.html import write_html
from backlight.doctor.report.model import Finding, Report
from backlight.doctor.subject.capture import save_capture
from backlight.doctor.subject.case import Case

SHRINK_SECONDS = {"quick": 30.0, "full": 90.0, "forensic": 300.0, "adversarial": 60.0}


def keep_report(report: Report, folder: str | Path) -> list[Path]:
    """Write the HTML and JSON files, and the repro script if the report has one; returns what was written."""
    folder = Path(folder)
    written = [write_html(report, folder / "report.html"), json.save(report, folder / "report.json")]
    if report.repro is not None:
        path = folder / "repro.py"
        path.write_text(report.repro, encoding="utf-8")
        written.append(path)
    return written


def chief_finding(report: Report) -> Finding | None:
    """The finding a repro script is about: the best one that is not a note."""
    return next((finding for finding in report.ranked if finding.severity != "note"), None)


def reproduce(
    report: Report,
    case: Case,
    subject: str,
    examine: Callable[[Case], Report],
    folder: str | Path | None = None,
    layout: str = "auto",
    seconds: float | None = None,
) -> str:
    """Shrink the case, write a script for its chief finding, run it once; fills `report.repro` and returns what happened.

    Captured tensors are cut to the shrunk case and saved beside the script, so they need a `folder`. `seconds` bounds the
    shrinking; None takes the level's own bound, 0 leaves the case as it is.
    """
    finding = chief_finding(report)
    if finding is None:
        return "nothing to reproduce"
    if case.tensors is not None and folder is None:
        return "no script: captured tensors need a folder to be saved in"

    def persists(smaller: Case) -> bool:
        chief = chief_finding(examine(smaller))
        return chief is not None and chief.id == finding.id

    limit = SHRINK_SECONDS[case.level] if seconds is None else seconds
    shrunk = shrink(case, persists, limit) if limit > 0 else Shrunk(case)
    text = repro.script(shrunk.case, subject, finding, shrunk.steps, layout)
    if folder is not None and shrunk.case.tensors is not None:
        boundaries = {name: x for name, x in shrunk.case.tensors.items() if name.startswith("cu_seqlens")}
        save_capture(Path(folder) / repro.INPUTS, shrunk.case.narrowed() | boundaries)
    trial = repro.try_script(text, folder)
    if not trial.reproduced:
        last = trial.output.strip().splitlines()[-1:] or ["it said nothing"]
        return f"no script: {finding.id} did not come back in a fresh process ({last[0]})"
    report.repro = text
    return f"{finding.id} came back in a fresh process, at {repro.describe(shrunk.case)}"
