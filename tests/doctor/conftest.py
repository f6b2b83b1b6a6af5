"""Every report that a test of the doctor makes is held against the published schema."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from backlight.doctor.report.model import Report
from backlight.doctor.report.schema import schema
from backlight.doctor.steps.sheet import Sheet


@cache
def validator() -> Any:
    import jsonschema

    return jsonschema.Draft202012Validator(schema())


@pytest.fixture(autouse=True)
def held_to_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an examination writes its report, and wherever one becomes plain data; not on a machine that has only a GPU."""
    if find_spec("jsonschema") is None:
        return
    to_dict, written = Report.to_dict, Sheet._report

    def checked(report: Report) -> dict[str, Any]:
        found = to_dict(report)
        validator().validate(found)
        return found

    def examined(sheet: Sheet, *arguments: Any) -> Report:
        report = written(sheet, *arguments)
        report.to_dict()
        return report

    monkeypatch.setattr(Report, "to_dict", checked)
    monkeypatch.setattr(Sheet, "_report", examined)
