"""What is measured: named lists of workloads. Sizes follow the device; the cases themselves are ordinary `Case`s."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from backlight.bench.workload import PHASES, Workload
from backlight.cases import BF16, FP32, Case

SPEED, MEMORY, OVERHEAD = "speed", "memory", "overhead"
TOKENS, WIDTH = 32768, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (512, 2048, 8192, 16384)
# a few long sequences and many short ones, no length a multiple of a tile
LONG = (9001, 6007, 4099, 3001, 2503, 1999, 1501, 1103)
SHORT = (887, 701, 509, 401, 307, 211, 149, 101, 83, 61, 47, 31, 23, 17, 13, 7, 6)
SKEWED = LONG + SHORT
SKEWED_SMALL = (401, 251, 149, 97, 61, 31, 17, 9, 5, 3)

GPU_PEERS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", "fa3", "fa3-bare")
EVERY_PEER = (*GPU_PEERS, "sdpa-math", "eager", "adasplash")
CPU_PEERS = ("sdpa-flash", "sdpa-math", "eager", "flex")
LAZY_TAU = (-1.0,)
OVERHEAD_PHASES = ("host forward", "host both", "graph forward", "graph both")


@dataclass(frozen=True)
class Suite:
    """Workloads with the contenders raced on them and the phases timed; a hasty suite is always measured the quick way."""

    name: str
    summary: str
    kind: str
    workloads: tuple[Workload, ...]
    contenders: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    rounds: int = 3
    hasty: bool = False


def plain(device: torch.device, quick: bool) -> Suite:
    """The field everybody runs on: bf16, B * S = 32768, H * D = 2048."""
    lengths = QUICK_LENGTHS if quick else LENGTHS
    cases = [
        _square(f"plain,d={d},s={s},{'causal' if causal else 'full'}", s, TOKENS // s, WIDTH // d, d, causal=causal)
        for d in (64, 128, 256)
        for s in lengths
        for causal in (True, False)
    ]
    return Suite("plain", "D x S x mask, bf16, B*S = 32768, H*D = 2048", SPEED, _in(cases, BF16), ("backlight", *GPU_PEERS))


def variants(device: torch.device, quick: bool) -> Suite:
    """One workload for each variant beside the plain causal one of the same shape, so its own cost can be read off."""
    on_gpu = device.type == "cuda"
    s, tokens, width, window = (8192, TOKENS, WIDTH, 1023) if on_gpu else (1024, 1024, 256, 127)
    cases = []
    for d in (64,) if quick or not on_gpu else (64, 128):
        h, b = width // d, tokens // s
        shape = f"d={d},s={s}"
        cases += [
            _square(f"causal,{shape}", s, b, h, d),
            _square(f"window,{shape}", s, b, h, d, window=(window, 0)),
            _square(f"gqa,{shape}", s, b, h, d, hkv=max(1, h // 8)),
            Case(f"varlen,d={d}", hq=h, hkv=h, d=d, causal=True, lengths_q=SKEWED if on_gpu else SKEWED_SMALL),
            _square(f"bias,{shape}", s, b, h, d, bias=512),
            _square(f"lazy,{shape}", s, b, h, d, bias=512, tau=LAZY_TAU),
            _square(f"sink,{shape}", s, b, h, d, sink=True),
            _square(f"softcap,{shape}", s, b, h, d, softcap=20.0),
            _square(f"gate,{shape}", s, b, h, d, gate=True),
        ]
        if on_gpu:
            cases += [
                _square(f"causal,d={d},s={2 * s}", 2 * s, b // 2, h, d),
                _square(f"window,d={d},s={2 * s}", 2 * s, b // 2, h, d, window=(window, 0)),
            ]
    contenders = ("backlight", *GPU_PEERS, "eager") if on_gpu else ("backlight", *CPU_PEERS)
    return Suite("variants", "each variant beside plain causal", SPEED, _in(cases, BF16 if on_gpu else FP32), contenders)


def cpu(device: torch.device, quick: bool) -> Suite:
    """Sizes a processor can bear, fp32 and bf16; the S = 4096 rows carry the project's own bars."""
    s = 1024 if quick else 4096
    long = _square(f"causal,s={s}", s, 1, 8, 64)
    short = [_square("causal,s=512", 512, 1, 8, 64), _square("gqa,s=512", 512, 1, 8, 64, hkv=1)]
    workloads = (
        *_in([long, _square(f"full,s={s}", s, 1, 8, 64, causal=False)], FP32),
        *_in([long], BF16),
        *_in([_square(f"lazy,s={s}", s, 1, 8, 64, bias=512, tau=LAZY_TAU), *short], FP32),
        *_in(short[:1], BF16),
    )
    return Suite("cpu", "B=1 H=8 D=64, fp32 and bf16", SPEED, workloads, ("backlight", *CPU_PEERS))


