"""The Triton tangent kernel in Triton's interpreter, against the tiled backend in float64 of the same inputs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import backlight
from backlight import registry
from backlight.backends.tiled.tangent import tangent
from backlight.backends.triton.config import KernelConfig
from backlight.call import Call, Part
from backlight.config import override
from backlight.spec import LEARNED
from cases import BY_NAME, FP32, Case, case_id

NAMES = (
    "plain",
    "causal",
    "window",
    "softcap",
    "bias",
    "sink",
    "gate",
    "gqa",
    "varlen",
    "sq<sk",
    "causal,d=16,dv=40",
    "rows without keys,sink,dlse",
    "window sees nothing",
    "bias,two-sided,sq<sk",
    "varlen,empty k",
    "varlen,window,unequal",
    "sk=0,sink",
    "mask",
    "mask,nothing is seen",
    "mask,varlen,empty segments",
    "mask,pos,varlen,causal",
    "softcap,saturated",
    "pair",
    "pair,keys",
    "pair+softcap",
    "pair,batch+rows",
    "pair,two entries share",
    "pair,hidden,sink",
    "pair,hidden,mask",
    "pair,wide,own,hidden",
    "pair,strided",
)
ELASTIC = (
    "tau",
    "tau,negative",
    "tau,positive",
    "tau,minus one,self only",
    "tau,minus one,sink",
    "tau,nothing survives",
    "tau,gqa 8:1",
)
TOGETHER = Case(
    "everything", b=1, hq=4, hkv=2, sq=40, sk=70, causal=True, window=(30, 0), softcap=1.5, bias=24, sink=True, gate=True
)
SMALL = KernelConfig(16, 16, 4, 1)


def learned(call: Call) -> dict[str, Tensor]:
    return {name: x for name in LEARNED if (x := getattr(call, name)) is not None}


def tangents_of(call: Call) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(x.shape, generator=generator).to(x.dtype) for name, x in learned(call).items()}


def judge(call: Call, tangents: dict[str, Tensor], limit: float, known: bool = False) -> None:
    exact = replace(call, **{name: x.double() for name, x in learned(call).items()})
    wanted = tangent(exact, {name: t.double() for name, t in tangents.items()}, None, save_u=True)
    u = None if wanted.u is None else wanted.u.to(call.q.dtype)
    saved = (wanted.y.to(call.q.dtype), wanted.lse.float(), u) if known else None
    found = registry.get("triton").tangent(call, tangents, saved)
    for name, got, want in zip(("y", "lse", "u", "ty", "tlse", "tu"), found, wanted.all, strict=True):
        if want is None or not want.numel():
            continue
        at = want.isfinite()
        assert torch.equal(at, got.isfinite()), name
        scale = max(1.0, float(want[at].abs().max()) if at.any() else 0.0)
        assert float((got.double() - want)[at].abs().max() if at.any() else 0.0) <= limit * scale, name


@pytest.mark.parametrize("case", [*(BY_NAME[name] for name in NAMES), TOGETHER], ids=case_id)
def test_fp32(case: Case) -> None:
    call = case.make(FP32).call
    tangents = tangents_of(call)
    with override("triton.tangent", SMALL):
        judge(call, tangents, 5e-6)


@pytest.mark.parametrize(
    "name", ["window", "varlen,empty k", "rows without keys,sink,dlse", "mask,nothing is seen", "softcap,saturated"]
)
def test_beside_known_results(name: str) -> None:
    call = BY_NAME[name].make(FP32).call
    with override("triton.tangent_known", SMALL):
        judge(call, tangents_of(call), 5e-6, known=True)


def test_known_rows_whose_first_keys_weigh_nothing() -> None:
    """Their weights underflow, so the reference comes from the tiles behind: without one, all scores moving by about 200 would
    be rounded at that size."""
    call = Case("", b=1, hq=1, hkv=1, sq=20, sk=48, sink=True).make(torch.float16).call
    call.q[..., 0], call.k[..., 0], call.k[..., :16, 0] = 16.0, 0.0, -32.0
    tangents = tangents_of(call)
    tangents["k"][..., 0] = 50.0
    with override("triton.tangent_known", SMALL):
        judge(call, {"k": tangents["k"]}, 2e-3, known=True)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sink", "gate", "pair_bias"])
def test_one_tangent(name: str, known: bool) -> None:
    pair = ("heads", "rows", "hidden") if name == "pair_bias" or not known else None
    call = replace(replace_length(TOGETHER), pair_bias=pair).make(FP32).call
    with override("triton.tangent", SMALL), override("triton.tangent_known", SMALL):
        judge(call, {name: tangents_of(call)[name]}, 5e-6, known)


def replace_length(case: Case) -> Case:
    return replace(case, sq=20, sk=36, hq=2, hkv=1)


def test_fp16_and_tiles_of_the_heuristic() -> None:
    call = Case("tiles", b=1, hq=1, hkv=1, causal=True, sq=70, sk=130, d=64).make(torch.float16).call
    judge(call, tangents_of(call), 4e-3)


def test_the_public_call() -> None:
    call = BY_NAME["causal"].make(FP32).call
    tangents = tangents_of(call)
    y, ty = backlight.attention_jvp(*learned(call).values(), *tangents.values(), causal=True, backend="triton")
    wanted = backlight.attention_jvp(*learned(call).values(), *tangents.values(), causal=True, backend="tiled")
    torch.testing.assert_close((y, ty), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [False, True], ids=["fresh", "known"])
@pytest.mark.parametrize("name", ELASTIC)
def test_tau(name: str, known: bool) -> None:
    call = BY_NAME[name].make(FP32).call
    with override("triton.tangent_elastic", SMALL), override("triton.lse", SMALL):
        judge(call, tangents_of(call), 5e-6, known)


@pytest.mark.parametrize("known", [False, True], ids=["fresh", "known"])
@pytest.mark.parametrize("given", ["q", "k", "v", "bias", "sink", "tau", "gate", "all"])
def test_tau_beside_everything(given: str, known: bool) -> None:
    call = replace(replace_length(TOGETHER), tau=(-0.7, 0.4)).make(FP32).call
    tangents = tangents_of(call)
    with override("triton.tangent_elastic", SMALL), override("triton.lse", SMALL):
        judge(call, tangents if given == "all" else {given: tangents[given]}, 5e-6, known)


@pytest.mark.parametrize(
    "case",
    [
        Case("packed", lengths_q=(10, 17, 7), lengths_k=(20, 0, 20), hq=2, hkv=1, causal=True, tau=(-0.7, 0.4), gate=True),
        Case("mask", b=1, hq=2, hkv=1, mask="two runs", sq=29, sk=20, tau=(0.4, -1.5)),
    ],
    ids=case_id,
)
def test_tau_of_packed_and_masked_rows(case: Case) -> None:
    call = case.make(FP32).call
    with override("triton.tangent_elastic", SMALL), override("triton.lse", SMALL):
        judge(call, tangents_of(call), 5e-6)


def test_tau_in_fp16_and_tiles_of_the_heuristic() -> None:
    call = Case("tiles", b=1, hq=1, hkv=1, causal=True, sq=70, sk=130, d=64, tau=(-0.7,)).make(torch.float16).call
    judge(call, tangents_of(call), 4e-3)


def test_tau_of_a_part_is_refused_by_name() -> None:
    call = BY_NAME["tau"].make(FP32).call
    reasons = registry.get("triton").why_not_differentiated("tangent", replace(call, part=Part()))
    assert reasons == ("has no forward-mode derivative of tau with parts of a larger problem",)
