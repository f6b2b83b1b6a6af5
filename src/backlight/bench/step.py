"""One workload of a run: draw, judge every contender, then time the green ones in turns, recording as it goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from backlight.bench import machine, memory, timing
from backlight.bench.contender import Adapter, Contender
from backlight.bench.contenders.ours import OURS
from backlight.bench.gate import WRONG, Gate
from backlight.bench.rehearsal import too_slow
from backlight.bench.results import TIMED, Results, rates
from backlight.bench.suites import MEMORY, OVERHEAD, Suite
from backlight.bench.timing import Effort
from backlight.bench.workload import PHASES, Tensors, Workload
from backlight.errors import Unsupported

Row = dict[str, Any]
Entry = tuple[Contender, Row]

# a card runs above its sustained clocks until its power limit reacts, which takes some 50 ms
FULL, QUICK = Effort(50, 100, least=3), Effort(40, 60, least=2)
CPU_FULL, CPU_QUICK = Effort(20, 300), Effort(0, 60)
# the memory suite shows no speed: above this many pairs it relies on the verdict of shorter lengths
JUDGED_PAIRS = 8 * 4096 * 4096
NOT_JUDGED = {"status": "not judged", "judged": [], "notes": ["no speed is shown here, and shorter lengths are judged"]}
REASON_LENGTH = 300
LONGEST_S, LONGEST_MEMORY_S = 40.0, 300.0


@dataclass(frozen=True)
class Settings:
    """How thoroughly: rounds of interleaved measurement, quick or not, and the seed of the data.

    seconds:   stop after so long and leave a record that can be resumed; None = no limit.
    processes: compile ahead in so many processes, on CUDA; 0 = each contender when its turn comes.
    """

    rounds: int
    quick: bool = False
    seed: int = 0
    seconds: float | None = None
    processes: int = 0

    def effort(self, device: torch.device) -> Effort:
        if device.type == "cuda":
            return QUICK if self.quick else FULL
        return CPU_QUICK if self.quick else CPU_FULL

    def to_json(self, adapters: Sequence[Adapter], device: torch.device) -> dict[str, Any]:
        effort = self.effort(device)
        return {
            "rounds": self.rounds,
            "quick": self.quick,
            "seed": self.seed,
            "timer": timing.timer_name(device),
            "warm_ms": effort.warm_ms,
            "rep_ms": effort.rep_ms,
            "contenders": [adapter.name for adapter in adapters],
        }


class OutOfTime(Exception):
    """The time a run was given is over."""


class Step:
    """One workload of a run."""

    def __init__(
        self,
        suite: Suite,
        workload: Workload,
        device: torch.device,
        settings: Settings,
        results: Results,
        report: Callable[[str], None],
        deadline: float | None = None,
    ):
        self.suite, self.workload, self.device, self.settings = suite, workload, device, settings
        self.results, self.report, self.deadline = results, report, deadline
        self.gate: Gate | None = None

    def run(self, adapters: Sequence[Adapter]) -> None:
        try:
            self._measure(adapters)
        except OutOfTime:
            self.results.drop_case(self.workload)
            raise

    def _measure(self, adapters: Sequence[Adapter]) -> None:
        self._check_time()
        begin = time.monotonic()
        case = self.results.add_case(self.workload)
        if plain := self.suite.plain.get(self.workload.id):
            case["plain"] = plain
        self.report(f"{self.workload.id}: drawing")
        tensors = self.workload.draw(self.device, self.settings.seed)
        green = [found for adapter in adapters if (found := self._admit(adapter, tensors)) is not None]
        self.gate = None
        self._release()
        judged = time.monotonic()
        if self.suite.phases:
            entries = [(contender, self.results.row(self.workload, contender.name)) for contender in green]
            beside = self._beside(entries, adapters)
            case |= self._race([*entries, *((contender, row) for contender, row, _ in beside)])
            for _, row, mine in beside:
                if "times" in row:
                    mine["plain_times"] = row["times"]
            del entries, beside
        del green, tensors
        self._release()
        # where a run's own time goes
        case["seconds"] = {"judging": round(judged - begin, 2), "timing": round(time.monotonic() - judged, 2)}
        self.results.save()

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise OutOfTime

    def _admit(self, adapter: Adapter, tensors: Tensors) -> Contender | None:
        """Build and judge; None unless its numbers are right. What goes wrong in a peer is a row, not the end of the run."""
        self._check_time()
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
            self.results.save_soon()
        return contender

    def _judge(self, adapter: Adapter, tensors: Tensors, row: dict[str, Any]) -> Contender | None:
        begin = time.perf_counter()
        contender = adapter.build(tensors)
        row |= {"path": contender.path, "detail": contender.detail}
        if contender.options:
            row["options"] = contender.options
        if contender.forward_only:
            missing = (phase for phase in self.suite.phases if phase.split()[-1] not in contender.phases)
            row["untimed"] = dict.fromkeys(missing, contender.forward_only)
        if self.suite.kind == MEMORY and self.workload.pairs > JUDGED_PAIRS:
            row |= {"status": "ok", "gate": NOT_JUDGED}
        else:
            with contender.scope():
                results = contender.results()
                if self.suite.phases:
                    # a plan or graph for inference is built here and not in a timed window
                    contender.forward()
            self._wait()
            row["first_call_s"] = round(time.perf_counter() - begin, 3)
            if self.gate is None:
                self.report(f"{self.workload.id}: computing the truth")
                self.gate = Gate(tensors, self.settings.seed)
            verdict = self.gate.judge(results, contender.precision, bool(contender.forward_only))
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

    def _beside(self, entries: list[Entry], adapters: Sequence[Adapter]) -> list[tuple[Contender, Row, Row]]:
        """(ours on plain of the same shape, a row for it, our row here): what a term costs is read within one race.

        Plain was judged as a case of its own; without a green verdict there it is not raced here.
        """
        plain = next((w for w in self.suite.workloads if w.id == self.suite.plain.get(self.workload.id)), None)
        named = {adapter.name: adapter for adapter in adapters if adapter.name.startswith(OURS)}
        mine = [] if plain is None else [row for _, row in entries if row["contender"] in named]
        found = []
        for row in mine:
            assert plain is not None
            if self.results.status(plain, row["contender"]) in TIMED:
                contender = named[row["contender"]].build(plain.draw(self.device, self.settings.seed))
                found.append((replace(contender, name=f"{contender.name}, plain"), {"status": "ok"}, row))
        return found

    def _race(self, entries: list[Entry]) -> dict[str, Any]:
        """Rounds over all contenders, so that a machine that slows down slows all of them; returns what it was like then."""
        taken: dict[str, dict[str, list[list[float]]]] = {contender.name: {} for contender, _ in entries}
        watch: machine.Watch | None = None
        for number in range(self.settings.rounds):
            if number + 1 == self.settings.rounds and self.device.type == "cuda":
                watch = machine.Watch(self.device)
            for contender, row in entries:
                for phase in self.suite.phases:
                    earlier = taken[contender.name].get(phase, [])
                    if row["status"] == "failed" or phase in row.get("untimed", {}) or timing.slow(earlier):
                        continue
                    self._check_time()
                    self.report(f"{self.workload.id}: round {number + 1}/{self.settings.rounds}, {contender.name} {phase}")
                    try:
                        found = self._time(contender, phase)
                        taken[contender.name].setdefault(phase, []).append(found)
                    except Exception as error:
                        self._stumbled(row, phase, _sentence(f"{type(error).__name__}: {error}"))
                if row["status"] != "failed":
                    times = {phase: timing.summary(rounds) for phase, rounds in taken[contender.name].items()}
                    row |= {"times": times, "tflops": rates(times, self.workload.flops())}
                self.results.save_soon()
        return {} if watch is None else {"under_load": watch.read()}

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
