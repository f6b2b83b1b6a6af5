"""What `backlight doctor --list` shows: kernels that can be named, the four stories, the defect catalogue by family."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from backlight.doctor.defects.catalogue import families
from backlight.doctor.defects.stories import STORIES
from backlight.doctor.subject.names import NAMED


def show(console: Console, own: Iterable[tuple[str, str]] = ()) -> None:
    """Three tables; `own` adds (name, summary) of this package's backends to the kernels."""
    kernels = [*own, *NAMED.items(), ("file.py:fn", "a function of yours; module:fn works too")]
    _table(console, "Kernels", kernels)
    _table(console, "Stories, --demo NAME", [(name, story.title) for name, story in STORIES.items()])
    entries = families()
    console.print(Text(f"Defects, --demo NAME ({sum(map(len, entries.values()))})", style="bold"))
    for family, defects in entries.items():
        _table(console, f"  {family}", [(defect.id, defect.does) for defect in defects], style="cyan")


def _table(console: Console, title: str, rows: Iterable[tuple[str, str]], style: str = "bold") -> None:
    console.print(Text(title, style=style))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=26)
    table.add_column(ratio=1)
    for name, words in rows:
        table.add_row(Text(f"    {name}"), Text(words))
    console.print(table, width=min(console.width, 100))
    console.print()
