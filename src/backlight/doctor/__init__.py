"""The doctor: finds out why an attention gradient is wrong, in any kernel, through its inputs and outputs alone.

report = doctor.diagnose(fn, AttentionSpec(causal=True), shape=(2, 4, 200, 64))
doctor.assert_healthy(fn, AttentionSpec(causal=True))
doctor.audit_rule(rule, AttentionSpec(causal=True))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight.doctor.defects.audit import AuditResult, audit_rule
    from backlight.doctor.report.model import Report
    from backlight.doctor.steps.examination import diagnose, run_once
    from backlight.doctor.steps.health import Unhealthy, assert_healthy
    from backlight.doctor.subject.apart import Limits
    from backlight.doctor.subject.subject import Subject

# imported when asked for: pytest loads the plugin beside this file in every run, and most runs examine nothing
HOMES = {
    "AuditResult": "defects.audit",
    "Limits": "subject.apart",
    "Report": "report.model",
    "Subject": "subject.subject",
    "Unhealthy": "steps.health",
    "assert_healthy": "steps.health",
    "audit_rule": "defects.audit",
    "diagnose": "steps.examination",
    "run_once": "steps.examination",
}

__all__ = ["AuditResult", "Limits", "Report", "Subject", "Unhealthy", "assert_healthy", "audit_rule", "diagnose", "run_once"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
