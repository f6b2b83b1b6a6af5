"""The published JSON Schema of a report, for programs that read one."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def text() -> str:
    """`schema.json` beside this file, as it is."""
    return (files("backlight.doctor.report") / "schema.json").read_text(encoding="utf-8")


def schema() -> dict[str, Any]:
    return json.loads(text())
