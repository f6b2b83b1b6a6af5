"""How long one phase of one contender takes.

CUDA: device events around each run with the L2 cache flushed before it (`triton.testing.do_bench` where Triton is installed,
the same loop otherwise). Elsewhere: the host clock. Every contender has already run in the gate, so compilation is over.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backlight.bench.contender import Contender

Work = Callable[[], Any]

FLUSH_BYTES = 256 << 20
# do_bench runs a function about eight times whatever it costs; slower ones are timed by hand
SLOW_MS = 30.0
CALLS_PER_SAMPLE = 20


@dataclass(frozen=True)
class Effort:
    """warm_ms and rep_ms: time spent before and while measuring one phase in one round; `least` samples come in any case."""

    warm_ms: float
    rep_ms: float
    least: int = 1


def phase_of(contender: Contender, phase: str) -> Work:
    """The function whose time is the phase: forward without gradients, backward of a kept graph, or one after the other."""
    if phase == "backward":
        return contender.backward_of_kept()
    return {"forward": contender.forward, "both": contender.both}[phase]


def samples(work: Work, device: torch.device, effort: Effort) -> list[float]:
    """Milliseconds of single runs, at least `effort.least` of them."""
    return _cuda_samples(work, effort) if device.type == "cuda" else _host_samples(work, effort)


def timer_name(device: torch.device) -> str:
    if device.type != "cuda":
        return "perf_counter"
    flushed = "CUDA events, L2 flushed"
    return f"{flushed}, triton.testing.do_bench" if importlib.util.find_spec("triton") else flushed


def _host_samples(work: Work, effort: Effort) -> list[float]:
    def once() -> float:
        begin = time.perf_counter()
        work()
        return (time.perf_counter() - begin) * 1e3

    spent = once()
    estimate = spent
    while spent < effort.warm_ms:
        estimate = once()
        spent += estimate
    found = [once() for _ in range(effort.least)]
    while sum(found) + min(estimate, found[-1]) < effort.rep_ms:
        found.append(once())
    return found


def _cuda_samples(work: Work, effort: Effort) -> list[float]:
    estimate = _event_samples(work, 1)[0]
    if estimate < SLOW_MS and importlib.util.find_spec("triton") is not None:
        from triton.testing import do_bench

        return list(do_bench(work, warmup=effort.warm_ms, rep=effort.rep_ms, return_mode="all"))
    for _ in range(int(effort.warm_ms / max(estimate, 1e-3))):
        work()
    return _event_samples(work, max(effort.least, int(effort.rep_ms / max(estimate, 1e-3))))


def _event_samples(work: Work, count: int) -> list[float]:
    cache = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    begins = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    for begin, end in zip(begins, ends, strict=True):
        cache.zero_()
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(begins, ends, strict=True)]


# --- host time of one call ---------------------------------------------------------------------------------------------------


def host_samples(work: Work, device: torch.device, effort: Effort) -> list[float]:
    """Milliseconds the host is busy with one call, from runs of several calls; the device is waited for between the runs."""
    found: list[float] = []
    for _ in range(3):
        work()
    begin_all = time.perf_counter()
    while not found or (time.perf_counter() - begin_all) * 1e3 < effort.rep_ms or len(found) < effort.least:
        _wait(device)
        begin = time.perf_counter()
        for _ in range(CALLS_PER_SAMPLE):
            work()
        found.append((time.perf_counter() - begin) * 1e3 / CALLS_PER_SAMPLE)
    _wait(device)
    return found


def graph_samples(work: Work, effort: Effort) -> list[float]:
    """Milliseconds of one replay of the work captured in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    del kept
    return host_waited(graph.replay, effort)


def host_waited(replay: Work, effort: Effort) -> list[float]:
    found: list[float] = []
    begin_all = time.perf_counter()
    while not found or (time.perf_counter() - begin_all) * 1e3 < effort.rep_ms or len(found) < effort.least:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS_PER_SAMPLE):
            replay()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3 / CALLS_PER_SAMPLE)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# --- statistics --------------------------------------------------------------------------------------------------------------


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the sorted values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Median and 20 / 80 % percentiles of all samples, and the median of each round: the spread from round to round."""
    pooled = [value for taken in rounds for value in taken]
    return {
        "median_ms": statistics.median(pooled),
        "p20_ms": percentile(pooled, 0.2),
        "p80_ms": percentile(pooled, 0.8),
        "n": len(pooled),
        "round_medians_ms": [statistics.median(taken) for taken in rounds],
    }
