"""The parts of the demo in the order they run. A new part is one more line here and one more module beside this one."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True, slots=True)
class Part:
    """A named part; `module` has `run(console, out) -> bool`, true when what it shows is as it should be."""

    name: str
    title: str
    module: str

    def run(self, console: Console, out: Path) -> bool:
        return importlib.import_module(self.module).run(console, out)


PARTS = (
    Part("machine", "What this machine has", "backlight.demo.machine"),
    Part("seeds", "The seed cases against the float64 oracle", "backlight.demo.seeds"),
    Part("doctor", "The doctor: healthy kernels and famous bugs", "backlight.demo.doctor"),
    Part("train", "Small models with Lazy Attention and entmax learn", "backlight.demo.train"),
)
NAMES = tuple(part.name for part in PARTS)


def run(console: Console, out: Path, names: Iterable[str]) -> int:
    """Run the named parts in their own order; 0 when all of them hold, 1 otherwise."""
    wanted = set(names)
    failed = []
    start = time.perf_counter()
    for part in PARTS:
        if part.name in wanted:
            console.rule(f"[bold]{part.title}")
            if not part.run(console, out):
                failed.append(part.name)
    console.rule()
    took = f"in {time.perf_counter() - start:.0f} s"
    if failed:
        console.print(f"[bold red]FAILED[/] {took}: {', '.join(failed)}")
        return 1
    console.print(f"[bold green]all good[/] {took}")
    return 0
