"""`assert_healthy`: the doctor as an assertion."""

from __future__ import annotations

from typing import Any

from backlight.doctor.report.model import Report
from backlight.doctor.report.terminal import text
from backlight.doctor.steps.examination import diagnose
from backlight.spec import AttentionSpec


class Unhealthy(AssertionError):
    """Raised by `assert_healthy`; `.report` holds the whole examination."""

    def __init__(self, report: Report):
        self.report = report
        super().__init__(text(report))


def assert_healthy(subject: Any, spec: AttentionSpec, *args: Any, allow_precision: bool = False, **kwargs: Any) -> Report:
    """Examine `subject` as `diagnose` does and raise `Unhealthy` unless it is healthy; returns the report.

    allow_precision: a verdict of "precision" (right algorithm, coarser rounding than it needs) does not raise.
    """
    report = diagnose(subject, spec, *args, **kwargs)
    accepted = ("healthy", "precision") if allow_precision else ("healthy",)
    if report.verdict not in accepted or any(f.severity == "test-fault" for f in report.findings):
        raise Unhealthy(report)
    return report
