"""The forward where rows are short: Q of the next tile early, tiles without a counter, small blocks; tiles done again once."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import emulator
from aot import SHARED_MEMORY, compiled, hidden_exponentials

from backlight.backends.hopper.config import ForwardConfig, forward_config
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec
from cases import FP16, Case, case_id
from gate import judge

CASES = (
    Case("causal", b=1, hq=5, hkv=5, sq=330, sk=330, d=64, causal=True),
    Case("full,gate", b=1, hq=4, hkv=2, sq=330, sk=400, d=64, gate=True),
    Case("window,sink", b=1, hq=3, hkv=1, sq=400, sk=400, d=64, window=(140, 70), sink=True),
    Case("packed,bias", hq=3, hkv=1, lengths_q=(130, 1, 0, 300, 64), d=64, causal=True, bias=70),
    Case("one tile", b=1, hq=1, hkv=1, sq=60, sk=90, d=64),
)
CONFIGS = {
    "as chosen": None,
    "small blocks": ForwardConfig(64, 2, stages=4, q_buffers=2, drawn=False),
    "three": ForwardConfig(128, 3, q_buffers=2, pingpong=True, late_rescale=True),
    "alone": ForwardConfig(64, 2, q_buffers=2, persistent=False),
}


@pytest.mark.parametrize("late", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["late", "early"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_numbers(case: Case, name: str, late: bool) -> None:
    problem = case.make(FP16)
    with override("hopper.forward", CONFIGS[name] or forward_config(problem.call)), emulator.emulated(forward, late=late):
        y, lse, *_ = forward.forward(problem.call)
    verdict = judge(problem.call, None, None, {"y": y, "lse": lse})
    assert verdict.ok, f"{case.name}\n{verdict}"


def call_of(d: int, rows: int, causal: bool, keys: int = 0) -> Call:
    q, k = torch.zeros(1, 2, rows, d, dtype=torch.bfloat16), torch.zeros(1, 2, keys or rows, d, dtype=torch.bfloat16)
    return Call(AttentionSpec(causal=causal), q, k, k)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("d", [64, 128])
def test_compiled(d: int, causal: bool) -> None:
    call = call_of(d, 512, causal)
    with compiled(forward) as reports:
        forward.forward(call)
    (report,) = reports
    assert report.spills == 0, str(report)
    assert not report.warnings, str(report)
    assert report.shared <= SHARED_MEMORY, str(report)
    if report.sass:
        # a thread's share of 64 rows over 128 threads
        share = forward_config(call).block_n // 2
        assert hidden_exponentials(report.sass) >= share - 4, f"{report}: {hidden_exponentials(report.sass)} of {share}"


def test_what_is_chosen() -> None:
    """Two buffers of Q wherever rows are short; tiles in a fixed order only where each CTA gets its share of every length."""
    for rows, d, causal in ((512, 64, True), (1024, 64, True), (512, 64, False), (512, 128, True), (512, 128, False)):
        assert forward_config(call_of(d, rows, causal)).q_buffers == 2
    assert not forward_config(call_of(64, 512, True)).drawn
    assert forward_config(call_of(64, 4096, True)).drawn
    cu = torch.tensor([0, 40, 512], dtype=torch.int32)
    call = call_of(64, 512, True)
    assert forward_config(Call(call.spec, call.q, call.k, call.v, cu_seqlens_q=cu, cu_seqlens_k=cu)).drawn
    # few rows, many keys: what the check at the end costs does not show
    assert not forward_config(call_of(64, 512, True)).keep_first_max
    assert forward_config(call_of(64, 512, True, keys=8192)).keep_first_max
    assert forward_config(call_of(128, 512, True, keys=8192)) == forward_config(call_of(128, 8192, True))


@pytest.mark.parametrize(
    "config",
    [ForwardConfig(128, 3, keep_first_max=True), ForwardConfig(128, 2, keep_first_max=True, q_buffers=2)],
    ids=["3", "2"],
)
def test_every_tile_is_done_again_once(monkeypatch: pytest.MonkeyPatch, config: ForwardConfig) -> None:
    """Scores that grow towards the left, in every row: twice the loads of a usual call, however many warpgroups share tiles."""
    loads = []
    tma_load = emulator.tma_load

    def counted(*args: object) -> None:
        loads.append(args)
        tma_load(*args)

    monkeypatch.setitem(emulator.REPLACED, "tma_load", counted)
    problem = Case("rising", b=1, hq=2, hkv=1, sq=384, sk=640, d=64).make(FP16)
    counts = []
    for slope in (0.0, 60.0):
        problem.call.q[..., 0] = 8.0
        problem.call.k[..., 0] = (slope * (1 - torch.arange(640) / 640)).to(torch.float16)
        with override("hopper.forward", config), emulator.emulated(forward, late=True):
            y, lse, *_ = forward.forward(problem.call)
        verdict = judge(problem.call, None, None, {"y": y, "lse": lse})
        assert verdict.ok, str(verdict)
        counts.append(len(loads))
        loads.clear()
    assert counts[1] == 2 * counts[0]
