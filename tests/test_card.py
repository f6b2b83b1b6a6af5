"""`tools/card.py` on tests that need no card: every one runs once, and what it came to is counted."""

from __future__ import annotations

import json
from pathlib import Path

import card
import pytest

from backlight.bench.results import read

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


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up tests need none, and each of the processes would import them."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def count(folder: Path, limit: int, chosen: str = "") -> dict:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "logs").mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    return card.summary(card.run([str(folder / "test_some.py")], chosen, 3, limit, folder / "logs"))


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


def test_what_is_chosen_is_shared_out_evenly(tmp_path: Path) -> None:
    count(tmp_path, 100, "hopper")
    assert [len(path.read_text().splitlines()) for path in (tmp_path / "logs").glob("*.jsonl")] == [1, 1, 1]


def test_pages_quote_the_record() -> None:
    """What docs/hopper.md and docs/kernels.md say of the case list on the card."""
    docs = card.ROOT / "docs"
    whole, pairs, elastic = map(json.loads, read(docs / "data" / "cases-card-h200.jsonl.gz").splitlines())
    hopper, triton = (
        whole["counts"][f"tests/conformance/test_gpu.py::test_case_on_cuda, {backend}"] for backend in ("hopper", "triton")
    )
    after, tau = (next(iter(record["counts"].values()))["passed"] for record in (pairs, elastic))
    page = " ".join((docs / "hopper.md").read_text().split())
    assert f"of all {sum(hopper.values())} runs {hopper['passed']} passed and {hopper['refused']} were refused" in page
    assert f"with Triton {elastic['machine']['triton']} {tau} runs with tau passed" in page
    page = " ".join((docs / "kernels.md").read_text().split())
    assert (
        f"of {sum(triton.values())} runs {triton['passed']} passed, {triton['refused']} were refused with their reason" in page
    )
    assert f"{triton['left out']} did not begin within its limit, and {triton['failed']} failed" in page
    assert f"{after} runs with a pair bias passed after that" in page
