"""`tools/card.py` on tests that need no card: every one runs once, and what it came to is counted."""

from __future__ import annotations

from pathlib import Path

import card

TESTS = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize("length", [1, 63, 65])
def test_case(backend, length, record_property):
    if backend == "hopper" and length == 1:
        record_property("refused", "too short")
    assert (backend, length) != ("triton", 63)

def test_alone():
    pass
"""


def count(folder: Path, limit: int) -> dict:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "logs").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return card.summary(card.run([str(folder / "test_some.py")], "", 3, limit, folder / "logs"))


def test_outcomes(tmp_path: Path) -> None:
    found = count(tmp_path, 100)
    by_name = {name.split("::")[1]: counts for name, counts in found["counts"].items()}
    assert by_name == {
        "test_alone": {"passed": 1},
        "test_case, hopper": {"passed": 2, "refused": 1},
        "test_case, triton": {"passed": 2, "failed": 1},
    }
    assert found["refused"] == {"too short": 1}
    assert [name.split("::")[1] for name in found["failed"]] == ["test_case[63-triton]"]


def test_what_the_limit_leaves_out_is_counted(tmp_path: Path) -> None:
    assert sum(counts.get("left out", 0) for counts in count(tmp_path, -1)["counts"].values()) == 7
