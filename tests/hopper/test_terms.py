"""Learned terms in the Hopper forward, in the emulator, judged by the oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import emulator
from modules import mutant

from backlight.backends.hopper import BACKEND, terms
from backlight.backends.hopper.forward import consumer, elastic, kernel, scores, steps
from backlight.backends.hopper.forward import host as forward
from backlight.reference import oracle
from cases import CASES, FP16, Case, case_id
from gate import judge

LATE, EARLY = pytest.param(True, id="late"), pytest.param(False, id="early", marks=pytest.mark.slow)
ORDERS = pytest.mark.parametrize("late", [LATE, EARLY])
ELSEWHERE = "tensors are on cpu, not on a GPU"

UNPAIRED = [case for case in CASES if case.pair_bias is None and case.entmax is None]
WITH_TERMS = [case for case in UNPAIRED if not case.mask and (case.bias or case.sink or case.gate or case.softcap or case.tau)]
TERMS = [case for case in WITH_TERMS if BACKEND.why_not(case.make(FP16, margin=0).call) == (ELSEWHERE,)]
TILES = (
    Case("bias,300", b=1, hq=2, hkv=1, sq=300, sk=300, d=64, causal=True, bias=140),
    Case("bias,longer,420", b=1, hq=1, hkv=1, sq=420, sk=420, d=64, causal=True, bias=600),
    Case("bias,short,420", b=1, hq=1, hkv=1, sq=420, sk=420, d=64, causal=True, bias=3),
    Case("bias,two-sided,150x420", b=1, hq=1, hkv=1, sq=150, sk=420, d=64, bias=100, bias_origin=60),
    Case("bias,far,400", b=1, hq=1, hkv=1, sq=400, sk=400, d=64, causal=True, bias=60, bias_origin=-150),
    Case("bias,window,500", b=1, hq=1, hkv=1, sq=500, sk=500, d=64, window=(140, 70), bias=100, bias_origin=30),
    Case("bias,softcap,packed", hq=2, hkv=1, lengths_q=(300, 1, 0, 140), d=64, causal=True, bias=50, softcap=2.0),
    Case("sink,gate,330", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, causal=True, sink=True, gate=True),
    Case("sink,gate,packed", hq=1, hkv=1, lengths_q=(300, 5, 140), lengths_k=(200, 60, 140), d=64, sink=True, gate=True),
    Case("gate,d=128", b=1, hq=2, hkv=1, sq=260, sk=260, d=128, causal=True, gate=True),
    Case("gate,d=256", b=1, hq=1, hkv=1, sq=200, sk=200, d=256, causal=True, gate=True, bias=70),
    Case("softcap,260", b=1, hq=1, hkv=1, sq=260, sk=260, d=64, softcap=3.0),
    Case("tau,even", b=1, hq=2, hkv=1, sq=256, sk=256, d=64, tau=(-0.7, 0.4)),
    Case("tau,causal,330", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, causal=True, tau=(-1.0, 0.3)),
    Case("tau,window,bias", b=1, hq=2, hkv=1, sq=420, sk=420, d=64, window=(140, 0), bias=100, tau=(-0.7, 0.0)),
    Case("tau,rows without keys", b=1, hq=2, hkv=1, sq=300, sk=150, d=64, causal=True, tau=(-0.7, 0.4)),
    Case("tau,packed", hq=2, hkv=1, lengths_q=(300, 1, 0, 140), d=64, causal=True, bias=70, tau=(-1.0, 0.4)),
    Case("lazy,d=128", b=1, hq=2, hkv=1, sq=260, sk=260, d=128, causal=True, bias=90, tau=(-0.9, 0.4), gate=True),
    Case(
        "everything",
        b=2,
        hq=4,
        hkv=2,
        sq=200,
        sk=270,
        d=96,
        causal=True,
        bias=90,
        sink=True,
        gate=True,
        softcap=4.0,
        tau=(-0.9, 0.4, -1.0, 0.0),
    ),
    Case("all but tau", b=2, hq=4, hkv=2, sq=200, sk=270, d=96, causal=True, bias=90, sink=True, gate=True, softcap=4.0),
)


def examine(case: Case, late: bool) -> None:
    problem = case.make(FP16)
    with emulator.emulated(forward, late=late):
        y, lse, u, _ = forward.forward(problem.call, save_u=True)
    verdict = judge(problem.call, None, None, {"y": y, "lse": lse})
    assert verdict.ok, f"{case.name}\n{verdict}"
    assert (u is None) == (case.tau is None)
    if u is not None and u.numel():
        wanted = oracle(problem.call, keep=("u",))["u"]
        assert (u.double() - wanted).abs().max() <= 2e-3 * (1 + wanted.abs().max()), case.name


def test_terms_are_many() -> None:
    assert len(TERMS) > 40


@ORDERS
@pytest.mark.parametrize("case", TERMS, ids=case_id)
def test_case(case: Case, late: bool) -> None:
    examine(case, late)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("case", TILES, ids=case_id)
def test_tiles(case: Case, late: bool) -> None:
    examine(case, late)


@pytest.mark.parametrize("d", [64, 128])
def test_capped_scores_beside_hidden_ones_that_are_no_numbers(d: int) -> None:
    """Every thread holds some: what a warp then takes for its largest score must not make a short series of the others."""
    call = Case("hidden", b=1, hq=1, hkv=1, sq=128, sk=128, d=d, causal=True, softcap=0.5).make(FP16).call
    spoilt = call.k.clone()
    spoilt[:, :, 31::32] = torch.nan
    with emulator.emulated(forward):
        clean, found = (forward.forward(replace(call, k=k, _segments=None)) for k in (call.k, spoilt))
    for got, wanted in zip(found[:2], clean[:2], strict=True):
        assert torch.equal(got[:, :, :31], wanted[:, :, :31])


@pytest.mark.parametrize("tau", [None, (-0.7,)], ids=["softmax", "elastic"])
def test_a_bias_of_minus_infinity_hides_keys(tau: tuple[float] | None) -> None:
    """Whole blocks of them too, and all keys of a row, where nothing else hides any."""
    call = Case("hiding", b=1, hq=1, hkv=1, sq=128, sk=256, d=64, bias=400, bias_origin=200, tau=tau).make(FP16).call
    assert call.bias is not None
    call.bias[:, 60:340] = -torch.inf
    with emulator.emulated(forward):
        y, lse, *_ = forward.forward(call)
    verdict = judge(call, None, None, {"y": y, "lse": lse})
    assert verdict.ok, str(verdict)
    assert 0 < lse.isinf().sum() < lse.numel()


# --- what is broken is noticed -----------------------------------------------------------------------------------------------

BIAS = {"causal": True, "bias": 60}
TAU = {"causal": True, "tau": (-0.7, 0.4)}
BROKEN = {
    "band too short": (scores, "(here < p.n_bias + s.shape[1] - 1)", "(here < p.n_bias)", consumer, "seen_scores", BIAS),
    "distances of lower rows": (terms, "gl.expand_dims(down & 8, 1)", "gl.expand_dims(down & 0, 1)", scores, "bias_tile", BIAS),
    "slope at 0": (
        terms,
        "mul.f32 w, {factor}, {unit};",
        "mul.f32 w, {factor}, {factor};",
        terms,
        "RATIO_32",
        {"softcap": 20.0},
    ),
    "large scores as small ones": (
        terms,
        "unless(LONG[0], ",
        "unless(99.0, ",
        terms,
        "RATIO_32",
        {"softcap": 0.5},
    ),
    "sink in every column": (
        terms,
        "gl.where(first, 1.0, 0.0)",
        "gl.where(first, 1.0, 1.0)",
        scores,
        "sink_sums",
        {"sink": True},
    ),
    "gate read in flight": (
        steps,
        "mbarrier.wait(p.buffers.gate_full.index(W), turn & 1)",
        "pass",
        consumer,
        "write_o",
        {"gate": True},
    ),
    "gate of the next head": (
        steps,
        "load_tile(p.gate_desc, place.b, place.h,",
        "load_tile(p.gate_desc, place.b, 0,",
        consumer,
        "load_gate",
        {"gate": True},
    ),
    "v never released": (elastic, "release(p.v, previous)", "pass", kernel, "elastic_consumer", TAU),
    "k never released": (elastic, "release(p.k, stage)", "pass", kernel, "elastic_consumer", TAU),
    "future keys leak": (
        elastic,
        "block, view.sk), weight, -INF)",
        "block, view.sk), weight, share)",
        kernel,
        "elastic_consumer",
        TAU,
    ),
    "weights of the block before overwritten": (
        elastic,
        "o, u, weight = warpgroup_mma_wait(0",
        "o, u, weight = warpgroup_mma_wait(2",
        kernel,
        "elastic_consumer",
        TAU,
    ),
    "u read in flight": (
        elastic,
        "o, u = warpgroup_mma_wait(0",
        "o, u = warpgroup_mma_wait(1",
        kernel,
        "elastic_consumer",
        TAU,
    ),
    "tile before still leaving": (
        elastic,
        "        tma.store_wait(0)\n",
        "        pass\n",
        kernel,
        "elastic_consumer",
        TAU,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, target, attribute, options = BROKEN[name]
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    monkeypatch.setattr(target, attribute, getattr(mutant(tmp_path, module, old, new), attribute))
    with pytest.raises((RuntimeError, AssertionError)):
        examine(Case("broken", b=1, hq=2, hkv=1, sq=300, sk=300, d=16, **options), late=True)
