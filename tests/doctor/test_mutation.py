"""Every entry of the catalogue, injected, is found; the right name ranks first for at least 95 % of them.

Twice: as the broken kernels that the demos use (the mutant itself run as a kernel, so bug and mutant share code), and as faults
of the tiled backend, which shares no code with the mutants: its source text is edited, or its entry points are wrapped.
"""

from __future__ import annotations

import pytest
import torch
from injection import NOT_INJECTED, inject

from backlight import doctor
from backlight.doctor import broken, catalogue

SMALL = (2, 4, 72, 64)
SHARE = 0.95
named: dict[str, dict[str, str]] = {"broken": {}, "tiled": {}}


def arguments(name: str) -> dict:
    """The demo's arguments, smaller where the demo does not ask for a shape or other lengths."""
    demo = catalogue.get(name).demo
    small = not {"shape", "sk", "cu_seqlens", "level"} & set(demo)
    return catalogue.demo_arguments(name) | ({"shape": SMALL} if small else {})


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


@pytest.mark.parametrize("name", catalogue.names())
def test_broken_kernel_is_found(name: str) -> None:
    report = doctor.diagnose(broken.subject(name), **arguments(name))
    named["broken"][name] = report.findings[0].id if report.findings else ""
    expect_found(report, name)
    assert report.findings[0].id == name, f"{name} was called {[f.id for f in report.findings]}"


@pytest.mark.parametrize("name", [n for n in catalogue.names() if n not in NOT_INJECTED])
def test_broken_tiled_backend_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = inject(name, monkeypatch)
    report = doctor.diagnose(subject, **catalogue.demo_arguments(name))
    named["tiled"][name] = report.findings[0].id if report.findings else ""
    assert report.verdict != "healthy", f"{name} injected into the tiled backend went unseen"
    first = report.findings[0]
    assert first.id == name or (first.id == "open" and first.mechanism == "open"), f"{name} was called {first.id}: {first.title}"


def test_share_named_in_the_tiled_backend() -> None:
    """At least 95 % by name; whoever is not named says `open`. Needs the tests above in the same process."""
    found = named["tiled"]
    if len(found) < len(catalogue.DEFECTS) - len(NOT_INJECTED):
        pytest.skip("the injections ran in other processes")
    right = [name for name, said in found.items() if name == said]
    assert len(right) >= SHARE * len(found), f"{len(right)} of {len(found)} named; not named: {sorted(set(found) - set(right))}"


def test_catalogue_is_large_and_complete() -> None:
    assert len(catalogue.DEFECTS) >= 40
    assert len(set(catalogue.names())) == len(catalogue.DEFECTS)
    families = catalogue.families()
    wanted = ("scale transposition masks windows alignment tails varlen gqa heads accumulation memory lse delta terms precision test")
    assert set(wanted.split()) <= set(families)
    for defect in catalogue.DEFECTS:
        assert defect.variants is not None or defect.broken in broken.MAKERS, defect.id
        for text in (defect.title, defect.does, defect.signal, defect.confirm, defect.next_check):
            assert text, f"{defect.id} has an empty field"
