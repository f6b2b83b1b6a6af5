"""The doctor: finds out why an attention gradient is wrong, in any kernel, through its inputs and outputs alone.

report = doctor.diagnose(fn, AttentionSpec(causal=True), shape=(2, 4, 200, 64))
doctor.assert_healthy(fn, AttentionSpec(causal=True))
doctor.audit_rule(rule, AttentionSpec(causal=True))
"""

from backlight.doctor.audit import AuditResult, audit_rule
from backlight.doctor.diagnose import diagnose, run_once
from backlight.doctor.health import Unhealthy, assert_healthy
from backlight.doctor.report.model import Report
from backlight.doctor.subject import Subject

__all__ = ["AuditResult", "Report", "Subject", "Unhealthy", "assert_healthy", "audit_rule", "diagnose", "run_once"]
