"""Entmax on Hopper in the emulator, judged by the oracle: numerics, synchronisation, blocks that are left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import emulator
from modules import mutant

from backlight.backends.hopper import BACKEND, threshold
from backlight.backends.hopper.backward import alive, dq_convert, dq_rows, host, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import ForwardConfig, entmax_config
from backlight.backends.hopper.forward import entmax, kernel, live_blocks, sparse, sparse_producer
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.config import override
from backlight.reference import oracle
from cases import CASES, FP16, Case, Problem, case_id
from gate import judge

LATE, EARLY = pytest.param(True, id="late"), pytest.param(False, id="early", marks=pytest.mark.slow)
ORDERS = pytest.mark.parametrize("late", [LATE, EARLY])
NARROW = ForwardConfig(128, 2)
ELSEWHERE = "tensors are on cpu, not on a GPU"
NUMBERS = [case for case in CASES if isinstance(case.entmax, float) and case.pair_bias is None]
LISTED = [case for case in NUMBERS if BACKEND.why_not(case.make(FP16).call) == (ELSEWHERE,)]
TILES = (
    Case("full,300x500", b=1, hq=2, hkv=1, sq=300, sk=500, d=64, entmax=1.5),
    Case("full,even", b=1, hq=4, hkv=1, sq=256, sk=256, d=64, entmax=1.5),
    Case("causal,400", b=1, hq=2, hkv=1, sq=400, sk=400, d=64, causal=True, entmax=1.5),
    Case("causal,1.25", b=1, hq=1, hkv=1, sq=300, sk=300, d=64, causal=True, entmax=1.25),
    Case("causal,1.37", b=1, hq=1, hkv=1, sq=300, sk=300, d=64, causal=True, entmax=1.37),
    Case("causal,150x420", b=1, hq=2, hkv=1, sq=150, sk=420, d=64, causal=True, entmax=1.5),
    Case("causal,420x150", b=1, hq=2, hkv=1, sq=420, sk=150, d=64, causal=True, entmax=1.5),
    Case("sharp", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, causal=True, logits=8.0, entmax=1.5),
    Case("sharp,1.25", b=1, hq=1, hkv=1, sq=330, sk=330, d=64, causal=True, logits=8.0, entmax=1.25),
    Case("ties", b=1, hq=2, hkv=1, sq=200, sk=330, d=64, logits=0.0, entmax=1.5),
    Case("low", b=1, hq=1, hkv=1, sq=200, sk=330, d=64, causal=True, logit_shift=-120.0, entmax=1.5),
    Case("steep", b=1, hq=1, hkv=1, sq=64, sk=330, d=64, falling=-4.0, entmax=1.5),
    Case("window", b=1, hq=2, hkv=1, sq=500, sk=500, d=64, window=(140, 70), entmax=1.5),
    Case("window,narrow", b=1, hq=1, hkv=1, sq=420, sk=420, d=64, window=(10, 0), entmax=1.5),
    Case("self only", b=1, hq=1, hkv=1, sq=200, sk=200, d=64, window=(0, 0), entmax=1.5),
    Case("packed", hq=2, hkv=1, lengths_q=(300, 1, 0, 140), d=64, causal=True, entmax=1.5),
    Case("packed,window", hq=1, hkv=1, lengths_q=(300, 5, 140), lengths_k=(200, 60, 140), d=64, window=(90, 20), entmax=1.5),
    Case("d=96", b=1, hq=2, hkv=1, sq=200, sk=200, d=96, causal=True, entmax=1.5),
    Case("d=128", b=1, hq=2, hkv=1, sq=330, sk=330, d=128, causal=True, entmax=1.5),
    Case("d=64,dv=128", b=1, hq=1, hkv=1, sq=150, sk=240, d=64, dv=128, entmax=1.5),
    Case("sink,gate", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, causal=True, sink=True, gate=True, entmax=1.5),
    Case("sink of all sizes", b=1, hq=3, hkv=1, sq=150, sk=150, d=64, sink=(40.0, -40.0, 1.0), entmax=1.5),
    Case("softcap", b=1, hq=1, hkv=1, sq=260, sk=260, d=64, causal=True, softcap=3.0, entmax=1.5),
    Case("softcap,d=128", b=1, hq=1, hkv=1, sq=200, sk=200, d=128, causal=True, softcap=3.0, entmax=1.5),
)


def examine(problem: Problem, late: bool) -> None:
    call = problem.call
    needs = frozenset({"dq", "dk", "dv", *(f"d{term}" for term in ("sink", "gate") if getattr(call, term) is not None)})
    with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, alive, late=late):
        y, lse, u, _ = forward.forward(call, save_u=True)
        gradients = host.backward(call, y, lse, u, problem.dy, problem.dlse, needs)
    # alpha is a number here, which has no gradient
    given = {"dentmax": oracle(call, problem.dy, problem.dlse, keep=("dentmax",))["dentmax"]}
    verdict = judge(call, problem.dy, problem.dlse, {"y": y, "lse": lse} | gradients | given)
    assert verdict.ok, f"{problem.case.name}\n{verdict}"
    assert u is not None
    if u.numel():
        wanted = oracle(call, keep=("u",))["u"]
        assert (u.double() - wanted).abs().max() <= 2e-3 * (1 + wanted.abs().max()), problem.case.name


def test_cases_are_many() -> None:
    assert len(LISTED) > 12


@ORDERS
@pytest.mark.parametrize("case", LISTED, ids=case_id)
def test_case(case: Case, late: bool) -> None:
    examine(case.make(FP16), late)


@ORDERS
@pytest.mark.parametrize("case", TILES, ids=case_id)
def test_tiles(case: Case, late: bool) -> None:
    examine(case.make(FP16), late)


@pytest.mark.parametrize("config", [NARROW, ForwardConfig(64, 2, persistent=False), ForwardConfig(64, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (80, 30)}], ids=str)
def test_configs(options: dict[str, Any], config: ForwardConfig) -> None:
    with override("hopper.entmax", config):
        examine(Case("forward", b=1, hq=2, hkv=1, sq=330, sk=330, d=64, entmax=1.5, **options).make(FP16), late=True)


@pytest.mark.parametrize("alpha", [1.5, 1.25, 1.37])
@pytest.mark.parametrize("key", [3, 100, 299])
def test_what_is_not_a_number_stays_one(key: int, alpha: float) -> None:
    """In the block that is visited first, last, or between: a multiply-add that saturates makes a zero of it."""
    problem = Case("spoilt", b=1, hq=2, hkv=2, sq=300, sk=300, d=64, causal=True, entmax=alpha).make(FP16)
    problem.call.k[0, 0, key, 2] = torch.nan
    with emulator.emulated(forward):
        y, lse, u, _ = forward.forward(problem.call, save_u=True)
    spoilt = torch.zeros(1, 2, 300, dtype=torch.bool)
    spoilt[0, 0, key:] = True
    assert torch.equal(lse.isnan(), spoilt)
    assert u is not None
    for found in (y, u):
        assert torch.equal(found.isnan(), spoilt[..., None].expand_as(found))


# --- blocks that are left out ------------------------------------------------------------------------------------------------


def falling(case: Case, per_key: float) -> Problem:
    """Scores that fall with the distance before a row by so much per key."""
    problem = case.make(FP16)
    q, k = problem.call.q.clone(), problem.call.k.clone()
    keys = torch.arange(k.shape[2])
    q[..., :2] = 8.0
    step = per_key / (8.0 * problem.call.scale)
    k[..., 0], k[..., 1] = (keys // 64 * 64 * step).half(), (keys % 64 * step).half()
    return replace(problem, call=replace(problem.call, q=q, k=k, _segments=None))


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"causal": True, "d": 128}, {"window": (400, 0)}, {"lengths_q": (700, 90), "causal": True}],
    ids=str,
)
def test_blocks_without_a_weight_are_left_out(options: dict[str, Any], late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"b": 1, "sq": 900, "sk": 900} if "lengths_q" not in options else {}
    problem = falling(Case("falling", hq=2, hkv=1, **sizes, **({"d": 64} | options), entmax=1.5), 1 / 32)
    made: list[entmax.Living] = []
    given = entmax.Living.of

    def kept(*args: Any) -> entmax.Living:
        made.append(given(*args))
        return made[-1]

    monkeypatch.setattr(forward.Living, "of", kept)
    examine(problem, late)
    living, looked = made
    assert 0 < looked.live.sum() <= living.live.sum() < 0.3 * living.live.numel()
    # thresholds are known in the backward: nothing lives there that did not in the forward
    assert (looked.live <= living.live).all()
    if not problem.call.varlen:
        alive = blocks_with_weights(problem.call, entmax_config(problem.call).block_n)
        rows, keys = alive.shape[1:]
        for each in made:
            assert (each.live[:, :rows, :keys].bool() | ~alive).all(), "a block with a weight was left out"


def blocks_with_weights(call: Call, block_n: int) -> torch.Tensor:
    """Blocks of 64 rows and `block_n` keys in which some u is above rounding: [heads, rows, keys]."""
    made = oracle(call, keep=("s", "lse"))
    above = (made["s"] - made["lse"][..., None]) * 0.5 + 1 > 2.0**-12
    padded = torch.nn.functional.pad(above, (0, -above.shape[-1] % block_n, 0, -above.shape[-2] % 64))
    return padded.unflatten(-1, (-1, block_n)).unflatten(-3, (-1, 64)).any(-1).any(-2).flatten(0, 1)


# --- what is broken is noticed -----------------------------------------------------------------------------------------------

BROKEN = {
    "blocks read before they are known": (live_blocks, "bar_sync(FORWARD_MEETING, p.V.NC * 128 + 32)", "pass", "meet"),
    "no step": (sparse, "Rows(theta + moved", "Rows(theta + 0 * moved", ""),
    "u not divided": (sparse, "u = u * beside_products(weight, u)", "u = u", ""),
    "keys beyond the row": (sparse, "s = hide(p, s, position, block, view.sk)", "s = s", ""),
    "k never released": (sparse, "    release(p.k, stage)\n", "    pass\n", ""),
    "v never released": (sparse, "    release(p.v, previous)\n", "    pass\n", ""),
    "products read in flight": (
        sparse,
        "o, u = warpgroup_mma_wait(0, deps=[o_token",
        "o, u = warpgroup_mma_wait(1, deps=[o_token",
        "",
    ),
    "a bound that is none": (threshold, "base + lift + t", "base + lift + 3 * t", "raised_bound"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module, old, new, attribute = BROKEN[name]
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    changed = mutant(tmp_path, module, old, new)
    if attribute == "meet":
        monkeypatch.setattr(sparse, "meet", changed.meet)
        monkeypatch.setattr(sparse_producer, "meet", changed.meet)
    elif attribute:
        monkeypatch.setattr(sparse, attribute, getattr(changed, attribute))
    else:
        monkeypatch.setattr(kernel, "sparse_consumer", changed.sparse_consumer)
    problem = falling(Case("broken", b=1, hq=2, hkv=1, sq=900, sk=900, d=16, causal=True, entmax=1.5), 1 / 64)
    with pytest.raises((RuntimeError, AssertionError)):
        examine(problem, late=True)
