"""The gate judges everything else, so it is judged first: correct kernels pass, every injected defect turns it red."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference import GRADIENTS, OUTPUTS, STAGES, Oracle, Trace, eager, flashlike, oracle
from backlight.reference.trace import Stage
from backlight.spec import AttentionSpec
from cases import BF16, BY_NAME, FP32, NUMERICS, SINGLES, TAU, TOGETHER, Case, Problem, case_id, compose
from gate import judge, measure

Results = dict[str, Tensor]

HEALTHY = (*SINGLES, *TOGETHER, *TAU, *NUMERICS, BY_NAME["rows without keys,everything"], BY_NAME["causal,decode"])
PLAIN = BY_NAME["causal+window"]
EVERYTHING = BY_NAME["everything,batched,sq<sk"]
WITH_PAIRS = BY_NAME["pair"]
WITH_ENTMAX = BY_NAME["entmax"]
SINK = compose("causal", "sink", "dlse")
LAZY = compose("causal", "bias", "tau", name="lazy", bias=65, bias_origin=0)
EMPTY_ROWS = BY_NAME["rows without keys,dlse"]


def as_kernel(problem: Problem, trace: Mapping[str, Tensor]) -> Results:
    """A trace as a kernel would return it: storage dtype, fp32 lse and parameter gradients."""
    call = problem.call
    fp32 = ("lse", "dbias", "dsink", "dtau")
    names = (*OUTPUTS, *call.gradients)
    return {name: trace[name].to(call.accumulator_dtype if name in fp32 else call.q.dtype) for name in names}


def healthy(problem: Problem) -> Results:
    return as_kernel(problem, flashlike(problem.call, problem.dy, problem.dlse))


def verdict_of(problem: Problem, results: Results):
    return judge(problem.call, problem.dy, problem.dlse, results)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
@pytest.mark.parametrize("case", HEALTHY, ids=case_id)
def test_correct_arithmetic_passes(case: Case, dtype: torch.dtype) -> None:
    """Yardstick A is no defect by A's measure; yardstick B has the precision of the algorithm."""
    problem = case.make(dtype, seed=1)
    yardsticks = measure(problem.call, problem.dy, problem.dlse)
    flash = judge(problem.call, problem.dy, problem.dlse, as_kernel(problem, yardsticks.flashlike), yardsticks)
    assert flash.ok, flash
    plain = judge(problem.call, problem.dy, problem.dlse, as_kernel(problem, yardsticks.eager), yardsticks)
    assert not plain.defects, plain


def test_gate_is_not_slack_at_the_yardstick() -> None:
    """Twice the normal error of a large bf16 tensor is already too much: the limits bite where correct kernels end."""
    problem = BY_NAME["causal,s=200"].make(BF16)
    yardsticks = measure(problem.call, problem.dy, problem.dlse)
    doubled = {name: 2 * yardsticks.flashlike[name] - yardsticks.truth[name] for name in ("y", "dq", "dk", "dv")}
    results = {name: value.float() for name, value in doubled.items()} | {"lse": yardsticks.truth.lse}
    verdict = judge(problem.call, problem.dy, problem.dlse, results, yardsticks)
    assert verdict.coarse == {"y", "dq", "dk", "dv"}, verdict


# --- defects ----------------------------------------------------------------


def scaled(name: str, factor: float) -> Callable[[Problem], Results]:
    def mutate(problem: Problem) -> Results:
        results = healthy(problem)
        results[name] = results[name] * factor
        return results

    return mutate


def with_stage(name: str, compute: Callable[..., Tensor]) -> Callable[[Problem], Results]:
    """The kernel that computes one stage wrongly; what follows inherits the error."""

    def mutate(problem: Problem) -> Results:
        wrong = Oracle(stages=STAGES | {name: Stage.of(compute, name)})
        return as_kernel(problem, wrong(problem.call, problem.dy, problem.dlse))

    return mutate


