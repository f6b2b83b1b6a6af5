"""What the docs claim is what was measured: docs/data/doctor-shares.json, doctor-sweep.json, and docs/doctor.md with them."""

from __future__ import annotations

from pathlib import Path

import shares
import sweep
from injection import NOT_INJECTED, kind_of

from backlight.doctor.defects import catalogue

RECORD = shares.load()
PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_every_entry_has_a_record() -> None:
    assert list(RECORD["defects"]) == list(catalogue.names())
    for name, entry in RECORD["defects"].items():
        assert entry["injection"] == ("none" if name in NOT_INJECTED else kind_of(name)), name
        expected = name in NOT_INJECTED or name in shares.NEEDS_LSE
        assert (entry["black box"] == shares.NOT_APPLICABLE) == expected, name


def test_totals_add_up() -> None:
    assert RECORD["totals"] == shares.totals(RECORD["defects"])


def test_the_page_shows_the_record() -> None:
    assert shares.table(RECORD) in PAGE
    assert shares.independence(RECORD) in PAGE


def test_what_is_not_named_or_not_injected_is_said() -> None:
    for name, entry in RECORD["defects"].items():
        if entry["injection"] == "none" or not {entry["white box"], entry["black box"]} <= {
            shares.NAMED,
            shares.NOT_APPLICABLE,
        }:
            assert f"`{name}`" in PAGE, name


def test_the_page_shows_what_the_sweep_counted() -> None:
    counted = sweep.load()
    assert counted["cpu"]["tiled"]["examined"] == len(sweep.VARIANTS) * len(sweep.DTYPES) * len(sweep.RECIPES) * sweep.CPU_SEEDS
    assert sweep.table(counted) in PAGE
    assert sweep.levels_table() in PAGE


def test_counts_are_read_from_both_kinds_of_file(tmp_path: Path) -> None:
    lines = tmp_path / "runs.jsonl"
    lines.write_text(
        '{"subject": "flex", "verdict": "healthy", "clean": true}\n'
        '{"subject": "flex", "verdict": "defect", "clean": false}\n'
        '{"subject": "flex", "verdict": "declined", "clean": true}\n'
    )
    assert sweep.counted(lines) == {"cuda": {"flex": {"examined": 2, "complaints": 1}}}
    results = tmp_path / "seeds.xml"
    case = '<testcase name="test_many_seeds[a-bf16]"><properties><property name="tiled" value="60"/></properties></testcase>'
    results.write_text(f"<testsuites><testsuite>{case}{case}</testsuite></testsuites>")
    assert sweep.counted(results) == {"cpu": {"tiled": {"examined": 120, "complaints": 0}}}
