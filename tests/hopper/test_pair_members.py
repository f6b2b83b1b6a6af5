"""The kernels of a shared pair bias: in the emulator against the oracle, and compiled for sm_90a."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import emulator
from aot import SHARED_MEMORY, compiled
from modules import mutant

from backlight.backends.hopper import BACKEND
from backlight.backends.hopper.backward import host as backward_host
from backlight.backends.hopper.backward import prepass
from backlight.backends.hopper.forward import host as forward_host
from backlight.backends.hopper.pair import config, forward, host, keys, members, rows
from backlight.backends.hopper.pair.config import PairConfig, groups_of
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec
from cases import FP16, Case, Problem, case_id
from gate import Verdict, judge

SHARED = ("heads", "rows")
CONFIGS = (PairConfig(), PairConfig(4, 64, 3, 32, 2))
CASES = (
    Case("shared", b=5, hq=2, hkv=2, sq=100, sk=150, d=32, pair_bias=SHARED, dlse=True),
    Case("two entries,causal", b=6, hq=1, hkv=1, sq=130, sk=130, d=16, dv=32, causal=True, pair_bias=("pairs", *SHARED)),
    Case("heads share,window", b=2, hq=3, hkv=3, sq=70, sk=190, d=24, window=(90, 20), pair_bias=("batch", "rows", "strided")),
    Case("all share,hidden,gate", b=2, hq=2, hkv=2, sq=90, sk=90, d=32, gate=True, pair_bias=("rows", "hidden")),
    Case("slabs", b=2, hq=1, hkv=1, sq=66, sk=460, d=32, pair_bias=SHARED),
)


def run(problem: Problem, late: bool) -> dict[str, torch.Tensor]:
    call = problem.call
    needs = frozenset(call.gradients)
    with emulator.emulated(host, prepass, late=late):
        y, lse, _ = forward_host.forward(call, False)
        grads = backward_host.backward(call, y, lse, None, problem.dy, problem.dlse, needs)
    return {"y": y, "lse": lse, **grads}


def judged(case: Case, late: bool) -> Verdict:
    problem = case.make(FP16)
    return judge(problem.call, problem.dy, problem.dlse, run(problem, late))


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
@pytest.mark.parametrize("forced", CONFIGS, ids=["", "other tiles"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_tiles(case: Case, forced: PairConfig, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # groups of members, and several members to a group
    monkeypatch.setattr(host, "groups_of", lambda members, tiles, programs: (-(-members // 2), 2 if members > 1 else 1))
    with override("hopper.pair", forced):
        verdict = judged(case, late)
    assert verdict.ok, str(verdict)


MUTANTS = {
    "members kept": (rows, "consumer", "        bar_arrive(PAIR_MEMBER_EMPTY + stage, threads_of(WGS, 1))\n", ""),
    "a part of dq left out": (rows, "consumer", "gl.static_range(WGS - 1)", "gl.static_range(WGS - 2)"),
    "sums of the wrong tile": (rows, "consumer", "store_dpair(p, out, d1, W * T + 1)", "store_dpair(p, out, d0, W * T + 1)"),
    "slabs not carried": (rows, "leave_dq", "dq = gl.load(between) + dq", "dq = dq"),
    "dp in flight": (rows, "key_tile", "dp = warpgroup_mma_wait(0, deps=[dp_token])", "dp = warpgroup_mma_wait(1, deps=[dp_token])"),
    "rows of another tile": (keys, "row_tile", "buffers.bias.index(i)", "buffers.bias.index(0)"),
    "rows kept": (keys, "row_tile", "    bar_arrive(PAIR_ROWS_EMPTY + stage, GROUP_AND_WARP)\n", ""),
    "a part of dv left out": (keys, "consumer", "dv = dv + handed", "dv = dv + 0 * handed"),
    "rows of another member": (forward, "consumer", "buffers.q.index(W * STAGES + round % STAGES)", "buffers.q.index(W * STAGES)"),
    "keys beyond the end": (members, "keep_bias", "    seen = key < p.sk\n", "    seen = key < p.sk + 64\n"),
    "wrong entry": (members, "member_of", "p.entry_b * p.sharing", "p.entry_b"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(emulator, "PATIENCE", 0.5)
    module, part, old, new = MUTANTS[name]
    broken = mutant(tmp_path, module, old, new)
    for user in (rows, keys, forward, members):
        if hasattr(user, part) and (user is module or module is members):
            monkeypatch.setattr(user, part, getattr(broken, part))
    shape = {"sq": 140, "sk": 460} if "slabs" in name else {"sq": 300, "sk": 150}
    entries = ("pairs",) if "entry" in name else ()
    case = Case("broken", b=8, hq=1, hkv=1, **shape, d=16, pair_bias=(*entries, *SHARED), logit_shift=-120.0)
    try:
        verdict = judged(case, late=True)
    except (RuntimeError, AssertionError):
        return
    assert not verdict.ok


def call_of(batch: int, s: int, d: int = 32, entries: int = 1, dtype: torch.dtype = torch.bfloat16, **spec: bool) -> Call:
    q = torch.zeros(batch, 2, s, d, dtype=torch.bfloat16)
    return Call(AttentionSpec(pair_bias=True, **spec), q, q, q, pair_bias=torch.zeros(entries, 2, s, s, dtype=dtype))


def test_what_it_takes() -> None:
    elsewhere = "tensors are on cpu, not on a GPU"

    def reasons(call: Call) -> list[str]:
        return [reason for reason in BACKEND.why_not(call) if reason != elsewhere]

    assert not reasons(call_of(16, 384))
    assert not reasons(call_of(16, 1024, causal=True))
    assert not reasons(call_of(16, 512, dtype=torch.float32))
    assert reasons(call_of(16, 1024, dtype=torch.float32)) == ["a pair bias with 1024 rows or keys, not 65 to 512"]
    assert reasons(call_of(16, 64)) == ["a pair bias with 64 rows or keys, not 65 to 1024"]
    assert reasons(call_of(16, 384, d=64)) == ["a pair bias with heads wider than 32"]
    assert reasons(call_of(16, 384, entries=4)) == ["a pair bias that fewer than 16 heads share"]


def test_groups_fill_whole_rounds_of_a_card() -> None:
    assert groups_of(384, 24, 132) == (35, 11)
    assert groups_of(768, 48, 132) == (70, 11)
    for members_, tiles in ((16, 1), (17, 500), (1000, 7)):
        each, groups = groups_of(members_, tiles, 132)
        assert (groups - 1) * each < members_ <= groups * each


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled(dtype: torch.dtype) -> None:
    call = call_of(64, 384 if dtype == torch.bfloat16 else 512, dtype=dtype)
    with compiled(host) as reports, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "prepass", prepared)
        y, lse, _ = forward_host.forward(call, False)
        backward_host.backward(call, y, lse, None, y, None, frozenset(call.gradients))
    assert {report.kernel for report in reports} >= {"_pair_forward_kernel", "_pair_rows_kernel", "_pair_keys_kernel"}
    for report in reports:
        assert not report.warnings, str(report)
        assert report.shared <= SHARED_MEMORY, str(report)
        assert report.spills <= 260, str(report)


def prepared(launch: object, *args: object) -> prepass.Rows:
    vector = torch.zeros(64 * 2 * 512 + 64)
    q = launch.call.q  # type: ignore[attr-defined]
    return prepass.Rows(args[0], q, vector, vector, None, None, -(-q.shape[2] // 128), q, q, q, 0)  # type: ignore[arg-type]


def test_config_is_named() -> None:
    call = call_of(16, 384)
    assert BACKEND.config(call) == {"pair": config.pair_config(call)}
