"""The shortest look at largest logits, low halves, ordered adds and batch invariance on a card, about 40 seconds:
PYTHONPATH=src python benchmarks/sums_short.py FILE.json

A few cells of `extras.py` and `ordered.py`; every kernel is compiled by a process of its own before anything is measured.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import extras
import ordered
import torch
import triton

ROOT = Path(__file__).parents[1]
COSTS = extras.JOBS[:4]
ORDERED = ordered.JOBS[:4]
SMALL = ordered.SMALL[:1]
LENGTHS = (512, 2048, 8192)
PARTS = ("forward", "forward, max_logit", "forward, exact_delta", "backward", "backward, exact_delta")


def invariance() -> list[str]:
    """Results of a packed sequence that differ with what is drawn beside it; none."""
    sys.path.insert(0, str(ROOT / "tests"))
    from sequences import differing

    return differing(600, 128, 6, torch.bfloat16, "cuda", True, 3000, backend="hopper", causal=True)


def compile_kernels(unit: tuple[str, Any]) -> None:
    kind, what = unit
    if kind == "cost":
        job, part = what
        for each in (job, replace(job, length=2048)):
            call = each.call(1, 2)
            if part.startswith("forward"):
                backend = extras.registry.get("hopper")
                manner = {"max_logit": part.endswith("max_logit"), "exact_delta": part.endswith("exact_delta")}
                backend.forward(replace(call, **manner), manner["exact_delta"])
            else:
                each.works(call)[part]()
    elif kind == "ordered":
        job, way = what
        call, dy = replace(job, batch=1, heads=2 * job.heads // job.kv_heads, kv_heads=2).call()
        work, around = ordered.work_of(call, dy, way)
        with around:
            work()
    elif kind == "errors":
        extras.ours(*what)(*extras.qk_norm(512))
    else:
        invariance()
    torch.cuda.synchronize()


def main(path: str) -> None:
    begin = time.perf_counter()
    units: list[tuple[str, Any]] = [("invariance", None)]
    units += [("ordered", (job, way)) for job in (*ORDERED, *SMALL) for way in ("ordered", "seven products")]
    units += [("cost", (job, part)) for job in COSTS for part in PARTS]
    units += [("errors", way) for way in extras.WAYS]
    with multiprocessing.get_context("spawn").Pool(16) as pool:
        pool.map(compile_kernels, units, chunksize=1)
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    print(record, f"kernels compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    extras.ROUNDS = ordered.ROUNDS = 5
    extras.LENGTHS = LENGTHS
    record["cost"] = [job.cost() for job in COSTS]
    record["ordered"] = [ordered.measured(job) for job in ORDERED]
    record["repeats"] = [ordered.repeated(job, 3000) for job in SMALL]
    record["differing"] = invariance()
    print("batch invariance, what differs:", record["differing"], flush=True)
    record["errors"] = extras.errors()
    with open(path, "w") as file:
        json.dump(record, file)
    print(f"{time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
