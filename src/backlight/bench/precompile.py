"""Compilation before a run: parallel processes build what the contenders will need and leave it in the caches on disk.

Kernels of Triton and graphs of inductor are found there again, so the run itself only loads them. The processes are gone before
the first time is taken.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backlight.bench.contender import PER_SHAPE, Adapter
from backlight.bench.workload import Workload

Job = tuple[dict[str, Any], str, str]
Report = Callable[[str], None]
TRITON_CACHE = "TRITON_CACHE_DIR"
LIMIT_S = 150.0


def jobs(workloads: Sequence[Workload], adapters: Sequence[Adapter], device: torch.device) -> list[tuple[Workload, Adapter]]:
    """What has to be compiled: every workload, or one of each kind where lengths do not matter; the slowest first."""
    found: dict[tuple[str, Any], tuple[Workload, Adapter]] = {}
    for adapter in adapters:
        compiles = getattr(adapter, "compiles", None)
        for workload in workloads if compiles is not None else ():
            key = (adapter.name, workload if compiles == PER_SHAPE else _kind(workload))
            if key not in found and adapter.refuse(workload, device) is None:
                found[key] = (workload, adapter)
    # wide heads and captured tables take longest
    return sorted(found.values(), key=lambda job: -job[0].case.d * (1 if job[0].case.bias is None else 4))


def _kind(workload: Workload) -> tuple[Any, ...]:
    """The workload without its name, batch and lengths; heads stay, since Triton specialises on sizes that 16 divides."""
    case = replace(workload.case, name="", b=1, sq=1, sk=1, lengths_q=None, lengths_k=None)
    return case, workload.case.varlen, workload.case.sq == workload.case.sk, workload.dtype


def precompile(
    workloads: Sequence[Workload],
    adapters: Sequence[Adapter],
    device: torch.device,
    processes: int,
    limit_s: float = LIMIT_S,
    report: Report = lambda what: None,
) -> dict[str, Any]:
    """Compile in `processes` processes for at most `limit_s`; returns what was done, for the record.

    Adapters learn what the processes found out (`prefer`), so that they need not search again.
    """
    begin = time.monotonic()
    # inductor moves this folder when it first compiles; named, it is the same for every process from the start
    os.environ.setdefault(TRITON_CACHE, str(Path.home() / ".triton" / "cache"))
    wanted = jobs(workloads, adapters, device)
    known = {(workload.id, adapter.name): (workload, adapter) for workload, adapter in wanted}
    failed: list[str] = []
    done = 0
    for found in _results(wanted, device, min(processes, len(wanted)), begin + limit_s):
        if "case" not in found:
            failed.append(found["error"])
            continue
        done += 1
        workload, adapter = known[found["case"], found["contender"]]
        report(f"compiling ahead, {done}/{len(wanted)}: {workload.id}, {adapter.name}, {found['seconds']:.1f} s")
        if "error" in found:
            failed.append(f"{workload.id}, {adapter.name}: {found['error']}")
        elif found["options"] and (prefer := getattr(adapter, "prefer", None)) is not None:
            prefer(workload, found["options"])
    seconds = round(time.monotonic() - begin, 1)
    return {"jobs": len(wanted), "done": done, "processes": processes, "seconds": seconds, "failed": failed}


def _results(
    wanted: Sequence[tuple[Workload, Adapter]], device: torch.device, processes: int, deadline: float
) -> Iterator[dict[str, Any]]:
    if not wanted:
        return
    packed: list[Job] = [(workload.to_json(), adapter.name, str(device)) for workload, adapter in wanted]
    # spawned, since a forked process cannot use CUDA; leaving the block ends whatever still runs
    with multiprocessing.get_context("spawn").Pool(processes, _start) as pool:
        arriving = pool.imap_unordered(_compile, packed)
        for _ in packed:
            try:
                yield arriving.next(timeout=max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                yield {"error": "time was up before all was compiled"}
                return


def _start() -> None:
    # the processes are the parallelism; inductor's own pool in each of them would only fight for the cores
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def _compile(job: Job) -> dict[str, Any]:
    from backlight.bench.contenders import adapter

    described, name, device = job
    workload, begin = Workload.from_json(described), time.monotonic()
    found: dict[str, Any] = {"case": workload.id, "contender": name}
    try:
        contender = adapter(name).build(workload.draw(torch.device(device)))
        with contender.scope():
            contender.both()
            contender.forward()
        found["options"] = contender.options
        del contender
    except Exception as error:
        found["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return found | {"seconds": time.monotonic() - begin}
