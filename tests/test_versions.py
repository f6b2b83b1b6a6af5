"""tools/matrix.py and the page made of what it records."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def matrix(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    # dataclasses look their module up by name
    monkeypatch.setitem(sys.modules, "matrix", sys.modules[__name__])
    return runpy.run_path(str(ROOT / "tools" / "matrix.py"), run_name="matrix")


@pytest.fixture
def page() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "make_versions_page.py"))


def test_the_page_is_the_record(page: dict[str, Any]) -> None:
    text = (ROOT / "docs" / "versions.md").read_text()
    assert page["written"](text) == text


def test_every_environment_and_part_has_a_place_on_the_page(matrix: dict[str, Any], page: dict[str, Any]) -> None:
    assert page["ORDER"] == tuple(environment.name for environment in matrix["ENVIRONMENTS"])
    assert page["PARTS"].keys() == matrix["PARTS"].keys()
    for part in ("cli", "compile"):
        for path in (word for word in matrix["PARTS"][part] if word.startswith("tests/")):
            assert (ROOT / path).is_file(), path


def test_the_environment_chooses_its_own_pins_alone(matrix: dict[str, Any]) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    oldest, newest, lowest = (matrix["ENVIRONMENTS"][place] for place in (0, -2, -1))
    for environment in (oldest, newest):
        lines = matrix["others"](constraints, environment).splitlines()
        names = {line.partition("==")[0] for line in lines if "==" in line}
        assert not environment.pins.keys() & names
        assert {"torch", "triton"} <= environment.pins.keys()
        assert {"numpy", "typer", "transformers"} <= names | environment.pins.keys()
    command = matrix["installation"](oldest, Path("python"), Path("pins"))
    assert command[-5:] == ["--constraints", "pins", "torch==2.11.0", "triton==3.6.0", "numpy==2.3.5"]
    command = matrix["installation"](lowest, Path("python"), Path("pins"))
    assert command[-3:] == ["--upgrade", "--resolution", "lowest-direct"]


def test_an_outcome_is_what_pytest_counted(matrix: dict[str, Any]) -> None:
    output = "FAILED tests/a.py::test_b[c d] - assert 1 == 2\nERROR tests/e.py\n1 failed, 79 passed, 3 skipped, 1 error in 2s\n"
    assert matrix["outcome"](1, output) == {
        "ok": False,
        "counts": {"failed": 1, "passed": 79, "skipped": 3, "error": 1},
        "failed": ["tests/a.py::test_b[c d]", "tests/e.py"],
    }
    assert not matrix["outcome"](2, "")["ok"]


def test_a_result_takes_the_place_of_its_older_self(matrix: dict[str, Any]) -> None:
    merged, versions = matrix["merged"], {"torch": "2.11.0", "typer": "0.15.4"}
    data = merged({}, "lowest", versions, "cli", {"ok": False})
    data = merged(data, "lowest", versions, "host", {"ok": True})
    data = merged(data, "lowest", versions, "cli", {"ok": True})
    assert data["lowest"]["parts"] == {"cli": {"ok": True}, "host": {"ok": True}}
    # what was found with other versions says nothing about these
    data = merged(data, "lowest", {**versions, "typer": "0.16.0"}, "host", {"ok": True})
    assert data["lowest"]["parts"] == {"host": {"ok": True}}


def test_a_failure_is_on_the_page(page: dict[str, Any]) -> None:
    assert page["cell"](None) == "not run"
    bad = {"ok": False, "counts": {"passed": 3, "failed": 1, "error": 1}, "failed": ["tests/a.py::test_b"]}
    assert page["cell"](bad) == "3 passed, **2 failed**"
    assert page["cell"]({"ok": False, "counts": {}, "failed": []}) == "**broke off**"
    assert page["failures"]({"lowest": {"parts": {"cli": bad}}})[-1] == "* lowest, cli: `tests/a.py::test_b`"


def test_a_repaired_test_is_on_the_page_as_both(matrix: dict[str, Any], page: dict[str, Any]) -> None:
    old = {"ok": False, "counts": {"passed": 3, "failed": 2}, "failed": ["a", "b"], "commit": "1"}
    half = matrix["tried_again"](old, {"ok": False, "counts": {}, "failed": ["b"], "commit": "2"})
    assert page["cell"](half) == "3 passed, 1 after a repair, **1 failed**"
    assert page["failures"]({"lowest": {"parts": {"cli": half}}})[-2:] == [
        "* lowest, cli: `a`, passes since at 2",
        "* lowest, cli: `b`",
    ]
    whole = matrix["tried_again"](half, {"ok": True, "counts": {"passed": 2}, "failed": [], "commit": "3"})
    assert page["cell"](whole) == "3 passed, 2 after a repair"
    for ok, counts in (False, {}), (True, {"skipped": 2}):
        none = matrix["tried_again"](old, {"ok": ok, "counts": counts, "failed": ["tests/x.py"][ok:], "commit": "2"})
        assert page["cell"](none) == "3 passed, **2 failed**"
