"""Time tile configurations of the Triton kernels on this GPU and write the best ones as the shipped table.

    PYTHONPATH=src python benchmarks/tune_triton.py --out src/backlight/data/tuning

Every candidate is compiled first, in parallel processes that fill Triton's cache, then timed alone. A candidate that does not
compile (shared memory, registers) is a row with its reason. Each timed configuration is compared with the first one's result.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

from backlight.backends.triton.config import KernelConfig, kernels_of
from backlight.backends.triton.dbias import dbias_of
from backlight.backends.triton.delta import RowState, prepare_rows
from backlight.backends.triton.device import device_of
from backlight.backends.triton.dkdv import launch_keys
from backlight.backends.triton.dq import dq_of
from backlight.backends.triton.elastic import elastic_of
from backlight.backends.triton.forward import forward, softmax_of
from backlight.backends.triton.launch import Launch
from backlight.call import Call
from backlight.config import override
from backlight.spec import LN2, AttentionSpec

# block_m, block_n, warps, stages, TMA, direct; a list of its own for a variant that behaves otherwise
CANDIDATES = {
    "forward/64": "64,128,4,3,1 64,128,4,2,1 64,64,4,2,1",
    "forward/64/full": "64,128,4,3,1 64,128,4,2,1 128,64,8,3,0",
    "forward/64/softcap": "64,64,4,3,1 128,64,8,3,1 64,128,4,2,1",
    "forward/64/window": "64,64,4,2,1 64,64,4,3,1",
    "forward/128": "64,64,4,3,1 64,64,4,2,1",
    "forward/128/softcap": "64,64,4,3,1 64,64,4,2,1",
    "forward/256": "128,64,8,2,1 128,64,8,2,0",
    "lse/64": "64,64,4,3,1 64,64,4,2,1 64,128,4,3,1",
    "lse/128": "64,128,4,3,1 64,64,4,3,1",
    "lse/256": "128,64,8,2,1 64,64,4,2,1",
    "elastic/64": "64,64,4,3,1 64,64,4,2,1",
    "elastic/128": "64,64,4,3,1 64,64,4,2,1",
    "elastic/256": "64,64,8,2,0 64,64,8,2,1",
    "dq/64": "64,128,4,3,1 64,64,4,3,1",
    "dq/64/softcap": "64,64,4,2,1 64,64,4,3,1 128,64,8,3,1 128,64,8,2,1",
    "dq/64/window": "64,64,4,2,1 64,64,4,3,1",
    "dq/128": "128,64,8,3,1 64,64,4,2,1",
    "dq/256": "128,64,8,1,1 128,32,8,2,1",
    "dkdv/64": "128,64,4,2,1 64,64,4,3,1,1",
    "dkdv/64/lazy": "64,64,4,3,1,1 64,64,4,2,1,1",
    "dkdv/64/softcap": "64,64,4,3,1,1 32,64,4,3,1,1",
    "dkdv/128": "64,128,8,3,1,1 32,64,4,3,1,1",
    "dk/256": "32,128,8,2,0 32,128,8,2,1 32,128,8,2,1,1",
    "dv/256": "64,128,8,2,1 64,128,8,2,1,1",
    "dbias/64": "64,64,4,2,1 64,64,4,3,0",
    "dbias/128": "64,64,4,3,1 64,128,8,2,1",
    "dbias/256": "64,64,8,1,0 64,64,8,1,1",
}
LATE = "out of time"
TURNS = 3
VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "bias": {"causal": True, "bias": True},
    "lazy": {"causal": True, "bias": True, "tau": True},
    "softcap": {"causal": True, "softcap": 20.0},
    "window": {"causal": True, "window": (1023, 0)},
}


def length_of(variant: str) -> int:
    return 16384 if variant == "window" else 8192


def make(d: int, variant: str, s: int, tokens: int = 32768, width: int = 2048, empty: bool = False) -> tuple[Call, RowState]:
    """A call and what its backward knows per row; empty: of the right shapes only."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    heads = width // d
    shape = (tokens // s, heads, s, d)
    spec = AttentionSpec(**VARIANTS[variant])
    q, k, v, dy = (normal(*shape) for _ in range(4))
    bias = torch.randn(heads, 512, device="cuda") if spec.bias else None
    tau = torch.full((heads,), -1.0, device="cuda") if spec.tau else None
    call = Call(spec, q, k, v, bias=bias, tau=tau)
    if empty:
        return call, RowState(dy, *torch.zeros(3, *shape[:3], device="cuda"))
    y, lse, u, _ = forward(call, save_u=True)
    return call, prepare_rows(Launch(call), y, lse, u, dy, None, {})


def run(kernel: str, call: Call, rows: RowState) -> tuple[torch.Tensor, ...]:
    if kernel in ("forward", "lse"):
        y, lse = torch.empty_like(call.q), torch.empty_like(call.q[..., 0], dtype=torch.float32)
        softmax_of(Launch(call), y, lse)
        return (lse if kernel == "lse" else y,)
    if kernel == "elastic":
        y, u = torch.empty_like(call.q), torch.empty_like(call.q)
        elastic_of(Launch(call), rows.minus_lse2[..., : call.q.shape[2]].contiguous() * -LN2, y, u)
        return y, u
    if kernel == "dq":
        return (dq_of(Launch(call), rows),)
    if kernel == "dbias":
        return (dbias_of(Launch(call), rows),)
    dk, dv = torch.empty_like(call.k), torch.empty_like(call.v)
    launch_keys(kernel, Launch(call), rows, dk, dv)
    return tuple(x for name, x in (("dk", dk), ("dv", dv)) if name in kernel)


def jobs_of(d: int, variant: str, places: str = "*") -> list[tuple[int, str, str, str]]:
    """(d, variant, kernel, configuration) of every candidate; places: patterns of kernel/d/variant, with commas."""
    spec = AttentionSpec(**VARIANTS[variant])
    q = torch.empty(1, 1, 1, d, dtype=torch.bfloat16, device="meta")
    call = Call(spec, q, q, q, bias=q[0, 0] if spec.bias else None, tau=q[0, 0, 0, :1] if spec.tau else None)
    return [
        (d, variant, kernel, text)
        for kernel in kernels_of(call)
        if any(fnmatch(f"{kernel}/{d}/{variant}", pattern) for pattern in places.split(","))
        for text in (CANDIDATES.get(f"{kernel}/{d}/{variant}") or CANDIDATES[f"{kernel}/{d}"]).split()
    ]


def parse(text: str) -> KernelConfig:
    return KernelConfig(*map(int, text.split(",")))


def compile_one(job: tuple[int, str, str, str, float]) -> str:
    d, variant, kernel, text, deadline = job
    if time.time() > deadline:
        return LATE
    try:
        call, rows = make(d, variant, s=512, tokens=512, empty=True)
        with override(f"triton.{kernel}", parse(text)):
            run(kernel, call, rows)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def time_rivals(call: Call, rows: RowState, kernel: str, rivals: list[tuple[str, str]], deadline: float) -> list[dict]:
    """A row for each (configuration, reason why it did not compile); results are compared with the first one's.

    Rivals take turns: a hot card slows down, and would punish whoever comes last.
    """
    found = [{"kernel": kernel, "config": text, "ms": None, "reason": reason} for text, reason in rivals]
    first, rounds = None, {}
    for turn in range(TURNS):
        for row in found:
            if row["reason"]:
                continue
            if time.time() > deadline:
                row["reason"] = LATE
                continue
            with override(f"triton.{kernel}", parse(row["config"])):
                if turn == 0:
                    result = run(kernel, call, rows)
                    first = first or result
                    pairs = [(a.float(), b.float()) for a, b in zip(result, first, strict=True)]
                    worst = max(((a - b).norm() / b.norm()).item() for a, b in pairs)
                    if not worst <= 2e-2:
                        row["reason"] = f"differs from the first candidate by {worst:.1e}"
                        continue
                ms = do_bench(lambda: run(kernel, call, rows), warmup=3, rep=12, return_mode="median")
                rounds.setdefault(row["config"], []).append(ms)
    for row in found:
        if not row["reason"]:
            row["ms"] = statistics.median(rounds[row["config"]])
    return found


def launched(row: dict) -> bool:
    return any(job[2] == row["kernel"] for job in jobs_of(row["d"], row["variant"]))


def write(path: Path, rows: list[dict]) -> None:
    """Best of `rows` into the table; what was not measured again stays, unless nothing launches it any more."""
    best: dict[str, dict] = {}
    for row in rows:
        key = f"{row['kernel']}/{row['d']}/{row['variant']}"
        if row["ms"] and (key not in best or row["ms"] < best[key]["ms"]):
            best[key] = row
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    record = {
        "device": device.name,
        "arch": device.arch,
        "shared": device.shared,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "shape": "B*S = 32768, H*D = 2048, bf16; S is in the rows, 4096 where it is not",
        "best": {key: [int(x) for x in row["config"].split(",")] for key, row in best.items()},
        "rows": rows,
    }
    if path.exists():
        before = json.loads(path.read_text())
        kept = [r for r in before["rows"] if f"{r['kernel']}/{r['d']}/{r['variant']}" not in best and launched(r)]
        places = {f"{r['kernel']}/{r['d']}/{r['variant']}" for r in kept}
        record["best"] = {key: value for key, value in before["best"].items() if key in places} | record["best"]
        record["rows"] = kept + rows
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1))
    sys.stdout.write(f"before it is committed: python tools/compact.py {path}\n")


