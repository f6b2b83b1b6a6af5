"""Part `machine`: the same tables as `backlight info`."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from backlight import info


def run(console: Console, out: Path) -> bool:
    info.show(console)
    return True
