"""The kernel of a shared pair bias: in the emulator against the oracle, and compiled for sm_90a."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

pytest.importorskip("triton")

import emulator
from aot import SHARED_MEMORY, compiled
from modules import mutant

from backlight.backends.hopper.pair import host, members, rows
from backlight.backends.hopper.pair.config import PairConfig, groups_of, takes
from backlight.backends.tiled import BACKEND as TILED
from backlight.call import Call
from backlight.config import override
from backlight.spec import LOG2E, AttentionSpec
from cases import FP16, Case, Problem, case_id
from gate import Verdict, judge

SHARED = ("heads", "rows")
CONFIGS = (PairConfig(), PairConfig(3, 32))
PITCH = 128
CASES = (
    Case("shared,group", b=5, hq=2, hkv=1, sq=100, sk=150, d=32, pair_bias=SHARED, dlse=True),
    Case("two entries,causal", b=6, hq=1, hkv=1, sq=130, sk=130, d=16, dv=32, causal=True, pair_bias=("pairs", *SHARED)),
    Case("heads share,window", b=2, hq=3, hkv=3, sq=70, sk=190, d=24, window=(90, 20), pair_bias=("batch", "rows", "strided")),
    Case("all share,hidden", b=2, hq=2, hkv=2, sq=90, sk=90, d=32, sink=True, pair_bias=("rows", "hidden")),
    Case("slabs", b=2, hq=1, hkv=1, sq=66, sk=460, d=32, pair_bias=SHARED),
)


def start(kernel: Any, grid: tuple[int, ...], args: list[Any], named: dict[str, Any]) -> None:
    kernel[grid](*args, **named)


def padded_rows(values: torch.Tensor, beyond: float) -> torch.Tensor:
    batch, heads, sq = values.shape
    out = torch.full((batch, heads, -(-sq // PITCH) * PITCH), beyond)
    out[..., :sq] = values
    return out


def judged(problem: Problem, late: bool) -> Verdict:
    call = problem.call
    y, lse, *_ = TILED.forward(call, False)
    delta = (problem.dy.float() * y.float()).sum(-1)
    if problem.dlse is not None:
        delta = delta - torch.where(lse == -torch.inf, 0, problem.dlse.float())
    minus_lse2 = torch.where(lse == -torch.inf, lse, -lse * LOG2E)
    state = problem.dy, padded_rows(minus_lse2, -torch.inf), padded_rows(delta, 0.0)
    with emulator.emulated(host, late=late):
        walk = host.Walk(start, call, *state)
        dq, dpair_bias = walk.dq_and_dpair(True)
    result = {"dq": dq, "dpair_bias": dpair_bias}
    return judge(call, problem.dy, problem.dlse, result, names=tuple(result))


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("forced", CONFIGS, ids=["", "three"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_tiles(case: Case, forced: PairConfig, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # groups of members, and several members to a group
    monkeypatch.setattr(host, "groups_of", lambda members, tiles, programs: (-(-members // 2), 2 if members > 1 else 1))
    with override("hopper.pair", forced):
        verdict = judged(case.make(FP16), late)
    assert verdict.ok, str(verdict)


MUTANTS = {
    "members kept": (rows, "consumer", "        bar_arrive(PAIR_MEMBER_EMPTY + stage, threads_of(WGS, 1))\n", ""),
    "a part of dq left out": (rows, "consumer", "gl.static_range(WGS - 1)", "gl.static_range(WGS - 2)"),
    "sums of the wrong tile": (rows, "consumer", "store_dpair(p, out, d1, W * T + 1)", "store_dpair(p, out, d0, W * T + 1)"),
    "slabs not carried": (rows, "leave_dq", "dq = gl.load(between) + dq", "dq = dq"),
    "dp in flight": (rows, "key_tile", "mma_wait(0, deps=[dp_token])", "mma_wait(1, deps=[dp_token])"),
    "keys beyond the end": (members, "keep_bias", "    seen = key < p.sk\n", "    seen = key < p.sk + 64\n"),
    "wrong entry": (members, "member_of", "p.entry_b * p.sharing", "p.entry_b"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    module, part, old, new = MUTANTS[name]
    broken = mutant(tmp_path, module, old, new)
    for user in (rows, members):
        if hasattr(user, part) and (user is module or module is members):
            monkeypatch.setattr(user, part, getattr(broken, part))
    shape = {"sq": 140, "sk": 460} if "slabs" in name else {"sq": 300, "sk": 150}
    entries = ("pairs",) if "entry" in name else ()
    case = Case("broken", b=8, hq=1, hkv=1, **shape, d=16, pair_bias=(*entries, *SHARED), logit_shift=-120.0)
    try:
        verdict = judged(case.make(FP16), late=True)
    except (RuntimeError, AssertionError):
        return
    assert not verdict.ok


def call_of(batch: int, s: int, d: int = 32, entries: int = 1, dtype: torch.dtype = torch.bfloat16, **spec: bool) -> Call:
    q = torch.zeros(batch, 2, s, d, dtype=torch.bfloat16)
    return Call(AttentionSpec(pair_bias=True, **spec), q, q, q, pair_bias=torch.zeros(entries, 2, s, s, dtype=dtype))


def test_what_it_takes() -> None:
    assert takes(call_of(16, 384))
    assert takes(call_of(16, 1024, causal=True))
    assert takes(call_of(16, 512, dtype=torch.float32))
    assert not takes(call_of(16, 64))
    assert not takes(call_of(16, 384, d=64))
    assert not takes(call_of(16, 384, entries=4))


def test_groups_fill_whole_rounds_of_a_card() -> None:
    assert groups_of(384, 24, 132) == (35, 11)
    assert groups_of(768, 48, 132) == (70, 11)
    for members_, tiles in ((16, 1), (17, 500), (1000, 7)):
        each, groups = groups_of(members_, tiles, 132)
        assert (groups - 1) * each < members_ <= groups * each


@pytest.mark.slow
@pytest.mark.parametrize(("length", "dtype"), [(384, torch.bfloat16), (1024, torch.bfloat16), (512, torch.float32)], ids=str)
def test_compiled(length: int, dtype: torch.dtype) -> None:
    call = call_of(64, length, dtype=dtype)
    vector = torch.zeros(64, 2, length)
    with compiled(host) as reports:
        walk = host.Walk(start, call, call.q, vector, vector)
        walk.dq_and_dpair(True)
    assert {report.kernel for report in reports} == {"_pair_rows_kernel", "_pair_parts_kernel"}
    for report in reports:
        assert not report.warnings, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
        # ptxas of Triton 3.6, which the kernel was timed with, and later ones
        assert report.spills <= (200 if triton.__version__.startswith("3.6") else 480), str(report)
