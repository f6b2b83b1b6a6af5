"""The report as SARIF 2.1.0, which code hosts and editors show beside the code: one result a finding, at the kernel's line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

from backlight.doctor.report.model import Finding, Report

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {"defect": "error", "test-fault": "error", "precision": "warning", "note": "note"}
PLACE = re.compile(r"([^():]+\.py):(\d+)")


def sarif(report: Report, version: str = "") -> dict[str, Any]:
    """One run with one result a finding. An examination that could not run is a failed invocation with a notification."""
    rules = {finding.id: finding for finding in reversed(report.ranked)}
    driver: dict[str, Any] = {"name": "backlight doctor", "rules": [_rule(finding) for finding in rules.values()]}
    if version:
        driver["version"] = version
    invocation: dict[str, Any] = {"executionSuccessful": report.verdict != "could-not-run", "exitCode": report.exit_code}
    if report.verdict == "could-not-run":
        notification = {"level": "error", "message": {"text": report.headline}} | _locations(report.headline, report.location)
        invocation["toolExecutionNotifications"] = [notification]
    run = {
        "tool": {"driver": driver},
        "invocations": [invocation],
        "results": [_result(finding, report, list(rules).index(finding.id)) for finding in report.ranked],
        "properties": {"verdict": report.verdict, "subject": report.subject, "headline": report.headline},
    }
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def dumps(report: Report, version: str = "") -> str:
    return json.dumps(sarif(report, version), indent=2, allow_nan=False) + "\n"


def _rule(finding: Finding) -> dict[str, Any]:
    help_ = {"help": {"text": finding.next_check}} if finding.next_check else {}
    return {"id": finding.id, "shortDescription": {"text": finding.title}} | help_


def _result(finding: Finding, report: Report, rule: int) -> dict[str, Any]:
    where = f" ({finding.where.text})" if finding.where is not None and finding.where.text else ""
    check = f" Next check: {finding.next_check}" if finding.next_check else ""
    return {
        "ruleId": finding.id,
        "ruleIndex": rule,
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.title}{where}.{check}"},
        "properties": {
            "stage": finding.stage,
            "severity": finding.severity,
            "confidence": finding.confidence,
            "mechanism": finding.mechanism,
            "evidence": finding.evidence,
        },
    } | _locations(report.location)


def _locations(*texts: str) -> dict[str, Any]:
    """The first `file.py:12` in the texts; nothing for compiled code."""
    found = next((match for match in map(PLACE.search, texts) if match), None)
    if found is None:
        return {}
    path = Path(found[1].strip())
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix())
    physical = {"artifactLocation": {"uri": uri}, "region": {"startLine": max(1, int(found[2]))}}
    return {"locations": [{"physicalLocation": physical}]}
