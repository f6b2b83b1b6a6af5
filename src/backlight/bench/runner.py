"""One run: the workloads of a suite one after the other, ahead of them what can be compiled, recorded as it goes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backlight.bench import machine, resume
from backlight.bench.contender import Adapter
from backlight.bench.precompile import precompile
from backlight.bench.results import Results, add_costs
from backlight.bench.step import OutOfTime, Settings, Step
from backlight.bench.suites import Suite
from backlight.bench.workload import Workload

Report = Callable[[str, int, int], None]


def run(
    suite: Suite,
    adapters: Sequence[Adapter],
    device: torch.device,
    path: Path,
    settings: Settings,
    report: Report = lambda what, done, total: None,
    earlier: dict[str, Any] | None = None,
) -> Results:
    """Measure a suite; `report(what, done, total)` is told about every step. Interrupting leaves what was measured.

    `earlier` is a record to go on with: only the cases it lacks are measured. `CannotResume` when this machine, this code or
    these settings are not the record's.
    """
    begin = time.monotonic()
    total = len(suite.workloads)
    results, workloads = _opened(suite, adapters, device, path, settings, earlier)
    done = total - len(workloads)
    tell = partial(_tell, report, done, total)
    prepared = {}
    if settings.processes and device.type == "cuda":
        prepared = {"precompiled": precompile(workloads, adapters, device, settings.processes, report=tell)}
    tell("ceilings of this machine")
    dtypes = tuple(dict.fromkeys(workload.dtype for workload in suite.workloads))
    here, ceilings = machine.machine(device), machine.ceilings(device, dtypes, small=suite.hasty)
    if earlier is None:
        results.data |= {"machine": here, "ceilings": ceilings}
    results.add_part(machine=here, ceilings=ceilings, **prepared)
    results.save()
    status = "interrupted"
    try:
        with warnings.catch_warnings():
            # peers warn about their own internals; the record and the table are what a reader looks at
            warnings.simplefilter("ignore")
            for number, workload in enumerate(workloads, done):
                deadline = None if settings.seconds is None else begin + settings.seconds
                Step(suite, workload, device, settings, results, partial(_tell, report, number, total), deadline).run(adapters)
        status = "complete"
    except OutOfTime:
        status = "stopped"
    finally:
        results.data["parts"][-1]["seconds"] = round(time.monotonic() - begin, 1)
        results.arrange(suite.workloads)
        add_costs(results.data)
        results.finish(status)
    return results


def _opened(
    suite: Suite,
    adapters: Sequence[Adapter],
    device: torch.device,
    path: Path,
    settings: Settings,
    earlier: dict[str, Any] | None,
) -> tuple[Results, list[Workload]]:
    """The record to write and the workloads it still needs."""
    described = settings.to_json(adapters, device)
    if earlier is None:
        return Results(path, suite.name, suite.kind, machine={}, ceilings={}, settings=described), list(suite.workloads)
    reasons = resume.differences(earlier, suite, machine.machine(device), described)
    if reasons:
        raise resume.CannotResume("this record cannot be continued here: " + "; ".join(reasons))
    wanted = set(resume.missing(earlier, suite))
    kept = Results.resumed(path, resume.trimmed(earlier, suite))
    return kept, [workload for workload in suite.workloads if workload.id in wanted]


def _tell(report: Report, done: int, total: int, what: str) -> None:
    report(what, done, total)
