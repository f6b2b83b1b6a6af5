"""Operations are counted as math.md eq. 42 says, tensors are what the case asks for, and a workload survives JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from backlight.bench.workload import Workload
from backlight.problems.case import BF16, FP32, Case

CASES = (
    Case("full", b=2, hq=3, hkv=3, sq=9, sk=9, d=4),
    Case("causal", b=2, hq=3, hkv=3, sq=9, sk=9, d=4, causal=True),
    Case("sq<sk", b=1, hq=2, hkv=1, sq=5, sk=11, d=4, dv=6, causal=True),
    Case("sq>sk", b=1, hq=2, hkv=1, sq=11, sk=5, d=4, causal=True),
    Case("window", b=2, hq=4, hkv=2, sq=20, sk=20, d=4, window=(3, 2)),
    Case("everything", b=2, hq=4, hkv=2, sq=20, sk=20, d=4, window=(7, 0), bias=8, sink=True, tau=(-1.0, 0.5), gate=True),
    Case("packed", hq=2, hkv=2, d=4, causal=True, lengths_q=(3, 8, 1)),
    Case("packed,unequal", hq=2, hkv=1, d=4, causal=True, lengths_q=(3, 8), lengths_k=(5, 9)),
)


def matmul_flops(m: int, n: int, k: int) -> int:
    return 2 * m * n * k


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_flops_count_every_matmul_over_visible_pairs(case: Case) -> None:
    """Brute force over visible pairs: QK and PV forward; QK again, dP, dV, dQ and dK backward."""
    d, dv = case.d, case.d if case.dv is None else case.dv
    lengths_k = case.lengths_q if case.lengths_k is None else case.lengths_k
    problems = [(case.sq, case.sk)] * case.b if case.lengths_q is None else list(zip(case.lengths_q, lengths_k, strict=True))
    forward = backward = 0
    for sq, sk in problems:
        for _pair in case.spec.allowed(sq, sk).nonzero():
            forward += matmul_flops(1, 1, d) + matmul_flops(1, dv, 1)
            backward += matmul_flops(1, 1, d) + matmul_flops(1, 1, dv) + matmul_flops(1, dv, 1) + 2 * matmul_flops(1, d, 1)
    found = Workload(case, FP32).flops()
    assert found == {
        "forward": case.hq * forward,
        "backward": case.hq * backward,
        "both": case.hq * (forward + backward),
    }


def test_headline_numbers_of_eq_41() -> None:
    full = Workload(Case("full", b=2, hq=8, hkv=1, sq=64, sk=64, d=32), BF16).flops()
    assert full["forward"] == 4 * 2 * 8 * 64 * 64 * 32
    assert full["backward"] == 2.5 * full["forward"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_tensors_and_bytes(case: Case, dtype: torch.dtype) -> None:
    workload = Workload(case, dtype)
    tensors = workload.draw(torch.device("cpu"))
    call = tensors.call
    assert call.spec == case.spec
    assert {x.dtype for x in (call.q, call.k, call.v, tensors.dy)} == {dtype}
    assert sum(x.nbytes for x in (call.q, call.k, call.v)) == workload.input_bytes()
    assert tensors.dy.shape == (*call.q.shape[:3], call.v.shape[-1])
    for name in ("bias", "sink", "tau"):
        parameter = getattr(call, name)
        assert parameter is None or parameter.dtype == FP32
    assert sum(z.sq * z.sk for z in call.segments()) == sum(sq * sk for sq, sk in workload.lengths)
    again = workload.draw(torch.device("cpu"))
    assert torch.equal(again.call.q, call.q)
    assert not torch.equal(workload.draw(torch.device("cpu"), seed=1).call.q, call.q)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_json_round_trip(case: Case) -> None:
    workload = Workload(case, BF16)
    assert Workload.from_json(json.loads(json.dumps(workload.to_json()))) == workload


SCORES: dict[str, dict[str, Any]] = {"plain": {}, "peaky": {"logits": 8.0}, "falling": {"falling": 0.5}}


def test_larger_and_falling_scores() -> None:
    cases = {name: Case(name, sq=40, sk=40, d=64, **options) for name, options in SCORES.items()}
    plain, peaky, falling = (Workload(case, FP32).draw(torch.device("cpu")).call for case in cases.values())
    assert torch.equal(peaky.q, 8 * plain.q)
    assert torch.equal(peaky.k, plain.k)
    for call in (falling, cases["falling"].make(FP32).call):
        steps = ((call.q @ call.k.transpose(-1, -2)) * call.scale).mean(dim=(0, 1, 2)).diff()
        assert abs(float(steps.mean()) - 0.5) < 0.05
