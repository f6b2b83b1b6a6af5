"""The last room: `backlight doctor`, from the words of a command line to a report, its files and an exit code."""

from backlight.doctor.command.line import app
from backlight.doctor.command.subjects import resolve

__all__ = ["app", "resolve"]
