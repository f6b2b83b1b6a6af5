"""The backward whose warpgroups have a partition each: in the emulator against the oracle, and compiled for sm_90a."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import emulator
from aot import SHARED_MEMORY, compiled
from modules import mutant

from backlight.backends.hopper import apart, backward, dq, prepass
from backlight.backends.hopper.config import BackwardConfig, backward_config
from backlight.backends.tiled import BACKEND as TILED
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec
from cases import FP16, Case, Problem, case_id
from gate import Verdict, judge

CONFIG = BackwardConfig(128, 128, apart=True)
NEEDS = ("dq", "dk", "dv")
TILES = (
    Case("full,300x500", b=1, sq=300, sk=500, d=64),
    Case("full,even,group", b=2, sq=256, sk=256, d=64, hq=4, hkv=1),
    Case("causal,400", b=1, sq=400, sk=400, d=64, causal=True, dlse=True),
    Case("causal,sq=420,sk=150", b=1, sq=420, sk=150, d=40, causal=True),
    Case("causal,sq=150,sk=420", b=1, sq=150, sk=420, d=16, causal=True),
    Case("window,500", b=1, sq=500, sk=500, d=64, window=(140, 70)),
    Case("packed,causal", hq=2, hkv=1, lengths_q=(300, 1, 0, 140), d=64, causal=True),
    Case("packed,window", hq=1, hkv=1, lengths_q=(300, 5, 140), lengths_k=(200, 60, 140), d=32, window=(90, 20), dlse=True),
    Case("d=32,dv=64", b=1, sq=150, sk=140, d=32, dv=64),
)


def judged(problem: Problem, late: bool) -> Verdict:
    call = replace(problem.call, _segments=None)
    y, lse, _ = TILED.forward(call, False)
    with override("hopper.backward", CONFIG), emulator.emulated(apart, backward, dq, prepass, late=late):
        result = backward.backward(call, y, lse, None, problem.dy, problem.dlse, frozenset(NEEDS))
    return judge(call, problem.dy, problem.dlse, result, names=NEEDS)


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("case", TILES, ids=case_id)
def test_tiles(case: Case, late: bool) -> None:
    verdict = judged(case.make(FP16), late)
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("                tma.store_wait(0)\n                mbarrier", "                mbarrier"),
        ("    before = (count & 1) ^ 1\n", "    before = count & 1\n"),
        ("    bar_arrive(DQ_FULL + W, ONE)\n    bar_arrive", "    bar_arrive"),
        ("bar_arrive(Q_EMPTY + stage, EVERYBODY)", "pass"),
        ("dp = warpgroup_mma_wait(0, deps=[dp_token])", "dp = warpgroup_mma_wait(1, deps=[dp_token])"),
        ("seen = from_on(first - i * ROWS, columns)", "seen = from_on(first - i * ROWS + 1, columns)"),
        ("        plain_begin = end\n", ""),
        ("        bar_arrive(DS_FULL + W * 2 + 1, PAIR)\n", ""),
    ],
    ids=[
        "dq left behind",
        "ds of another block",
        "dq never full",
        "q kept",
        "dp in flight",
        "mask",
        "ragged keys",
        "first block",
    ],
)
def test_a_mutant_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    monkeypatch.setattr(emulator, "PATIENCE", 0.5)
    broken = mutant(tmp_path, apart, old, new)
    monkeypatch.setattr(apart, "_bwd_apart_kernel", broken._bwd_apart_kernel)
    problem = Case("broken", b=1, hq=1, hkv=1, sq=500, sk=270, d=16, causal="plain_begin" not in old, logit_shift=-120.0).make(
        FP16
    )
    try:
        verdict = judged(problem, late=True)
    except (RuntimeError, AssertionError):
        return
    assert not verdict.ok


def test_when_it_is_used() -> None:
    def config(rows: int, d: int = 64, **terms: bool) -> BackwardConfig:
        q = torch.zeros(1, 1, rows, d, dtype=torch.float16)
        given = {name: torch.zeros(1, 8) if name == "bias" else torch.zeros(1) for name in terms}
        return backward_config(Call(AttentionSpec(**terms), q, q, q, **given))

    assert config(4096) == CONFIG
    assert not any(c.apart for c in (config(2048), config(4096, 128), config(4096, bias=True), config(4096, tau=True)))
    assert config(4096, sink=True).apart


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_compiled(causal: bool) -> None:
    q, k = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16)
    call = Call(AttentionSpec(causal=causal), q, k, k)
    with override("hopper.backward", CONFIG), compiled(apart, backward, dq, prepass) as reports:
        backward.backward(call, q, torch.zeros(1, 4, 512), None, q, None, frozenset(NEEDS))
    main = next(report for report in reports if report.kernel == "_bwd_apart_kernel")
    assert not main.warnings, str(main)
    assert main.shared <= SHARED_MEMORY, str(main)
    # addresses that do not change in the loops, a few loads an iteration
    assert main.spills <= 400, str(main)
    assert main.registers == 168, str(main)
    if main.sass:
        for opcode in ("HGMMA", "UTMALDG", "UTMASTG", "UTMAREDG", "USETMAXREG"):
            assert main.has(opcode), f"{main}: no {opcode}"
