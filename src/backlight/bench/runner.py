"""One run: for each workload draw, judge every contender, then time the green ones in turns, recording as it goes."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backlight.bench import machine, memory, timing
from backlight.bench.contender import Adapter, Contender
from backlight.bench.gate import WRONG, Gate
from backlight.bench.rehearsal import too_slow
from backlight.bench.results import Results, rates
from backlight.bench.suites import MEMORY, OVERHEAD, Suite
from backlight.bench.timing import Effort
from backlight.bench.workload import PHASES, Tensors, Workload
from backlight.errors import Unsupported

Report = Callable[[str, int, int], None]

FULL, QUICK = Effort(30, 150), Effort(10, 60)
CPU_FULL, CPU_QUICK = Effort(20, 300), Effort(0, 60)
# on a CPU, above this many pairs, the memory suite, which shows no speed, takes the verdict of the shorter lengths
JUDGED_PAIRS = 8 * 4096 * 4096
NOT_JUDGED = {"status": "not judged", "judged": [], "notes": ["no speed is shown here, and shorter lengths are judged"]}
REASON_LENGTH = 300
LONGEST_S, LONGEST_MEMORY_S = 40.0, 300.0


@dataclass(frozen=True)
class Settings:
    """How thoroughly: rounds of interleaved measurement, quick or not, and the seed of the data."""

    rounds: int
    quick: bool = False
    seed: int = 0

    def effort(self, device: torch.device) -> Effort:
        if device.type == "cuda":
            return QUICK if self.quick else FULL
        return CPU_QUICK if self.quick else CPU_FULL


def run(
    suite: Suite,
    adapters: Sequence[Adapter],
    device: torch.device,
    path: Path,
    settings: Settings,
    report: Report = lambda what, done, total: None,
) -> Results:
    """Measure a suite; `report(what, done, total)` is told about every step. Interrupting leaves what was measured."""
    report("ceilings of this machine", 0, len(suite.workloads))
    dtypes = tuple(dict.fromkeys(workload.dtype for workload in suite.workloads))
    ceilings = machine.ceilings(device, dtypes, small=suite.hasty)
    results = Results(
        path,
        suite.name,
        suite.kind,
        machine=machine.machine(device),
        ceilings=ceilings,
        settings={
            "rounds": settings.rounds,
            "quick": settings.quick,
            "seed": settings.seed,
            "timer": timing.timer_name(device),
            "contenders": [adapter.name for adapter in adapters],
        },
    )
    results.save()
    status = "interrupted"
    try:
        with warnings.catch_warnings():
            # peers warn about their own internals; the record and the table are what a reader looks at
            warnings.simplefilter("ignore")
            for number, workload in enumerate(suite.workloads):
                tell = partial(_tell, report, number, len(suite.workloads))
                _Step(suite, workload, device, settings, results, tell).run(adapters)
        status = "complete"
    finally:
        results.finish(status)
    return results


def _tell(report: Report, done: int, total: int, what: str) -> None:
    report(what, done, total)


class _Step:
    """One workload of a run."""

    def __init__(
        self,
        suite: Suite,
        workload: Workload,
        device: torch.device,
        settings: Settings,
        results: Results,
        report: Callable[[str], None],
    ):
        self.suite, self.workload, self.device, self.settings = suite, workload, device, settings
        self.results, self.report = results, report
        self.gate: Gate | None = None

    def run(self, adapters: Sequence[Adapter]) -> None:
        self.results.add_case(self.workload)
        self.report(f"{self.workload.id}: drawing")
        tensors = self.workload.draw(self.device, self.settings.seed)
        green = [found for adapter in adapters if (found := self._admit(adapter, tensors)) is not None]
        self.gate = None
        self._release()
        if self.suite.phases:
            self._race(green)
        del green, tensors
        self._release()

    def _admit(self, adapter: Adapter, tensors: Tensors) -> Contender | None:
        """Build and judge; None unless its numbers are right. What goes wrong in a peer is a row, not the end of the run."""
        row = self.results.row(self.workload, adapter.name)
        self.report(f"{self.workload.id}: judging {adapter.name}")
        try:
            limit_s = LONGEST_MEMORY_S if self.suite.kind == MEMORY else LONGEST_S
            reason = adapter.refuse(self.workload, self.device) or too_slow(adapter, self.workload, self.device, limit_s)
            if reason is not None:
                row |= {"status": "refused", "reason": reason}
                return None
            contender = self._judge(adapter, tensors, row)
        except Unsupported as error:
            row |= {"status": "refused", "reason": _sentence("; ".join(x for why in error.reasons.values() for x in why))}
            return None
        except Exception as error:
            row |= {"status": "failed", "reason": _sentence(f"{type(error).__name__}: {error}")}
            return None
        finally:
            self.results.save()
            self._release()
        return contender

    def _judge(self, adapter: Adapter, tensors: Tensors, row: dict[str, Any]) -> Contender | None:
        begin = time.perf_counter()
        contender = adapter.build(tensors)
        row |= {"path": contender.path, "detail": contender.detail}
        if self.suite.kind == MEMORY and self.device.type == "cpu" and self.workload.pairs > JUDGED_PAIRS:
            row |= {"status": "ok", "gate": NOT_JUDGED}
        else:
            with contender.scope():
                results = contender.results()
            self._wait()
            row["first_call_s"] = round(time.perf_counter() - begin, 3)
            if self.gate is None:
                self.report(f"{self.workload.id}: computing the truth")
                self.gate = Gate(tensors, self.settings.seed)
            verdict = self.gate.judge(results)
            del results
            row |= {"status": verdict.status, "gate": verdict.to_json()}
            if verdict.status == WRONG:
                row["reason"] = "; ".join(verdict.reasons)
                return None
        self._measure_memory(contender, row)
        return contender

    def _measure_memory(self, contender: Contender, row: dict[str, Any]) -> None:
        found: dict[str, Any] = {}
        if self.device.type == "cuda":
            found = {"peak_bytes": memory.cuda_peak(contender), "method": "allocator peak"}
        elif self.suite.kind == MEMORY:
            self.report(f"{self.workload.id}: memory of {contender.name}")
            found = memory.cpu_peak(self.workload, contender.name) | {"method": "resident memory of a process of its own"}
        if "error" in found:
            row |= {"status": "failed", "reason": _sentence(f"memory: {found['error']}")}
        elif found:
            row["memory"] = found | {"relative": found["peak_bytes"] / self.workload.input_bytes()}

    def _race(self, green: list[Contender]) -> None:
        """Rounds over all contenders, so that a machine that slows down slows all of them."""
        taken: dict[str, dict[str, list[list[float]]]] = {contender.name: {} for contender in green}
        for number in range(self.settings.rounds):
            for contender in green:
                row = self.results.row(self.workload, contender.name)
                for phase in self.suite.phases:
                    if row["status"] == "failed" or phase in row.get("untimed", {}):
                        continue
                    self.report(f"{self.workload.id}: round {number + 1}/{self.settings.rounds}, {contender.name} {phase}")
                    try:
                        found = self._time(contender, phase)
                        taken[contender.name].setdefault(phase, []).append(found)
                    except Exception as error:
                        self._stumbled(row, phase, _sentence(f"{type(error).__name__}: {error}"))
                if row["status"] != "failed":
                    times = {phase: timing.summary(rounds) for phase, rounds in taken[contender.name].items()}
                    row |= {"times": times, "tflops": rates(times, self.workload.flops())}
                self.results.save()

    def _stumbled(self, row: dict[str, Any], phase: str, reason: str) -> None:
        """A graph that cannot be captured leaves the other phases standing; a failing forward or backward does not."""
        if self.suite.kind == OVERHEAD:
            row.setdefault("untimed", {})[phase] = reason
            return
        for key in ("times", "tflops"):
            row.pop(key, None)
        row |= {"status": "failed", "reason": f"{phase}: {reason}"}

    def _time(self, contender: Contender, phase: str) -> list[float]:
        effort = self.settings.effort(self.device)
        with contender.scope():
            if phase in PHASES:
                return timing.samples(timing.phase_of(contender, phase), self.device, effort)
            how, what = phase.split()
            work = timing.phase_of(contender, what)
            return timing.graph_samples(work, effort) if how == "graph" else timing.host_samples(work, self.device, effort)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _release(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _sentence(text: str) -> str:
    """The first line of an error, short enough for a table's footnote."""
    line = " ".join(text.strip().split("\n")[0].split())
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 3] + "..."
