"""The last room: `backlight doctor`, from the words of a command line to a report, its files and an exit code."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from backlight.doctor.command.line import app
    from backlight.doctor.command.subjects import resolve

# imported when asked for: the pytest plugin keeps its evidence through this room and needs no command line
HOMES = {"app": "line", "resolve": "subjects"}

__all__ = ["app", "resolve"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{HOMES[name]}"), name)
