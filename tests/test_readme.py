"""The README tells the truth: its code runs, its links lead somewhere, its tables match the package. Examples run too."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import backlight
from backlight import registry

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKS = [
    (page, target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text())
    if not target.startswith(("http:", "https:"))
]


def rows_after(heading):
    """Cells of the first table below a heading, header row first."""
    section = README.split(f"## {heading}\n", 1)[1]
    table = section[section.index("|") :].split("\n\n", 1)[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table if not set(line) <= set("|- ")]


def test_there_is_code_to_run():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_code_runs(block):
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize(("page", "target"), LINKS, ids=[f"{page.name}:{target}" for page, target in LINKS])
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists()


def test_status_table_matches_the_registry():
    """A backend is `planned` exactly as long as the registry does not know it."""
    header, *rows = rows_after("Status")
    for column, heading in enumerate(header[1:], start=1):
        name = re.match(r"`(\w+)`", heading)[1]
        planned = {row[column] == "planned" for row in rows}
        assert planned == {name not in registry.names()}


def test_keyword_table_matches_the_signature():
    section = README.split("| keyword |", 1)[1].split("\n\n", 1)[0]
    described = set(re.findall(r"`(\w+)=", section))
    keywords = {
        name
        for name, parameter in inspect.signature(backlight.attention).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    assert described == keywords


def test_picture_is_small():
    for image in (ROOT / "docs" / "images").iterdir():
        assert image.stat().st_size < 200_000


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs(example):
    result = subprocess.run(
        [sys.executable, str(example)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert result.returncode == 0, result.stderr
