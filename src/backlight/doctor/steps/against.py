"""A reference of the user's own, whose faults look like those of the kernel."""

from __future__ import annotations

from dataclasses import replace

from backlight.doctor.report.model import Finding, Report
from backlight.doctor.subject.subject import Subject


def judge(report: Report, found: Report, reference: Subject) -> None:
    """`found` is the report about the user's own reference, by the same oracle; its faults are faults of the test."""
    if found.verdict == "could-not-run":
        report.findings.append(Finding("against", f"the reference could not run: {found.headline}", "note", score=0.5))
        return
    worst = next((f for f in found.findings if f.severity in ("defect", "test-fault")), None)
    if worst is None:
        report.recipe["notes"].append(f"the reference {reference.name} agrees with the oracle")
        return
    title = f"your reference is at fault: {worst.title.replace('what runs', 'it')}"
    fault = replace(
        worst, title=title, severity="test-fault", score=worst.score - 10 if report.verdict == "defect" else worst.score
    )
    fault.evidence = [f"reference {reference.name} ({reference.location})", *worst.evidence]
    report.findings.append(fault)
    report.findings.sort(key=lambda f: -f.score)
    if report.verdict != "defect":
        report.headline = f"the kernel is healthy; {title}"
