"""A run: wrong peers get no speed, failing peers do not end it, and killing it half-way leaves what was measured."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from backlight import registry
from backlight.bench import command, machine, memory, profile, runner, step, suites, timing
from backlight.bench.contender import Contender
from backlight.bench.contenders import adapter
from backlight.bench.results import load
from backlight.bench.step import Settings
from backlight.bench.suites import MEMORY, OVERHEAD, SPEED, Suite
from backlight.bench.workload import Tensors, Workload
from backlight.problems.case import FP32, Case

CPU = torch.device("cpu")
TINY = Workload(Case("tiny", b=2, hq=2, hkv=2, sq=40, sk=40, d=8, causal=True), FP32)
SUITE = Suite("tiny", "for tests", SPEED, (TINY,), ("backlight",), rounds=2)
ROOT = Path(__file__).resolve().parents[2]


class Wrong:
    """Right output, fast, and dq one per cent too large in the last head."""

    name = "wrong"

    def refuse(self, workload: Workload, device: torch.device) -> None:
        return None

    def build(self, tensors: Tensors) -> Contender:
        good = adapter("sdpa-math").build(tensors)

        def gradients(y: torch.Tensor, state: Any, retain: bool) -> tuple[torch.Tensor, ...]:
            dq, *rest = good.gradients(y, state, retain)
            dq = dq.clone()
            dq[:, -1] *= 1.01
            return (dq, *rest)

        return replace(good, name=self.name, gradients=gradients)


class Broken(Wrong):
    name = "broken"

    def build(self, tensors: Tensors) -> Contender:
        raise RuntimeError("no engine for this shape\nand a long stack trace")


class BreaksLater(Wrong):
    """Passes the gate, then fails while it is timed."""

    name = "breaks later"

    def build(self, tensors: Tensors) -> Contender:
        good = adapter("sdpa-math").build(tensors)
        calls = []

        def attend() -> tuple[torch.Tensor, Any]:
            calls.append(1)
            if len(calls) > 3:
                raise RuntimeError("out of luck")
            return good.attend()

        return replace(good, name=self.name, attend=attend)


class Refusing(Wrong):
    name = "refusing"

    def refuse(self, workload: Workload, device: torch.device) -> str:  # type: ignore[override]
        return "not today"


@pytest.fixture(autouse=True)
def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(machine.MATMUL_SIZE, "cpu", 256)
    monkeypatch.setitem(machine.COPY_BYTES, "cpu", 1 << 20)


def run(*adapters: Any, suite: Suite = SUITE, path: Path) -> dict[str, Any]:
    runner.run(suite, adapters, CPU, path, Settings(rounds=2, quick=True))
    return load(path)


def by_name(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["contender"]: row for row in data["rows"]}


def test_a_wrong_peer_is_reported_and_gets_no_speed(tmp_path: Path) -> None:
    data = run(adapter("backlight"), Wrong(), adapter("sdpa-math"), path=tmp_path / "run.json")
    rows = by_name(data)
    assert rows["wrong"]["status"] == "wrong"
    assert "dq: a head is 1.01 times what it should be" in rows["wrong"]["reason"]
    assert "times" not in rows["wrong"]
    assert "tflops" not in rows["wrong"]
    for name in ("backlight", "sdpa-math"):
        assert rows[name]["status"] == "ok"
        assert set(rows[name]["times"]) == {"forward", "backward", "both"}
        assert rows[name]["times"]["forward"]["n"] >= 2
        assert len(rows[name]["times"]["forward"]["round_medians_ms"]) == 2
        flops, median = TINY.flops()["both"], rows[name]["times"]["both"]["median_ms"]
        assert rows[name]["tflops"]["both"] == pytest.approx(flops / median / 1e9)
    assert data["status"] == "complete"
    assert rows["backlight"]["detail"].startswith("aten")
    assert rows["backlight"]["gate"]["judged"]


def test_a_failing_peer_is_a_row_and_the_run_goes_on(tmp_path: Path) -> None:
    rows = by_name(run(Broken(), BreaksLater(), Refusing(), adapter("backlight"), path=tmp_path / "run.json"))
    assert rows["broken"]["status"] == "failed"
    assert rows["broken"]["reason"] == "RuntimeError: no engine for this shape"
    assert rows["breaks later"]["status"] == "failed"
    assert "out of luck" in rows["breaks later"]["reason"]
    assert "times" not in rows["breaks later"]
    assert (rows["refusing"]["status"], rows["refusing"]["reason"]) == ("refused", "not today")
    assert rows["backlight"]["status"] == "ok"


def test_a_call_no_backend_takes_is_refused_with_its_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(registry.get("tiled")), "why_not", lambda self, call: ("never on a Sunday",))
    rows = by_name(run(adapter("backlight:tiled"), path=tmp_path / "run.json"))
    assert rows["backlight:tiled"]["status"] == "refused"
    assert rows["backlight:tiled"]["reason"] == "never on a Sunday"


class Hopeless(Wrong):
    """Right, and a second for every few rows."""

    name = "hopeless"

    def build(self, tensors: Tensors) -> Contender:
        good = adapter("sdpa-math").build(tensors)
        assert tensors.call.q.shape[2] <= 256, "the whole workload was begun"

        def attend() -> tuple[torch.Tensor, Any]:
            time.sleep(1.1)
            return good.attend()

        return replace(good, name=self.name, attend=attend)


def test_a_hopelessly_slow_contender_is_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = Workload(Case("long", b=1, hq=1, hkv=1, sq=2048, sk=2048, d=16, causal=True), FP32)
    monkeypatch.setattr("backlight.bench.rehearsal.SMALL_FLOPS", 1e6)
    data = run(Hopeless(), suite=replace(SUITE, workloads=(long,)), path=tmp_path / "run.json")
    row = by_name(data)["hopeless"]
    assert row["status"] == "refused"
    assert re.match(r"one forward and backward would take about \d\d+ s here", row["reason"])


def test_an_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    class Interrupting(Wrong):
        name = "interrupting"

        def build(self, tensors: Tensors) -> Contender:
            raise KeyboardInterrupt

    second = Workload(replace(TINY.case, name="second"), FP32)
    adapters = (adapter("backlight"), Interrupting())
    only_second = SimpleNamespace(
        name="interrupting", refuse=lambda w, d: None if w is second else "later", build=adapters[1].build
    )
    with pytest.raises(KeyboardInterrupt):
        run(adapters[0], only_second, suite=replace(SUITE, workloads=(TINY, second)), path=tmp_path / "run.json")
    data = load(tmp_path / "run.json")
    assert data["status"] == "interrupted"
    assert "times" in data["rows"][0]
    assert all(row["status"] != "running" for row in data["rows"])


def test_killing_a_run_leaves_valid_json_of_what_was_measured(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", "backlight.bench", "smoke", "--device", "cpu", "--out", str(tmp_path), "--no-plot"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        measured: list[dict[str, Any]] = []
        while not measured:
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            time.sleep(0.05)
            # every look at the file must find a whole record
            for path in tmp_path.glob("*/smoke-*.json"):
                measured = [row for row in json.loads(path.read_text())["rows"] if row.get("times")]
    finally:
        process.kill()
        process.communicate()
    (path,) = tmp_path.glob("*/smoke-*.json")
    data = load(path)
    assert data["status"] == "running"
    assert len(data["cases"]) < len(suites.suite("smoke", CPU).workloads)
    assert any(row.get("tflops") for row in data["rows"])
    shown = CliRunner().invoke(command.app, ["show", str(path)])
    assert shown.exit_code == 0, shown.output


# --- the other kinds of suite --------------------------------------------------------------------------------------------


def test_memory_is_measured_in_a_process_of_its_own() -> None:
    long = Workload(Case("long", b=1, hq=4, hkv=4, sq=1024, sk=1024, d=32, causal=True), FP32)
    ours, dense = (memory.cpu_peak(long, name)["peak_bytes"] for name in ("backlight", "eager"))
    matrix = 4 * 4 * 1024 * 1024
    assert dense > 2 * matrix
    assert 0 < ours < dense
    assert "there are" in memory.cpu_peak(long, "nobody")["error"]


def test_memory_suite_records_bytes_and_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cpu_peak", lambda workload, name: {"peak_bytes": 3 * workload.input_bytes()})
    rows = by_name(run(adapter("backlight"), suite=replace(SUITE, kind=MEMORY, phases=()), path=tmp_path / "run.json"))
    assert rows["backlight"]["memory"]["relative"] == 3.0
    assert "times" not in rows["backlight"]
    assert rows["backlight"]["gate"]["status"] == "ok"


def test_overhead_suite_times_the_host(tmp_path: Path) -> None:
    suite = replace(SUITE, kind=OVERHEAD, phases=("host forward", "host both"))
    rows = by_name(run(adapter("backlight"), suite=suite, path=tmp_path / "run.json"))
    assert set(rows["backlight"]["times"]) == {"host forward", "host both"}
    assert rows["backlight"]["tflops"] == {}


def test_an_uncapturable_graph_leaves_the_other_phases(tmp_path: Path) -> None:
    suite = replace(SUITE, kind=OVERHEAD, phases=("host forward", "graph forward"))
    rows = by_name(run(adapter("backlight"), suite=suite, path=tmp_path / "run.json"))
    assert rows["backlight"]["status"] == "ok"
    assert set(rows["backlight"]["times"]) == {"host forward"}
    assert set(rows["backlight"]["untimed"]) == {"graph forward"}


# --- what a row holds ----------------------------------------------------------------------------------------------------


def test_ours_on_plain_is_raced_beside_a_variant(tmp_path: Path) -> None:
    sink = Workload(replace(TINY.case, name="sink", sink=True), FP32)
    suite = replace(SUITE, workloads=(TINY, sink), plain={sink.id: TINY.id})
    data = run(adapter("backlight"), adapter("eager"), suite=suite, path=tmp_path / "run.json")
    rows = {(row["case"], row["contender"]): row for row in data["rows"]}
    ours, eager = rows[sink.id, "backlight"], rows[sink.id, "eager"]
    assert len(ours["plain_times"]["both"]["round_medians_ms"]) == 2
    beside = ours["plain_times"]["both"]["median_ms"]
    assert ours["over_plain"]["both"] == pytest.approx(ours["times"]["both"]["median_ms"] / beside)
    assert "plain_times" not in eager
    alone = rows[TINY.id, "eager"]["times"]["both"]["median_ms"]
    assert eager["over_plain"]["both"] == pytest.approx(eager["times"]["both"]["median_ms"] / alone)
    assert len(rows) == 4


def test_options_a_contender_settled_on_are_recorded(tmp_path: Path) -> None:
    class Settled(Wrong):
        name = "settled"

        def build(self, tensors: Tensors) -> Contender:
            return replace(adapter("sdpa-math").build(tensors), name=self.name, options={"stages": 2})

    rows = by_name(run(Settled(), adapter("backlight"), path=tmp_path / "run.json"))
    assert rows["settled"]["options"] == {"stages": 2}
    assert "options" not in rows["backlight"]


def test_long_lengths_of_the_memory_suite_take_the_verdict_of_short_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "cpu_peak", lambda workload, name: {"peak_bytes": 1})
    monkeypatch.setattr(step, "JUDGED_PAIRS", 0)
    rows = by_name(run(adapter("backlight"), suite=replace(SUITE, kind=MEMORY, phases=()), path=tmp_path / "run.json"))
    assert rows["backlight"]["gate"]["status"] == "not judged"
    assert "times" not in rows["backlight"]


# --- profile -------------------------------------------------------------------------------------------------------------


@pytest.mark.clean_memory
def test_profile_takes_a_call_apart(tmp_path: Path) -> None:
    larger = Workload(replace(TINY.case, sq=256, sk=256, d=64), FP32)
    data = profile.run(larger, (adapter("backlight:tiled"), Wrong()), CPU, tmp_path / "profile.json")
    assert load(tmp_path / "profile.json") == data
    (found,) = data["profiles"]
    for phase in ("forward", "backward"):
        parts = found["phases"][phase]["parts"]
        assert sum(part["share"] for part in parts) == pytest.approx(1)
        assert sum(part["time_ms"] for part in parts) == pytest.approx(found["phases"][phase]["time_ms"])
        assert any("mm" in part["name"] for part in parts), [part["name"] for part in parts]
    assert by_name(data)["wrong"]["status"] == "wrong"


def test_a_contender_that_cannot_be_profiled_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = profile.run(TINY, (Broken(), adapter("backlight")), CPU, tmp_path / "profile.json")
    rows = by_name(data)
    assert rows["broken"]["reason"].startswith("RuntimeError: no engine for this shape")
    assert rows["backlight"]["status"] == "ok"
    monkeypatch.setattr(profile, "measure", lambda work, device, workload: [])
    rows = by_name(profile.run(TINY, (adapter("backlight"),), CPU, tmp_path / "profile.json"))
    assert rows["backlight"]["status"] == "failed"
    assert "recorded no kernels" in rows["backlight"]["reason"]


def test_compiled_kernels_are_read_from_backend_modules() -> None:
    kernel = SimpleNamespace(n_regs=168, n_spills=4, metadata=SimpleNamespace(shared=1024, num_warps=8, num_stages=3))
    jit = SimpleNamespace(__name__="_fwd_kernel", device_caches={0: ({"key": kernel}, "more")})
    modules = {
        "backlight.backends.triton.forward": SimpleNamespace(_fwd_kernel=jit, other=3),
        "backlight.backends.triton.backward": SimpleNamespace(_fwd_kernel=jit),
        "elsewhere": SimpleNamespace(kernel=jit),
    }
    (found,) = profile.compiled_kernels(modules)  # type: ignore[arg-type]
    assert found == {"kernel": "_fwd_kernel", "registers": 168, "spills": 4, "shared_bytes": 1024, "warps": 8, "stages": 3}


# --- the command ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_smoke(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = Workload(replace(TINY.case, name="tiny,longer", sq=64, sk=64), FP32)
    found = replace(
        SUITE, name="smoke", workloads=(TINY, longer), contenders=("backlight", "sdpa-flash", "adasplash"), hasty=True
    )
    monkeypatch.setitem(suites.SUITES, "smoke", lambda device, quick: found)


def test_the_command_writes_json_table_and_pictures(tmp_path: Path, tiny_smoke: None) -> None:
    done = CliRunner().invoke(command.app, ["smoke", "--device", "cpu", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "backlight" in done.output
    assert "adasplash refused (every case): adasplash is not installed" in done.output
    (path,) = tmp_path.glob("cpu-*/smoke-*.json")
    assert load(path)["status"] == "complete"
    pictures = {p.name.removeprefix(path.stem) for p in path.parent.iterdir()} - {".json"}
    assert {"-rates.png", "-rates.svg", "-ratios.png", "-roofline.svg"} <= pictures
    again = CliRunner().invoke(command.app, ["plot", str(path), "--out", str(tmp_path / "again")])
    assert again.exit_code == 0, again.output
    assert {p.name.removeprefix(path.stem) for p in (tmp_path / "again").iterdir()} == pictures


def test_compare_names_regressions_and_exits_with_1(tmp_path: Path) -> None:
    from bench_records import record

    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(record()))
    new.write_text(json.dumps(record(scale=1.5)))
    done = CliRunner().invoke(command.app, ["compare", str(old), str(new)])
    assert done.exit_code == 1
    assert "18 slower" in done.output
    assert "1.500" in done.output
    assert CliRunner().invoke(command.app, ["compare", str(old), str(old)]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["nothing"],
            "no suite is called 'nothing'; there are plain, every, variants, terms, masks, entmax, pair, fp8, cpu, smoke, "
            "memory, overhead",
        ),
        (["smoke", "--contenders", "nobody"], "no contender is called 'nobody'"),
        (["smoke", "--device", "abacus"], "--device must be auto or a torch device"),
        (["--profile", "nothing"], "no case is called 'nothing'"),
    ],
)
def test_bad_arguments_get_a_sentence(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(command.app, arguments)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


def test_list_and_help() -> None:
    done = CliRunner().invoke(command.app, ["list", "--device", "cpu"])
    ours = ", ".join(f"backlight:{name}" for name in (*registry.names(), "fp8", "fp8-given"))
    assert f"Contenders: backlight, {ours}, sdpa-flash" in " ".join(done.output.split())
    assert CliRunner().invoke(command.app, ["--help"]).exit_code == 0


def test_machine_line_names_no_path_or_host(tmp_path: Path) -> None:
    import platform

    text = json.dumps(run(adapter("backlight"), path=tmp_path / "run.json"))
    assert platform.node() not in text
    assert str(ROOT) not in text


@pytest.mark.slow
def test_smoke_takes_a_minute_of_one_core(tmp_path: Path) -> None:
    """Processor time: what the clock shows depends on the neighbours."""
    arguments = [sys.executable, "-m", "backlight.bench", "smoke", "--device", "cpu", "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    before = os.times()
    subprocess.run(arguments, env=environment, check=True, capture_output=True)
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 60
    assert list(tmp_path.glob("*/smoke-*-rates.png"))


def test_a_slow_contender_is_timed_in_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "slow", lambda rounds: bool(rounds))
    data = run(adapter("backlight"), path=tmp_path / "run.json")
    assert SUITE.rounds > 1
    assert all(len(found["round_medians_ms"]) == 1 for found in data["rows"][0]["times"].values())


def test_pictures_that_cannot_be_drawn_are_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else known(name))
    path = next((Path(__file__).parents[2] / "benchmarks" / "results").glob("cpu-*/cpu-*.json.gz"))
    done = CliRunner().invoke(command.app, ["plot", str(path), "--out", str(tmp_path)])
    assert done.exit_code == 2
    assert "pip install '.[report]'" in done.output
    assert not any(tmp_path.iterdir())
