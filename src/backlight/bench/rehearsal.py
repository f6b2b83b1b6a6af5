"""How long a call would take, estimated from a short version of it, so that one hopeless contender does not stop a run.

Needed on processors: a dtype without hardware support can be a thousand times slower than another (bf16 matmuls without bf16
instructions), and a call that has begun cannot be called off.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from backlight.bench.contender import Adapter
from backlight.bench.workload import Workload

ROWS = 256
# calls with fewer operations are over soon on anything
SMALL_FLOPS = 2e8


def expected_seconds(adapter: Adapter, workload: Workload, device: torch.device) -> float:
    """Forward and backward of the whole workload at the pace of a short one; 0 where nothing needs to be asked."""
    flops = workload.flops()["both"]
    if device.type != "cpu" or flops < SMALL_FLOPS:
        return 0.0
    rows, keys = min(ROWS, workload.sq), min(ROWS, workload.sk)
    short = Workload(replace(workload.case, b=1, lengths_q=None, lengths_k=None, sq=rows, sk=keys), workload.dtype)
    contender = adapter.build(short.draw(device))
    taken = []
    with contender.scope():
        for _ in range(2):
            begin = time.perf_counter()
            contender.both()
            taken.append(time.perf_counter() - begin)
            if taken[0] > 1:
                break
    return min(taken) * flops / short.flops()["both"]


def too_slow(adapter: Adapter, workload: Workload, device: torch.device, limit_s: float) -> str | None:
    """The reason not to begin, or None."""
    seconds = expected_seconds(adapter, workload, device)
    if seconds <= limit_s:
        return None
    return f"one forward and backward would take about {seconds:.0f} s here, judging by a short one (limit {limit_s:.0f} s)"