def smoke(device: torch.device, quick: bool) -> Suite:
    """Seconds: that the instrument works here, not how fast anything is."""
    s, h = (1024, 8) if device.type == "cuda" else (128, 4)
    cases = [
        _square(f"causal,s={s}", s, 1, h, 64),
        _square(f"full,s={s}", s, 1, h, 64, causal=False),
        _square(f"causal,s={2 * s}", 2 * s, 1, h, 64),
        _square(f"full,s={2 * s}", 2 * s, 1, h, 64, causal=False),
        _square(f"lazy,s={s}", s, 1, h, 64, bias=64, tau=LAZY_TAU),
    ]
    return Suite(
        "smoke",
        "seconds: that the instrument works here",
        SPEED,
        _in(cases, BF16 if device.type == "cuda" else FP32),
        ("backlight", *EVERY_PEER),
        rounds=2,
        hasty=True,
    )


def memory(device: torch.device, quick: bool) -> Suite:
    """Peak bytes beyond the inputs as S grows, against the bytes of q, k and v."""
    lengths = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
    if device.type == "cuda" and not quick:
        lengths = (*lengths, 32768, 65536)
    causal = [_square(f"causal,s={s}", s, 1, 8, 64) for s in lengths]
    lazy = [_square(f"lazy,s={s}", s, 1, 8, 64, bias=512, tau=LAZY_TAU) for s in lengths]
    workloads = (*_in(causal, FP32), *_in(causal, BF16), *_in(lazy, BF16 if device.type == "cuda" else FP32))
    contenders = ("backlight", "sdpa-flash", "sdpa-efficient", "flex", "fa3", "eager")
    return Suite("memory", "peak bytes of forward and backward, B=1 H=8 D=64", MEMORY, workloads, contenders, phases=())


def overhead(device: torch.device, quick: bool) -> Suite:
    """Host time of one call at sizes where nothing else takes any, eager and, on CUDA, as a replayed graph."""
    on_gpu = device.type == "cuda"
    cases = [_square("tiny,causal", 64, 1, 2, 64), _square("tiny,lazy", 64, 1, 2, 64, bias=32, tau=LAZY_TAU)]
    contenders = ("backlight", *(EVERY_PEER if on_gpu else CPU_PEERS))
    phases = OVERHEAD_PHASES if on_gpu else OVERHEAD_PHASES[:2]
    return Suite("overhead", "host time of one tiny call", OVERHEAD, _in(cases, BF16 if on_gpu else FP32), contenders, phases)


SUITES: dict[str, Callable[[torch.device, bool], Suite]] = {
    "plain": plain,
    "variants": variants,
    "cpu": cpu,
    "smoke": smoke,
    "memory": memory,
    "overhead": overhead,
}


def suite(name: str, device: torch.device, quick: bool = False) -> Suite:
    if name not in SUITES:
        raise ValueError(f"no suite is called {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name](device, quick)


def find(name: str, device: torch.device) -> Workload:
    """The first workload of any suite with this id, or whose case has this name."""
    known = [workload for make in SUITES.values() for workload in make(device, False).workloads]
    for workload in known:
        if name in (workload.id, workload.case.name):
            return workload
    close = get_close_matches(name, list(dict.fromkeys(workload.id for workload in known)), cutoff=0.4)
    raise ValueError(f"no case is called {name!r}; {'close to it: ' + ', '.join(close) if close else 'see `bench list`'}")


def _square(name: str, s: int, b: int, h: int, d: int, *, causal: bool = True, hkv: int | None = None, **options: Any) -> Case:
    return Case(name, b=b, hq=h, hkv=h if hkv is None else hkv, sq=s, sk=s, d=d, causal=causal, **options)


def _in(cases: list[Case], dtype: torch.dtype) -> tuple[Workload, ...]:
    return tuple(Workload(case, dtype) for case in cases)
