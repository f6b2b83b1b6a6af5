"""The oracle is the truth of every other test: its forward against the formulas word by word, its hand-written backward against
finite differences, its graph of stages, and the two yardsticks against it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from backlight.call import Call, counting_tensors
from backlight.reference import (
    BACKWARD,
    FORWARD,
    GRADIENTS,
    OUTPUTS,
    STAGES,
    Oracle,
    Stage,
    eager,
    flashlike,
    graph,
    oracle,
)
from backlight.spec import LEARNED
from cases import BF16, BY_NAME, FEATURES, FP16, FP32, FP64, SINGLES, TOGETHER, Case, case_id, compatible, compose, small

compositions = st.sets(st.sampled_from(sorted(FEATURES))).filter(compatible).map(lambda features: compose(*sorted(features)))
INPUTS = ("q", "k", "v", "bias", "sink", "tau", "gate", "pair_bias", "entmax", "dy", "dlse")
GEOMETRY = ("scale", "softcap", "visible", "n", "column")


# --- forward ----------------------------------------------------------------


def by_hand(call: Call, b: int, h: int, i: int, segment) -> tuple[list[float], float]:
    """(y_i, lse_i) of one row, eq. 1-13 in plain Python floats."""
    spec = call.spec
    position = i + segment.sk - segment.sq
    q = call.q[b, h, segment.q0 + i].tolist()
    keys, logits = [], []
    for j in range(segment.sk):
        left, right = spec.window
        if (left is not None and j < position - left) or (right is not None and j > position + right):
            continue
        if spec.causal and j > position:
            continue
        k = call.k[b, h // call.group, segment.k0 + j].tolist()
        s = call.scale * sum(x * y for x, y in zip(q, k, strict=True))
        if spec.softcap is not None:
            s = spec.softcap * math.tanh(s / spec.softcap)
        column = spec.bias_origin + position - j
        if call.bias is not None and 0 <= column < call.bias.shape[1]:
            s += call.bias[h, column].item()
        keys.append(j)
        logits.append(s)
    exponents = logits + ([] if call.sink is None else [call.sink[h].item()])
    total = sum(math.exp(s) for s in exponents)
    y = [0.0] * call.v.shape[-1]
    for j, s in zip(keys, logits, strict=True):
        a = math.exp(s) / total
        if call.tau is not None:
            a = max(0.0, a + call.tau[h].item() / len(keys))
        v = call.v[b, h // call.group, segment.k0 + j].tolist()
        y = [sum_ + a * x for sum_, x in zip(y, v, strict=True)]
    if call.gate is not None:
        gate = call.gate[b, h, segment.q0 + i].tolist()
        y = [x / (1 + math.exp(-g)) for x, g in zip(y, gate, strict=True)]
    return y, math.log(total) if total else -math.inf


@settings(max_examples=50)
@given(compositions, st.integers(0, 99))
def test_forward_is_the_formulas_word_by_word(case: Case, seed: int) -> None:
    call = small(case).make(FP64, seed).call
    trace = oracle(call, keep=OUTPUTS)
    for segment in call.segments():
        for h in range(call.q.shape[1]):
            for i in range(segment.sq):
                y, lse = by_hand(call, segment.batch, h, i, segment)
                got = trace.y[segment.batch, h, segment.q0 + i]
                torch.testing.assert_close(got, torch.tensor(y, dtype=FP64), rtol=1e-12, atol=1e-12)
                assert trace.lse[segment.batch, h, segment.q0 + i].item() == pytest.approx(lse, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_forward_is_torch_sdpa(causal: bool) -> None:
    call = compose("gqa", causal=causal).make(FP64).call
    expected = torch.nn.functional.scaled_dot_product_attention(call.q, call.k, call.v, is_causal=causal, enable_gqa=True)
    torch.testing.assert_close(oracle(call).y, expected, rtol=1e-12, atol=1e-12)


# --- backward ----------------------------------------------------------------


class Differentiable(torch.autograd.Function):
    """The oracle's forward with the oracle's own backward, as autograd sees a kernel."""

    @staticmethod
    def forward(ctx, template: Call, names: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call, ctx.names = rebind(template, dict(zip(names, tensors, strict=True))), names
        trace = oracle(ctx.call, keep=OUTPUTS)
        # a row without keys has lse = -inf, which finite differences cannot subtract
        return trace.y, trace.lse.masked_fill(trace.lse == -torch.inf, 0)

    @staticmethod
    def backward(ctx, dy: Tensor, dlse: Tensor):
        trace = oracle(ctx.call, dy, dlse, keep=GRADIENTS)
        return None, None, *(trace[f"d{name}"] for name in ctx.names)


def rebind(call: Call, tensors: dict[str, Tensor]) -> Call:
    terms = [tensors.get(name, getattr(call, name)) for name in LEARNED]
    return Call(call.spec, *terms, *counting_tensors(call))


def check_gradients(case: Case, seed: int = 0, fast: bool = False, only: tuple[str, ...] = LEARNED) -> None:
    call = small(case).make(FP64, seed, margin=1e-3).call
    names = tuple(name for name in only if getattr(call, name) is not None)
    tensors = [getattr(call, name).clone().requires_grad_() for name in names]
    assert gradcheck(lambda *inputs: Differentiable.apply(call, names, *inputs), tensors, fast_mode=fast)


@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER], ids=case_id)
def test_backward_is_the_derivative(case: Case) -> None:
    check_gradients(case, fast=case in TOGETHER)


@settings(max_examples=40)
@given(compositions, st.integers(0, 99))
def test_backward_of_compositions_is_the_derivative(case: Case, seed: int) -> None:
    check_gradients(case, seed, fast=True)


@pytest.mark.parametrize("stage", ["ds", "dv", "dbias", "dsink", "dtau", "dgate", "delta", "dx", "dq", "dk"])
def test_gradcheck_sees_a_wrong_stage(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of record can fail: one stage 1 % too large is caught, in its own gradient or in that of q."""
    right = STAGES[stage]
    wrong = Stage(right.name, right.equation, right.reads, lambda *values: 1.01 * right.compute(*values))
    monkeypatch.setattr(f"{__name__}.oracle", Oracle(stages=STAGES | {stage: wrong}))
    own = stage.removeprefix("d")
    with pytest.raises(GradcheckError):
        check_gradients(BY_NAME["everything,batched,sq<sk"], only=(own if own in LEARNED else "q",))


