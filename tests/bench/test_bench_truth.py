"""Truth computed piece by piece is the truth, and the judged heads are the ones a careless kernel gets wrong."""

from __future__ import annotations

import pytest
import torch

from backlight.bench import truth
from backlight.bench.workload import Workload
from backlight.problems.case import BF16, FP32, Case
from backlight.problems.problem import Problem

CPU = torch.device("cpu")
CASES = (
    Case("causal", b=1, hq=2, hkv=1, sq=150, sk=150, d=8, causal=True),
    Case("full,bias", b=2, hq=1, hkv=1, sq=150, sk=170, d=8, bias=60, bias_origin=20),
    Case("window,two-sided", b=1, hq=1, hkv=1, sq=150, sk=190, d=8, window=(30, 9), bias=40, bias_origin=5),
    Case("causal window,sink", b=1, hq=2, hkv=2, sq=150, sk=150, d=8, causal=True, window=(40, None), sink=True),
    Case("left only", b=1, hq=1, hkv=1, sq=150, sk=150, d=8, window=(40, None), softcap=3.0),
    Case("lazy,gate", b=2, hq=2, hkv=1, sq=150, sk=150, d=8, causal=True, bias=60, tau=(-1.0, 0.5), gate=True),
    Case("sq>sk", b=1, hq=1, hkv=1, sq=150, sk=100, d=8, causal=True),
    Case("packed", hq=2, hkv=1, d=8, causal=True, lengths_q=(140, 3, 70), bias=30, sink=True),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_pieces_give_the_whole(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(truth.PIECE_BYTES, "cpu", 1)
    tensors = Workload(case, FP32).draw(CPU)
    if case.name != "sq>sk":
        assert len(list(truth.pieces(tensors.call))) > len(tensors.call.segments())
    whole, pieced = Problem(tensors.call, tensors.dy), truth.problem_of(tensors.call, tensors.dy)
    for name in ("y", "lse", *tensors.call.gradients):
        torch.testing.assert_close(pieced.truth[name], whole.truth[name], rtol=1e-11, atol=1e-11)
        if name != "lse":
            # the floor of lse counts the keys of the call it belongs to, fewer in a piece: never laxer
            torch.testing.assert_close(pieced.noise[name], whole.noise[name], rtol=1e-9, atol=1e-11)
        for kind in ("eager", "flashlike"):
            error, limit = (getattr(x, kind)[name].double() - whole.truth[name] for x in (pieced, whole))
            # fp32 sums in another order: the same size of error, not the same error
            assert error.nan_to_num().norm() <= 3 * limit.nan_to_num().norm() + 1e-5


def test_yardstick_a_keeps_its_size_when_pieces_are_rounded_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A yardstick that grew with the number of pieces would let a worse kernel pass."""
    monkeypatch.setitem(truth.PIECE_BYTES, "cpu", 1)
    tensors = Workload(Case("causal", b=1, hq=1, hkv=1, sq=512, sk=512, d=16, causal=True), BF16).draw(CPU)
    whole, pieced = Problem(tensors.call, tensors.dy), truth.problem_of(tensors.call, tensors.dy)
    for name in ("y", "dq", "dk", "dv"):
        ours, theirs = ((x.eager[name].double() - x.truth[name]).norm() for x in (pieced, whole))
        assert 0.7 < float(ours / theirs) < 1.4, name


def test_first_and_last_heads_are_judged() -> None:
    call = Workload(Case("causal", b=3, hq=8, hkv=4, sq=16, sk=16, d=8, causal=True), FP32).draw(CPU).call
    spots = [(part.b0, part.g) for part in truth.sample(call)]
    assert spots[:2] == [(2, 3), (0, 0)]
    assert all(part.b1 == part.b0 + 1 for part in truth.sample(call))


def test_learned_terms_are_judged_over_the_whole_batch() -> None:
    call = Workload(Case("bias", b=3, hq=8, hkv=4, sq=16, sk=16, d=8, bias=8), FP32).draw(CPU).call
    assert {(part.b0, part.b1) for part in truth.sample(call)} == {(0, 3)}
    assert [part.g for part in truth.sample(call)][:2] == [3, 0]


def test_large_cases_are_judged_on_fewer_heads_but_never_on_none(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Workload(Case("causal", b=3, hq=8, hkv=4, sq=16, sk=16, d=8), FP32).draw(CPU).call
    monkeypatch.setitem(truth.PAIRS_LIMIT, "cpu", 1)
    assert len(truth.sample(call)) == 1


def test_slices_take_query_heads_of_their_group() -> None:
    tensors = Workload(Case("gqa", b=2, hq=6, hkv=2, sq=9, sk=9, d=4, bias=5), FP32).draw(CPU)
    part = truth.Slice(0, 2, 1)
    small = truth.narrowed(tensors.call, part)
    assert torch.equal(small.q, tensors.call.q[:, 3:6])
    assert torch.equal(small.k, tensors.call.k[:, 1:2])
    assert torch.equal(small.bias, tensors.call.bias[3:6])
    assert torch.equal(part.take("dk", tensors.call.k, 3), tensors.call.k[:, 1:2])
    assert torch.equal(part.take("dy", tensors.dy, 3), tensors.dy[:, 3:6])
    assert torch.equal(part.take("dv", tensors.call.v, 3), tensors.call.v[:, 1:2])
