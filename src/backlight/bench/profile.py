"""One call taken apart: kernels on CUDA, operators on a CPU, with time, share and rate; and what the compiler made of our own.

A rate needs to know how many operations a kernel does. The profiler counts them for torch's matmuls; for attention kernels the
name says which of the matmuls of math.md section 8 run inside (`_fwd_kernel` two, `_dkdv_kernel` four, and so on).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from backlight.bench import machine
from backlight.bench.contender import Adapter, Contender
from backlight.bench.gate import WRONG, Gate
from backlight.bench.results import Results
from backlight.bench.timing import Work, phase_of
from backlight.bench.workload import Tensors, Workload
from backlight.problems.case import DTYPE_NAMES

PHASES = ("forward", "backward")
MATMULS = {"_fwd_kernel": 2, "_dq_kernel": 3, "_dkdv_kernel": 4, "_bwd_kernel": 5, "_bwd_narrow_kernel": 5}
REPEATS = 5
# smaller parts are summed under one name
LEAST_SHARE = 0.01
REASON_LENGTH = 300
LONG_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


def run(workload: Workload, adapters: Sequence[Adapter], device: torch.device, path: Path) -> dict[str, Any]:
    """Judge and profile every adapter on one workload; returns the record written at `path`."""
    results = Results(
        path,
        "profile",
        "profile",
        machine=machine.machine(device),
        ceilings=machine.ceilings(device, (workload.dtype,), small=device.type == "cpu"),
        settings={"contenders": [adapter.name for adapter in adapters]},
    )
    results.add_case(workload)
    tensors = workload.draw(device)
    gate = Gate(tensors)
    for adapter in adapters:
        row = results.row(workload, adapter.name)
        reason = adapter.refuse(workload, device)
        if reason is not None:
            row |= {"status": "refused", "reason": reason}
            continue
        try:
            _examine(workload, adapter, tensors, gate, results, device)
        except Exception as error:
            row |= {"status": "failed", "reason": " ".join(f"{type(error).__name__}: {error}".split())[:REASON_LENGTH]}
        results.save()
    results.finish("complete")
    return results.data


def _examine(
    workload: Workload, adapter: Adapter, tensors: Tensors, gate: Gate, results: Results, device: torch.device
) -> None:
    row = results.row(workload, adapter.name)
    contender = adapter.build(tensors)
    row |= {"path": contender.path, "detail": contender.detail}
    with contender.scope():
        verdict = gate.judge(contender.results(), contender.precision, bool(contender.forward_only))
    row |= {"status": verdict.status, "gate": verdict.to_json()}
    if verdict.status == WRONG:
        row["reason"] = "; ".join(verdict.reasons)
        return
    found = profile(workload, contender, device, results.data["ceilings"])
    if not all(phase["parts"] for phase in found["phases"].values()):
        raise RuntimeError("the profiler recorded no kernels: CUPTI does not work here")
    results.data["profiles"].append(found)


def profile(workload: Workload, contender: Contender, device: torch.device, ceilings: dict[str, Any]) -> dict[str, Any]:
    """The profile of a contender, as recorded: parts of each phase, largest first, and compiled kernels' metadata."""
    ceiling = ceilings["matmul_tflops"].get(LONG_NAMES[DTYPE_NAMES[workload.dtype]])
    phases: dict[str, Any] = {}
    with contender.scope():
        for phase in (phase for phase in PHASES if phase in contender.phases):
            parts = measure(phase_of(contender, phase), device, workload)
            total = sum(part["time_ms"] for part in parts)
            rate = workload.flops()[phase] / total / 1e9 if total else 0.0
            phases[phase] = {"time_ms": total, "tflops": rate, "parts": parts}
            for found in (phases[phase], *parts):
                found["of_ceiling"] = found["tflops"] / ceiling if ceiling and found["tflops"] is not None else None
    return {
        "case": workload.id,
        "contender": contender.name,
        "detail": contender.detail,
        "phases": phases,
        "compiled": list(compiled_kernels(sys.modules)) if contender.name.startswith("backlight") else [],
    }


def measure(work: Work, device: torch.device, workload: Workload) -> list[dict[str, Any]]:
    """Parts of one run of `work`, mean of a few, largest first."""
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    work()
    if on_gpu:
        torch.cuda.synchronize()
    with torch_profile(activities=activities, with_flops=True) as recorded:
        for _ in range(REPEATS):
            work()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    parts = []
    for event in recorded.key_averages():
        micros = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        if event.device_type == wanted and micros > 0 and not event.key.startswith("ProfilerStep"):
            once = (micros / 1e3 / REPEATS, event.count / REPEATS, (event.flops or 0) / REPEATS)
            parts.append(_part(event.key, *once, workload))
    return gathered(parts)


def _part(name: str, time_ms: float, count: float, counted: float, workload: Workload) -> dict[str, Any]:
    matmuls = next((number for kernel, number in MATMULS.items() if kernel in name), None)
    flops = counted if matmuls is None else matmuls * workload.pairs * (workload.case.d + workload.dv)
    return {"name": name, "time_ms": time_ms, "calls": count, "tflops": flops / time_ms / 1e9 if flops else None}


def gathered(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Largest first with shares; everything below a hundredth under one name."""
    total = sum(part["time_ms"] for part in parts) or 1.0
    ordered = sorted(parts, key=lambda part: -part["time_ms"])
    large = [part | {"share": part["time_ms"] / total} for part in ordered if part["time_ms"] / total >= LEAST_SHARE]
    small = [part for part in ordered if part["time_ms"] / total < LEAST_SHARE]
    if small:
        rest = {key: sum(part[key] for part in small) for key in ("time_ms", "calls")}
        large.append({"name": f"{len(small)} smaller", **rest, "tflops": None, "share": rest["time_ms"] / total})
    return large


# --- what the compiler made --------------------------------------------------------------------------------------------------


def compiled_kernels(modules: dict[str, ModuleType]) -> Iterator[dict[str, Any]]:
    """Registers, shared memory and spills of every kernel that our backends compiled so far in this process."""
    seen: set[int] = set()
    for name, module in sorted(modules.items()):
        if not name.startswith("backlight.backends."):
            continue
        for found in vars(module).values():
            caches = getattr(found, "device_caches", None)
            if isinstance(caches, dict) and id(found) not in seen:
                seen.add(id(found))
                yield from _variants(getattr(found, "__name__", "kernel"), caches.values())


def _variants(name: str, caches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for cache in caches:
        compiled = cache[0] if isinstance(cache, tuple) else cache
        for kernel in compiled.values() if isinstance(compiled, dict) else ():
            metadata = getattr(kernel, "metadata", None)
            yield {
                "kernel": name,
                "registers": getattr(kernel, "n_regs", None),
                "spills": getattr(kernel, "n_spills", None),
                "shared_bytes": getattr(metadata, "shared", None),
                "warps": getattr(metadata, "num_warps", None),
                "stages": getattr(metadata, "num_stages", None),
            }
