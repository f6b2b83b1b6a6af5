"""A file that a page names is a file of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("src", "tests", "docs", "examples", "tools", "benchmarks", ".ci")
FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"[\w./-]*\w\.(?:py|md|json|jsonl|txt|toml|svg)")
# written by a command that the page shows
READERS = {"report.json"}


def files() -> set[str]:
    found = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    return found | {path.name for path in ROOT.iterdir() if path.is_file()}


def named(text: str) -> list[str]:
    """What stands in backticks by itself and looks like a file: `path/like/this.py` or `name.py`, outside blocks of code."""
    inline = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCES.sub("", text))
    return [word for word in inline if NAME.fullmatch(word) and word not in READERS]


def exists(name: str, known: set[str]) -> bool:
    """A path from the root, or the end of one: pages of a folder name its files without it."""
    name = name.removeprefix("../")
    return any(path == name or path.endswith(f"/{name}") for path in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    known = files()
    assert not sorted({name for name in named(page.read_text()) if not exists(name, known)})


def test_the_test_would_notice() -> None:
    known = files()
    assert named("`src/backlight/spec.py` and `gone.py`, `python x.py`\n```text\n`other.py`\n```") == [
        "src/backlight/spec.py",
        "gone.py",
    ]
    assert exists("src/backlight/spec.py", known)
    assert exists("spec.py", known)
    assert exists("backends/tiled/forward.py", known)
    assert not exists("gone.py", known)
    assert not exists("ec.py", known)
    assert sum(len(named(page.read_text())) for page in PAGES) > 100
