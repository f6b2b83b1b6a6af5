"""The sharded call in one process: ranks as threads, every variant against the oracle on the whole sequence."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor

import backlight
from backlight import registry
from backlight.backends.tiled import TiledBackend
from backlight.distributed import ring, simulated_attention
from backlight.doctor import assert_healthy, diagnose
from backlight.spec import AttentionSpec
from cases import BF16, BY_NAME, CASES, FP32, FP64, PAIR_BIAS, SINGLES, TOGETHER, Case, Problem, case_id, small
from gate import judge
from running import canonical, leaves, options, packed, run

MASKED = [
    BY_NAME[name]
    for name in ("mask,everything,sq<sk", "mask,everything,batched,sq>sk", "mask,pos,varlen,tau", "mask,pos,causal")
]
# a ring refuses a pair bias
EVERY = [(case, dtype) for case in CASES for dtype in (FP32, BF16) if case.pair_bias is None]


def run_simulated(problem: Problem, **how: object) -> dict[str, Tensor]:
    """y, lse and every gradient of the whole problem, canonical layout."""
    call = problem.call
    inputs = leaves(call)
    keywords = options(call) | {"return_lse": True} | how
    if call.varlen:
        keywords |= {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k}
    y, lse = simulated_attention(**inputs, **keywords)
    outputs, incoming = [y], [packed(problem.dy) if call.varlen else problem.dy]
    if problem.dlse is not None:
        outputs.append(lse)
        incoming.append(problem.dlse[0] if call.varlen else problem.dlse)
    grads = torch.autograd.grad(outputs, list(inputs.values()), incoming)
    result = {"y": y.detach(), "lse": lse.detach()} | {f"d{name}": grad for name, grad in zip(inputs, grads, strict=True)}
    return canonical(call, result)


def examine(case: Case, dtype: torch.dtype, **how: object) -> None:
    problem = case.make(dtype)
    verdict = judge(problem.call, problem.dy, problem.dlse, run_simulated(problem, **how))
    assert verdict.ok, f"{case.name}, {how}\n{verdict}"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER, *MASKED], ids=case_id)
def test_ring(case: Case, world: int) -> None:
    examine(case, FP32, world=world, layout="zigzag" if world == 2 else "contiguous", strategy="ring")


@pytest.mark.parametrize("case", TOGETHER, ids=case_id)
@pytest.mark.parametrize("dtype", [BF16, FP64], ids=case_id)
def test_ring_in_other_dtypes(case: Case, dtype: torch.dtype) -> None:
    examine(case, dtype, world=3, strategy="ring")


@pytest.mark.parametrize("case", [*SINGLES[:3], *TOGETHER, *MASKED], ids=case_id)
def test_all_to_all(case: Case) -> None:
    examine(case, FP32, world=2, strategy="all_to_all")


@pytest.mark.slow
@pytest.mark.parametrize(("world", "layout"), [(2, "contiguous"), (3, "zigzag"), (4, "zigzag")])
@pytest.mark.parametrize(("case", "dtype"), EVERY, ids=case_id)
def test_every_case(case: Case, dtype: torch.dtype, world: int, layout: str) -> None:
    examine(case, dtype, world=world, layout=layout, strategy="ring")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case.b == 4 else pytest.mark.slow) for case in PAIR_BIAS], ids=case_id
)
def test_a_pair_bias_of_all_to_all(case: Case) -> None:
    with pytest.raises(ValueError, match="pair_bias must be None where packed") if case.varlen else nullcontext():
        examine(case, FP32, world=2, strategy="all_to_all")


@pytest.mark.gpu
@pytest.mark.parametrize("backend", registry.names())
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER], ids=case_id)
def test_ring_on_cuda(case: Case, world: int, backend: str) -> None:
    host, there = case.make(BF16), case.make(BF16, device="cuda")
    try:
        result = run_simulated(there, world=world, strategy="ring", backend=backend)
    except backlight.Unsupported as refusal:
        pytest.skip(str(refusal))
    verdict = judge(host.call, host.dy, host.dlse, {name: value.cpu() for name, value in result.items()})
    assert verdict.ok, f"{case.name}\n{verdict}"


def test_all_to_all_is_one_rank_to_the_bit() -> None:
    problem = BY_NAME["everything,batched,sq<sk"].make(BF16)
    whole, sharded = run(problem), run_simulated(problem, world=2, strategy="all_to_all")
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


# --- precision ---------------------------------------------------------------------------------------------------------------


def errors(problem: Problem, result: dict[str, Tensor]) -> dict[str, float]:
    from backlight.reference import oracle

    truth = oracle(problem.call, problem.dy, problem.dlse, keep=list(result))
    finite = {name: torch.isfinite(truth[name]) for name in result}
    return {name: float((x.double() - truth[name])[finite[name]].square().mean().sqrt()) for name, x in result.items()}


@pytest.mark.parametrize("name", ["causal,s=200", "everything,s=200", "everything,batched,sq>sk", "large logits"])
def test_no_less_precise_than_one_rank(name: str) -> None:
    """bf16, four ranks: partial results are merged before they are rounded."""
    problem = BY_NAME[name].make(BF16)
    one, four = errors(problem, run(problem)), errors(problem, run_simulated(problem, world=4, strategy="ring"))
    wrong = {quantity: (four[quantity], one[quantity]) for quantity in one if not four[quantity] <= 1.2 * one[quantity]}
    assert not wrong, wrong


def test_rounded_parts_would_be_less_precise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: a backend that rounds what is still to be summed fails it."""
    honest = TiledBackend.forward

    def rounded(self, call, save_u):
        y, *others = honest(self, call, save_u)
        return y.to(call.q.dtype), *others

    monkeypatch.setattr(TiledBackend, "forward", rounded)
    problem = BY_NAME["causal,s=200"].make(BF16)
    one, four = errors(problem, run(problem)), errors(problem, run_simulated(problem, world=4, strategy="ring"))
    assert four["y"] > 1.2 * one["y"]


