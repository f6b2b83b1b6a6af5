"""Where a run took place: the machine line, and the two ceilings that speeds are read against."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backlight import info
from backlight.bench.timing import Effort, percentile, samples

SMI_FIELDS = {
    "card": "name",
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_cap_w": "power.limit",
    "power_draw_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
COMMIT_VARIABLE = "BACKLIGHT_COMMIT"
UNDER_LOAD = ("sm_clock_mhz", "power_draw_w", "temperature_c")
MATMUL_SIZE = {"cuda": 8192, "cpu": 2048}
COPY_BYTES = {"cuda": 4 << 30, "cpu": 256 << 20}
SMALL = 2
PATIENCE_MS = 100


def machine(device: torch.device) -> dict[str, Any]:
    """Card, clocks, driver, versions, processor, date and commit; nothing that names a person, a host or a path."""
    found: dict[str, Any] = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "device": device.type}
    found |= info.versions()
    found |= {"cpu": info.cpu_model(), "cpu_threads": torch.get_num_threads(), "commit": commit()}
    found["cpu_kernels"] = torch.backends.cpu.get_cpu_capability()
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "card": properties.name,
            "sm": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "ptxas": ptxas(),
        }
        found |= nvidia_smi(device)
    return found


def device_name(device: torch.device) -> str:
    """A folder name for results of this device: `nvidia-h200`, `cpu-...`."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {info.cpu_model()}"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def machine_line(found: dict[str, Any]) -> str:
    """One line for tables and pictures."""
    versions = f"torch {found['torch']}, triton {found['triton']}"
    if found["device"] == "cuda":
        clock, cap = found.get("sm_clock_mhz", "?"), found.get("power_cap_w", "?")
        parts = [f"{found['card']} (SM {clock} MHz, cap {cap} W)", f"driver {found.get('driver', '?')}", versions]
        parts += [f"cuDNN {found.get('cudnn')}", f"ptxas {found.get('ptxas')}"]
    else:
        parts = [f"{found['cpu']}, {found['cpu_threads']} threads, {found['cpu_kernels']} kernels", versions]
    return "; ".join([*parts, found["date"][:10], f"commit {found['commit'] or 'unknown'}"])


def nvidia_smi(device: torch.device, fields: Sequence[str] = tuple(SMI_FIELDS)) -> dict[str, str]:
    """What the driver's own tool says now; empty where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(SMI_FIELDS[name] for name in fields)}"
    index = str(device.index or 0)
    line = _output(["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", index])
    values = [value.strip() for value in line.split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


class Watch:
    """Clock, power and temperature of a card while it works, asked for from a thread that does not hold up the work."""

    def __init__(self, device: torch.device):
        self.found: dict[str, str] = {}
        self._thread = threading.Thread(target=lambda: self.found.update(nvidia_smi(device, UNDER_LOAD)), daemon=True)
        self._thread.start()

    def read(self) -> dict[str, str]:
        self._thread.join()
        return self.found


def ptxas() -> str | None:
    """Version of the assembler that Triton uses, or of the one on the path."""
    program = None
    if importlib.util.find_spec("triton") is not None:
        from backlight._private.triton import assembler

        program = assembler()
    program = program or shutil.which("ptxas")
    found = re.search(r"V(\d+[\d.]+)", _output([program, "--version"])) if program else None
    return found.group(1) if found else None


def commit() -> str | None:
    """What BACKLIGHT_COMMIT says, else the commit of the checkout this package lies in, `+` when files differ from it.

    None outside a checkout. The variable is for copies of a checkout that were taken without its history.
    """
    if named := os.environ.get(COMMIT_VARIABLE, "").strip():
        return named
    here = Path(__file__).resolve()
    root = next((folder for folder in here.parents if (folder / ".git").exists()), None)
    if root is None or shutil.which("git") is None or not here.is_relative_to(root / "src"):
        return None
    name = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]).strip()
    if not name:
        return None
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--", "src"]).strip()
    return f"{name}{'+' if changed else ''}"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


# --- ceilings ----------------------------------------------------------------------------------------------------------------


def ceilings(device: torch.device, dtypes: tuple[torch.dtype, ...], small: bool = False) -> dict[str, Any]:
    """Measured matmul rate for each dtype (TFLOP/s) and copy bandwidth (TB/s, bytes read and written), random data."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    largest, copied = MATMUL_SIZE[kind] // (SMALL if small else 1), COPY_BYTES[kind] // (SMALL if small else 1)
    effort = Effort(50, 200, least=3) if kind == "cuda" else Effort(20, 100 if small else 300, least=3)
    # a shared processor is only ever slowed down, so its ceiling is the best run; a GPU's is what it sustains
    share = 0.5 if kind == "cuda" else 0.0
    found: dict[str, Any] = {"matmul_size": {}, "matmul_tflops": {}, "copy_bytes": copied}
    for dtype in dtypes:
        size = _bearable(device, dtype, largest)
        found["matmul_size"][_name(dtype)] = size
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        out = torch.empty_like(a)
        taken = percentile(samples(partial(torch.mm, a, b, out=out), device, effort), share)
        found["matmul_tflops"][_name(dtype)] = 2 * size**3 / taken / 1e9
    source = torch.randn(copied // 8, device=device, dtype=torch.float32)
    target = torch.empty_like(source)
    taken = percentile(samples(lambda: target.copy_(source), device, effort), share)
    found["copy_tb_s"] = 2 * source.nbytes / taken / 1e9
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _bearable(device: torch.device, dtype: torch.dtype, largest: int) -> int:
    """The largest power of two up to `largest` whose matmul takes seconds at most: some CPUs have no fast bf16."""
    size = min(256, largest)
    while device.type == "cpu" and size < largest:
        a = torch.randn(size, size, device=device, dtype=dtype)
        if percentile(samples(partial(torch.mm, a, a), device, Effort(0, 0, least=2)), 0.0) > PATIENCE_MS:
            return size
        size *= 2
    return largest


def stamp() -> str:
    """Date and time for a file name, UTC."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime())
