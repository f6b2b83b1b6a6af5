"""The same defects in kernels that return o and gradients and nothing else: no lse, no intermediates.

Names come from mutants, identities and probes; what the forward's and backward's weights look like comes from one-hot probes.
"""

from __future__ import annotations

import pytest
import shares
import torch
from injection import NOT_INJECTED, inject
from shares import NAMED, NEEDS_LSE

from backlight import doctor
from backlight.config import Config, override
from backlight.doctor.defects import broken, catalogue
from backlight.spec import AttentionSpec

RECORD = shares.load()["defects"]
INJECTED = [name for name in catalogue.names() if name not in NEEDS_LSE and name not in NOT_INJECTED]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("name", INJECTED)
def test_black_box_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = shares.examine(name, monkeypatch, boxed=True)
    assert report.findings, f"{name} went unseen"
    assert all("inferred" in row.note for row in report.stages if row.name == "lse"), "a black box shows no lse"
    said = report.findings[0].title
    assert shares.outcome(name, report) == RECORD[name]["black box"], f"{name} was called otherwise: {said}"


SAMPLE = ("transpose-dv", "mask-causal-backward", "lse-base", "gqa-last-writer")


@pytest.mark.parametrize("name", SAMPLE)
def test_black_box_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    report = shares.examine(name, monkeypatch, boxed=True)
    assert shares.outcome(name, report) == NAMED == RECORD[name]["black box"]


TAU = AttentionSpec(causal=True, tau=True)


@pytest.mark.parametrize("boxed", [False, True], ids=["white", "black"])
@pytest.mark.parametrize(
    ("tile", "level", "where"),
    [
        (32, "quick", "in tiles of 32 x 32 that have visible cells"),
        (24, "full", "in head 1: they weigh tau / n, which is not masked"),
    ],
)
def test_hidden_keys_that_tau_gives_a_weight(
    tile: int, level: str, where: str, boxed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of a usual size are tried; the cells of others are read off the kernel."""
    subject = inject("tau-unmasked", monkeypatch)
    subject = shares.black_box(subject) if boxed else subject
    with override("tiled", Config(tile, tile, tile, 8)):
        report = doctor.diagnose(subject, TAU, shape=(1, 2, 72, 32), level=level)
    first = report.findings[0]
    assert (first.id, first.confidence) == ("tau-unmasked", "high")
    assert first.title.endswith(where)


def test_tomography_sees_the_leaking_diagonal() -> None:
    """A backward window one too wide leaks on one diagonal, i - j = 41, and only in the backward's weights."""
    spec = AttentionSpec(causal=True, window=(40, 0))
    report = doctor.diagnose(broken.subject("window+1"), spec, shape=(1, 2, 72, 32), level="full")
    rows = {row.name: row for row in report.stages}
    assert rows["p"].status == "ok"
    assert rows["p (bwd)"].status == "culprit"
    assert "62 leaked cells, all at i-j = 41" in rows["p (bwd)"].note
    assert {rows[name].status for name in ("dq", "dk", "dv")} == {"inherited"}
    picture = next(p for p in report.pictures if p.kind == "support")
    assert picture.data["leaks"] == 31
    assert picture.data["holes"] == 0


def test_tomography_sees_holes_on_the_diagonal() -> None:
    spec = AttentionSpec(causal=True)
    report = doctor.diagnose(broken.subject("mask-strict-backward"), spec, shape=(1, 2, 40, 16), level="full")
    row = next(row for row in report.stages if row.name == "p (bwd)")
    assert "80 missing cells, all at i-j = 0" in row.note


def test_tomography_sees_a_missing_delta() -> None:
    """ds is wrong although the weights of both directions are right."""
    report = doctor.diagnose(broken.subject("delta-missing"), AttentionSpec(causal=True), shape=(1, 2, 40, 16), level="full")
    rows = {row.name: row for row in report.stages}
    assert (rows["p"].status, rows["p (bwd)"].status) == ("ok", "ok")
    assert rows["delta"].status == "culprit"
    assert rows["ds"].status == "inherited"
