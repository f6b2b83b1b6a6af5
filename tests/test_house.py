"""What makes a source hard to read does not become more: the numbers stand in CONTRIBUTING.md.

If one of them rose: shorten what is new. If it fell: python tools/house.py --write.
"""

from __future__ import annotations

import ast
from pathlib import Path
from textwrap import indent

import house
import pytest

BARS = house.bars(house.PAGE.read_text())


@pytest.mark.parametrize("words", BARS)
def test_no_count_rises(words: str) -> None:
    found = house.counts()[words]
    assert len(found) <= BARS[words], f"{len(found)} {words}, at most {BARS[words]}:\n" + "\n".join(found)


def test_every_count_stands_on_the_page() -> None:
    assert set(BARS) == set(house.counts())


def test_the_median_file_is_read_at_one_sitting() -> None:
    assert 100 <= house.median_file() <= 200


def test_arguments_are_counted_without_the_receiver() -> None:
    (function,) = ast.parse("def f(self, a, /, b, *more, c=1, **rest): ...").body
    assert isinstance(function, ast.FunctionDef)
    assert house.arguments_of(function) == 5


def test_equal_lines_are_found_and_imports_and_heads_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "".join(f"    x{number} = {number}\n" for number in range(house.EQUAL_LINES))
    names = ",\n    ".join(("cos", "e", "exp", "pi", "sin", "sqrt", "tan"))
    head = f"from math import (\n    {names},\n)\n"
    (tmp_path / "one.py").write_text(f"{head}\ndef f():\n{body}    # the end\n")
    (tmp_path / "other.py").write_text(f"{head}\ndef g():\n    if True:\n{indent(body, '    ')}")
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    assert house.equal_places() == ["one.py:12 other.py:13"]


def test_the_table_is_written_from_the_counts() -> None:
    page = "| files over 450 lines | 7 |\nand no other\n"
    assert house.written(page) == "| files over 450 lines | 0 |\nand no other\n"
