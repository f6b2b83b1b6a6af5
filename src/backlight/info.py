"""What this machine has: versions, devices, and which backends can run on it."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from backlight import __version__, registry, slot
from backlight._private import torch as private_torch

NOT_INSTALLED = "not installed"


def version_of(*distributions: str) -> str:
    """Version of the first of these distributions that is installed, read without importing it."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return NOT_INSTALLED


def versions() -> dict[str, str]:
    """Versions that change results or speed."""
    return {
        "backlight": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-windows"),
        "platform": f"{platform.system()} {platform.machine()}",
    }


def cpu_model() -> str:
    """The processor's name as the system knows it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    if shutil.which("lscpu"):
        lines += subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name"))
    return next((name for name in named if name and name != "-"), platform.processor() or platform.machine())


def devices() -> Iterator[tuple[str, str]]:
    """(device, description) for the processor and every accelerator torch can see."""
    yield "cpu", f"{cpu_model()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()} kernels"
    yield "cpu threads", str(torch.get_num_threads())
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        kind = f"sm_{found.major}{found.minor}" if torch.version.cuda else getattr(found, "gcnArchName", "HIP")
        yield f"cuda:{index}", f"{found.name}, {kind}, {found.total_memory / 2**30:.0f} GiB"
        tiles: Any = registry.get("triton")
        yield f"cuda:{index} triton", tiles.table_in_use(torch.device("cuda", index))
        hopper: Any = registry.get("hopper")
        if (found.major, found.minor) == (9, 0) and not hopper.available():
            yield f"cuda:{index} hopper", hopper.code_in_use()
    if torch.backends.mps.is_available():
        yield "mps", "Apple Metal"


def slower() -> dict[str, str]:
    """Names that torch or Triton no longer has, and what is slower here without them."""
    gpu = torch.cuda.is_available()
    private_torch.compiler_settings()
    found = private_torch.NAMES.slower(gpu)
    if importlib.util.find_spec("triton") is not None:
        from backlight._private import triton as private_triton

        found |= private_triton.slower(gpu)
    return found


def show(console: Console) -> None:
    """Print versions, devices, backends, and what is slower than it could be."""
    machine = Table(title="This machine", title_justify="left", show_header=False)
    machine.add_column(style="bold")
    machine.add_column()
    for name, value in versions().items():
        machine.add_row(name, value)
    machine.add_section()
    for name, value in devices():
        machine.add_row(name, value)
    if not torch.cuda.is_available():
        machine.add_row("cuda", "no device, or a torch built without CUDA", style="dim")
    machine.add_section()
    machine.add_row("sdpa", slot.state())
    console.print(machine)

    backends = Table(title="Backends, in the order they are tried", title_justify="left")
    for heading in ("backend", "what it is", "here"):
        backends.add_column(heading)
    for name in registry.names():
        backend = registry.get(name)
        reasons = backend.available()
        here = "[green]available[/]" if not reasons else "[yellow]" + "\n".join(reasons) + "[/]"
        backends.add_row(name, backend.summary, here)
    console.print(backends)

    if missing := slower():
        table = Table(title="Slower here: names that these versions of torch and Triton lack", title_justify="left")
        for heading in ("name", "without it"):
            table.add_column(heading, overflow="fold")
        for name, without in missing.items():
            table.add_row(name, without)
        console.print(table)
