"""The one list of cases, which every suite of the tests reads. Benchmarks make the same `Case` of shapes worth measuring.

A `Case` is pure data: the options, the shapes and the awkwardness of one attention problem. `case.make(dtype)` draws its
tensors, already quantised to that dtype, together with the incoming gradients. Learned per-head terms (bias, sink, tau) stay
fp32, or fp64 for an fp64 problem, as parameters do under mixed precision.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from backlight.call import Call
from backlight.problems.axes import Sizes
from backlight.problems.draw import (
    borders,
    call_of,
    mask_terms,
    normal,
    pair_bias_term,
    parameter_dtype,
    repeated,
    settle,
    terms_to_draw,
)
from backlight.problems.kink import KINK_MARGIN
from backlight.problems.kink import margin as kink_margin
from backlight.spec import PER_HEAD, AttentionSpec

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
DTYPE_NAMES = {FP16: "fp16", BF16: "bf16", FP32: "fp32", FP64: "fp64"}
EVERY_DTYPE = (FP32, BF16, FP16, FP64)

REDRAWS = 100


@dataclass(frozen=True)
class Case:
    """One problem. Lengths (`lengths_q`) make it packed and then replace b, sq and sk; tau is repeated over the heads, and
    so is a sink that is not drawn. `mask` names how intervals are drawn, `mask_of` the axes along which they differ;
    `pair_bias` says what that one is like (`draw.PAIR_WORDS`)."""

    name: str
    b: int = 2
    hq: int = 2
    hkv: int = 2
    sq: int = 65
    sk: int = 65
    d: int = 16
    dv: int | None = None
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: int | None = None
    bias_origin: int = 0
    sink: bool | tuple[float, ...] = False
    tau: tuple[float, ...] | None = None
    gate: bool = False
    pair_bias: tuple[str, ...] | None = None
    mask: str | None = None
    mask_of: tuple[str, ...] = ("batch", "heads")
    pos: bool = False
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    dlse: bool = False
    logits: float = 1.0
    logit_shift: float = 0.0
    equal_values: bool = False
    value_shift: float = 0.0
    dtypes: tuple[torch.dtype, ...] = (FP32, BF16)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            causal=self.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            bias=self.bias is not None,
            bias_origin=self.bias_origin,
            sink=bool(self.sink),
            tau=self.tau is not None,
            gate=self.gate,
            pair_bias=self.pair_bias is not None,
            rows=self.mask is not None,
            pos=self.pos,
        )

    @property
    def varlen(self) -> bool:
        return self.lengths_q is not None

    @property
    def sizes(self) -> Sizes:
        """Lengths of all axes; a packed case is one batch entry."""
        dv = self.d if self.dv is None else self.dv
        b, sq, sk = self.b, self.sq, self.sk
        if self.lengths_q is not None:
            lengths_k = self.lengths_q if self.lengths_k is None else self.lengths_k
            b, sq, sk = 1, sum(self.lengths_q), sum(lengths_k)
        return Sizes(b, self.hq, self.hkv, sq, sk, self.d, dv, self.bias or 0)

    @property
    def pair_sizes(self) -> Sizes:
        """`sizes` as a pair bias counts them."""
        if self.lengths_q is None:
            return self.sizes
        lengths_k = self.lengths_q if self.lengths_k is None else self.lengths_k
        return self.sizes.of_sequences(self.lengths_q, lengths_k)

    def chosen(self, dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
        """Terms whose values stand in the case, repeated over the heads."""
        named = [name for name in self.spec.terms if name in PER_HEAD]
        listed = {name: getattr(self, name) for name in named if isinstance(getattr(self, name), tuple)}
        return {name: repeated(values, self.hq, parameter_dtype(dtype), device) for name, values in listed.items()}

    def make(
        self, dtype: torch.dtype = FP32, seed: int = 0, device: torch.device | str = "cpu", margin: float = KINK_MARGIN
    ) -> Problem:
        """Tensors of the case; redrawn (same seed, same tensors) until no weight sits on the kink of the elastic softmax."""
        for redraw in range(REDRAWS):
            problem = self._draw(dtype, seed + 1000 * redraw, device)
            if kink_margin(problem.call) >= margin:
                return problem
        raise RuntimeError(f"{self.name}: no draw out of {REDRAWS} keeps |p + tau/n| away from 0; make the case smaller")

    def _draw(self, dtype: torch.dtype, seed: int, device: torch.device | str) -> Problem:
        chosen = self.chosen(dtype, device)
        if self.pair_bias is not None:
            chosen["pair_bias"] = pair_bias_term(self.pair_sizes, self.pair_bias, dtype, seed).to(device)
        names = ("q", "k", "v", *terms_to_draw(self.spec, chosen), "dy", *(("dlse",) if self.dlse else ()))
        drawn = normal(self.sizes, names, dtype=dtype, seed=seed, wide=FP64)
        drawn["q"] = drawn["q"] * self.logits
        if self.logit_shift:
            reach = abs(self.logit_shift / self.spec.resolve_scale(self.d)) ** 0.5
            drawn["q"][..., 0], drawn["k"][..., 0] = reach, reach if self.logit_shift > 0 else -reach
        if self.equal_values:
            drawn["v"] = drawn["v"][:, :, :1].expand_as(drawn["v"])
        drawn["v"] = drawn["v"] + self.value_shift
        tensors = settle(drawn, dtype, device) | chosen
        if self.mask is not None:
            masked = mask_terms(self.spec, self.sizes, self.mask, seed, self.mask_of)
            tensors |= {name: x.to(device) for name, x in masked.items()}
        lengths = (self.lengths_q, self.lengths_q if self.lengths_k is None else self.lengths_k)
        cu_q, cu_k = (None if each is None else borders(each, device) for each in lengths)
        return Problem(self, call_of(self.spec, tensors, cu_q, cu_k), tensors["dy"], tensors.get("dlse"))


@dataclass(frozen=True)
class Problem:
    """A case with its tensors: the bound call and the gradients that come in from above."""

    case: Case
    call: Call
    dy: Tensor
    dlse: Tensor | None


# --- the list ----------------------------------------------------------------

FEATURES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"window": (17, 5)},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": 24, "bias_origin": 7},
    "sink": {"sink": True},
    "tau": {"tau": (-0.7, 0.4, -1.5, 0.1)},
    "gate": {"gate": True},
    "gqa": {"hq": 4, "hkv": 2},
    "varlen": {"lengths_q": (9, 0, 33, 20)},
    "sq<sk": {"sq": 47, "sk": 83},
    "sq>sk": {"sq": 83, "sk": 47},
    "dlse": {"dlse": True},
}
CONTRADICTIONS = {("sq<sk", "sq>sk")}


def compatible(features: Iterable[str]) -> bool:
    return not any({a, b} <= set(features) for a, b in CONTRADICTIONS)


def compose(*features: str, **changes: Any) -> Case:
    """The base case with several features on; unequal lengths become unequal segments in a packed case."""
    options: dict[str, Any] = {}
    for feature in features:
        options |= FEATURES[feature]
    if "varlen" in features and "sq<sk" in features:
        options["lengths_k"] = (14, 0, 40, 29)
    if "varlen" in features and "sq>sk" in features:
        options["lengths_k"] = (4, 0, 21, 20)
    return Case(**({"name": "+".join(features) or "plain"} | options | changes))


SINGLES = tuple(compose(*features, dtypes=EVERY_DTYPE) for features in [(), *((name,) for name in FEATURES)])
PAIRS = tuple(compose(*pair) for pair in itertools.combinations(FEATURES, 2) if compatible(pair))
TOGETHER = tuple(
    compose(*(f for f in FEATURES if f != other), name=f"everything,{shape}", dv=24, dtypes=EVERY_DTYPE)
    for other, shape in (("sq>sk", "sq<sk"), ("sq<sk", "sq>sk"))
) + tuple(
    compose(*(f for f in FEATURES if f not in (other, "varlen")), name=f"everything,batched,{shape}", dtypes=EVERY_DTYPE)
    for other, shape in (("sq>sk", "sq<sk"), ("sq<sk", "sq>sk"))
)

SIZES = (
    *(Case(f"causal,s={s}", causal=True, sq=s, sk=s) for s in (1, 63, 64, 127, 200)),
    *(Case(f"full,s={s}", sq=s, sk=s) for s in (1, 63, 127)),
    Case("causal,decode", causal=True, sq=1, sk=127),
    Case("causal,sq=200,sk=65", causal=True, sq=200, sk=65),
    Case("causal,sq=63,sk=200", causal=True, sq=63, sk=200),
    Case("window,sq=127,sk=200", window=(30, 12), sq=127, sk=200),
    Case("causal,b=3", b=3, causal=True),
    Case("everything,s=200", b=1, sq=200, sk=200, causal=True, window=(70, 0), bias=90, sink=True, tau=(-0.7, 0.4), gate=True),
    *(Case(f"causal,d={d}", causal=True, d=d) for d in (1, 8, 40, 64, 72)),
    Case("causal,d=16,dv=40", causal=True, dv=40),
    Case("lazy,d=40,dv=8", causal=True, d=40, dv=8, bias=65, tau=(-0.7, 0.4)),
    Case("gqa,8:1", hq=8, hkv=1, causal=True),
    Case("gqa,8:2", hq=8, hkv=2, causal=True, sq=33, sk=70),
    Case("mqa,h=3", hq=3, hkv=1, causal=True, bias=65, tau=(-0.7, 0.4, 0.0)),
    Case("scale", causal=True, scale=0.7),
    Case("scale,negative", causal=True, scale=-0.3),
    Case("scale,zero", causal=True, scale=0.0),
)

WIDE = (
    Case("causal,d=96", b=1, causal=True, d=96),
    Case("causal,d=192,dv=128", b=1, causal=True, d=192, dv=128),
    Case("causal,d=256,gqa", b=1, hq=4, hkv=2, causal=True, d=256, dlse=True),
    Case("terms,d=256", b=1, causal=True, d=256, bias=65, sink=True, softcap=1.5, gate=True, dlse=True),
    Case("bias,d=256,window", b=1, hq=4, hkv=2, window=(30, 12), sq=127, sk=150, d=256, bias=40, bias_origin=9),
    Case("terms,d=192,varlen", lengths_q=(9, 0, 33, 20), causal=True, d=192, bias=24, sink=True, gate=True),
    Case("everything,d=192,dv=128", b=1, causal=True, d=192, dv=128, bias=65, sink=True, tau=(-0.7, 0.4), gate=True),
    Case("lazy,d=256", b=1, causal=True, d=256, bias=65, tau=(-0.7, 0.4)),
)

EMPTY = (
    Case("sq=0", sq=0, causal=True, bias=8, sink=True, tau=(-0.7, 0.4), gate=True, dlse=True, dtypes=EVERY_DTYPE),
    Case("sk=0", sk=0, causal=True, bias=8, tau=(-0.7, 0.4), gate=True, dlse=True, dtypes=EVERY_DTYPE),
    Case("sk=0,sink", sk=0, sink=True, dlse=True, dtypes=EVERY_DTYPE),
    Case("sq=0,sk=0", sq=0, sk=0),
    Case("rows without keys", causal=True, sq=90, sk=20, dtypes=EVERY_DTYPE),
    Case("rows without keys,dlse", causal=True, sq=90, sk=20, dlse=True),
    Case("rows without keys,sink,dlse", causal=True, sq=90, sk=20, sink=True, dlse=True, dtypes=EVERY_DTYPE),
    Case("rows without keys,tau", causal=True, sq=90, sk=20, tau=(-0.7, 0.4)),
    Case("rows without keys,everything", causal=True, sq=90, sk=20, bias=30, sink=True, tau=(-0.7, 0.4), gate=True, dlse=True),
    Case("window sees nothing", window=(3, 2), sq=90, sk=20, dlse=True),
    Case("keys without rows", window=(3, 2), sq=20, sk=90, bias=12, bias_origin=5, dlse=True),
    Case("window,self only", window=(0, 0), dlse=True),
)

PACKED = (
    Case("varlen,one segment", lengths_q=(65,), causal=True),
    Case("varlen,segments of one", lengths_q=(1,) * 9, causal=True, tau=(-1.0, 0.3)),
    Case("varlen,empty q", lengths_q=(0, 30, 20, 0), lengths_k=(10, 30, 20, 7), causal=True, dtypes=EVERY_DTYPE),
    Case("varlen,empty k", lengths_q=(10, 30, 20, 7), lengths_k=(0, 30, 20, 0), causal=True, dlse=True, dtypes=EVERY_DTYPE),
    Case("varlen,empty k,sink", lengths_q=(10, 30, 20, 7), lengths_k=(0, 30, 20, 0), sink=True, dlse=True),
    Case("varlen,empty both", lengths_q=(0, 0, 40, 0), lengths_k=(0, 5, 40, 0), causal=True, bias=50),
    Case("varlen,nothing at all", lengths_q=(0, 0), lengths_k=(0, 0), causal=True),
    Case("varlen,long", lengths_q=(127, 3, 70), hq=4, hkv=2, causal=True, bias=130, tau=(-0.7, 0.4)),
    Case("varlen,window,unequal", lengths_q=(12, 50), lengths_k=(60, 20), window=(9, 4), sink=True),
)

BIAS = (
    Case("bias,longer than s", causal=True, bias=100),
    Case("bias,shorter than s", causal=True, bias=5),
    Case("bias,one entry", causal=True, bias=1),
    Case("bias,two-sided", bias=129, bias_origin=64),
    Case("bias,two-sided,sq<sk", bias=40, bias_origin=30, sq=33, sk=70),
    Case("bias,origin negative", bias=24, bias_origin=-3),
    Case("bias,origin beyond the table", bias=24, bias_origin=40),
    Case("bias,never met", causal=True, bias=8, bias_origin=-200),
    Case("bias,past only,full", bias=30, bias_origin=0),
    Case("bias,s=200", b=1, causal=True, bias=150, sq=200, sk=200),
)

TAU = (
    Case("tau,negative", causal=True, tau=(-0.5, -2.0), dtypes=EVERY_DTYPE),
    Case("tau,positive", causal=True, tau=(0.3, 2.0), dtypes=EVERY_DTYPE),
    Case("tau,zero", causal=True, tau=(0.0,), dtypes=EVERY_DTYPE),
    Case("tau,minus one", causal=True, tau=(-1.0,), dtypes=EVERY_DTYPE),
    Case("tau,minus one,self only", window=(0, 0), tau=(-1.0,), dlse=True, dtypes=EVERY_DTYPE),
    Case("tau,minus one,sink", causal=True, tau=(-1.0,), sink=True),
    Case("tau,mixed signs", causal=True, hq=4, hkv=4, tau=(-1.5, 0.0, 0.5, -0.25)),
    Case("tau,nothing survives", tau=(-100.0,), dtypes=EVERY_DTYPE),
    Case("tau,nothing survives,dlse", tau=(-100.0,), dlse=True),
    Case("tau,gqa 8:1", b=1, hq=8, hkv=1, causal=True, sq=40, sk=40, tau=(-1.5, 0.0, 0.5, -0.25)),
    Case("lazy,s=127", b=1, causal=True, sq=127, sk=127, bias=64, tau=(-0.7, 0.4)),
)

NUMERICS = (
    Case("low lse", causal=True, logit_shift=-120.0, dtypes=EVERY_DTYPE),
    Case("low lse,tau,bias", causal=True, logit_shift=-120.0, bias=65, tau=(-0.7, 0.4)),
    Case("low lse,dlse,sq>sk", causal=True, logit_shift=-120.0, sq=83, sk=47, dlse=True),
    Case("high lse", causal=True, logit_shift=120.0),
    Case("large logits", causal=True, logits=30.0, dtypes=EVERY_DTYPE),
    Case("large logits,sink", causal=True, logits=30.0, sink=True),
    Case("large logits,tau", causal=True, logits=30.0, tau=(-0.7, 0.4)),
    Case("softcap,small", causal=True, softcap=0.05),
    Case("softcap,saturated", causal=True, softcap=2.0, logits=10.0, dtypes=EVERY_DTYPE),
    Case("softcap,large", causal=True, softcap=50.0),
    Case("equal values", causal=True, equal_values=True, bias=65),
    Case("tau,large values", causal=True, value_shift=1500.0, tau=(-0.7, 0.4), dtypes=EVERY_DTYPE),
)

INFINITE = (math.inf, -math.inf)
EXTREMES = (
    Case("sink,infinite", causal=True, sq=90, sk=40, sink=INFINITE, dlse=True, dtypes=EVERY_DTYPE),
    Case("sink,infinite,no dlse", sink=INFINITE, bias=24),
    Case("sink,infinite,tau", causal=True, sq=83, sk=47, sink=INFINITE, tau=(0.4, -0.7, -0.7, 0.4), hq=4, gate=True, dlse=True),
    Case("sink,infinite,varlen", lengths_q=(10, 30, 20, 7), lengths_k=(0, 30, 20, 0), sink=INFINITE, dlse=True),
    Case("sink,infinite,no keys", sk=0, sink=INFINITE, dlse=True),
    Case("window beyond 32 bits,tau", window=(sys.maxsize, sys.maxsize), sq=83, sk=47, tau=(-0.7, 0.4)),
    Case("window beyond 32 bits,causal", causal=True, window=(2**31 - 1, None), sq=47, sk=83, bias=24),
    Case("bias,origin beyond 32 bits", causal=True, bias=24, bias_origin=2**31 - 1),
)

MASKS = (
    Case("mask", mask="run", dtypes=EVERY_DTYPE),
    *(compose(name, name=f"mask+{name}", mask="two runs") for name in FEATURES),
    *(replace(case, name=f"mask,{case.name}", mask="two runs") for case in TOGETHER),
    Case("mask,two runs", mask="two runs", dtypes=EVERY_DTYPE),
    Case("mask,documents", mask="documents", sq=200, sk=200, b=1),
    Case("mask,documents,causal,gqa", mask="documents", causal=True, sq=127, sk=127, hq=4, dlse=True),
    Case("mask,documents,tau,bias", mask="documents", causal=True, tau=(-0.7, 0.4), bias=65, dlse=True),
    Case("mask,one for all", mask="two runs", mask_of=(), hq=4),
    Case("mask,per batch entry", mask="two runs", mask_of=("batch",), hq=4, tau=(-0.7, 0.4)),
    Case("mask,per head", mask="two runs", mask_of=("heads",), hq=4, window=(30, 12)),
    Case("mask,nothing is seen", mask="nothing", dlse=True, tau=(-0.7, 0.4), gate=True, dtypes=EVERY_DTYPE),
    Case("mask,nothing is seen,sink", mask="nothing", dlse=True, sink=True),
    Case("mask,everything is seen", mask="everything", tau=(-0.7, 0.4), dtypes=EVERY_DTYPE),
    Case("mask,everything is seen,causal", mask="everything", causal=True, sq=63, sk=127),
    Case("mask,rows without keys", mask="run", causal=True, sq=90, sk=20, sink=True, dlse=True),
    *(
        Case(f"mask,sq={sq},sk={sk}", mask="two runs", sq=sq, sk=sk, b=1)
        for sq, sk in ((1, 127), (127, 1), (200, 65), (64, 128))
    ),
    Case("mask,sq=0", mask="run", sq=0, dlse=True),
    Case("mask,sk=0", mask="run", sk=0, sink=True, dlse=True),
    Case("mask,d=256", mask="two runs", b=1, causal=True, d=256),
    Case("mask,varlen,empty segments", mask="run", lengths_q=(0, 30, 20, 7), lengths_k=(10, 30, 0, 12), causal=True, dlse=True),
    Case("mask,varlen,documents", mask="documents", lengths_q=(127, 3, 70), hq=4, causal=True, tau=(-0.7, 0.4)),
    Case("mask,varlen,one for all", mask="two runs", mask_of=(), lengths_q=(9, 0, 33, 20), tau=(-0.7, 0.4)),
    Case("mask,pos", mask="run", pos=True, dtypes=EVERY_DTYPE),
    Case("mask,pos,two runs,tau", mask="two runs", pos=True, tau=(-0.7, 0.4), sink=True, bias=24, bias_origin=7, dlse=True),
    Case("mask,pos,causal", mask="two runs", pos=True, causal=True, hq=4, softcap=1.5, gate=True),
    Case("mask,pos,window,sq<sk", mask="run", pos=True, window=(17, 5), sq=47, sk=83, dlse=True),
    Case("mask,pos,one for all", mask="two runs", mask_of=(), pos=True, sq=83, sk=47),
    Case("mask,pos,varlen,tau", mask="two runs", pos=True, lengths_q=(9, 0, 33, 20), tau=(-0.7, 0.4)),
    Case("mask,pos,varlen,causal", mask="run", pos=True, lengths_q=(12, 50), lengths_k=(60, 20), causal=True, sink=True),
)

OWN = ("batch", "heads", "rows")
NO_PAIRS = ("tau",)
AWKWARD: dict[str, Any] = {"lengths_q": (65, 0, 1, 63)}
UNEQUAL: dict[str, Any] = {"lengths_q": (63, 0, 65, 1, 20, 7), "lengths_k": (30, 12, 65, 63, 0, 90)}
MANY: dict[str, Any] = {"pair_bias": ("pairs", "heads", "rows"), "mask": "two runs", "dv": 24}
PAIR_BIAS = (
    Case("pair", pair_bias=("heads", "rows"), dtypes=EVERY_DTYPE),
    *(compose(name, name=f"pair+{name}", pair_bias=("pairs", "heads", "rows")) for name in FEATURES if name not in NO_PAIRS),
    *(
        compose(*(f for f in FEATURES if f not in (other, "varlen", *NO_PAIRS)), name=f"pair,everything,{shape}", b=4, **MANY)
        for other, shape in (("sq>sk", "sq<sk"), ("sq<sk", "sq>sk"))
    ),
    *(
        Case(f"pair,{'+'.join(of) or 'keys'}", b=4, hq=4, sq=33, sk=40, causal=True, pair_bias=of, dtypes=EVERY_DTYPE)
        for size in range(4)
        for of in itertools.combinations(OWN, size)
    ),
    Case("pair,two entries share", b=4, hq=4, pair_bias=("pairs", "heads", "rows")),
    Case("pair,two entries share a row", b=4, hq=4, pair_bias=("pairs",), mask="two runs"),
    Case("pair,mask", pair_bias=("heads", "rows"), mask="two runs", dlse=True),
    Case("pair,mask,pos,sink", pair_bias=OWN, mask="run", pos=True, sink=True, dlse=True),
    Case("pair,hidden", pair_bias=("heads", "rows", "hidden"), dlse=True, dtypes=EVERY_DTYPE),
    Case("pair,hidden,sink", pair_bias=("heads", "rows", "hidden"), sink=True, dlse=True, gate=True),
    Case("pair,hidden,own,gqa", hq=8, pair_bias=(*OWN, "hidden"), causal=True, softcap=1.5),
    Case("pair,hidden,mask", pair_bias=("pairs", "heads", "rows", "hidden"), mask="documents", bias=24, bias_origin=7),
    Case("pair,hidden,keys", b=4, pair_bias=("batch", "hidden"), sq=47, sk=83),
    Case("pair,wide", pair_bias=("heads", "rows", "wide"), dtypes=EVERY_DTYPE),
    Case("pair,wide,own,hidden", pair_bias=(*OWN, "wide", "hidden"), causal=True),
    Case("pair,strided", pair_bias=("heads", "rows", "strided"), sq=47, sk=83),
    Case("pair,strided,own,gqa", hq=8, pair_bias=(*OWN, "strided"), causal=True),
    compose(
        *(f for f in FEATURES if f not in ("sq>sk", *NO_PAIRS)),
        name="pair,everything,varlen",
        pair_bias=("pairs", "heads", "rows"),
    ),
    *(Case(f"pair,s={s}", b=4, sq=s, sk=s, d=32, pair_bias=("pairs", "heads", "rows")) for s in (1, 63, 64, 127, 200)),
    *(Case(f"pair,sq={sq},sk={sk}", pair_bias=("heads", "rows"), sq=sq, sk=sk) for sq, sk in ((1, 127), (127, 1), (200, 63))),
    Case("pair,rows without keys", pair_bias=("heads", "rows"), causal=True, sq=90, sk=20, dlse=True),
    Case("pair,d=256", b=1, pair_bias=("heads", "rows"), d=256, causal=True),
    Case("pair,d=40,dv=8", pair_bias=("heads", "rows"), d=40, dv=8),
    *(
        Case(f"pair,varlen,{'+'.join(of) or 'keys'}", hq=4, causal=True, pair_bias=of, dlse=True, **UNEQUAL)
        for of in (
            (),
            ("heads",),
            ("rows",),
            ("heads", "rows"),
            ("pairs", "rows"),
            ("batch", "rows"),
            ("pairs",),
            ("batch",),
            OWN,
        )
    ),
    Case("pair,varlen,every dtype", pair_bias=("heads", "rows"), dtypes=EVERY_DTYPE, **AWKWARD),
    Case("pair,varlen,wide,own,hidden", hq=8, pair_bias=(*OWN, "wide", "hidden"), causal=True, dlse=True, **AWKWARD),
    Case("pair,varlen,hidden,sink", pair_bias=("pairs", "heads", "rows", "hidden"), sink=True, dlse=True, **UNEQUAL),
    Case("pair,varlen,strided,window", pair_bias=("heads", "rows", "strided"), window=(17, 5), softcap=1.5, **UNEQUAL),
    Case("pair,varlen,gqa,bias", hq=4, hkv=2, pair_bias=("rows",), bias=24, bias_origin=7, gate=True, **AWKWARD),
    Case("pair,varlen,mask", pair_bias=("pairs", "heads", "rows"), mask="two runs", dlse=True, **AWKWARD),
    Case("pair,varlen,long", hq=4, d=32, pair_bias=("heads", "rows"), lengths_q=(127, 3, 200)),
    Case("pair,varlen,nothing at all", pair_bias=("heads", "rows"), lengths_q=(0, 0)),
    Case("pair,sq=0", pair_bias=("heads",), sq=0, dlse=True),
    Case("pair,sk=0", pair_bias=("heads", "rows"), sk=0, sink=True, dlse=True),
)

CASES: tuple[Case, ...] = (
    *SINGLES,
    *PAIRS,
    *TOGETHER,
    *SIZES,
    *WIDE,
    *EMPTY,
    *PACKED,
    *BIAS,
    *TAU,
    *NUMERICS,
    *EXTREMES,
    *MASKS,
    *PAIR_BIAS,
)
BY_NAME = {case.name: case for case in CASES}


def small(case: Case, d: int = 3, dv: int = 2) -> Case:
    """The same composition at a size where finite differences and plain Python loops are cheap."""

    def shrink(length: int) -> int:
        return -(-length // 12)

    left, right = (None if reach is None else shrink(reach) for reach in case.window)
    return replace(
        case,
        b=1,
        sq=shrink(case.sq),
        sk=shrink(case.sk),
        d=d,
        dv=dv,
        window=(left, right),
        bias=None if case.bias is None else 5,
        bias_origin=min(case.bias_origin, 2),
        lengths_q=case.lengths_q and tuple(map(shrink, case.lengths_q)),
        lengths_k=case.lengths_k and tuple(map(shrink, case.lengths_k)),
    )


def with_dtypes(cases: tuple[Case, ...] = CASES) -> list[tuple[Case, torch.dtype]]:
    return [(case, dtype) for case in cases for dtype in case.dtypes]


def case_id(value: object) -> str:
    """pytest ids: the case's name, the dtype's short name."""
    if isinstance(value, Case):
        return value.name
    return DTYPE_NAMES[value] if isinstance(value, torch.dtype) else str(value)
