"""Learned terms in the Hopper backward, in the emulator, judged by the oracle: every gradient, and both ways to dbias.

The forward is the CPU backend's, so that nothing of the Hopper forward is judged here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import emulator
from modules import mutant

from backlight.backends.hopper.backward import dbias, dbias_ordered, dq_convert, dq_rows, host, prepass, reducer, row_block
from backlight.backends.hopper.backward import gradients as loops
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import BackwardConfig
from backlight.backends.tiled import BACKEND as TILED
from backlight.config import override
from cases import BY_NAME, CASES, FP16, Case, Problem, case_id
from gate import judge

LATE, EARLY = pytest.param(True, id="late"), pytest.param(False, id="early", marks=pytest.mark.slow)
FUSED, ORDERED = pytest.param(False, id="fused"), pytest.param(True, id="deterministic")
ORDERED_TOO = pytest.param(True, id="deterministic", marks=pytest.mark.slow)
TERMS = ("bias", "sink", "tau", "gate", "softcap")
SUPPORTED = [
    case
    for case in CASES
    if any(getattr(case, term) for term in TERMS) and not case.mask and case.pair_bias is None and case.entmax is None
    if case.d % 8 == 0 and (case.dv or 8) % 8 == 0 and (case.scale or 1) > 0
]
EVERY = {"bias": 200, "sink": True, "tau": (-0.7, 0.4), "gate": True, "softcap": 4.0}
LAZY = {"bias": 150, "tau": (-1.0, 0.4)}
# several tiles of every kernel
TILES = (
    Case("lazy,300", b=2, hq=2, hkv=1, sq=300, sk=300, d=64, causal=True, **LAZY),
    Case("lazy,d=128", b=1, hq=2, hkv=1, sq=300, sk=300, d=128, causal=True, **LAZY),
    Case("every,sq<sk", b=1, hq=2, hkv=1, sq=200, sk=330, d=64, causal=True, dlse=True, **EVERY),
    Case("every,sq>sk", b=1, hq=2, hkv=1, sq=330, sk=200, d=32, causal=True, dlse=True, **EVERY),
    Case("bias,origin>0", b=1, hq=2, hkv=2, sq=300, sk=420, d=64, bias=150, bias_origin=60),
    Case("bias,origin<0,causal", b=1, hq=2, hkv=1, sq=400, sk=400, d=16, causal=True, bias=100, bias_origin=-70),
    Case("bias,longer than s", b=1, hq=2, hkv=1, sq=300, sk=300, d=16, bias=1500, bias_origin=700),
    Case("bias,shorter than s", b=1, hq=2, hkv=1, sq=500, sk=500, d=16, causal=True, bias=33),
    Case("lazy,window", b=1, hq=2, hkv=1, sq=500, sk=500, d=16, window=(260, 30), **LAZY),
    Case("lazy,packed", hq=2, hkv=1, lengths_q=(300, 1, 0, 140), d=64, causal=True, **LAZY),
    Case(
        "every,packed,unequal", hq=2, hkv=1, lengths_q=(150, 5, 140), lengths_k=(200, 62, 37), d=16, bias_origin=45, dlse=True,
        **EVERY,
    ),
    Case("tau,minus one", b=1, hq=2, hkv=2, sq=200, sk=200, d=16, causal=True, tau=(-1.0, -1.0), dlse=True),
)  # fmt: skip


def gradients(
    problem: Problem, late: bool, deterministic: bool = False, needs: tuple[str, ...] | None = None
) -> Mapping[str, torch.Tensor]:
    call = replace(problem.call, deterministic=deterministic, _segments=None)
    y, lse, u, _ = TILED.forward(call, True)
    with emulator.emulated(backward, dbias_ordered, dbias, dq_convert, dq_rows, prepass, late=late):
        return host.backward(call, y, lse, u, problem.dy, problem.dlse, frozenset(needs or call.gradients))


def examine(problem: Problem, late: bool, deterministic: bool = False, needs: tuple[str, ...] | None = None) -> None:
    names = needs or problem.call.gradients
    result = gradients(problem, late, deterministic, needs)
    assert set(result) == set(names)
    verdict = judge(problem.call, problem.dy, problem.dlse, result, names=names)
    assert verdict.ok, f"{problem.case.name}\n{verdict}"


@pytest.mark.parametrize("late", [LATE, EARLY])
@pytest.mark.parametrize("deterministic", [FUSED, ORDERED_TOO])
@pytest.mark.parametrize("case", SUPPORTED, ids=case_id)
def test_case(case: Case, deterministic: bool, late: bool) -> None:
    examine(case.make(FP16), late, deterministic)


@pytest.mark.parametrize("late", [LATE, EARLY])
@pytest.mark.parametrize("deterministic", [FUSED, ORDERED])
@pytest.mark.parametrize("case", TILES, ids=case_id)
def test_tiles(case: Case, deterministic: bool, late: bool) -> None:
    examine(case.make(FP16), late, deterministic)


@pytest.mark.parametrize(
    "config",
    [BackwardConfig(64, 128, stages=3, overlap=True), BackwardConfig(128, 128), BackwardConfig(64, 64, split=True, wide=True)],
    ids=str,
)
def test_configs(config: BackwardConfig) -> None:
    problem = Case("config", b=1, hq=2, hkv=1, sq=330, sk=330, d=32, causal=True, **EVERY).make(FP16)
    with override("hopper.backward", config):
        examine(problem, late=True)


def test_every_head_by_itself() -> None:
    """Gradients of learned terms of one head, against the oracle's of the same head alone."""
    problem = Case("heads", b=2, hq=4, hkv=2, sq=150, sk=150, d=16, causal=True, **EVERY).make(FP16)
    together = gradients(problem, late=False)
    for h in range(4):
        call = problem.call
        one = {name: getattr(call, name)[h : h + 1] for name in ("bias", "sink", "tau")}
        keys = {name: getattr(call, name)[:, h // 2 : h // 2 + 1] for name in ("k", "v")}
        rows = {name: getattr(call, name)[:, h : h + 1] for name in ("q", "gate")}
        alone = replace(call, **one, **keys, **rows, _segments=None)
        result = {name: together[name][h : h + 1] for name in ("dbias", "dsink", "dtau")}
        verdict = judge(alone, problem.dy[:, h : h + 1], None, result, names=tuple(result))
        assert verdict.ok, f"head {h}\n{verdict}"


@pytest.mark.parametrize("deterministic", [FUSED, ORDERED])
@pytest.mark.parametrize(
    "needs", [("dbias",), ("dtau",), ("dgate", "dsink"), ("dq", "dbias"), ("dk", "dv"), ("dv", "dbias", "dtau")], ids=str
)
def test_needs(needs: tuple[str, ...], deterministic: bool) -> None:
    problem = Case("needs", b=1, hq=2, hkv=1, sq=140, sk=140, d=16, causal=True, **EVERY).make(FP16)
    examine(problem, late=False, deterministic=deterministic, needs=needs)


def test_deterministic_repeats() -> None:
    problem = Case("repeat", b=2, hq=2, hkv=1, sq=200, sk=200, d=16, causal=True, **EVERY).make(FP16)
    first, second = (gradients(problem, late, deterministic=True) for late in (False, True))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("awkward", ["transposed", "sliced", "expanded"])
def test_gate_strides(awkward: str) -> None:
    """A gate that cannot be read in place is copied; dgate has the gate's shape."""
    problem = Case("gate", b=2, hq=2, hkv=1, sq=70, sk=70, d=16, causal=True, gate=True, tau=(-0.7, 0.4)).make(FP16)
    gate = problem.call.gate
    assert gate is not None
    if awkward == "transposed":
        gate = gate.transpose(2, 3).contiguous().transpose(2, 3)
    elif awkward == "sliced":
        gate = torch.cat((gate, gate), 3)[..., 3 : 3 + gate.shape[3]]
    else:
        gate = gate[:1, :1, :1, :1].expand(gate.shape)
    call = replace(problem.call, gate=gate, _segments=None)
    examine(replace(problem, call=call), late=False)


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        (dbias, "total = sum_of(total, far[c + 1])", "pass"),
        (dbias, "    tma_reduce_add(p.diagonals_desc, [plane + 1, row >> 1, 0], box)\n", ""),
        (dbias, "slot = offset & (p.V.SLOTS - 1)", "slot = offset * 0"),
        (row_block, "b.i, MASK), p.V.TAU)", "b.i, MASK), False)"),
        (row_block, "dp = surviving(dp, at, limit)", "pass"),
        (row_block, "ds = ds * cap_slope(s)", "pass"),
        (prepass, "delta -= tau * mean", "pass"),
        (prepass, "share = tl.where(n == 1,", "share = tl.where(n == 0,"),
    ],
    ids=["half", "edge", "slot", "hidden keys", "dead keys", "slope", "delta of tau", "one key"],
)
def test_a_broken_term_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, old: str, new: str) -> None:
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    case = BY_NAME["tau,minus one,self only"] if "n == 1" in old else Case(
        "broken", hq=2, hkv=1, lengths_q=(150, 33, 1), lengths_k=(201, 30, 1), d=16, causal=True, bias=200, tau=(-1.0, 0.4),
        softcap=2.0, dlse=True,
    )  # fmt: skip
    broken = mutant(tmp_path, module, old, new)
    for user, name in (
        (row_block, "leave_diagonals"),
        (reducer, "add_diagonals"),
        (host, "prepass"),
        (loops, "row_block"),
    ):
        if hasattr(broken, name):
            monkeypatch.setattr(user, name, getattr(broken, name))
    if module is prepass:
        monkeypatch.setattr(prepass, "_prepass_kernel", broken._prepass_kernel)
    problem = case.make(FP16)
    y, lse, u, _ = TILED.forward(problem.call, True)
    with emulator.emulated(
        backward, dbias_ordered, dbias, dq_convert, dq_rows, prepass, *([broken] if module is prepass else []), late=True
    ):
        try:
            result = host.backward(problem.call, y, lse, u, problem.dy, problem.dlse, frozenset(problem.call.gradients))
        except (RuntimeError, AssertionError):
            return
    assert not judge(problem.call, problem.dy, problem.dlse, result, names=problem.call.gradients).ok


def test_nothing_to_attend_to() -> None:
    """Without a pair of row and key only the sink has a gradient, that of its lse."""
    problem = Case("sk=0", sk=0, d=16, **{**EVERY, "softcap": None}, dlse=True).make(FP16)
    examine(problem, late=False)
