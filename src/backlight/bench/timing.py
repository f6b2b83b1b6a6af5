"""How long one phase of one contender takes.

CUDA: device events around each run with the L2 cache flushed before it, the loop of `triton.testing.do_bench`, with the time a
window takes bounded whatever a run costs. Elsewhere: the host clock. Every contender has already run in the gate, so
compilation is over.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backlight.bench.contender import Contender

Work = Callable[[], Any]

FLUSH_BYTES = 256 << 20
FAST_MS = 5.0
CALLS_PER_SAMPLE = 20
# longer work is measured once: its noise is nothing beside its length
SLOW_MS = 1000.0


@dataclass(frozen=True)
class Effort:
    """warm_ms and rep_ms: time spent before and while measuring one phase in one round; `least` samples come in any case.

    A window must be warm before it counts: a card runs above its sustained clocks until its power limit reacts.
    """

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
    return "CUDA events, L2 flushed"


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
    # a first run may build things (a library's plan, a compiled inference graph): it is no sample and no estimate
    work()
    torch.cuda.synchronize()
    wall_ms = _wall_ms(work)
    if wall_ms > SLOW_MS:
        return [wall_ms]
    warm, counted = int(effort.warm_ms / wall_ms), max(effort.least, int(effort.rep_ms / wall_ms))
    # one batch: a pause between warming and measuring would let the clocks rise again
    return _event_samples(work, warm + counted)[warm:]


def _wall_ms(work: Work) -> float:
    """Wall time of one run with its flush: one run of slow work, the mean of a few of fast work."""
    each = 0.0
    for count in (1, 5):
        begin = time.perf_counter()
        _event_samples(work, count)
        each = (time.perf_counter() - begin) * 1e3 / count
        if each > FAST_MS:
            break
    return max(each, 1e-2)


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
    return host_waited(captured(work)[0].replay, effort)


def captured(work: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A CUDA graph of the work, warmed up before, and what the work returned, which every replay writes anew."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    return graph, kept


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


def slow(rounds: list[list[float]]) -> bool:
    """Whether one round has said enough."""
    return bool(rounds) and statistics.median(rounds[-1]) > SLOW_MS


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
