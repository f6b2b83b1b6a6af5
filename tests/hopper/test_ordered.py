"""dq added in a fixed order (`BackwardConfig.ordered`): right, and each tile in its turn."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import emulator
import pytest
import torch

pytest.importorskip("triton")

import aot
from modules import mutant

from backlight.backends.hopper.backward import dbias_ordered, dq_convert, dq_rows, host, order, prepass, reducer
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import BackwardConfig, backward_config
from backlight.backends.hopper.forward import host as forward
from backlight.call import Call
from backlight.config import override
from backlight.spec import AttentionSpec
from cases import FP16, Case, case_id
from gate import judge

# one CTA a tile: the emulator runs them one after the other
ORDERED = {
    64: BackwardConfig(128, 128, narrow=True, ordered=True, persistent=False),
    128: BackwardConfig(64, 128, overlap=True, ordered=True, persistent=False),
}
CASES = (
    Case("full", b=2, hq=2, hkv=1, sq=300, sk=420, d=64),
    Case("causal", b=1, hq=2, hkv=2, sq=420, sk=420, d=64, causal=True),
    Case("causal,d=128", b=1, hq=2, hkv=1, sq=300, sk=300, d=128, causal=True, dlse=True),
    Case("causal,sq<sk", b=1, hq=1, hkv=1, sq=150, sk=500, d=64, causal=True),
    Case("causal,sq>sk", b=1, hq=1, hkv=1, sq=500, sk=150, d=64, causal=True),
    Case("ahead", b=1, hq=1, hkv=1, sq=400, sk=400, d=64, window=(None, 70)),
    Case("gate,sink", b=1, hq=2, hkv=1, sq=260, sk=300, d=64, causal=True, gate=True, sink=True),
    Case("bias", b=1, hq=2, hkv=1, sq=260, sk=300, d=64, causal=True, bias=60),
)


def gradients_of(
    case: Case, config: BackwardConfig, backwards: bool = False
) -> tuple[Call, dict[str, torch.Tensor], list[str]]:
    problem = case.make(FP16)
    call = replace(problem.call, deterministic=True, _segments=None)
    with (
        override("hopper.backward", config),
        emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, dbias_ordered, late=True, backwards=backwards),
    ):
        y, lse, *_ = forward.forward(call)
        made = host.backward(call, y, lse, None, problem.dy, problem.dlse, frozenset(call.gradients))
    verdict = judge(call, problem.dy, problem.dlse, {"y": y, "lse": lse} | made)
    return call, made, [] if verdict.ok else [str(verdict)]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_gradients(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    split = []
    monkeypatch.setattr(host, "split_dq", lambda *_: split.append(True))
    _, _, wrong = gradients_of(case, ORDERED[case.d])
    assert not wrong, wrong[0]
    assert not split


def test_a_tile_out_of_its_turn_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles from the first keys on would wait for those that come after them."""
    once = "if seen != turn:\n        raise AssertionError('out of turn')\n    while seen < turn:"
    broken = mutant(tmp_path, order, "while seen < turn:", once)
    monkeypatch.setattr(reducer, "wait_for_turn", broken.wait_for_turn)
    assert not gradients_of(CASES[1], ORDERED[64])[2]
    # programs whose first tiles are those of their own numbers would wait for programs that have not begun
    assert not gradients_of(CASES[1], ORDERED[64], backwards=True)[2]
    assert not gradients_of(CASES[1], replace(ORDERED[64], persistent=True), backwards=True)[2]
    wrong = mutant(tmp_path, order, "last_key // p.V.BN - tile", "tile")
    monkeypatch.setattr(reducer, "turn_of", wrong.turn_of)
    with pytest.raises(AssertionError, match="out of turn"):
        gradients_of(CASES[1], ORDERED[64])


def test_waiting_for_ever_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator.machine, "PATIENCE", 0.5)
    monkeypatch.setattr(reducer, "turn_of", mutant(tmp_path, order, "return tile", "return tile + 1").turn_of)
    with pytest.raises(RuntimeError, match=r"never (changes|completes)"):
        gradients_of(Case("causal", b=1, hq=1, hkv=1, sq=130, sk=130, d=64, causal=True), ORDERED[64])


@pytest.mark.parametrize("case", [Case("window", window=(40, 0), d=64), Case("packed", lengths_q=(70, 90), d=64)], ids=case_id)
def test_what_has_no_order_takes_seven_products(case: Case) -> None:
    assert not order.can_be_ordered(case.make(FP16).call, wide=False)


@pytest.mark.slow
@pytest.mark.parametrize("d", [64, 128])
def test_compiled(d: int) -> None:
    q = torch.zeros(2, 4, 2048, d, dtype=torch.bfloat16)
    call = Call(AttentionSpec(causal=True), q, q, q, deterministic=True)
    config = replace(backward_config(call), ordered=True)
    with override("hopper.backward", config), aot.compiled(backward, dq_convert, prepass) as reports:
        host.backward(call, q, torch.zeros(2, 4, 2048), None, q, None, frozenset({"dq", "dk", "dv"}))
    (report,) = (report for report in reports if report.kernel == "_bwd_kernel")
    assert report.spills == 0, str(report)
    assert not report.warnings, str(report)
    assert "ld.acquire.gpu" in report.ptx
    assert "cp.async.bulk.wait_group \t0" in report.ptx or "cp.async.bulk.wait_group 0" in report.ptx
