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
import sys
import time
from pathlib import Path

import torch
import triton
from triton.testing import do_bench

from backlight.backends.triton.config import KernelConfig
from backlight.backends.triton.dbias import dbias_of
from backlight.backends.triton.delta import RowState, prepare_rows
from backlight.backends.triton.dkdv import dkdv_of
from backlight.backends.triton.dq import dq_of
from backlight.backends.triton.forward import forward
from backlight.backends.triton.launch import Launch
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec

# block_m, block_n, warps, stages, TMA
CANDIDATES = {
    "forward": {
        64: "64,64,4,3,0 128,64,4,3,0 128,64,8,3,0 64,64,4,3,1 64,64,4,4,1 128,64,4,3,1 128,64,8,3,1 64,128,4,3,1",
        128: "128,64,8,3,0 64,64,4,3,0 128,64,8,3,1 128,64,8,4,1 64,64,4,3,1 64,64,4,2,1 128,128,8,2,1 64,128,4,2,1",
        256: "128,64,8,2,0 64,64,4,2,0 128,64,8,2,1 64,64,4,2,1 128,32,8,3,1 128,64,8,1,1",
    },
    "dq": {
        64: "64,64,4,3,0 128,64,8,3,0 64,64,4,3,1 64,64,4,4,1 128,64,8,3,1 128,64,4,3,1 64,128,4,3,1",
        128: "128,64,8,3,0 64,64,4,2,0 128,64,8,3,1 128,64,8,2,1 64,64,4,3,1 64,64,4,2,1 128,128,8,2,1",
        256: "128,64,8,1,0 64,64,8,2,0 128,64,8,1,1 64,64,8,2,1 64,64,4,1,1 128,32,8,2,1",
    },
    "dkdv": {
        64: "64,64,4,3,0 128,64,4,2,0 64,64,4,3,1 64,64,4,4,1 64,128,8,3,1 128,64,4,2,1 128,64,4,3,1",
        128: "64,128,8,3,0 32,128,8,3,0 64,128,8,3,1 64,128,8,2,1 64,64,4,2,1 64,64,4,3,1 32,64,4,3,1 32,128,8,3,1 32,64,4,2,1",
        256: "64,64,8,2,0 64,64,8,1,0 64,64,8,2,1 64,64,8,1,1 32,64,8,2,1 32,64,4,2,1",
    },
    "dbias": {
        64: "64,64,4,3,0 64,64,4,3,1 64,64,4,2,1 64,64,4,4,1 64,128,8,2,1 128,128,8,2,1",
        128: "64,128,8,2,0 64,64,4,2,1 64,64,4,3,1 64,128,8,2,1 128,128,8,1,1",
        256: "64,64,8,1,0 64,64,8,1,1 32,64,4,1,1",
    },
}
VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "bias": {"causal": True, "bias": True},
    "lazy": {"causal": True, "bias": True, "tau": True},
}


def make(d: int, variant: str, s: int = 4096, tokens: int = 32768, width: int = 2048) -> tuple[Call, RowState]:
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
    y, lse, u = forward(call, save_u=True)
    return call, prepare_rows(Launch(call), y, lse, u, dy, None, {})


def run(kernel: str, call: Call, rows: RowState) -> tuple[torch.Tensor, ...]:
    if kernel == "forward":
        return (forward(call, save_u=True)[0],)
    if kernel == "dq":
        return (dq_of(Launch(call), rows),)
    if kernel == "dkdv":
        return dkdv_of(Launch(call), rows)
    return (dbias_of(Launch(call), rows),)


def candidates(d: int, variant: str, kernel: str) -> list[str]:
    if kernel == "dbias" and variant not in ("bias", "lazy"):
        return []
    return CANDIDATES[kernel][d].split()


def parse(text: str) -> KernelConfig:
    return KernelConfig(*map(int, text.split(",")))


def compile_one(job: tuple[int, str, str, str]) -> str:
    d, variant, kernel, text = job
    try:
        call, rows = make(d, variant)
        with override(f"triton.{kernel}", parse(text)):
            run(kernel, call, rows)
        torch.cuda.synchronize()
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--variants", default="full,causal,bias,lazy")
    parser.add_argument("--workers", type=int, default=14)
    args = parser.parse_args()
    jobs = [
        (d, variant, kernel, text)
        for d, variant, kernel in itertools.product(map(int, args.dims.split(",")), args.variants.split(","), CANDIDATES)
        for text in candidates(d, variant, kernel)
    ]
    begin = time.time()
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        reasons = pool.map(compile_one, jobs, chunksize=1)
    sys.stdout.write(f"compiled {len(jobs)} candidates in {time.time() - begin:.0f} s\n")
    rows_out = []
    for (d, variant), group in itertools.groupby(zip(jobs, reasons, strict=True), key=lambda item: item[0][:2]):
        call, rows = make(d, variant)
        for kernel, rivals in itertools.groupby(group, key=lambda item: item[0][2]):
            first = None
            for (_, _, _, text), reason in rivals:
                row = {"d": d, "variant": variant, "kernel": kernel, "config": text, "ms": None, "reason": reason}
                rows_out.append(row)
                if reason:
                    continue
                with override(f"triton.{kernel}", parse(text)):
                    result = run(kernel, call, rows)
                    first = first or result
                    worst = max(
                        ((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(result, first, strict=True)
                    )
                    if not worst <= 2e-2:
                        row["reason"] = f"differs from the first candidate by {worst:.1e}"
                        continue
                    row["ms"] = do_bench(lambda: run(kernel, call, rows), warmup=10, rep=50, return_mode="median")  # noqa: B023
            here = [r for r in rows_out if (r["d"], r["variant"], r["kernel"]) == (d, variant, kernel) and r["ms"]]
            timed = sorted(here, key=lambda r: r["ms"])
            shown = "  ".join(f"{r['config']} {r['ms']:.3f}" for r in timed[:4])
            sys.stdout.write(f"D{d} {variant:7} {kernel:8} {shown}\n")
            sys.stdout.flush()
    device = torch.cuda.get_device_name().replace(" ", "-").lower()
    best: dict[str, dict] = {}
    for row in rows_out:
        key = f"{row['kernel']}/{row['d']}/{row['variant']}"
        if row["ms"] and (key not in best or row["ms"] < best[key]["ms"]):
            best[key] = row
    record = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "shape": "B*S = 32768, H*D = 2048, S = 4096, bf16",
        "best": {key: [int(x) for x in row["config"].split(",")] for key, row in best.items()},
        "rows": rows_out,
    }
    path = args.out / device / "triton.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        # what this run did not measure stays
        before = json.loads(path.read_text())
        record["best"] = before["best"] | record["best"]
        record["rows"] = [r for r in before["rows"] if f"{r['kernel']}/{r['d']}/{r['variant']}" not in best] + rows_out
    path.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
