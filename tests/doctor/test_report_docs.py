"""The walk-through of docs/doctor.md, run: the kernel on the page has the defect the page says, and its repair works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backlight.doctor import diagnose
from backlight.doctor.command import resolve
from backlight.doctor.defects import catalogue
from backlight.spec import AttentionSpec

PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
CAUSAL = AttentionSpec(causal=True)


@pytest.fixture
def examine(tmp_path):
    def run(source: str, **settings):
        path = tmp_path / "my_kernel.py"
        path.write_text(source)
        return diagnose(resolve(f"{path}:fn"), CAUSAL, shape=(1, 2, 72, 64), **settings)

    return run


def blocks() -> tuple[str, str]:
    kernel = re.search(r"```python\n# my_kernel.py\n(.*?)```", PAGE, re.DOTALL)
    repair = re.search(r"```python\n +(dk = .*?)\n```", PAGE)
    assert kernel is not None
    assert repair is not None
    return kernel.group(1), repair.group(1)


def test_the_kernel_has_the_defect_the_page_names(examine):
    kernel, _ = blocks()
    report = examine(kernel)
    assert report.finding_ids[0] == "scale-dk"
    assert [row.name for row in report.stages if row.status == "culprit"] == ["dk"]
    assert "[scale-dk]" in PAGE


def test_the_repair_on_the_page_works_and_the_last_question_finds_the_alignment(examine):
    kernel, repair = blocks()
    repaired = re.sub(r"dk = ds\.mT.*", repair, kernel)
    assert repaired != kernel
    assert examine(repaired).healthy
    assert examine(repaired, sk=90).finding_ids[0] == "call-alignment"


def test_finding_ids_on_the_page_exist():
    mentioned = set(re.findall(r"--demo ([\w+-]+)", PAGE)) | set(re.findall(r"\[([\w]+-[\w+-]+)\]", PAGE))
    mentioned -= {"your-id"}
    assert mentioned
    assert mentioned <= catalogue.BY_ID.keys() | catalogue.STORIES.keys()
