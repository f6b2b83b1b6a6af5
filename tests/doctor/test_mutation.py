"""Every entry of the catalogue, injected, is found; the right name ranks first for at least 95 % of them.

Twice: as the broken kernels that the demos use (the mutant itself run as a kernel, so bug and mutant share code), and as faults
of the tiled backend, where the arithmetic is the backend's own and the fault is an edit of its source (`edits`) or a wrong call
(`injection`). What is expected of each injection is its record in docs/data/doctor-shares.json: `shares` measures it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

import pytest
import shares
import torch
from edits import EDITS
from edits_e4m3 import E4M3_EDITS, edited_text, edits_of
from injection import CALLERS, NOT_INJECTED, WRAPPERS, edited_texts, kind_of
from shares import NAMED, arguments

from backlight import doctor
from backlight.doctor.defects import broken, catalogue

SMALLER = (2, 4, 40, 64)
SHARE = 0.95
RECORD = shares.load()
INJECTED = [name for name in catalogue.names() if name not in NOT_INJECTED]


def expect_found(report: doctor.Report, name: str) -> None:
    """Found at all: the verdict and a finding say so, whatever the name."""
    severity = catalogue.get(name).severity
    verdicts = {"note": "healthy", "precision": "precision"}
    assert report.verdict == verdicts.get(severity, "defect"), f"{name}: verdict {report.verdict}, {report.headline}"
    assert report.findings, f"{name}: no finding"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def entries(names: Iterable[str], quick: Container[str], later: Container[str] = ()) -> list:
    """Parameters: what is in neither takes part in the slow run only, what needs a GPU where there is one."""
    found = []
    for name in names:
        marks = [] if name in quick else [pytest.mark.later if name in later else pytest.mark.slow]
        marks += [pytest.mark.gpu] if catalogue.get(name).demo.get("device") == "cuda" else []
        found.append(pytest.param(name, marks=marks))
    return found


# no mutant shows these, only probes and measurements do
WITHOUT_MUTANT = {defect.id for defect in catalogue.DEFECTS if defect.variants is None}
# of every other family the first is for `make test`, of the others for `make later`
FIRST = [defects[0].id for defects in catalogue.families().values()]
UNNAMED = {name for name, entry in RECORD["defects"].items() if entry["white box"].startswith("open")}


# at level full each takes seconds, and their injections are examined below
BRIEF = {name for name in WITHOUT_MUTANT if "level" not in catalogue.get(name).demo or name in NOT_INJECTED}
# which of its variants a demo has depends on the lengths
BRIEF |= {"bias-distance"}


@pytest.mark.parametrize("name", entries(catalogue.names(), BRIEF))
def test_broken_kernel_is_found(name: str) -> None:
    report = doctor.diagnose(broken.subject(name), **arguments(name, SMALLER))
    expect_found(report, name)
    assert report.findings[0].id == name, f"{name} was called {[f.id for f in report.findings]}"


@pytest.mark.parametrize("name", entries(INJECTED, FIRST[::2], {*FIRST[1::2], *WITHOUT_MUTANT, *UNNAMED}))
def test_broken_tiled_backend_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = shares.examine(name, monkeypatch)
    expect_found(report, name)
    said = report.findings[0].title
    assert shares.outcome(name, report) == RECORD["defects"][name]["white box"], f"{name} was called otherwise: {said}"


@pytest.mark.parametrize("name", sorted(EDITS))
def test_every_edit_finds_its_line(name: str) -> None:
    """Most injections are examined in the slow run only; a line that moved away from its edit is known at once."""
    if name not in E4M3_EDITS:
        assert edited_texts(EDITS[name])
        return
    for module in {edit.module for edit in E4M3_EDITS[name]}:
        assert edited_text(module, edits_of(name, module))


def test_share_named_in_the_tiled_backend() -> None:
    """The record is what the test above holds every injection to, so this bounds the share that is named."""
    found = RECORD["totals"]["white box"]
    assert found["injected"] == found["found"] == len(INJECTED)
    assert found["named"] >= SHARE * found["injected"]
    for name, entry in RECORD["defects"].items():
        assert entry["white box"] in (NAMED, shares.NOT_APPLICABLE) or entry["white box"].startswith("open at "), name


def test_injections_are_written_apart_from_the_mutants() -> None:
    """A defect counts for more when its injection shares nothing with the mutant that names it."""
    kinds = [kind_of(name) for name in INJECTED]
    assert kinds.count("edit") >= 0.85 * len(kinds)
    assert set(INJECTED) == set(EDITS) | set(CALLERS) | set(WRAPPERS)
    assert not (set(EDITS) & set(CALLERS)) | (set(EDITS) & set(WRAPPERS)) | (set(CALLERS) & set(WRAPPERS))


def test_catalogue_is_large_and_complete() -> None:
    assert len(catalogue.DEFECTS) >= 40
    assert len(set(catalogue.names())) == len(catalogue.DEFECTS)
    families = catalogue.families()
    wanted = (
        "scale transposition masks windows alignment tails varlen gqa heads accumulation memory lse delta terms precision test"
    )
    assert set(wanted.split()) <= set(families)
    for defect in catalogue.DEFECTS:
        assert defect.variants is not None or defect.broken in broken.MAKERS, defect.id
        for text in (defect.title, defect.does, defect.signal, defect.confirm, defect.next_check):
            assert text, f"{defect.id} has an empty field"