def test_gradcheck() -> None:
    problem = small(BY_NAME["everything,batched,sq<sk"]).make(FP64)
    inputs = leaves(problem.call)
    names, keywords = list(inputs), options(problem.call)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(names, tensors, strict=True))
        return simulated_attention(**named, **keywords, world=2, strategy="ring", return_lse=True)

    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)


# --- behaviour ---------------------------------------------------------------------------------------------------------------


def test_repeats_bitwise() -> None:
    problem = BY_NAME["everything,batched,sq<sk"].make(BF16)
    first, second = (run_simulated(problem, world=4, strategy="ring") for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_expanded_dy() -> None:
    """`y.sum().backward()` hands a gradient whose strides are all 0."""
    q = torch.randn(1, 2, 20, 8, requires_grad=True)
    (wanted,) = torch.autograd.grad(backlight.attention(q, q, q, causal=True).sum(), q)
    (found,) = torch.autograd.grad(simulated_attention(q, q, q, causal=True, world=2, strategy="ring").sum(), q)
    torch.testing.assert_close(found, wanted)


def test_a_backend_without_parts_is_not_given_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would round them and, with tau, keep other keys than the whole row's (math.md section 9): a wrong result."""
    monkeypatch.setattr(TiledBackend, "takes", TiledBackend.takes - {"part"})
    q, tau = torch.randn(1, 2, 20, 8), torch.full((2,), -0.5)
    no_parts = ("does not take parts of a larger problem",)
    with pytest.raises(backlight.Unsupported) as refusal:
        simulated_attention(q, q, q, world=2, strategy="ring")
    assert refusal.value.reasons["tiled"] == no_parts
    with pytest.raises(backlight.Unsupported) as refusal:
        simulated_attention(q, q, q, tau=tau, world=2, strategy="ring", backend="tiled")
    assert refusal.value.reasons == {"tiled": no_parts}
    # heads are traded instead: no row is cut
    assert simulated_attention(q, q, q, tau=tau, world=2, strategy="all_to_all", backend="tiled").shape == q.shape


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_the_doctor_is_content(strategy: str) -> None:
    subject = partial(simulated_attention, world=2, strategy=strategy, return_lse=True)
    for spec in (
        AttentionSpec(causal=True),
        AttentionSpec(causal=True, window=(70, None), softcap=20.0, bias=True, sink=True, tau=True, gate=True),
    ):
        assert_healthy(subject, spec, shape=(1, 4, 136, 16), kv_heads=2)


def test_the_doctor_sees_a_wrong_merge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts averaged instead of weighed by their lse."""

    def averaged(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
        o.add_(o_part).div_(2)
        lse.copy_(torch.logaddexp(lse, lse_part.double()))

    monkeypatch.setattr(ring, "merge_", averaged)
    subject = partial(simulated_attention, world=2, strategy="ring", return_lse=True)
    report = diagnose(subject, AttentionSpec(causal=True), shape=(1, 2, 136, 16))
    assert report.verdict == "defect", report.verdict
