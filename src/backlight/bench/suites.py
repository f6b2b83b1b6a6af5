"""What is measured: named lists of workloads. Sizes follow the device; the cases themselves are ordinary `Case`s."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch

from backlight.bench.workload import PHASES, Workload
from backlight.problems.case import BF16, FP32, Case

SPEED, MEMORY, OVERHEAD = "speed", "memory", "overhead"
TOKENS, WIDTH = 32768, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
QUICK_LENGTHS = (512, 2048, 8192, 16384)
# a few long sequences and many short ones, no length a multiple of a tile
LONG = (9001, 6007, 4099, 3001, 2503, 1999, 1501, 1103)
SHORT = (887, 701, 509, 401, 307, 211, 149, 101, 83, 61, 47, 31, 23, 17, 13, 7, 6)
SKEWED = LONG + SHORT
# drawn once between 64 and 3000
DOCUMENTS = (538, 2552, 1873, 2451, 2816, 512, 248, 2325, 1621, 1448)
SKEWED_SMALL = (401, 251, 149, 97, 61, 31, 17, 9, 5, 3)

GPU_PEERS = ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flex", "fa3", "fa3-bare")
EVERY_PEER = (*GPU_PEERS, "sdpa-math", "eager", "adasplash")
CPU_PEERS = ("sdpa-flash", "sdpa-math", "eager", "flex")
PAIR_PEERS = ("sdpa-efficient", "flex", "cuequivariance")
# (N, H, S, D) of pair biases: triangle attention, whole sequences, short rows
PAIRED = (
    (384, 4, 384, 32),
    (768, 4, 768, 32),
    (1, 16, 4096, 64),
    (512, 8, 64, 32),
    (256, 4, 256, 32),
    (1, 16, 768, 64),
)
# (D, S, B, Hq, Hkv, mask) of calls that people make, where kernels differ most: short rows, odd lengths, few key heads, narrow
# windows, wide heads; a mask is full, causal or, causal too, how many keys before its own a row sees
MET = (
    (64, 256, 64, 16, 16, "full"),
    (64, 1024, 8, 12, 12, "causal"),
    (64, 8192, 4, 32, 32, "causal"),
    (80, 4096, 4, 24, 24, "causal"),
    (96, 4096, 4, 20, 20, "causal"),
    (128, 512, 64, 16, 16, "causal"),
    (128, 777, 7, 40, 8, "causal"),
    (128, 2048, 16, 16, 16, "causal"),
    (128, 4096, 4, 32, 32, 127),
    (128, 5555, 2, 24, 8, "causal"),
    (128, 8192, 4, 16, 16, "full"),
    (128, 16384, 2, 16, 4, "causal"),
    (128, 16384, 2, 16, 16, 1023),
    (128, 32768, 1, 32, 8, 4095),
    (192, 2048, 8, 16, 16, "causal"),
    (192, 4096, 4, 16, 16, "causal"),
    (192, 8192, 2, 16, 16, "full"),
    (256, 2048, 16, 8, 8, "causal"),
    (256, 8192, 4, 8, 8, "causal"),
    (256, 16384, 2, 8, 8, "full"),
    # these two last: their oracle takes longest
    (64, 16384, 2, 32, 4, "full"),
    (128, 65536, 1, 8, 1, "causal"),
)
# with values of 128 columns beside keys of 192, as in multi-head latent attention
LATENT = (4096, 4, 16, 192)
LAZY_TAU = (-1.0,)
# B 4, H 16, L 4096, D 64, table 4096: what the authors of the elastic softmax published times for
PUBLISHED = (4096, 4, 16, 64)
OVERHEAD_PHASES = ("host forward", "host both", "graph forward", "graph both")


@dataclass(frozen=True)
class Suite:
    """Workloads with the contenders raced on them and the phases timed; a hasty suite is always measured the quick way.

    plain: id of a workload -> id of the plain one of the same shape, which its cost is read against.
    """

    name: str
    summary: str
    kind: str
    workloads: tuple[Workload, ...]
    contenders: tuple[str, ...]
    phases: tuple[str, ...] = PHASES
    rounds: int = 3
    hasty: bool = False
    plain: Mapping[str, str] = field(default_factory=dict)


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


def every(device: torch.device, quick: bool) -> Suite:
    """Shapes beside the even ones of `plain`, where a kernel of somebody else may be faster."""
    cases = [
        _square(f"d={d},s={s},b={b},h={hq}:{hkv},{_words(mask)}", s, b, hq, d, hkv=hkv, **_options(mask))
        for d, s, b, hq, hkv, mask in (MET[:-2] if quick else MET)
    ]
    s, b, h, d = LATENT
    cases.insert(len(cases) - 2, _square(f"d={d},dv=128,s={s},b={b},h={h}:{h},causal", *LATENT, dv=128))
    summary = "short and odd lengths, GQA, windows, D 64 to 256, bf16"
    return Suite("every", summary, SPEED, _in(cases, BF16), ("backlight", "fa3", "sdpa-cudnn"), rounds=2)


def _words(mask: str | int) -> str:
    return mask if isinstance(mask, str) else f"window {mask}"


def _options(mask: str | int) -> dict[str, Any]:
    return {"causal": mask != "full"} if isinstance(mask, str) else {"window": (mask, 0)}


class Beside:
    """Workloads of one shape each: the plain causal one first, then what is read against it."""

    def __init__(self, dtype: torch.dtype):
        self.dtype, self.cases, self.plain = dtype, list[Case](), dict[str, str]()

    def add(self, causal: Case, *others: Case) -> None:
        self.cases.append(causal)
        self.beside(causal, *others)

    def beside(self, causal: Case, *others: Case) -> None:
        """More that is read against one that is there."""
        self.cases.extend(others)
        self.plain.update({Workload(case, self.dtype).id: Workload(causal, self.dtype).id for case in others})


def variants(device: torch.device, quick: bool) -> Suite:
    """One workload for each variant beside the plain causal one of the same shape, so its own cost can be read off."""
    on_gpu = device.type == "cuda"
    s, tokens, width, window = (8192, TOKENS, WIDTH, 1023) if on_gpu else (1024, 1024, 256, 127)
    dtype = BF16 if on_gpu else FP32
    shapes = Beside(dtype)
    for d in (64,) if quick or not on_gpu else (64, 128):
        h, b = width // d, tokens // s
        shape, long = f"d={d},s={s}", 2 * s if on_gpu else s
        with_window = _square(f"window,d={d},s={long}", long, tokens // long, h, d, window=(window, 0))
        shapes.add(
            _square(f"causal,{shape}", s, b, h, d),
            *([] if on_gpu else [with_window]),
            _square(f"gqa,{shape}", s, b, h, d, hkv=max(1, h // 8)),
            *_with_terms(s, b, h, d),
        )
        if on_gpu:
            shapes.add(_square(f"causal,d={d},s={long}", long, tokens // long, h, d), with_window)
        shapes.cases.append(Case(f"varlen,d={d}", hq=h, hkv=h, d=d, causal=True, lengths_q=SKEWED if on_gpu else SKEWED_SMALL))
    if on_gpu:
        length = PUBLISHED[0]
        shapes.add(
            _square(f"causal,b=4,h=16,d=64,s={length}", *PUBLISHED),
            _square(f"lazy,b=4,h=16,d=64,s={length},table={length}", *PUBLISHED, bias=length, tau=LAZY_TAU),
        )
    contenders = ("backlight", "sdpa-flash", "flex", "fa3") if on_gpu else ("backlight", *CPU_PEERS)
    rounds = 2 if on_gpu else 3
    workloads = _in(shapes.cases, dtype)
    return Suite(
        "variants", "each variant beside plain causal", SPEED, workloads, contenders, rounds=rounds, plain=shapes.plain
    )


def terms(device: torch.device, quick: bool) -> Suite:
    """What every learned term costs as sequences grow, beside plain causal attention of the same shape."""
    on_gpu = device.type == "cuda"
    tokens, width, dtype = (TOKENS, WIDTH, BF16) if on_gpu else (1024, 256, FP32)
    lengths = (4096, 16384, 8192) if on_gpu else (512, 1024)
    shapes = Beside(dtype)
    for s, d in ((s, d) for s in (lengths[:2] if quick else lengths) for d in ((64, 128) if on_gpu else (64,))):
        b, h = tokens // s, width // d
        shapes.add(_square(f"causal,d={d},s={s}", s, b, h, d), *_with_terms(s, b, h, d))
    workloads = _in(shapes.cases, dtype)
    return Suite(
        "terms", "learned terms over length", SPEED, workloads, ("backlight", "sdpa-flash"), rounds=2, plain=shapes.plain
    )


# by how much scores fall from key to key so that about a tenth of all tiles of 64 rows and 64 keys live, by length
FALLING = {512: 0.2, 1024: 0.1, 4096: 0.025, 16384: 0.00275, 65536: 0.0005}


def entmax(device: torch.device, quick: bool) -> Suite:
    """Entmax beside plain causal attention of the same shape: alpha 1.5 on scores without an order and on falling ones, other
    alphas, and learned ones with their gradient."""
    on_gpu = device.type == "cuda"
    h, dtype = (16, BF16) if on_gpu else (2, FP32)
    lengths = ((4096, 4), (16384, 1), (65536, 1))[: 2 if quick else 3] if on_gpu else ((512, 1), (1024, 1))
    shapes = Beside(dtype)
    for s, b in lengths:
        fixed = _square(f"entmax,alpha=1.5,s={s}", s, b, h, 64, entmax=1.5)
        falling = _square(f"entmax,alpha=1.5,falling,s={s}", s, b, h, 64, entmax=1.5, falling=FALLING[s])
        shapes.add(_square(f"causal,d=64,s={s}", s, b, h, 64), fixed, falling)
    s, b = lengths[0]
    shapes.beside(
        shapes.cases[0],
        *(_square(f"entmax,alpha={alpha:g},s={s}", s, b, h, 64, entmax=alpha) for alpha in (1.25, 2.0)),
        *(_square(f"entmax,alpha={alpha:g},learned,s={s}", s, b, h, 64, entmax=(alpha,)) for alpha in (1.5, 1.3)),
    )
    contenders = ("backlight", "adasplash") if on_gpu else ("backlight", "eager")
    workloads = _in(shapes.cases, dtype)
    return Suite("entmax", "entmax beside plain causal", SPEED, workloads, contenders, rounds=2, plain=shapes.plain)


def masks(device: torch.device, quick: bool) -> Suite:
    """Masks by row intervals beside plain causal attention, and documents, by lengths and by ids, beside the packed call of the
    same lengths."""
    on_gpu = device.type == "cuda"
    s, width, dtype = (16384, WIDTH, BF16) if on_gpu else (1024, 128, FP32)
    documents = tuple(length * s // 16384 for length in DOCUMENTS)
    listed = ",".join(map(str, documents))
    drawn = {
        "causal as intervals": "prefix:0",
        "documents": f"documents:{listed}",
        "documents by ids": f"ids:{listed}",
        "prefix": f"prefix:{s // 4}",
        "rollouts": f"rollouts:{s // 4},{s // 16}",
    }
    shapes = Beside(dtype)
    for d in ((128,) if quick else (128, 64)) if on_gpu else (64,):
        h = width // d
        masked = [_square(f"{name},d={d}", s, 1, h, d, causal=False, mask=mask, mask_of=()) for name, mask in drawn.items()]
        shapes.add(_square(f"causal,d={d}", s, 1, h, d), *masked)
        shapes.cases.append(Case(f"packed documents,d={d}", hq=h, hkv=h, d=d, causal=True, lengths_q=documents))
    contenders = ("backlight", "flex") if on_gpu else ("backlight", "eager")
    workloads = _in(shapes.cases, dtype)
    return Suite("masks", "masks by row intervals", SPEED, workloads, contenders, rounds=2, plain=shapes.plain)


def pair(device: torch.device, quick: bool) -> Suite:
    """A pair bias of all heads and rows, which the batch shares, beside the plain call: triangles and long rows."""
    on_gpu = device.type == "cuda"
    shapes = Beside(BF16 if on_gpu else FP32)
    for b, h, s, d in (PAIRED[:3] if quick else PAIRED) if on_gpu else ((8, 2, 64, 32), (1, 2, 256, 64)):
        shape = f"n={b},h={h},s={s},d={d}"
        shapes.add(
            _square(f"plain,{shape}", s, b, h, d, causal=False),
            _square(f"pair,{shape}", s, b, h, d, causal=False, pair_bias=("heads", "rows")),
        )
    contenders = ("backlight", *(PAIR_PEERS if on_gpu else ("sdpa-math", "eager")))
    workloads = _in(shapes.cases, shapes.dtype)
    return Suite("pair", "a dense pair bias with its gradient", SPEED, workloads, contenders, rounds=2, plain=shapes.plain)


def fp8(device: torch.device, quick: bool) -> Suite:
    """The forward in e4m3 beside those of 16 bits, on shapes of `plain`; the backward is that of 16 bits, and only judged."""
    on_gpu = device.type == "cuda"
    tokens, width = (TOKENS, WIDTH) if on_gpu else (512, 128)
    lengths = (16384, 4096)[: 1 if quick else 2] if on_gpu else (256,)
    cases = [
        _square(f"plain,d={d},s={s},{'causal' if causal else 'full'}", s, tokens // s, width // d, d, causal=causal)
        for d in ((128, 256, 64) if on_gpu else (64,))
        for s in lengths
        for causal in (False, True)
    ]
    peers = ("sdpa-cudnn", "fa3") if on_gpu else ("sdpa-flash",)
    contenders = ("backlight", "backlight:fp8", "backlight:fp8-given", *peers)
    return Suite("fp8", "e4m3 beside 16 bits, forward", SPEED, _in(cases, BF16), contenders, phases=("forward",))


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
    summary = "peak bytes of forward and backward, B=1 H=8 D=64"
    terms: dict[str, dict[str, Any]] = {"causal": {}, "lazy": {"bias": 512, "tau": LAZY_TAU}}
    lengths: tuple[int, ...]
    if device.type != "cuda":
        lengths = (1024, 4096) if quick else (1024, 2048, 4096, 8192, 16384)
        causal, lazy = ([_square(f"{name},s={s}", s, 1, 8, 64, **options) for s in lengths] for name, options in terms.items())
        workloads = (*_in(causal, FP32), *_in(causal, BF16), *_in(lazy, FP32))
        return Suite("memory", summary, MEMORY, workloads, ("backlight", "sdpa-flash", "eager"), phases=())
    terms |= {"window": {"window": (1023, 0)}, "gqa": {"hkv": 1}, "bias": {"bias": 512}, "sink": {"sink": True}}
    terms |= {"softcap": {"softcap": 20.0}, "gate": {"gate": True}}
    lengths = (2048, 8192) if quick else (2048, 8192, 32768)
    cases = [_square(f"{name},s={s}", s, 1, 8, 64, **options) for name, options in terms.items() for s in lengths]
    return Suite("memory", summary, MEMORY, _in(cases, BF16), ("backlight", "sdpa-flash", "flex"), phases=())


def overhead(device: torch.device, quick: bool) -> Suite:
    """Host time of one call at sizes where nothing else takes any, eager and, on CUDA, as a replayed graph.

    On a card most of the suite's time is compilation, and windows hold hundreds of calls however short they are.
    """
    on_gpu = device.type == "cuda"
    cases = [_square("tiny,causal", 64, 1, 2, 64), _square("tiny,lazy", 64, 1, 2, 64, bias=32, tau=LAZY_TAU)]
    summary = "host time of one tiny call"
    if not on_gpu:
        return Suite("overhead", summary, OVERHEAD, _in(cases, FP32), ("backlight", *CPU_PEERS), OVERHEAD_PHASES[:2])
    contenders = ("backlight", "backlight:triton", "sdpa-flash", "sdpa-cudnn", "fa3", "flex")
    return Suite("overhead", summary, OVERHEAD, _in(cases, BF16), contenders, OVERHEAD_PHASES, rounds=2, hasty=True)


SUITES: dict[str, Callable[[torch.device, bool], Suite]] = {
    "plain": plain,
    "every": every,
    "variants": variants,
    "terms": terms,
    "masks": masks,
    "entmax": entmax,
    "pair": pair,
    "fp8": fp8,
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


def _with_terms(s: int, b: int, h: int, d: int) -> list[Case]:
    """A learned term each, and the two of Lazy Attention; plain causal otherwise."""
    given: dict[str, dict[str, Any]] = {"bias": {"bias": 512}, "lazy": {"bias": 512, "tau": LAZY_TAU}, "sink": {"sink": True}}
    given |= {"softcap": {"softcap": 20.0}, "gate": {"gate": True}}
    return [_square(f"{name},d={d},s={s}", s, b, h, d, **options) for name, options in given.items()]


def _square(name: str, s: int, b: int, h: int, d: int, *, causal: bool = True, hkv: int | None = None, **options: Any) -> Case:
    return Case(name, b=b, hq=h, hkv=h if hkv is None else hkv, sq=s, sk=s, d=d, causal=causal, **options)


def _in(cases: list[Case], dtype: torch.dtype) -> tuple[Workload, ...]:
    return tuple(Workload(case, dtype) for case in cases)
