"""The one list of cases, which every suite of the tests reads. Benchmarks make the same `Case` of shapes worth measuring."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from backlight.problems.case import DTYPE_NAMES, EVERY_DTYPE, Case

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

ALPHAS = (1.5, 1.25, 2.0, 1.75)
NO_ENTMAX = ("tau",)
# a number is compiled in; a tuple is learned
ENTMAX = (
    *(Case(f"entmax,{alpha}", causal=True, entmax=alpha, dtypes=EVERY_DTYPE) for alpha in (1.05, 1.25, 1.5, 1.75, 2.0)),
    Case("entmax", hq=4, hkv=4, entmax=ALPHAS, dtypes=EVERY_DTYPE),
    *(compose(name, name=f"entmax+{name}", entmax=(1.5, 1.3)) for name in FEATURES if name not in NO_ENTMAX),
    *(compose(name, name=f"entmax,1.5+{name}", entmax=1.5) for name in FEATURES if name not in NO_ENTMAX),
    *(
        compose(
            *(f for f in FEATURES if f not in (other, "tau", *left)), name=f"entmax,everything,{shape}", entmax=alpha, **rest
        )
        for other, shape, left, alpha, rest in (
            ("sq>sk", "sq<sk", (), ALPHAS, {"dv": 24}),
            ("sq<sk", "sq>sk", (), 1.5, {"dv": 24}),
            ("sq<sk", "batched", ("varlen",), ALPHAS, {"mask": "two runs"}),
            ("sq<sk", "pairs", ("varlen",), (1.5, 1.2), {"b": 4, "pair_bias": ("pairs", "heads", "rows"), "mask": "documents"}),
        )
    ),
    *(Case(f"entmax,s={s}", causal=True, sq=s, sk=s, entmax=1.5) for s in (1, 63, 64, 127, 200)),
    *(Case(f"entmax,{sq}x{sk}", sq=sq, sk=sk, entmax=(1.5, 2.0)) for sq, sk in ((1, 127), (127, 1), (200, 63))),
    Case("entmax,sink", causal=True, sink=True, entmax=(1.5, 2.0), dlse=True, dtypes=EVERY_DTYPE),
    Case("entmax,sink below the threshold", sink=(-40.0, -9.0), entmax=(1.5, 1.25), dlse=True),
    Case("entmax,sink above all", sink=(40.0, 9.0), entmax=(1.5, 2.0), dlse=True),
    Case(
        "entmax,sink,infinite", causal=True, sq=83, sk=47, sink=(math.inf, -math.inf), entmax=(1.5, 2.0), dlse=True, gate=True
    ),
    Case("entmax,rows without keys", causal=True, sq=90, sk=20, entmax=(1.5, 1.1), dlse=True, gate=True),
    Case("entmax,rows without keys,sink", causal=True, sq=90, sk=20, sink=True, entmax=(1.5, 2.0), dlse=True),
    Case("entmax,self only", window=(0, 0), entmax=(1.5, 2.0), dlse=True, dtypes=EVERY_DTYPE),
    Case("entmax,ties", logits=0.0, bias=24, bias_origin=7, entmax=ALPHAS, hq=4, hkv=4),
    Case("entmax,large logits", causal=True, logits=30.0, entmax=(1.5, 1.25)),
    Case("entmax,low lse", causal=True, logit_shift=-120.0, entmax=(1.5, 1.25)),
    Case("entmax,sq=0", sq=0, causal=True, sink=True, entmax=1.5, gate=True, dlse=True),
    Case("entmax,sk=0", sk=0, causal=True, sink=True, entmax=(1.5, 2.0), dlse=True),
    Case("entmax,mask", mask="two runs", entmax=(1.5, 1.75), dlse=True),
    Case("entmax,mask,nothing", mask="nothing", entmax=1.5, dlse=True),
    Case("entmax,mask,pos", mask="two runs", pos=True, sink=True, entmax=(1.5, 1.25)),
    Case("entmax,mask,varlen", mask="documents", lengths_q=(127, 3, 70), hq=4, causal=True, entmax=1.5),
    Case("entmax,varlen", lengths_q=(9, 0, 33, 20), lengths_k=(14, 0, 40, 29), causal=True, bias=24, entmax=(1.5, 2.0)),
    Case("entmax,pair", pair_bias=("heads", "rows"), entmax=1.5, dlse=True),
    Case("entmax,pair,own", hq=4, pair_bias=OWN, causal=True, entmax=(1.5, 1.3)),
    Case("entmax,pair,keys", b=4, pair_bias=("batch",), sq=47, sk=83, entmax=1.5),
    Case("entmax,pair,hidden", pair_bias=("heads", "rows", "hidden"), entmax=(1.5, 2.0), dlse=True),
    Case("entmax,d=40,dv=8", causal=True, d=40, dv=8, bias=65, entmax=1.5),
    Case("entmax,d=192,dv=128", b=1, causal=True, d=192, dv=128, entmax=1.5),
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
    *ENTMAX,
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