def test_dlse_of_rows_without_keys_is_ignored() -> None:
    problem = BY_NAME["rows without keys,dlse"].make(FP64)
    call = problem.call
    empty = call.spec.visible_counts(call.q.shape[2], call.k.shape[2]) == 0
    assert bool(empty.any())
    loud = problem.dlse.masked_fill(empty, torch.nan)
    for name in call.gradients:
        expected, got = (oracle(call, problem.dy, dlse)[name] for dlse in (problem.dlse, loud))
        assert torch.equal(expected, got), name


def test_gradients_are_linear_in_what_comes_in() -> None:
    problem = BY_NAME["everything,batched,sq>sk"].make(FP64)
    call, dy, dlse = problem.call, problem.dy, problem.dlse
    both = oracle(call, dy, dlse, keep=GRADIENTS)
    only_y, only_lse = oracle(call, dy, None, keep=GRADIENTS), oracle(call, None, dlse, keep=GRADIENTS)
    for name in call.gradients:
        torch.testing.assert_close(both[name], only_y[name] + only_lse[name], rtol=1e-10, atol=1e-12)


# --- the graph ----------------------------------------------------------------


def test_every_stage_reads_only_what_stands_before_it() -> None:
    assert tuple(STAGES) != ()
    assert set(STAGES) == set(FORWARD) | set(BACKWARD)
    known = {*INPUTS, *GEOMETRY}
    for name, stage in STAGES.items():
        assert set(stage.reads) <= known, f"{name} reads {set(stage.reads) - known} too early"
        known.add(name)


def test_forward_does_not_read_backward() -> None:
    for name in FORWARD:
        assert not set(STAGES[name].reads) & {*BACKWARD, "dy", "dlse"}


def test_graph_lists_stages_only() -> None:
    edges = graph()
    assert edges["x"] == ()
    assert set(edges["ds"]) == {"p", "m", "dp", "delta"}
    assert set(edges["dq"]) == {"dx"}
    assert all(set(reads) <= set(STAGES) for reads in edges.values())


def test_every_output_reaches_back_to_the_scores() -> None:
    edges = graph()

    def ancestors(name: str) -> set[str]:
        return {name}.union(*(ancestors(parent) for parent in edges[name]))

    for name in ("y", "lse", "dq", "dk", "dv", "dbias", "dtau", "dsink"):
        assert "s" in ancestors(name), name


def test_every_stage_cites_its_equation() -> None:
    assert all(stage.equation for stage in STAGES.values())


# --- the trace ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["everything,batched,sq<sk", "everything,sq>sk"])
def test_keep_returns_the_same_numbers_and_nothing_else(name: str) -> None:
    problem = BY_NAME[name].make(FP64)
    full = oracle(problem.call, problem.dy, problem.dlse)
    kept = oracle(problem.call, problem.dy, problem.dlse, keep=["dk", "lse"])
    assert set(full) == set(STAGES)
    assert set(kept) == {"dk", "lse"}
    assert all(torch.equal(kept[key], full[key]) for key in kept)


