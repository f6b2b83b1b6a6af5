"""The report in one line, for logs and for programs that want a verdict and the ids of its findings."""

from __future__ import annotations

from backlight.doctor.report import words
from backlight.doctor.report.model import Report


def line(report: Report) -> str:
    """`DEFECT my_kernel.py:fn [window+1] the window is one too wide (high, established)`; notes come last in the brackets."""
    ids = ",".join(report.finding_ids)
    best = words.top_facts(report).replace("confidence ", "").replace("   mechanism ", ", ")
    facts = f" ({best})" if best else ""
    said = " ".join(f"{words.verdict(report)} {report.subject} [{ids}] {report.headline}".split())
    return said + facts
