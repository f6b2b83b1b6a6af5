"""The record is valid at every moment, refuses what JSON cannot hold, and two of them compare as their spread allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_records import record, times, variants_record

from backlight.bench import regress
from backlight.bench.results import Results, add_costs, load
from backlight.bench.workload import Workload
from backlight.problems.case import FP32, Case

WORKLOAD = Workload(Case("causal", causal=True), FP32)


def results(path: Path) -> Results:
    run = Results(path, "smoke", "speed", machine={}, ceilings={}, settings={"contenders": ["backlight", "eager"]})
    run.add_case(WORKLOAD)
    return run


def test_rows_are_found_again_and_saved(tmp_path: Path) -> None:
    run = results(tmp_path / "deep" / "run.json")
    run.row(WORKLOAD, "backlight")["status"] = "ok"
    run.row(WORKLOAD, "backlight")["times"] = {}
    run.save()
    data = load(run.path)
    assert [row["contender"] for row in data["rows"]] == ["backlight"]
    assert data["cases"][0]["flops"] == WORKLOAD.flops()
    assert data["status"] == "running"
    assert [path.name for path in run.path.parent.iterdir()] == ["run.json"]


def test_a_failing_save_leaves_the_file_before_it(tmp_path: Path) -> None:
    run = results(tmp_path / "run.json")
    run.save()
    before = run.path.read_text()
    run.row(WORKLOAD, "backlight")["rho"] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        run.save()
    assert run.path.read_text() == before


def test_an_unfinished_row_does_not_outlive_the_run(tmp_path: Path) -> None:
    run = results(tmp_path / "run.json")
    run.row(WORKLOAD, "backlight")
    run.row(WORKLOAD, "eager")["status"] = "ok"
    run.finish("interrupted")
    data = load(run.path)
    assert (data["status"], [row["contender"] for row in data["rows"]]) == ("interrupted", ["eager"])


def test_other_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        load(path)
    path.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="of schema 1, got 99"):
        load(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="got 'list'"):
        load(path)


def slower(old: dict, new: dict) -> set[tuple[str, str]]:
    return {(change.contender, change.phase) for change in regress.changes(old, new) if change.slower}


def test_a_regression_beyond_the_spread_is_named() -> None:
    old, new = record(), record(scale=1.2)
    assert slower(old, new) == {("backlight", "forward"), ("backlight", "backward"), ("backlight", "both")}
    assert not slower(new, old)
    assert sum(change.faster for change in regress.changes(new, old)) == 3 * len(old["cases"])


def test_a_change_within_the_spread_is_not() -> None:
    old, new = record(), record(scale=1.04)
    assert not slower(old, new)
    for data in (old, new):
        for row in data["rows"]:
            for phase, found in row.get("times", {}).items():
                row["times"][phase] = times(found["median_ms"], spread=0.001)
    assert slower(old, new) == {("backlight", "forward"), ("backlight", "backward"), ("backlight", "both")}


def test_rounds_that_disagree_widen_the_spread() -> None:
    steady, shaky = times(1.0, 0.001), times(1.0, 0.001) | {"round_medians_ms": [0.8, 1.2]}
    assert regress.spread(steady) == pytest.approx(0.001)
    assert regress.spread(shaky) == pytest.approx(0.2)


def test_a_contender_that_turned_wrong_is_lost_not_faster() -> None:
    old, new = record(), record()
    new["rows"][0] = {**new["rows"][0], "status": "wrong", "reason": "dq: error", "times": {}}
    assert regress.lost(old, new) == [(new["rows"][0]["case"], "backlight", "wrong: dq: error")]


def test_other_machines_are_pointed_out() -> None:
    old, new = record(), record()
    new["machine"]["card"] = "Another card"
    assert regress.comparable(old, new) == ["card differs: Test card and Another card"]
    assert not regress.comparable(old, old)


def test_costs_are_read_within_one_race_where_plain_was_in_it() -> None:
    data = variants_record()
    add_costs(data)
    plain, theirs, ours, peer = data["rows"]
    assert "over_plain" not in plain
    assert "over_plain" not in theirs
    assert ours["over_plain"] == pytest.approx(dict.fromkeys(("forward", "backward", "both"), 1.2))
    assert peer["over_plain"] == pytest.approx(dict.fromkeys(("forward", "backward", "both"), 3.0))


def test_a_red_plain_gives_no_cost() -> None:
    data = variants_record()
    data["rows"][1]["status"] = "wrong"
    add_costs(data)
    assert "over_plain" not in data["rows"][3]


def test_a_record_is_written_at_most_every_moment(tmp_path: Path) -> None:
    run = results(tmp_path / "run.json")
    run.save()
    run.row(WORKLOAD, "backlight")["status"] = "ok"
    run.save_soon()
    assert load(run.path)["rows"] == []
    run.saved_at -= 60
    run.save_soon()
    assert len(load(run.path)["rows"]) == 1
