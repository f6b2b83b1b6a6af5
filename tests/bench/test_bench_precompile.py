"""What is compiled ahead of a run: each kind once, each shape where shapes matter, in processes that end with it."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from backlight.bench import contenders, precompile, runner, suites
from backlight.bench.contender import PER_SHAPE
from backlight.bench.step import Settings
from backlight.bench.suites import SPEED, Suite
from backlight.bench.workload import Workload
from backlight.problems.case import FP32, Case

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
TINY = Workload(Case("tiny", b=1, hq=2, hkv=2, sq=16, sk=16, d=8, causal=True), FP32)


class Shaped:
    name, compiles = "shaped", PER_SHAPE

    def __init__(self) -> None:
        self.told: dict[str, Any] = {}

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        return "too wide" if workload.case.d > 128 else None

    def prefer(self, workload: Workload, options: dict[str, int]) -> None:
        self.told[workload.id] = options


def test_kinds_are_compiled_once_and_shapes_each() -> None:
    grid = suites.suite("plain", CUDA).workloads
    found = precompile.jobs(grid, (*contenders.select(("backlight", "sdpa-flash")), Shaped()), CUDA)
    names = [adapter.name for _, adapter in found]
    # 3 head dimensions, causal or full; every length of the two that are not refused
    assert (names.count("backlight"), names.count("shaped"), names.count("sdpa-flash")) == (6, 24, 0)
    assert [workload.case.d for workload, _ in found] == sorted((w.case.d for w, _ in found), reverse=True)


def test_every_variant_is_a_kind_of_its_own() -> None:
    variants = suites.suite("variants", CUDA, quick=True).workloads
    found = {workload.case.name for workload, _ in precompile.jobs(variants, contenders.select(("backlight",)), CUDA)}
    assert {"bias,d=64,s=8192", "lazy,d=64,s=8192", "gate,d=64,s=8192", "gqa,d=64,s=8192", "varlen,d=64"} <= found
    assert "causal,d=64,s=16384" not in found


def test_findings_reach_the_adapter_and_failures_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = Workload(Case("wide", b=1, hq=2, hkv=2, sq=16, sk=16, d=64), FP32)
    results = [
        {"case": wide.id, "contender": "shaped", "seconds": 1.0, "options": {"stages": 2}},
        {"case": TINY.id, "contender": "shaped", "seconds": 1.0, "error": "RuntimeError: no"},
        {"error": "time was up before all was compiled"},
    ]
    monkeypatch.setattr(precompile, "_results", lambda *arguments: iter(results))
    shaped, said = Shaped(), []
    found = precompile.precompile((TINY, wide), (shaped,), CPU, 2, report=said.append)
    assert shaped.told == {wide.id: {"stages": 2}}
    assert found["failed"] == [f"{TINY.id}, shaped: RuntimeError: no", "time was up before all was compiled"]
    assert (found["jobs"], found["done"]) == (2, 2)
    assert said[0].startswith(f"compiling ahead, 1/2: {wide.id}, shaped")


def test_processes_compile_and_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = precompile.precompile((TINY,), contenders.select(("backlight",)), CPU, 1)
    assert (found["jobs"], found["done"], found["failed"]) == (1, 1, [])
    assert not multiprocessing.active_children()


def test_time_runs_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = precompile.precompile((TINY,), contenders.select(("backlight",)), CPU, 1, limit_s=0)
    assert (found["done"], found["failed"]) == (0, ["time was up before all was compiled"])
    assert not multiprocessing.active_children()


def test_only_a_card_is_compiled_for_ahead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "precompile", lambda *arguments, **options: pytest.fail("compiled ahead on a CPU"))
    suite = Suite("tiny", "for tests", SPEED, (), ("backlight",))
    runner.run(suite, contenders.select(("backlight",)), CPU, tmp_path / "run.json", Settings(1, True, processes=4))
