"""A file that a page names is a file of the repository, an equation that anything cites one of docs/math.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("src", "tests", "docs", "examples", "tools", "benchmarks", ".ci")
FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"[\w./-]*\w\.(?:py|md|json|jsonl|txt|toml|svg)")
CITED = re.compile(r"\beq\.? (\d+(?:(?:-|–|, | and )\d+)*)")
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


def cited(text: str) -> set[int]:
    """Numbers of equations, both ends of a range."""
    return {int(number) for group in CITED.findall(text) for number in re.findall(r"\d+", group)}


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


@pytest.mark.parametrize("folder", ["src", "tests", "docs", "benchmarks"])
def test_every_equation_that_is_cited_is_there(folder: str) -> None:
    there = {int(number) for number in re.findall(r"\((\d+)[a-z]?\)", (ROOT / "docs/math.md").read_text())}
    known = {path: cited(path.read_text()) for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")}
    assert not {path.name: sorted(numbers - there) for path, numbers in known.items() if not numbers <= there}
    assert any(known.values())


def test_equations_are_found_in_text() -> None:
    assert cited("(eq. 31-33), math.md eq 17, eq. 83, 86 and 87; freq. 5") == {31, 33, 17, 83, 86, 87}
