"""How long the masks of `backlight.mask` take to make on a GPU, 16384 positions each.

    PYTHONPATH=src python benchmarks/build_masks.py --out docs/data/mask-building-h200.json

device_ms: a replay of a CUDA graph of one call, the device's own time. clock_ms: the host's clock around a call and a wait for
the device, median. Every mask of a graph is compared with one made outside, and none may make the host wait.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from backlight import mask
from backlight.bench.machine import machine
from backlight.bench.timing import captured
from backlight.mask import Mask

S, CALLS = 16384, 50
KEPT = ("date", "card", "driver", "torch", "triton", "commit")


def constructors() -> dict[str, Callable[[], Mask]]:
    on = {"device": "cuda"}
    ids = torch.arange(S, **on) // 1638
    lengths = torch.tensor([248, 2816, 1500, 1700, 1800, 1900, 1620, 1600, 1600, 1600], **on)
    starts = torch.arange(0, S, 1024, **on)
    prefix = torch.tensor([4096], **on)
    gone = torch.arange(S, **on) + 1024
    rollouts = torch.arange(-1, S - 1, **on)
    rollouts[4096::1024] = 4095
    return {
        "documents(ids, causal=True)": lambda: mask.documents(ids, causal=True),
        "documents(lengths=, causal=True)": lambda: mask.documents(lengths=lengths, length=S, causal=True),
        "prefix": lambda: mask.prefix(prefix, S),
        "spans": lambda: mask.spans(starts, starts + 256, S),
        "blocks": lambda: mask.blocks(512, S, device="cuda"),
        "chunks": lambda: mask.chunks(512, S, device="cuda"),
        "evict": lambda: mask.evict(gone),
        "global_first": lambda: mask.global_first(4, 1024, S, device="cuda"),
        "rows": lambda: mask.rows(gone, gone),
        "tree(preorder=True)": lambda: mask.tree(rollouts, preorder=True),
        "tree": lambda: mask.tree(rollouts),
    }


def clock_ms(make: Callable[[], Mask]) -> float:
    found = []
    for _ in range(CALLS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        make()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def device_ms(make: Callable[[], Mask]) -> float:
    graph, kept = captured(make)
    graph.replay()
    assert torch.equal(kept.rows, make().rows)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    for _ in range(CALLS):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / CALLS


def check_no_wait(make: Callable[[], Mask]) -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        make()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path)
    asked = options.parse_args()
    found = machine(torch.device("cuda"))
    rows = {}
    for name, make in constructors().items():
        make()
        check_no_wait(make)
        rows[name] = {"device_ms": round(device_ms(make), 4), "clock_ms": round(clock_ms(make), 4)}
        print(f"{name:34} {rows[name]}", flush=True)
    if asked.out:
        record = {"machine": {key: found[key] for key in KEPT if key in found}, "positions": S, "rows": rows}
        asked.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
