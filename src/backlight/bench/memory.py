"""How much memory one forward and backward takes beyond its inputs.

On CUDA the allocator's own peak is read in this process. On a CPU a fresh process per contender runs one forward and backward
and reports the growth of its resident memory, so scratch space inside libraries counts too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from backlight.bench.contender import Contender
from backlight.bench.contenders import adapter
from backlight.bench.workload import Workload
from backlight.problems.case import Case


def cuda_peak(contender: Contender) -> int:
    """Peak bytes of one forward and backward beyond what was allocated before; output and gradients included."""
    with contender.scope():
        # whatever a first run loads or builds stays out of the count
        contender.both()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        contender.both()
        torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def cpu_peak(workload: Workload, contender: str, timeout_s: float = 600) -> dict[str, Any]:
    """The same on a CPU, in a process of its own: {"peak_bytes"} or {"error"}."""
    request = json.dumps({"workload": workload.to_json(), "contender": contender, "threads": torch.get_num_threads()})
    command = [sys.executable, "-m", "backlight.bench.memory", request]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return {"error": f"not finished after {timeout_s:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"error": lines[-1] if lines else f"the measuring process ended with {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _high_water() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def _measure_here(request: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(request["threads"])
    workload = Workload.from_json(request["workload"])
    device, chosen = torch.device("cpu"), adapter(request["contender"])
    # libraries and thread pools load on first use; a small call of the same dtype brings them in
    with (small := chosen.build(Workload(Case("small", b=1, sq=64, sk=64, causal=True), workload.dtype).draw(device))).scope():
        small.both()
    contender = chosen.build(workload.draw(device))
    # 5 resets the high-water mark (proc(5)); what the inputs took on the way must not count
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident()
    with contender.scope():
        kept = contender.both()
    return {"peak_bytes": max(0, _high_water() - before), "gradients": len(kept)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_measure_here(json.loads(sys.argv[1]))) + "\n")
