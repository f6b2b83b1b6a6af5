"""The list itself: complete, distinct, reproducible, quantised, and away from the kink."""

from __future__ import annotations

import itertools

import pytest
import torch

from backlight.call import Call
from backlight.spec import AttentionSpec
from cases import BF16, CASES, FEATURES, FP16, FP32, FP64, KINK_MARGIN, PAIRS, Case, case_id, compatible, compose, kink_margin


def test_names_are_distinct() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))


def test_every_feature_alone_and_every_pair() -> None:
    names = {case.name for case in CASES}
    assert set(FEATURES) <= names
    pairs = [pair for pair in itertools.combinations(FEATURES, 2) if compatible(pair)]
    assert {"+".join(pair) for pair in pairs} == {case.name for case in PAIRS}
    assert len(pairs) == 65


def test_what_the_list_must_cover() -> None:
    assert {1, 63, 65, 127, 200} <= {case.sq for case in CASES} | {case.sk for case in CASES}
    assert {1, 8, 40, 64, 72} <= {case.d for case in CASES}
    assert {1, 2, 8} <= {case.hq // case.hkv for case in CASES}
    assert any(case.hkv == 1 < case.hq for case in CASES)
    assert any(case.dv is not None and case.dv != case.d for case in CASES)
    assert {(case.sq == 0, case.sk == 0) for case in CASES} == {(False, False), (True, False), (False, True), (True, True)}
    assert {FP16, BF16, FP32, FP64} <= {dtype for case in CASES for dtype in case.dtypes}
    assert all(FP32 in case.dtypes for case in CASES)
    empty = [
        (q == 0, k == 0)
        for case in CASES
        if case.varlen
        for q, k in zip(case.lengths_q, case.lengths_k or case.lengths_q, strict=True)
    ]
    assert {(True, True), (True, False), (False, True), (False, False)} == set(empty)
    signs = {(min(case.tau) < 0, max(case.tau) > 0) for case in CASES if case.tau}
    assert signs == {(True, True), (True, False), (False, True), (False, False)}
    assert any(case.tau and -1.0 in case.tau for case in CASES)
    assert any(case.bias and case.bias_origin >= case.bias for case in CASES)
    assert any(case.bias and case.bias_origin < 0 for case in CASES)


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32, FP64], ids=case_id)
def test_drawn_tensors(dtype: torch.dtype) -> None:
    """In the dtype from the start, parameters in fp32 or better, the same for the same seed."""
    case = compose("causal", "bias", "sink", "tau", "gate", "gqa", "dlse")
    problem, again, other = case.make(dtype), case.make(dtype), case.make(dtype, seed=1)
    call = problem.call
    assert {x.dtype for x in (call.q, call.k, call.v, call.gate, problem.dy)} == {dtype}
    assert {x.dtype for x in (call.bias, call.sink, call.tau, problem.dlse)} == {FP64 if dtype == FP64 else FP32}
    assert torch.equal(call.q, again.call.q)
    assert torch.equal(problem.dy, again.dy)
    assert not torch.equal(call.q, other.call.q)
    assert call.q.shape == (2, 4, 65, 16)
    assert call.k.shape == (2, 2, 65, 16)


def test_packed_tensors() -> None:
    call = Case("packed", lengths_q=(3, 0, 4), lengths_k=(5, 2, 0)).make().call
    assert call.q.shape[2] == 7
    assert call.k.shape[2] == 7
    assert call.cu_seqlens_q.tolist() == [0, 3, 3, 7]
    assert call.cu_seqlens_k.tolist() == [0, 5, 7, 7]
    assert call.cu_seqlens_q.dtype == torch.int32


@pytest.mark.parametrize("shift", [-120.0, 120.0])
def test_shifted_logits(shift: float) -> None:
    call = Case("shifted", logit_shift=shift).make(BF16).call
    scores = call.scale * call.q.double() @ call.k.double().mT
    assert bool(((scores - shift).abs() < 10).all())


def elastic(*tau: float, q: float = 0.0) -> Call:
    """Causal, 4 rows, every score equal unless q differs from 0: p = 1 / n."""
    x = torch.zeros(1, len(tau), 4, 2)
    k = torch.arange(8.0).reshape(1, 1, 4, 2).expand(1, len(tau), 4, 2)
    return Call(AttentionSpec(causal=True, tau=True), x + q, k, k, tau=torch.tensor(tau))


def test_kink_margin() -> None:
    assert kink_margin(elastic(0.5, 0.0)) == float("inf")
    assert kink_margin(elastic(-0.5)) == pytest.approx(1.0)
    assert kink_margin(elastic(0.5, -0.8)) == pytest.approx(0.25)
    # uniform p and tau = -1: every row with two or more keys sits on the kink; a row with one key may
    assert kink_margin(elastic(-1.0)) < 1e-12
    assert kink_margin(elastic(-1.0, q=1.0)) > 0.1


def test_cases_keep_away_from_the_kink() -> None:
    elastic_cases = [case for case in CASES if case.tau and min(case.tau) < 0]
    assert len(elastic_cases) > 20
    for case in elastic_cases:
        assert kink_margin(case.make(FP32).call) >= KINK_MARGIN, case.name


def test_a_case_that_cannot_keep_away_says_so() -> None:
    with pytest.raises(RuntimeError, match="away from 0"):
        Case("kink", scale=0.0, causal=True, tau=(-1.0,)).make()
