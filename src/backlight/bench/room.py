"""How much memory there is, and whether dense scores fit into it."""

from __future__ import annotations

from pathlib import Path

import torch

from backlight.bench.workload import Workload

DENSE_SHARE = {"cuda": 0.5, "cpu": 0.4}
UNKNOWN_MEMORY = 8 << 30


def available_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    found = (int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return next(found, UNKNOWN_MEMORY)


def dense_refusal(workload: Workload, device: torch.device, copies: int) -> str | None:
    """The reason against a contender that keeps `copies` fp32 matrices of the scores, or None when they fit."""
    largest = workload.batch * max((sq * sk for sq, sk in workload.lengths), default=0)
    needed = copies * 4 * workload.case.hq * largest
    allowed = DENSE_SHARE.get(device.type, 0.4) * available_bytes(device)
    if needed <= allowed:
        return None
    return f"its S x S matrices would take {needed / 2**30:.0f} GiB of the {allowed / 2**30:.0f} GiB it is allowed here"
