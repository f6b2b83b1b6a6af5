"""Bugs that public attention kernels had, each as one line of `tiles`, `tiles_packed`, `slabs` or `strips`.

What the doctor says of each; the answers were written down before it was asked. `docs/doctor.md` has the table, with links; a
test holds it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiles_packed import PackedTiles
from wild import FIRST, Wild
from wild_again import AGAIN
from wild_held_out import HELD_OUT
from wild_packed import PACKED
from wild_slabs import SLABS
from wild_strips import STRIPS

from backlight import doctor
from backlight.spec import AttentionSpec

PAGE = Path(__file__).parents[2] / "docs" / "doctor.md"
WILD = FIRST | AGAIN | PACKED | SLABS | HELD_OUT | STRIPS


def table() -> str:
    """The table of docs/doctor.md."""
    lines = ["| where | the bug | level | named |", "|---|---|---|---|"]
    for wild in WILD.values():
        repository, number = wild.where.split("#")
        link = f"[{repository.split('/')[1]} #{number}](https://github.com/{repository}/issues/{number})"
        lines.append(f"| {link} | {wild.words} | `{wild.level}` | `{wild.names[0]}` |")
    return "\n".join(lines)


def test_the_page_has_the_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")


def examine(bug: str, wild: Wild, level: str | None = None) -> doctor.Report:
    packed = "cu_seqlens" in wild.more
    kind = PackedTiles if packed else wild.kernel
    kernels = kind(bug)
    backward = None if wild.inference else kernels.backward
    layout = "packed" if packed else "BHSD"
    subject = doctor.Subject(kernels.forward, backward, layout=layout, name="kernel", forward_only=wild.inference)
    given = {"shape": wild.shape, "dtype": torch.float32, "level": level or wild.level} | wild.more
    return doctor.diagnose(subject, AttentionSpec(**wild.spec), **given)


# every fourth of the quick ones is for `make test`
LATER = {bug for number, (bug, wild) in enumerate(WILD.items()) if wild.level == "full" or number % 4}


@pytest.mark.parametrize("bug", [pytest.param(bug, marks=[pytest.mark.later] * (bug in LATER)) for bug in WILD])
def test_named(bug: str) -> None:
    wild = WILD[bug]
    report = examine(bug, wild)
    assert report.verdict == wild.verdict, report.headline
    first = report.findings[0]
    assert first.id in wild.names, (first.id, first.stage, report.headline)
    assert first.stage in wild.stages, (first.id, first.stage, report.headline)


@pytest.mark.later
@pytest.mark.parametrize("bug", WILD)
def test_healthy_without_the_bug(bug: str) -> None:
    report = examine("", WILD[bug], "quick")
    assert report.verdict == "healthy", report.headline
