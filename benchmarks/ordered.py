"""Deterministic backwards on a card: PYTHONPATH=src python benchmarks/ordered.py FILE.json

Time of the backward in free order, with dq from a kernel of its own (seven products), and with dq added in a fixed order (five;
`BackwardConfig.ordered`), in turns; gradients are compared before, and the ordered ones bit by bit over many repeats after.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from backlight import registry
from backlight.api import call_of
from backlight.backends.hopper.config import backward_config
from backlight.call import Call
from backlight.config import override

NEEDS = frozenset({"dq", "dk", "dv"})
ROUNDS, LAUNCHES, REPEATS = 9, 5, 10_000
WAYS = ("free", "seven products", "ordered")


@dataclass(frozen=True)
class Job:
    batch: int
    length: int
    width: int
    causal: bool
    heads: int = 16
    kv_heads: int = 16

    def call(self) -> tuple[Call, Tensor]:
        torch.manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, h, self.length, self.width) for h in heads]
        q, k, v, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
        return call_of(q, k, v, causal=self.causal), dy


JOBS = (
    *(Job(2, 8192, width, causal) for width in (64, 128) for causal in (False, True)),
    *(Job(8, 2048, width, causal) for width in (64, 128) for causal in (False, True)),
    Job(1, 16384, 128, True, 16, 2),
)
SMALL = (Job(1, 1024, 128, True, 4, 2), Job(1, 1100, 64, False, 6, 3), Job(1, 1100, 64, True, 6, 6))


def work_of(call: Call, dy: Tensor, way: str) -> tuple[Callable[[], Any], AbstractContextManager[Any]]:
    """A backward, and what has to be around it."""
    backend = registry.get("hopper")
    y, lse, *_ = backend.forward(call, False)
    chosen = replace(call, deterministic=way != "free")
    config = replace(backward_config(chosen), ordered=way == "ordered")
    return lambda: backend.backward(chosen, y, lse, None, dy, None, NEEDS), override("hopper.backward", config)


def milliseconds(works: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]]) -> dict[str, float]:
    """Medians of rounds in turn, the card asleep until the host has launched: a forced configuration is not replayed."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for n in range(ROUNDS + 2):
        for name, (work, around) in works.items():
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with around():
                torch.cuda._sleep(20_000_000)
                first.record()
                for _ in range(LAUNCHES):
                    work()
                last.record()
            last.synchronize()
            if n >= 2:
                times[name].append(first.elapsed_time(last) / LAUNCHES)
    return {name: statistics.median(taken) for name, taken in times.items()}


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return max(((a[name].float() - b[name].float()).norm() / b[name].float().norm()).item() for name in NEEDS)


def measured(job: Job) -> dict[str, Any]:
    call, dy = job.call()
    works, found = {}, {}
    for way in WAYS:
        work, _ = work_of(call, dy, way)
        works[way] = (work, lambda way=way: work_of(call, dy, way)[1])
    for way in WAYS:
        with works[way][1]():
            found[way] = works[way][0]()
    for way in WAYS[1:]:
        assert far(found[way], found["free"]) < 5e-3, f"{job} {way}: {far(found[way], found['free']):.2e} off"
    with works["ordered"][1]():
        again = works["ordered"][0]()
    assert all(torch.equal(again[name], found["ordered"][name]) for name in NEEDS), f"{job}: not the same bits"
    ms = milliseconds(works)
    print(job, {way: f"{taken:.3f} ms, {taken / ms['free']:.3f}" for way, taken in ms.items()}, flush=True)
    return {**asdict(job), "ms": ms}


def repeated(job: Job, repeats: int) -> dict[str, Any]:
    """Runs whose bits differ from the first one's, while other work keeps the card uneven."""
    call, dy = job.call()
    work, around = work_of(call, dy, "ordered")
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    noise = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    side, begin = torch.cuda.Stream(), time.perf_counter()
    with around:
        first = work()
        for n in range(repeats):
            if n % 7 == 0:
                with torch.cuda.stream(side):
                    noise @ noise
            differing += (work()["dq"] != first["dq"]).any()
            if n % 500 == 499 and time.perf_counter() - begin > 60:
                repeats = n + 1
                break
    found = int(differing)
    print(job, f"{found} of {repeats} repeats differ, {time.perf_counter() - begin:.0f} s", flush=True)
    return {**asdict(job), "repeats": repeats, "differing": found}


def compile_kernels(job: Job) -> None:
    """Into the cache on disk, by a process of its own."""
    call, dy = replace(job, batch=1, heads=2 * job.heads // job.kv_heads, kv_heads=2).call()
    for way in WAYS:
        work, around = work_of(call, dy, way)
        with around:
            work()
    torch.cuda.synchronize()


def main(path: str) -> None:
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    begin = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pool.map(compile_kernels, [*JOBS[:4], *SMALL], chunksize=1)
    print(record, f"kernels compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    record["times"] = [measured(job) for job in JOBS]
    record["repeats"] = [repeated(job, REPEATS) for job in SMALL]
    with open(path, "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main(sys.argv[1])