def test_forward_only_trace_has_no_gradients() -> None:
    trace = oracle(BY_NAME["causal"].make(FP64).call)
    assert set(trace) == set(FORWARD)
    with pytest.raises(AttributeError, match=r"no 'dq'.*lse"):
        _ = trace.dq


def test_shapes_of_a_trace() -> None:
    case = BY_NAME["everything,batched,sq<sk"]
    problem = case.make(FP64)
    trace = oracle(problem.call, problem.dy, problem.dlse)
    b, hq, hkv, sq, sk, d = case.b, case.hq, case.hkv, case.sq, case.sk, case.d
    assert trace.p.shape == trace.ds.shape == (b, hq, sq, sk)
    assert trace.lse.shape == trace.delta.shape == (b, hq, sq)
    assert trace.dq.shape == (b, hq, sq, d)
    assert trace.dk.shape == (b, hkv, sk, d)
    assert trace.dbias.shape == (hq, case.bias)
    assert trace.dtau.shape == trace.dsink.shape == (hq,)
    assert all(value.dtype == FP64 for value in trace.values())


def test_packed_matrices_are_blocks() -> None:
    """Nothing is visible across a border: exact zeros outside the segments, -inf in s."""
    problem = BY_NAME["varlen"].make(FP64)
    trace = oracle(problem.call, problem.dy)
    inside = torch.zeros(trace.p.shape[2:], dtype=torch.bool)
    for segment in problem.call.segments():
        inside[segment.q0 : segment.q1, segment.k0 : segment.k1] = True
    assert bool((trace.p[:, :, ~inside] == 0).all())
    assert bool((trace.ds[:, :, ~inside] == 0).all())
    assert bool((trace.s[:, :, ~inside] == -torch.inf).all())
    assert bool((trace.p[:, :, inside] > 0).all())


def test_packed_equals_one_by_one() -> None:
    problem = compose("causal", "bias", "sink", "tau", "gate", "varlen", "dlse").make(FP64)
    call = problem.call
    packed = oracle(call, problem.dy, problem.dlse)
    sums = {name: torch.zeros_like(packed[name]) for name in ("dbias", "dsink", "dtau")}
    for segment in call.segments():
        rows, keys = slice(segment.q0, segment.q1), slice(segment.k0, segment.k1)
        alone = Call(
            call.spec,
            call.q[:, :, rows],
            call.k[:, :, keys],
            call.v[:, :, keys],
            call.bias,
            call.sink,
            call.tau,
            call.gate[:, :, rows],
        )
        trace = oracle(alone, problem.dy[:, :, rows], problem.dlse[:, :, rows])
        for name in ("y", "lse", "dq", "dgate"):
            assert torch.equal(trace[name], packed[name][:, :, rows]), name
        for name in ("dk", "dv"):
            assert torch.equal(trace[name], packed[name][:, :, keys]), name
        sums = {name: total + trace[name] for name, total in sums.items()}
    for name, total in sums.items():
        torch.testing.assert_close(total, packed[name], rtol=1e-12, atol=1e-12)


# --- yardsticks ----------------------------------------------------------------


def relative_error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize(("dtype", "eps"), [(BF16, 2**-8), (FP16, 2**-11)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", ["causal,s=200", "everything,batched,sq<sk"])
def test_yardsticks_err_by_their_dtype(name: str, dtype: torch.dtype, eps: float) -> None:
    """Both err by a small multiple of the rounding of their dtype and not by less than a fraction of it; B by less than A."""
    problem = BY_NAME[name].make(dtype)
    truth = oracle(problem.call, problem.dy, problem.dlse)
    coarse, fine = (yardstick(problem.call, problem.dy, problem.dlse) for yardstick in (eager, flashlike))
    for quantity in ("y", "dq", "dk", "dv"):
        a, b = relative_error(coarse[quantity], truth[quantity]), relative_error(fine[quantity], truth[quantity])
        assert 0.1 * eps < b < a < 20 * eps, (quantity, a / eps, b / eps)


@pytest.mark.parametrize("yardstick", [eager, flashlike])
def test_yardsticks_are_exact_in_float64(yardstick) -> None:
    problem = BY_NAME["everything,batched,sq<sk"].make(FP64)
    truth = oracle(problem.call, problem.dy, problem.dlse)
    trace = yardstick(problem.call, problem.dy, problem.dlse)
    for name in (*OUTPUTS, *problem.call.gradients):
        assert relative_error(trace[name], truth[name]) < 1e-13, name


def test_flashlike_keeps_lse_in_fp32() -> None:
    problem = BY_NAME["causal,s=200"].make(BF16)
    truth, trace = oracle(problem.call), flashlike(problem.call)
    assert trace.lse.dtype == FP32
    assert float((trace.lse - truth.lse).abs().max()) < 4e-6