def backward_window_one_too_wide(problem: Problem) -> Results:
    call = problem.call
    left, right = call.spec.window
    wrong = type(call)(call.spec.replace(window=(left + 1, right)), call.q, call.k, call.v)
    trace = oracle(wrong, problem.dy)
    return healthy(problem) | {name: trace[name].to(call.q.dtype) for name in ("dq", "dk", "dv")}


def zero_row(name: str) -> Callable[[Problem], Results]:
    def mutate(problem: Problem) -> Results:
        results = healthy(problem)
        results[name][0, 1, 40] = 0
        return results

    return mutate


def only_head_0(problem: Problem) -> Results:
    results = healthy(problem)
    for name in ("dq", "dk", "dv"):
        results[name][:, 1:] = 0
    return results


def shifted_table(problem: Problem) -> Results:
    results = healthy(problem)
    results["dbias"] = results["dbias"].roll(1, dims=1)
    return results


def lost_table_edge(problem: Problem) -> Results:
    results = healthy(problem)
    results["dbias"][:, 20] = 0
    return results


DEFECTS = {
    "dk 1% too large": (PLAIN, scaled("dk", 1.01), {"dk"}),
    "dq scaled by log2 e": (PLAIN, scaled("dq", 1.4427), {"dq"}),
    "scale missing on dk": (PLAIN, with_stage("dk", lambda dx, q: dx.mT @ q), {"dk"}),
    "backward window one too wide": (PLAIN, backward_window_one_too_wide, {"dq", "dk", "dv"}),
    "delta missing": (PLAIN, with_stage("ds", lambda p, m, dp: p * m * dp), {"dq", "dk"}),
    "delta negated": (PLAIN, with_stage("ds", lambda p, m, dp, delta: p * (m * dp + delta[:, None])), {"dq", "dk"}),
    "lse in base 2": (PLAIN, scaled("lse", 1.4427), {"lse"}),
    "one row of dk lost": (PLAIN, zero_row("dk"), {"dk"}),
    "one row of dq lost": (PLAIN, zero_row("dq"), {"dq"}),
    "one row of y lost": (PLAIN, zero_row("y"), {"y"}),
    "only head 0 has gradients": (PLAIN, only_head_0, {"dq", "dk", "dv"}),
    "softcap not differentiated": (
        compose("causal", "softcap"),
        with_stage("dx", lambda ds: ds),
        {"dq", "dk"},
    ),
    "bias table shifted by one": (LAZY, shifted_table, {"dbias"}),
    "one table entry lost": (LAZY, lost_table_edge, {"dbias"}),
    "tau: delta from dO.O": (
        LAZY,
        with_stage("delta", lambda a, m, dp: (a * m * dp).sum(-1)),
        {"dq", "dk", "dbias"},
    ),
    "tau: dead weights dropped from ds": (
        LAZY,
        with_stage("ds", lambda p, m, dp, delta: m * p * (dp - delta[:, None])),
        {"dq", "dk", "dbias"},
    ),
    "tau: dtau not divided by n": (LAZY, with_stage("dtau", lambda m, dp: (m * dp).sum()), {"dtau"}),
    "tau: dtau 10% too large": (LAZY, scaled("dtau", 1.1), {"dtau"}),
    "sink: dlse ignored": (SINK, with_stage("delta", lambda p, m, dp: (p * m * dp).sum(-1)), {"dq", "dk", "dsink"}),
    "sink: sign of dsink": (SINK, scaled("dsink", -1.0), {"dsink"}),
    "gate: sigmoid not differentiated": (
        compose("causal", "gate"),
        with_stage("dgate", lambda dy, o, gate: dy * o * torch.sigmoid(gate)),
        {"dgate"},
    ),
    "gqa: one query head of the group": (
        compose("causal", "gqa"),
        lambda problem: as_kernel(problem, Oracle(kv_head=lambda h, group: 0)(problem.call, problem.dy)),
        {"y", "lse", "dq", "dk", "dv"},
    ),
}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
@pytest.mark.parametrize("defect", DEFECTS)
def test_defect_turns_it_red(defect: str, dtype: torch.dtype) -> None:
    case, mutate, expected = DEFECTS[defect]
    problem = case.make(dtype)
    before = verdict_of(problem, healthy(problem))
    assert before.ok, before
    verdict = verdict_of(problem, mutate(problem))
    assert verdict.defective | verdict.coarse == expected, verdict


