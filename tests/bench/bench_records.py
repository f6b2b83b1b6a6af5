"""Records made by hand: what tables, pictures and comparisons are tested with."""

from __future__ import annotations

from typing import Any

from backlight.bench.results import SCHEMA, describe, rates
from backlight.bench.workload import Workload
from backlight.problems.case import BF16, Case

MACHINE = {
    "date": "2026-11-15T10:00:00+00:00",
    "device": "cuda",
    "card": "Test card",
    "sm_clock_mhz": "1980",
    "power_cap_w": "700",
    "driver": "1.2",
    "torch": "2.13.0",
    "triton": "3.6.0",
    "cudnn": 91900,
    "ptxas": "12.9",
    "cpu": "Test processor",
    "cpu_threads": 2,
    "cpu_kernels": "AVX512",
    "commit": "abc",
}


def times(median: float, spread: float = 0.01) -> dict[str, Any]:
    low, high = median * (1 - spread), median * (1 + spread)
    return {"median_ms": median, "p20_ms": low, "p80_ms": high, "n": 9, "round_medians_ms": [low, median, high]}


def workloads() -> list[Workload]:
    plain = [
        Case(f"plain,d={d},s={s}", b=4096 // s, hq=2048 // d, hkv=2048 // d, sq=s, sk=s, d=d, causal=True)
        for d in (64, 128)
        for s in (512, 1024, 2048)
    ]
    return [Workload(case, BF16) for case in plain]


def timed_row(workload: Workload, name: str, scale: float = 1.0, **extra: Any) -> dict[str, Any]:
    flops = workload.flops()
    found = {phase: times(scale * flops[phase] / 400e9) for phase in flops}
    peak = {"peak_bytes": 5 * workload.input_bytes(), "relative": 5.0, "method": "allocator peak"}
    row = {"case": workload.id, "contender": name, "status": "ok", "path": "autograd", "times": found, "memory": peak}
    return row | {"tflops": rates(found, flops)} | extra


def record(scale: float = 1.0) -> dict[str, Any]:
    """Ours (`scale` times its usual time), a faster bare operator, a wrong peer, a refusing one and a failing one."""
    loads = workloads()
    rows = []
    for workload in loads:
        rows += [
            timed_row(workload, "backlight", scale),
            timed_row(workload, "fa3-bare", 0.8, path="bare op"),
            {
                "case": workload.id,
                "contender": "sdpa-flash",
                "status": "wrong",
                "reason": "dq: error 50 times that of eager PyTorch",
            },
            {"case": workload.id, "contender": "sdpa-cudnn", "status": "failed", "reason": "RuntimeError: no engine"},
            {"case": workload.id, "contender": "adasplash", "status": "refused", "reason": "adasplash is not installed"},
        ]
    parts = [
        {"name": "_bwd_dkdv_kernel", "time_ms": 2.0, "calls": 1, "share": 0.8, "tflops": 300.0, "of_ceiling": 0.4},
        {"name": "3 smaller", "time_ms": 0.5, "calls": 3, "share": 0.2, "tflops": None, "of_ceiling": None},
    ]
    profiled = {"time_ms": 2.5, "tflops": 250.0, "of_ceiling": 0.3, "parts": parts}
    kernel = {"kernel": "_bwd_dkdv_kernel", "registers": 168, "spills": 0, "shared_bytes": 98304, "warps": 8, "stages": 2}
    return {
        "schema": SCHEMA,
        "suite": "plain",
        "kind": "speed",
        "status": "complete",
        "machine": dict(MACHINE),
        "ceilings": {
            "matmul_tflops": {"bfloat16": 790.0},
            "matmul_size": {"bfloat16": 8192},
            "copy_tb_s": 4.3,
            "copy_bytes": 1 << 30,
        },
        "settings": {"contenders": ["backlight", "fa3-bare", "sdpa-flash", "sdpa-cudnn", "adasplash"], "rounds": 3},
        "cases": [describe(workload) for workload in loads],
        "rows": rows,
        "profiles": [
            {
                "case": loads[0].id,
                "contender": "backlight",
                "detail": "triton",
                "phases": {"backward": profiled},
                "compiled": [kernel],
            }
        ],
    }


def variants_record() -> dict[str, Any]:
    """Ours and a peer on plain and on a variant that takes 1.2 times as long in ours and 3 times in the peer."""
    data = record()
    plain = Workload(Case("causal", b=4, hq=16, hkv=16, sq=1024, sk=1024, d=64, causal=True), BF16)
    sink = Workload(Case("sink", b=4, hq=16, hkv=16, sq=1024, sk=1024, d=64, causal=True, sink=True), BF16)
    rows = [timed_row(plain, "backlight"), timed_row(plain, "flex", 2.0), timed_row(sink, "backlight", 1.2 * 1.5)]
    # the card ran slower while the variant was raced, and our plain beside it as well
    rows[-1]["plain_times"] = timed_row(plain, "backlight", 1.5)["times"]
    rows.append(timed_row(sink, "flex", 6.0))
    data |= {
        "suite": "variants",
        "cases": [describe(plain), describe(sink) | {"plain": plain.id}],
        "rows": rows,
        "profiles": [],
    }
    data["settings"] = {"contenders": ["backlight", "flex"], "rounds": 3}
    return data
