"""A run that was given too little time says so, keeps whole cases only, and is finished by another one of the same kind."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_records import record
from typer.testing import CliRunner

from backlight.bench import command, machine, resume, runner, step, suites
from backlight.bench.contender import Contender
from backlight.bench.contenders import adapter
from backlight.bench.results import load
from backlight.bench.step import Settings
from backlight.bench.suites import SPEED, Suite
from backlight.bench.workload import Tensors, Workload
from backlight.problems.case import FP32, Case

CPU = torch.device("cpu")
TINY = Case("first", b=1, hq=2, hkv=2, sq=40, sk=40, d=8, causal=True)
WORKLOADS = tuple(Workload(replace(TINY, name=name), FP32) for name in ("first", "second", "third"))
SUITE = Suite("tiny", "for tests", SPEED, WORKLOADS, ("counting",), rounds=2)
SETTINGS = Settings(rounds=2, quick=True, seconds=100)


class Counting:
    """A peer that remembers what it was built for, and lets the clock run out at `late`."""

    name = "counting"

    def __init__(self, late: str | None = None):
        self.late, self.built, self.over = late, [], False

    def refuse(self, workload: Workload, device: torch.device) -> None:
        return None

    def build(self, tensors: Tensors) -> Contender:
        name = tensors.workload.case.name
        self.built.append(name)
        self.over = self.over or name == self.late
        return replace(adapter("sdpa-math").build(tensors), name=self.name)

    def clock(self) -> SimpleNamespace:
        return SimpleNamespace(
            monotonic=lambda: time.monotonic() + 1e6 * self.over, perf_counter=time.perf_counter, sleep=time.sleep
        )


@pytest.fixture(autouse=True, scope="module")
def small_ceilings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 256)
        monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 20)
        yield


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record whose run stopped in the middle of its second case."""
    late, path = Counting("second"), tmp_path_factory.mktemp("stopped") / "run.json"
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(step, "time", late.clock())
        runner.run(SUITE, (late,), CPU, path, SETTINGS)
    assert late.built == ["first", "second"]
    return path


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of it, which a test may change."""
    return Path(shutil.copy(stopped_once, tmp_path))


def names(data: dict[str, Any]) -> list[str]:
    return [case["case"]["name"] for case in data["cases"]]


def test_a_run_out_of_time_is_stopped_and_keeps_whole_cases(stopped: Path) -> None:
    data = load(stopped)
    assert data["status"] == "stopped"
    assert names(data) == ["first"]
    assert {row["case"] for row in data["rows"]} == {"first/fp32"}
    assert len(data["rows"][0]["times"]["both"]["round_medians_ms"]) == 2
    assert set(data["cases"][0]["seconds"]) == {"judging", "timing"}
    assert [part["machine"]["device"] for part in data["parts"]] == ["cpu"]


def test_a_run_without_any_time_leaves_a_valid_record(tmp_path: Path) -> None:
    runner.run(SUITE, (Counting(),), CPU, tmp_path / "run.json", replace(SETTINGS, seconds=0))
    data = load(tmp_path / "run.json")
    assert (data["status"], data["cases"], data["rows"]) == ("stopped", [], [])


def test_resuming_measures_what_is_missing_and_nothing_else(stopped: Path) -> None:
    earlier, fresh = load(stopped), Counting()
    runner.run(SUITE, (fresh,), CPU, stopped, SETTINGS, earlier=earlier)
    data = load(stopped)
    assert fresh.built == ["second", "third"]
    assert data["status"] == "complete"
    assert names(data) == ["first", "second", "third"]
    assert [row["case"] for row in data["rows"]] == ["first/fp32", "second/fp32", "third/fp32"]
    assert data["rows"][0] == earlier["rows"][0]
    assert [case["part"] for case in data["cases"]] == [0, 1, 1]
    assert len(data["parts"]) == 2
    assert all("matmul_tflops" in part["ceilings"] for part in data["parts"])


def test_a_killed_run_is_resumed_from_its_last_whole_case(stopped: Path) -> None:
    """A run that was killed has rows that lack rounds, or were only judged."""
    data = load(stopped) | {"status": "running"}
    half = {"case": "second/fp32", "contender": "counting", "status": "ok"}
    described = {**data["cases"][0], "id": "second/fp32"}
    data |= {"cases": [*data["cases"], described], "rows": [*data["rows"], half]}
    assert resume.missing(data, SUITE) == ["second/fp32", "third/fp32"]
    one_round = {phase: {"round_medians_ms": [1.0]} for phase in SUITE.phases}
    data["rows"][-1] = half | {"times": one_round}
    assert resume.missing(data, SUITE) == ["second/fp32", "third/fp32"]
    kept = resume.trimmed(data, SUITE)
    assert [case["id"] for case in kept["cases"]] == ["first/fp32"]
    assert [row["case"] for row in kept["rows"]] == ["first/fp32"]
    two_rounds = {phase: {"round_medians_ms": [1.0, 1.0]} for phase in SUITE.phases}
    data["rows"][-1] = half | {"times": two_rounds}
    assert resume.missing(data, SUITE) == ["third/fp32"]


@pytest.mark.parametrize("status", ["refused", "failed", "wrong"])
def test_a_verdict_without_speed_finishes_a_case(stopped: Path, status: str) -> None:
    data = load(stopped)
    row = {"case": "second/fp32", "contender": "counting", "status": status, "reason": "so it is"}
    data |= {"cases": [*data["cases"], {**data["cases"][0], "id": "second/fp32"}], "rows": [*data["rows"], row]}
    assert resume.missing(data, SUITE) == ["third/fp32"]


@pytest.mark.parametrize(
    ("section", "change", "words"),
    [
        ("machine", {"cpu": "another processor"}, "cpu: the record has another processor"),
        ("machine", {"torch": "1.0"}, "torch: the record has 1.0"),
        ("machine", {"commit": "abc"}, "commit: the record has abc, here it is def"),
        ("settings", {"rounds": 7}, "rounds: the record has 7, here it is 2"),
        ("settings", {"contenders": ["counting", "eager"]}, "contenders: the record has"),
    ],
)
def test_another_machine_code_or_setting_is_refused(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, section: str, change: dict[str, Any], words: str
) -> None:
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "def")
    data = load(stopped)
    data["machine"]["commit"] = "def"
    data[section] |= change
    with pytest.raises(resume.CannotResume, match=words):
        runner.run(SUITE, (Counting(),), CPU, stopped, SETTINGS, earlier=data)
    with pytest.raises(resume.CannotResume, match="suite: the record has plain"):
        runner.run(SUITE, (Counting(),), CPU, stopped, SETTINGS, earlier=record())


def test_the_command_stops_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = replace(SUITE, name="smoke", contenders=("sdpa-math",), hasty=True)
    monkeypatch.setitem(suites.SUITES, "smoke", lambda device, quick: suite)
    monkeypatch.setattr(step.Step, "_check_time", _out_of_time_at("third"))
    done = CliRunner().invoke(command.app, ["smoke", "--device", "cpu", "--out", str(tmp_path), "--no-plot", "--seconds", "50"])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*/smoke-*.json")
    assert f"stopped after 50 s; go on with: backlight bench --resume {path}" in done.output
    assert names(load(path)) == ["first", "second"]
    monkeypatch.undo()
    monkeypatch.setitem(suites.SUITES, "smoke", lambda device, quick: suite)
    again = CliRunner().invoke(command.app, ["--resume", str(path), "--device", "cpu", "--no-plot"])
    assert again.exit_code == 0, again.output
    assert load(path)["status"] == "complete"
    assert names(load(path)) == ["first", "second", "third"]
    data = load(path)
    assert [case["part"] for case in data["cases"]] == [0, 0, 1]


def _out_of_time_at(name: str) -> Any:
    def check(self: step.Step) -> None:
        if self.workload.case.name == name:
            raise step.OutOfTime

    return check


# --- the commit ----------------------------------------------------------------------------------------------------------


def test_the_commit_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a checkout without its history: the record must still say which code it measured."""
    monkeypatch.setenv(machine.COMMIT_VARIABLE, " 0123abc ")
    assert machine.machine(CPU)["commit"] == "0123abc"
    assert "commit 0123abc" in machine.machine_line(machine.machine(CPU))


def test_a_folder_that_git_does_not_know_names_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(machine.COMMIT_VARIABLE, raising=False)
    monkeypatch.setattr(machine, "_output", lambda command: "")
    assert machine.commit() is None


def test_a_card_is_watched_without_holding_up_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []
    answer = threading.Event()

    def slow(device: torch.device, fields: tuple[str, ...]) -> dict[str, str]:
        answer.wait(60)
        asked.append(fields)
        return {"sm_clock_mhz": "1755"}

    monkeypatch.setattr(machine, "nvidia_smi", slow)
    watch = machine.Watch(torch.device("cuda", 0))
    # back before the card has answered
    assert not asked
    answer.set()
    assert watch.read() == {"sm_clock_mhz": "1755"}
    assert asked == [machine.UNDER_LOAD]
