"""A run on a card, with the processor standing in for it: compiled ahead, timed by events, watched, its memory counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backlight.bench import machine, runner, timing
from backlight.bench.contenders import select
from backlight.bench.results import load
from backlight.bench.step import FULL, Settings
from backlight.bench.suites import MEMORY, OVERHEAD, OVERHEAD_PHASES, SPEED, Suite
from backlight.bench.workload import Tensors, Workload
from backlight.problems.case import FP32, Case

CPU, CARD = torch.device("cpu"), torch.device("cuda", 0)
CAUSAL = Workload(Case("causal", b=1, hq=2, hkv=2, sq=48, sk=48, d=16, causal=True), FP32)
SINK = Workload(replace(CAUSAL.case, name="sink", sink=True), FP32)
SUITE = Suite("tiny", "for tests", SPEED, (CAUSAL, SINK), ("backlight",), rounds=2, plain={SINK.id: CAUSAL.id})
PROPERTIES = SimpleNamespace(name="Stand-in", major=9, minor=0, multi_processor_count=2, total_memory=1 << 30)


def events(work: Callable[[], Any], count: int) -> list[float]:
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a run asks of `torch.cuda`; returns what it was asked to compile."""
    asked: dict[str, Any] = {"peaks": 0}
    drawn = Workload.draw

    def draw(self: Workload, device: torch.device, seed: int = 0) -> Tensors:
        return drawn(self, CPU, seed)

    def peak() -> int:
        asked["peaks"] += 1
        return 5000

    def ahead(workloads: Any, adapters: Any, device: torch.device, processes: int, **options: Any) -> dict[str, Any]:
        asked["ahead"] = ([w.id for w in workloads], [a.name for a in adapters], device, processes)
        return {"jobs": 2, "failed": []}

    monkeypatch.setattr(Workload, "draw", draw)
    monkeypatch.setattr(timing, "_event_samples", events)
    monkeypatch.setattr(runner, "precompile", ahead)
    monkeypatch.setattr(
        machine, "ceilings", lambda device, dtypes, small: {"matmul_tflops": {"float32": 1.0}, "copy_tb_s": 1.0}
    )
    monkeypatch.setattr(machine, "nvidia_smi", lambda device, fields=(): {"sm_clock_mhz": "1700"})
    for name, stand_in in {
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": peak,
        "get_device_properties": lambda device: PROPERTIES,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return asked


def run(suite: Suite, path: Path, names: tuple[str, ...] = ("backlight",)) -> dict[str, Any]:
    runner.run(suite, select(names), CARD, path, Settings(rounds=2, processes=3))
    return load(path)


def test_speed_on_a_card(card: dict[str, Any], tmp_path: Path) -> None:
    data = run(SUITE, tmp_path / "run.json")
    assert card["ahead"] == ([CAUSAL.id, SINK.id], ["backlight"], CARD, 3)
    assert data["parts"][0]["precompiled"] == {"jobs": 2, "failed": []}
    assert (data["settings"]["warm_ms"], data["settings"]["rep_ms"]) == (FULL.warm_ms, FULL.rep_ms)
    assert data["settings"]["timer"] == "CUDA events, L2 flushed"
    assert data["machine"]["card"] == "Stand-in"
    for case, row in zip(data["cases"], data["rows"], strict=True):
        assert case["under_load"] == {"sm_clock_mhz": "1700"}
        assert row["status"] == "ok"
        assert row["memory"]["peak_bytes"] == 4000
        assert all(found["n"] >= 2 * FULL.least for found in row["times"].values())
    assert set(data["rows"][1]["over_plain"]) == {"forward", "backward", "both"}


def test_memory_on_a_card(card: dict[str, Any], tmp_path: Path) -> None:
    data = run(replace(SUITE, kind=MEMORY, phases=()), tmp_path / "run.json")
    assert [row["memory"]["peak_bytes"] for row in data["rows"]] == [4000, 4000]
    assert card["peaks"] == 2
    assert all(row["gate"]["status"] == "ok" and "times" not in row for row in data["rows"])


def test_overhead_on_a_card(card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replayed(work: timing.Work, effort: timing.Effort) -> list[float]:
        work()
        return [0.5]

    monkeypatch.setattr(timing, "graph_samples", replayed)
    suite = replace(SUITE, kind=OVERHEAD, phases=OVERHEAD_PHASES, workloads=(CAUSAL,), plain={})
    (row,) = run(suite, tmp_path / "run.json")["rows"]
    assert set(row["times"]) == set(OVERHEAD_PHASES)
    assert row["times"]["graph both"]["median_ms"] == 0.5
    assert row["tflops"] == {}
