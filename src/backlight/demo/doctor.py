"""Part `doctor`: two healthy kernels and the four seed stories, each examined, each with its page.

A story holds when the doctor puts the story's own defect first; a healthy kernel holds when nothing is found.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import backlight
from backlight.doctor import Subject, diagnose
from backlight.doctor.command.keep import keep_report
from backlight.doctor.defects.catalogue import STORIES as DEFECT_OF
from backlight.doctor.defects.stories import STORIES
from backlight.doctor.report.model import Report
from backlight.doctor.subject.names import named
from backlight.spec import AttentionSpec

SHAPE = (2, 4, 136, 64)


def run(console: Console, out: Path) -> bool:
    table = Table("kernel", "verdict", "what the doctor says first", title="The doctor", title_justify="left")
    good = True
    with console.status("examining two healthy kernels and four famous bugs"):
        for name, subject in healthy().items():
            report = diagnose(subject, AttentionSpec(causal=True), shape=SHAPE, dtype=torch.float32)
            good &= _row(table, name, report, report.verdict == "healthy", out)
        for name, story in STORIES.items():
            report = diagnose(
                story.kernel, story.spec, shape=SHAPE, dtype=torch.float32, level=story.level, against=story.reference
            )
            found = bool(report.findings) and report.findings[0].id == DEFECT_OF[name]
            good &= _row(table, f"{name}: {story.title}", report, found, out)
    console.print(table)
    console.print(f"one page each, to open in a browser: {out / 'doctor'}")
    console.print("any kernel of yours: backlight doctor my_kernel.py:fn --causal; all known defects: backlight doctor --list")
    return good


def healthy() -> dict[str, Subject]:
    ours = Subject(partial(backlight.attention, return_lse=True), layout="BHSD", name="backlight")
    return {"backlight": ours, "torch sdpa": Subject.of(named("sdpa"))}


def _row(table: Table, name: str, report: Report, as_expected: bool, out: Path) -> bool:
    keep_report(report, out / "doctor" / name.partition(":")[0].replace(" ", "-"))
    says = report.findings[0].title if report.findings else report.headline
    table.add_row(name, report.verdict, says, style=None if as_expected else "bold red")
    return as_expected
