"""What the forward gives besides y and lse: the largest logits of rows (eq. 72), the low half of y (eq. 103)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import emulator
import pytest
import torch

pytest.importorskip("triton")

from modules import mutant

from backlight.backends.hopper.backward import dq_convert, dq_rows, host, prepass
from backlight.backends.hopper.backward import launch as backward
from backlight.backends.hopper.config import ForwardConfig
from backlight.backends.hopper.forward import consumer, peaks
from backlight.backends.hopper.forward import host as forward
from backlight.config import override
from backlight.reference import max_logit, oracle
from cases import FP16, Case, case_id
from gate import judge

KEEPS = ForwardConfig(128, 3, pingpong=True, late_rescale=True, keep_first_max=True)
LOOKS = ForwardConfig(128, 2)
NARROW = ForwardConfig(64, 2, early_p=True, keep_first_max=True)
HOT = {"logits": 12.0}
# of (74), from weights of 16 bits; the rest is that of sums in fp32
OF_WEIGHTS = 2.0**-8
CASES = (
    Case("full,300x500", b=2, hq=2, hkv=1, sq=300, sk=500, d=64),
    Case("causal,700,hot", b=1, hq=2, hkv=1, sq=700, sk=700, d=64, causal=True, **HOT),
    Case("rows without keys", b=1, hq=1, hkv=1, sq=500, sk=300, d=64, causal=True),
    Case("packed", hq=2, hkv=1, lengths_q=(300, 1, 0, 400), d=64, causal=True),
    Case("window", b=1, hq=1, hkv=1, sq=500, sk=500, d=64, window=(140, 70)),
    Case("sink,hot", b=1, hq=2, hkv=1, sq=300, sk=700, d=64, sink=True, **HOT),
    Case("bias,softcap", b=1, hq=2, hkv=1, sq=300, sk=420, d=64, causal=True, softcap=2.0, bias=50),
    Case("bias,hot", b=1, hq=2, hkv=1, sq=420, sk=420, d=64, causal=True, bias=70, **HOT),
    Case("gate,d=128", b=1, hq=1, hkv=1, sq=200, sk=300, d=128, gate=True),
    Case("mask", b=1, hq=2, hkv=2, sq=300, sk=300, d=64, mask="documents"),
    Case("mask,softcap", b=1, hq=2, hkv=2, sq=300, sk=300, d=64, mask="run", softcap=5.0),
)
WITH_TAU = (
    Case("tau,hot", b=1, hq=2, hkv=1, sq=420, sk=420, d=64, causal=True, tau=(-0.8, 0.3), **HOT),
    Case("tau,bias", b=1, hq=2, hkv=1, sq=420, sk=420, d=64, causal=True, bias=90, tau=(-0.8, 0.3)),
)


def largest(case: Case, config: ForwardConfig, which: str = "hopper.forward") -> tuple[torch.Tensor, torch.Tensor]:
    """Of each head, and what the oracle says; y and lse are as good as without."""
    call = replace(case.make(FP16).call, max_logit=True)
    with override(which, config), emulator.emulated(forward, late=True):
        y, lse, _, found = forward.forward(call)
    verdict = judge(call, None, None, {"y": y, "lse": lse})
    assert verdict.ok, f"{case.name}\n{verdict}"
    return found.amax((0, 2)), max_logit(call)


def check(found: torch.Tensor, wanted: torch.Tensor, by_weights: bool) -> None:
    limit = 1e-5 * wanted.abs().clamp(min=1) + (OF_WEIGHTS if by_weights else 0)
    assert ((found - wanted).abs() <= limit).all(), f"{found} is not {wanted}"


@pytest.mark.parametrize("config", [KEEPS, LOOKS, NARROW], ids=["keeps the first maximum", "looks at all", "narrow"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_largest_logits(case: Case, config: ForwardConfig) -> None:
    found, wanted = largest(case, config)
    check(found, wanted, config.keep_first_max)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("case", WITH_TAU, ids=case_id)
def test_with_tau(case: Case, keep: bool) -> None:
    check(*largest(case, ForwardConfig(64, 2, keep_first_max=keep), "hopper.elastic"), False)


def test_rows_that_see_nothing() -> None:
    call = replace(Case("nothing", b=1, hq=1, hkv=1, sq=100, sk=20, d=64, causal=True).make(FP16).call, max_logit=True)
    with override("hopper.forward", KEEPS), emulator.emulated(forward, late=True):
        *_, found = forward.forward(call)
    assert (found[0, 0, :80] == -torch.inf).all()
    assert found[0, 0, 80:].isfinite().all()


BROKEN = {
    "the first maximum alone": ("gl.maximum(above, 0.0)", "gl.minimum(above, 0.0)", "store_peaks"),
    "the left half of every block": (
        "with_columns(with_columns(peak, left), right)",
        "with_columns(peak, left)",
        "with_weights",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_one_is_seen(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old, new, function = BROKEN[name]
    broken = mutant(tmp_path, peaks, old, new)
    monkeypatch.setattr(consumer, function, getattr(broken, function))
    found, wanted = largest(CASES[0], KEEPS)
    assert not ((found - wanted).abs() <= 2 * OF_WEIGHTS).all()


LOW = (
    Case("low,causal", b=2, hq=2, hkv=1, sq=200, sk=260, d=64, causal=True),
    Case("low,packed,dv=40", hq=2, hkv=1, lengths_q=(150, 1, 0, 140), d=64, dv=40, causal=True),
    Case("low,gate,hot", b=1, hq=1, hkv=1, sq=200, sk=400, d=64, gate=True, **HOT),
    Case("low,gate,two tiles of O", b=1, hq=1, hkv=1, sq=100, sk=130, d=136, dv=176, gate=True, causal=True),
    Case("low,mask", b=1, hq=2, hkv=2, sq=200, sk=200, d=64, mask="documents"),
)


@pytest.mark.parametrize("config", [KEEPS, LOOKS], ids=["keeps the first maximum", "looks at all"])
@pytest.mark.parametrize("case", LOW, ids=case_id)
def test_low_half(case: Case, config: ForwardConfig) -> None:
    """y and its low half are closer to the truth than y can be, and gradients are right with it."""
    problem = case.make(FP16)
    call = replace(problem.call, exact_delta=True, _segments=None)
    with (
        override("hopper.forward", config),
        emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, late=True),
    ):
        y, lse, low, _ = forward.forward(call, save_u=True)
        needs = frozenset(call.gradients)
        made = host.backward(call, y, lse, low, problem.dy, problem.dlse, needs)
    assert low.stride() == y.stride()
    assert (low.abs() <= 2.0**-11 * y.abs().clamp(min=2.0**-13)).all()
    verdict = judge(call, problem.dy, problem.dlse, {"y": y, "lse": lse} | made)
    assert verdict.ok, f"{case.name}\n{verdict}"
    truth = oracle(call, keep=("y",))["y"]
    assert low.abs().max() > 0
    assert torch.linalg.norm(y.double() - truth) > 1e-5
    # weights are rounded too, so that y is not exact to 22 bits
    assert torch.linalg.norm(y.double() + low.double() - truth) < torch.linalg.norm(y.double() - truth)


def test_delta_has_the_low_half() -> None:
    """A low half that is not small is seen in dq: the pre-pass adds it."""
    problem = LOW[0].make(FP16)
    call = replace(problem.call, exact_delta=True, _segments=None)
    with emulator.emulated(forward, backward, dq_convert, dq_rows, prepass, late=True):
        y, lse, low, _ = forward.forward(call, save_u=True)
        of = [host.backward(call, y, lse, x, problem.dy, None, frozenset({"dq"}))["dq"] for x in (low, low + 1)]
    assert (of[0] - of[1]).abs().max() > 0.01
