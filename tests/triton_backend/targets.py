"""The Triton kernels compiled for cards that are not here, with the tiles each of them would get: shared memory and spills.

    python tests/triton_backend/targets.py docs/data/triton-targets.json

compiles the whole grid (ten minutes of a processor) and writes what every kernel took; tools/compact.py compresses that, and
tools/make_targets_table.py makes a table of it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from compiling import Launched, recorded
from triton.backends.compiler import GPUTarget

from backlight.backends.intervals import tiles
from backlight.backends.triton import config, dbias, delta, dkdv, dq, elastic, forward, small, table
from backlight.backends.triton import launch as host
from backlight.backends.triton.backward import backward
from backlight.backends.triton.device import KIB, Device
from backlight.call import Call
from backlight.spec import AttentionSpec

KERNELS = (forward, elastic, delta, dq, dkdv, dbias, table, small, tiles, host)
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

# what the cards say of themselves
CARDS = {
    "sm_80": Device("NVIDIA A100-SXM4-80GB", "sm_80", 163 * KIB),
    "sm_86": Device("NVIDIA A10", "sm_86", 99 * KIB),
    "sm_89": Device("NVIDIA L40S", "sm_89", 99 * KIB),
    "sm_90": Device("NVIDIA H100 80GB HBM3", "sm_90", 227 * KIB),
    "sm_100": Device("NVIDIA B200", "sm_100", 227 * KIB),
    "sm_120": Device("NVIDIA GeForce RTX 5090", "sm_120", 99 * KIB),
    "gfx942": Device("AMD Instinct MI300X", "gfx942", 64 * KIB),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 20)},
    "bias": {"causal": True, "bias": True},
    "tau": {"causal": True, "tau": True},
    "sink": {"causal": True, "sink": True},
    "gate": {"gate": True},
    "softcap": {"causal": True, "softcap": 20.0},
    "varlen": {"causal": True, "varlen": True},
    "everything": {"causal": True, "window": (100, None), "softcap": 20.0}
    | dict.fromkeys(("bias", "sink", "tau", "gate"), True),
}
VARIANTS["everything,varlen"] = VARIANTS["everything"] | {"varlen": True}
VARIANTS["mask"] = {"causal": True, "rows": True}
VARIANTS["mask,pos,bias"] = {"causal": True, "rows": True, "pos": True, "bias": True}
VARIANTS["mask,everything,varlen"] = VARIANTS["everything,varlen"] | {"rows": True}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# every size that tiles know, and two between them
SIZES = (16, 64, 128, 40, 32, 256, 192)


@dataclass(frozen=True)
class Combination:
    card: str
    variant: str
    d: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.card},{self.variant},d={self.d},{self.dtype}"


# where most is wanted at a time
HEAVIEST = (("full", 128, "bf16"), ("full", 256, "fp16"), ("everything", 128, "fp16"), ("everything", 256, "bf16"))


def grid() -> Iterator[Combination]:
    """On every card what takes most, and every variant once, at a size and in a dtype that go round from card to card.

    Tiles and code of sm_89 are those of sm_86, which it does not repeat.
    """
    for turn, card in enumerate(CARDS):
        if card != "sm_89":
            yield from (Combination(card, *which) for which in HEAVIEST)
        for place, variant in enumerate(VARIANTS):
            d = SIZES[(place + turn) % len(SIZES)]
            dtype = list(DTYPES)[(place + 2 * turn) % len(DTYPES)]
            if card == "sm_89" or (variant, d, dtype) not in HEAVIEST:
                yield Combination(card, variant, d, dtype)


@dataclass(frozen=True)
class Report:
    """What a kernel took: bytes of shared memory of a program, bytes of local memory of a thread."""

    kernel: str
    tiles: str
    shared: int
    spilled: int


def call_of(combination: Combination) -> Call:
    options = dict(VARIANTS[combination.variant])
    varlen = options.pop("varlen", False)
    spec = AttentionSpec(**options)
    batch, length = (1, 320) if varlen else (2, 256)
    q, k, v, gate = (torch.zeros(batch, 4, length, combination.d, dtype=DTYPES[combination.dtype]) for _ in range(4))
    cu = torch.tensor([0, 100, 320], dtype=torch.int32) if varlen else None
    return Call(
        *(spec, q, k, v),
        bias=torch.zeros(4, 64) if spec.bias else None,
        sink=torch.zeros(4) if spec.sink else None,
        tau=torch.zeros(4) if spec.tau else None,
        gate=gate if spec.gate else None,
        rows=torch.zeros(1, 4, 4, length, dtype=torch.int32) if spec.rows else None,
        pos=torch.zeros(1, length, dtype=torch.int32) if spec.pos else None,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
    )


def target_of(card: str) -> GPUTarget:
    return GPUTarget("cuda", int(card[3:]), 32) if card.startswith("sm_") else GPUTarget("hip", card, 64)


@contextmanager
def standing_in_for(card: str) -> Iterator[None]:
    """CPU tensors pass for those of the card."""
    nvidia = card.startswith("sm_")
    modern = nvidia and int(card[3:]) >= 90
    with (
        mock.patch.object(host.Launch, "nvidia", nvidia),
        mock.patch.object(host, "hopper", return_value=modern),
        mock.patch.object(config, "device_of", return_value=CARDS[card]),
    ):
        yield


def launches_of(combination: Combination) -> list[Launched]:
    call = call_of(combination)
    with standing_in_for(combination.card), recorded(*KERNELS) as launches:
        y, lse, u, _ = forward.forward(call, save_u=True)
        backward(call, y, lse, u, torch.zeros_like(y), None, frozenset(call.gradients))
    return launches


def report_of(launched: Launched, card: str) -> Report:
    done = launched.compile(target_of(card))
    tiles = ",".join(
        str(launched.options[name]) for name in ("BM", "BN", "num_warps", "num_stages") if name in launched.options
    )
    return Report(launched.kernel.fn.__name__, tiles, done.metadata.shared, spilled(done.asm))


def spilled(asm: dict[str, Any]) -> int:
    if "amdgcn" in asm:
        return max(map(int, re.findall(r"\.private_segment_fixed_size:\s*(\d+)", asm["amdgcn"])))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(map(int, re.findall(r"STACK:(\d+)", told)))


def reports_of(combination: Combination, only: str | None = None) -> list[Report]:
    """One for each kernel that the call and its backward launch, or for those of one name."""
    return [
        report_of(launched, combination.card)
        for launched in launches_of(combination)
        if only is None or launched.kernel.fn.__name__ == only
    ]


def record(path: Path) -> None:
    rows = []
    for combination in grid():
        found = dict.fromkeys(reports_of(combination))
        rows.append(asdict(combination) | {"kernels": [astuple(report) for report in found]})
        print(combination, max(report.shared for report in found), max(report.spilled for report in found), flush=True)
    cards = {name: asdict(card) | {"table": words(name)} for name, card in CARDS.items()}
    text = {"triton": triton.__version__, "date": date.today().isoformat(), "cards": cards}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    path.write_text(json.dumps(text, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n')


def words(card: str) -> str:
    with standing_in_for(card):
        return config.table_in_use(torch.device("cuda", 0))


if __name__ == "__main__":
    record(Path(sys.argv[1]))
