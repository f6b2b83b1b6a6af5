"""Identities I1 to I13 of math.md section 6, on the oracle in float64, over compositions drawn by hypothesis.

They hold without knowing any gradient, so they check the oracle once more, and they are what the doctor relies on. Packed
sequences, windows, GQA and empty rows are drawn like everything else; an identity that does not hold for a feature says so.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from backlight.call import Call, counting_tensors
from backlight.reference import STAGES, Oracle, Stage, Trace, oracle
from cases import FEATURES, FP64, Problem, compatible, compose

ATOL = 1e-11


def drawn(*, without: tuple[str, ...] = (), always: tuple[str, ...] = (), **changes: object) -> st.SearchStrategy[Problem]:
    """Problems with any features but `without`, always with `always`; a third of the default length."""
    free = [name for name in sorted(FEATURES) if name not in without]
    features = st.sets(st.sampled_from(free)).map(lambda some: sorted(some | set(always))).filter(compatible)

    def make(names: list[str], seed: int) -> Problem:
        lengths = {"sq": 31 if "sq>sk" in names else 17, "sk": 31 if "sq<sk" in names else 17}
        return compose(*names, **(lengths | {"d": 4, "dv": 3} | changes)).make(FP64, seed)

    return st.builds(make, features, st.integers(0, 99))


def traced(problem: Problem) -> Trace:
    return oracle(problem.call, problem.dy, problem.dlse)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=ATOL)


def grouped(call: Call, value: Tensor) -> Tensor:
    """[B, Hq, ...] -> [B, Hkv, r, ...]."""
    return value.unflatten(1, (call.k.shape[1], call.group))


def per_row(call: Call) -> Tensor:
    """n [B, Sq]."""
    n = torch.zeros(call.q.shape[0], call.q.shape[2], dtype=FP64)
    for segment in call.segments():
        n[segment.batch, segment.q0 : segment.q1] = call.spec.visible_counts(segment.sq, segment.sk).double()
    return n


def row_sums(problem: Problem, trace: Trace) -> Tensor:
    """rho of eq. 29: what the rows of ds add up to."""
    n = per_row(problem.call)
    p_sink = trace.p_sink
    dlse = torch.zeros_like(trace.lse) if problem.dlse is None else problem.dlse
    plain = trace.delta + dlse
    rho = dlse * (1 - p_sink) + p_sink * plain
    return rho.masked_fill((n == 0)[:, None], 0)


def delta_by_outputs(problem: Problem, trace: Trace) -> Tensor:
    """delta - dlse from saved tensors alone: eq. 27, 28."""
    call = problem.call
    delta = (problem.dy * trace.y).sum(-1)
    if call.tau is not None:
        delta = delta - call.tau[:, None] * (trace.do * trace.u).sum(-1)
    return delta if problem.dlse is None else delta - problem.dlse


@given(drawn())
def test_i1_scores_seen_from_both_sides(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    left = grouped(call, call.q.mT @ trace.dq).sum(2)
    close(left, trace.dk.mT @ call.k)


@given(drawn())
def test_i2_weights_of_both_directions(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    close(grouped(call, trace.o.mT @ trace.do).sum(2), call.v.mT @ trace.dv)
    gated = grouped(call, (trace.y * problem.dy).sum(2)).sum(2)
    close(gated, (call.v * trace.dv).sum(2))


@given(drawn())
def test_i3_row_sums_of_ds(problem: Problem) -> None:
    trace = traced(problem)
    close(trace.ds.sum(-1), row_sums(problem, trace))


@given(drawn(without=("softcap",)))
def test_i4_column_sum_of_dk(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    rho = row_sums(problem, trace)
    close(trace.dk.sum(2), call.scale * grouped(call, (rho[..., None] * call.q).sum(2)).sum(2))


@given(drawn(without=("tau",)) | drawn(always=("tau",), tau=(0.6, 0.0, 2.0)))
def test_i5_column_sum_of_dv(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    n = per_row(call)
    weight = 1 - trace.p_sink
    if call.tau is not None:
        weight = weight + call.tau[:, None]
    weight = weight.masked_fill((n == 0)[:, None], 0)
    close(trace.dv.sum(2), grouped(call, (weight[..., None] * trace.do).sum(2)).sum(2))


@given(drawn(always=("bias",), bias=80, bias_origin=40))
def test_i6_sum_of_dbias(problem: Problem) -> None:
    """A table that covers every distance collects all of ds."""
    trace = traced(problem)
    close(trace.dbias.sum(1), row_sums(problem, trace).sum((0, 2)))


@given(drawn(always=("sink",)))
def test_i7_dsink_from_saved_tensors(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    p_sink = torch.exp(call.sink[:, None] - trace.lse)
    close(trace.dsink, -(p_sink * delta_by_outputs(problem, trace)).sum((0, 2)))


@given(drawn(always=("tau",), tau=(0.6, 0.0, 2.0)))
def test_i8_dtau_is_the_mean_value_seen(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    mean = torch.zeros_like(trace.o)
    for segment in call.segments():
        rows, keys = slice(segment.q0, segment.q1), slice(segment.k0, segment.k1)
        seen = call.spec.allowed(segment.sq, segment.sk).double()
        v = call.v[segment.batch, :, keys].repeat_interleave(call.group, 0)
        mean[segment.batch, :, rows] = seen @ v / seen.sum(1, keepdim=True).clamp(min=1)
    close(trace.dtau, (trace.do * mean).sum((0, 2, 3)))


@given(drawn(without=("sink", "softcap", "sq>sk"), always=("causal",)))
def test_i9_a_row_with_one_key_moves_only_lse(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    for segment in call.segments():
        for i in (call.spec.visible_counts(segment.sq, segment.sk) == 1).nonzero().flatten().tolist():
            j = int(call.spec.allowed(segment.sq, segment.sk)[i].nonzero())
            key = call.k[segment.batch, :, segment.k0 + j].repeat_interleave(call.group, 0)
            row = segment.q0 + i
            dlse = 0 if problem.dlse is None else problem.dlse[segment.batch, :, row, None]
            close(trace.dq[segment.batch, :, row], call.scale * dlse * key + 0 * key)


@given(
    drawn(without=("sink", "dlse", "tau"), equal_values=True)
    | drawn(without=("sink", "dlse"), always=("tau",), equal_values=True, tau=(0.6, 0.0, 2.0))
)
def test_i10_equal_values_leave_nothing_to_prefer(problem: Problem) -> None:
    trace = traced(problem)
    for name in ("dq", "dk", "dbias"):
        assert bool((trace[name].abs() <= ATOL).all()), name


@given(drawn(without=("softcap",), always=("dlse",)))
def test_i11_gradient_through_lse_alone(problem: Problem) -> None:
    """dq_i = scale dlse_i (mean key under p): the forward itself, with k in the place of v, is the derivative of lse."""
    call = problem.call
    trace = oracle(call, None, problem.dlse)
    for name in ("dv", "dtau", "dgate"):
        assert not trace[name].any(), name
    spec = call.spec.replace(tau=False, gate=False)
    mean_key = Call(
        spec, call.q, call.k, call.k, call.bias, call.sink, None, None, call.pair_bias, call.entmax, *counting_tensors(call)
    )
    n = per_row(call)
    dlse = problem.dlse.masked_fill((n == 0)[:, None], 0)
    close(trace.dq, call.scale * dlse[..., None] * oracle(mean_key, keep=["o"]).o)


@given(drawn())
def test_i12_keys_nobody_sees_and_weights_all_dead(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    for segment in call.segments():
        unseen = ~call.spec.allowed(segment.sq, segment.sk).any(0)
        for name in ("dk", "dv"):
            assert not trace[name][segment.batch, :, segment.k0 : segment.k1][:, unseen].any()


@given(drawn(without=("dlse",), always=("tau",), tau=(-100.0,)))
def test_i12_nothing_survives(problem: Problem) -> None:
    trace = traced(problem)
    for name in ("o", "y", *problem.call.gradients):
        assert not trace[name].any(), name


@given(drawn())
def test_i13_traces(problem: Problem) -> None:
    call, trace = problem.call, traced(problem)
    close((call.q * trace.dq).sum(), (call.k * trace.dk).sum())
    close((trace.y * problem.dy).sum(), (call.v * trace.dv).sum())


@given(drawn(without=("varlen",)))
def test_dscale(problem: Problem) -> None:
    """eq. 26: the derivative by scale is <q, dq> / scale, against a central difference."""
    call, trace = problem.call, traced(problem)

    def loss(scale: float) -> Tensor:
        terms = (call.q, call.k, call.v, call.bias, call.sink, call.tau, call.gate)
        moved = oracle(Call(call.spec.replace(scale=scale), *terms), keep=("y", "lse"))
        total = (moved.y * problem.dy).sum()
        return total if problem.dlse is None else total + (moved.lse * problem.dlse)[torch.isfinite(moved.lse)].sum()

    step = 1e-6
    numeric = (loss(call.scale + step) - loss(call.scale - step)) / (2 * step)
    torch.testing.assert_close((call.q * trace.dq).sum() / call.scale, numeric, rtol=1e-5, atol=1e-5)


@given(drawn())
def test_delta_from_saved_tensors(problem: Problem) -> None:
    """eq. 27, 28: what a kernel may use instead of a sum over keys."""
    trace = traced(problem)
    n = per_row(problem.call)
    seen = (n > 0)[:, None].expand_as(trace.delta)
    close(trace.delta[seen], delta_by_outputs(problem, trace)[seen])


@given(drawn(without=("tau",), always=("sink",)))
def test_sink_after_the_fact(problem: Problem) -> None:
    """eq. 14."""
    call = problem.call
    spec = call.spec.replace(sink=False)
    without = oracle(
        Call(
            spec, call.q, call.k, call.v, call.bias, None, None, call.gate, call.pair_bias, call.entmax, *counting_tensors(call)
        )
    )
    trace, sink = oracle(call), call.sink[:, None]
    close(trace.lse, torch.logaddexp(without.lse, sink.expand_as(without.lse)))
    close(trace.o, without.o * torch.sigmoid(without.lse - sink)[..., None])


WRONG = {
    "i1": (test_i1_scores_seen_from_both_sides, "dk", lambda dx, q, scale: 1.01 * scale * (dx.mT @ q)),
    "i2": (test_i2_weights_of_both_directions, "dv", lambda a, do: 1.01 * (a.mT @ do)),
    "i3": (test_i3_row_sums_of_ds, "ds", lambda p, m, dp, delta: p * (m * dp - 1.01 * delta[:, None])),
    "i4": (test_i4_column_sum_of_dk, "ds", lambda p, m, dp, delta: p * (m * dp - 1.01 * delta[:, None])),
    "i5": (test_i5_column_sum_of_dv, "dv", lambda a, do: 1.01 * (a.mT @ do)),
    "i6": (test_i6_sum_of_dbias, "ds", lambda p, m, dp, delta: p * (m * dp - 1.01 * delta[:, None])),
    "i7": (test_i7_dsink_from_saved_tensors, "dsink", lambda p_sink, delta: -1.01 * (p_sink * delta).sum()),
    "i8": (test_i8_dtau_is_the_mean_value_seen, "dtau", lambda m, dp: (m * dp).sum()),
    "i9": (test_i9_a_row_with_one_key_moves_only_lse, "ds", lambda p, m, dp: p * m * dp),
    "i10": (test_i10_equal_values_leave_nothing_to_prefer, "ds", lambda p, m, dp: p * m * dp),
    "i11": (test_i11_gradient_through_lse_alone, "delta", lambda p, m, dp, dlse: (p * m * dp).sum(-1) + dlse),
    "i13": (test_i13_traces, "dq", lambda dx, k, scale: 1.01 * scale * (dx @ k)),
}


@pytest.mark.parametrize("identity", WRONG)
def test_identity_can_fail(identity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each identity sees the defect it is said to catch."""
    holds, stage, wrong = WRONG[identity]
    monkeypatch.setattr(f"{__name__}.oracle", Oracle(stages=STAGES | {stage: Stage.of(wrong, stage)}))
    with pytest.raises(AssertionError):
        settings(max_examples=20, database=None, phases=[Phase.generate])(holds)()