def jobs_at(places: str) -> list[tuple[int, str, str, str]]:
    return [
        job
        for d, variant in itertools.product((64, 128, 256), VARIANTS)
        # wide heads behave like causal with these
        if d <= 128 or variant not in ("softcap", "window")
        for job in jobs_of(d, variant, places)
    ]


def time_all(jobs: list[tuple[int, str, str, str]], reasons: list[str], deadline: float) -> list[dict]:
    """Rows of all jobs; reasons: why one did not compile, else empty."""
    found: list[dict] = []
    for (d, variant), group in itertools.groupby(zip(jobs, reasons, strict=True), key=lambda item: item[0][:2]):
        s = length_of(variant)
        call, rows = make(d, variant, s)
        for kernel, rivals in itertools.groupby(group, key=lambda item: item[0][2]):
            here = time_rivals(call, rows, kernel, [(job[3], reason) for job, reason in rivals], deadline)
            found += [{"d": d, "variant": variant, "s": s} | row for row in here]
            timed = sorted((row for row in here if row["ms"]), key=lambda row: row["ms"])
            shown = "  ".join(f"{row['config']} {row['ms']:.3f}" for row in timed)
            sys.stdout.write(f"D{d} {variant:7} {kernel:8} {shown}\n")
            sys.stdout.flush()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--places", default="*", help="patterns of kernel/d/variant, with commas: dq/64/*,*/*/lazy")
    parser.add_argument("--seconds", type=float, default=3600, help="candidates not reached by then are left out")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    begin = time.time()
    jobs = jobs_at(args.places)
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        # half of the time is for timing what compiled
        reasons = pool.map(compile_one, [(*job, begin + args.seconds / 2) for job in jobs], chunksize=1)
    sys.stdout.write(f"compiled {len(jobs) - reasons.count(LATE)} of {len(jobs)} in {time.time() - begin:.0f} s\n")
    path = args.out / torch.cuda.get_device_name().replace(" ", "-").lower() / "triton.json"
    write(path, time_all(jobs, reasons, begin + args.seconds))
    sys.stdout.write(f"{time.time() - begin:.0f} s\n")


if __name__ == "__main__":
    main()