@pytest.mark.parametrize("name", [*OUTPUTS, *GRADIENTS])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite(name: str, poison: float) -> None:
    # neither a pair bias nor entmax goes with tau
    problem = {"dpair_bias": WITH_PAIRS, "dentmax": WITH_ENTMAX}.get(name, EVERYTHING).make(BF16)
    results = healthy(problem)
    results[name].view(-1)[-1] = poison
    verdict = verdict_of(problem, results)
    assert verdict.defective == {name}, verdict
    assert "1 of" in verdict.defects[0]


@pytest.mark.parametrize("name", ["y", "dq", "dk", "dv"])
def test_zeros_do_not_pass(name: str) -> None:
    problem = PLAIN.make(BF16)
    verdict = verdict_of(problem, healthy(problem) | {name: torch.zeros_like(healthy(problem)[name])})
    assert verdict.defective == {name}, verdict


def test_rows_without_keys_are_exact() -> None:
    problem = EMPTY_ROWS.make(BF16)
    assert verdict_of(problem, healthy(problem)).ok
    for name, value in (("lse", 0.0), ("lse", torch.nan), ("lse", torch.inf), ("y", 1e-30), ("dq", 1e-30)):
        results = healthy(problem)
        results[name][1, 0, 3] = value
        verdict = verdict_of(problem, results)
        assert verdict.defective == {name}, (name, value, verdict)


def test_unmet_table_entries_are_exact() -> None:
    problem = BY_NAME["bias,longer than s"].make(FP32)
    results = healthy(problem)
    results["dbias"][1, 99] = 1e-30
    assert verdict_of(problem, results).defective == {"dbias"}


def test_wrong_shape_is_a_defect() -> None:
    problem = PLAIN.make(FP32)
    results = healthy(problem)
    verdict = verdict_of(problem, results | {"dk": results["dk"].mT})
    assert verdict.defective == {"dk"}


def test_low_precision_accumulation_is_a_class_of_its_own() -> None:
    """dq summed in bf16 over tiles of 16 keys: no defect by yardstick A, yet worse than the algorithm has to be."""
    problem = Case("accumulate", b=1, sq=256, sk=256, d=32).make(BF16)
    call = problem.call
    trace = oracle(call, problem.dy, keep=["dx"])
    dq = torch.zeros_like(call.q)
    for j in range(0, 256, 16):
        dx = trace.dx[..., j : j + 16].to(BF16).float()
        dq += (call.scale * dx @ call.k[:, :, j : j + 16].float()).to(BF16)
    verdict = verdict_of(problem, healthy(problem) | {"dq": dq})
    assert not verdict.defects, verdict
    assert verdict.coarse == {"dq"}, verdict


def test_verdict_reads_as_a_table() -> None:
    problem = PLAIN.make(BF16)
    text = str(verdict_of(problem, scaled("dk", 2.0)(problem)))
    assert text.startswith("dk: rho_A ")
    assert "gain 2.00" in text
    assert isinstance(eager(problem.call), Trace)


def test_yardsticks_are_kept_by_value() -> None:
    """The same problem is measured once; another value, or the same tensor changed, is another problem. Strides may be 0."""
    one = torch.zeros(1, 1, 1, 1).expand(1, 1, 1, 1).as_strided((1, 1, 1, 1), (0, 0, 0, 0))
    call = Call(AttentionSpec(), one, one, one)
    first = measure(call, one)
    assert measure(Call(AttentionSpec(), one.clone(), one.clone(), one.clone()), one) is first
    other = torch.ones(1, 1, 1, 1)
    changed = Call(AttentionSpec(), one, one, other)
    second = measure(changed, one)
    assert second is not first
    other.fill_(2.0)
    assert measure(changed, one) is not second
    assert float(second.call.v) == 1.0
