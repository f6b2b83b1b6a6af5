"""The call inside PyTorch: derivatives of record, partial gradients, autocast, grad modes, repeats, threads."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.autograd.gradcheck import gradcheck
from torch.utils.checkpoint import checkpoint

import backlight
from backlight.spec import LEARNED
from cases import BF16, BY_NAME, FP16, FP32, FP64, SINGLES, TAU, TOGETHER, Case, case_id, compose, small
from gate import judge
from running import forward, leaves, run

EVERYTHING = BY_NAME["everything,batched,sq<sk"]


def finite(lse: Tensor) -> Tensor:
    """Rows without keys have lse = -inf, which finite differences cannot subtract."""
    return lse.masked_fill(lse == -torch.inf, 0)


# --- derivatives ----------------------------------------------------------------


@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER, BY_NAME["rows without keys,everything"]], ids=case_id)
def test_gradcheck(case: Case) -> None:
    """The public call itself in float64, y and lse, every tensor argument, against finite differences."""
    call = small(case).make(FP64, margin=1e-3).call
    inputs = leaves(call)

    def outputs(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        y, lse = forward(call, dict(zip(inputs, tensors, strict=True)))
        return y, finite(lse)

    assert gradcheck(outputs, tuple(inputs.values()), fast_mode=case not in SINGLES)


def test_gradcheck_positive_and_negative_tau() -> None:
    for case in TAU[:2]:
        call = small(case).make(FP64, margin=1e-3).call
        q, k, v, tau = (x.clone().requires_grad_() for x in (call.q, call.k, call.v, call.tau))
        assert gradcheck(lambda q, k, v, tau: backlight.attention(q, k, v, causal=True, tau=tau), (q, k, v, tau))


def everything_with(name: str) -> Case:
    """A pair bias goes neither with tau nor with packed sequences, entmax not with tau."""
    others = {"pair_bias": BY_NAME["pair,everything,sq<sk"], "entmax": BY_NAME["entmax,everything,batched"]}
    return others.get(name, EVERYTHING)


@pytest.mark.parametrize("wanted", LEARNED)
def test_gradient_of_one_argument_alone(wanted: str) -> None:
    """Only this tensor requires a gradient: it gets the same one, the others get none."""
    problem = everything_with(wanted).make(FP32)
    full = run(problem)
    inputs = leaves(problem.call, requires_grad=False)
    inputs[wanted].requires_grad_()
    y, lse = forward(problem.call, inputs)
    torch.autograd.backward([y, lse], [problem.dy, problem.dlse])
    assert torch.equal(inputs[wanted].grad, full[f"d{wanted}"])
    assert [name for name, x in inputs.items() if x.grad is not None] == [wanted]


@pytest.mark.parametrize("frozen", LEARNED)
def test_gradient_of_all_but_one(frozen: str) -> None:
    problem = everything_with(frozen).make(FP32)
    full = run(problem)
    inputs = leaves(problem.call)
    inputs[frozen].requires_grad_(False)
    y, lse = forward(problem.call, inputs)
    torch.autograd.backward([y, lse], [problem.dy, problem.dlse])
    for name, x in inputs.items():
        if name == frozen:
            assert x.grad is None
        else:
            assert torch.equal(x.grad, full[f"d{name}"]), name


@pytest.mark.parametrize("name", ["everything,batched,sq<sk", "everything,sq>sk", "causal"])
def test_gradient_through_lse_alone(name: str) -> None:
    """y is not used at all: its gradient never arrives."""
    problem = compose(*name.split("+"), dlse=True).make(FP32) if name == "causal" else BY_NAME[name].make(FP32)
    inputs = leaves(problem.call)
    lse = forward(problem.call, inputs)[1]
    dlse = problem.dlse[0] if problem.call.varlen else problem.dlse
    grads = torch.autograd.grad(lse, list(inputs.values()), dlse)
    got = dict(zip((f"d{name}" for name in inputs), grads, strict=True))
    zero = torch.zeros_like(problem.dy)
    reference = run(type(problem)(problem.case, problem.call, zero, problem.dlse))
    for key, value in got.items():
        if problem.call.varlen and value.dim() == 3:
            value = value.transpose(0, 1)[None]
        torch.testing.assert_close(value, reference[key])
        if key in ("dv", "dtau", "dgate"):
            assert not value.any(), key


def test_unused_lse_costs_no_gradient() -> None:
    problem = EVERYTHING.make(FP32)
    inputs = leaves(problem.call)
    y = forward(problem.call, inputs, return_lse=False)
    assert isinstance(y, Tensor)
    grads = torch.autograd.grad(y, list(inputs.values()), problem.dy)
    without = run(type(problem)(problem.case, problem.call, problem.dy, None))
    for name, grad in zip(inputs, grads, strict=True):
        assert torch.equal(grad, without[f"d{name}"]), name


def test_zero_gradient_gives_exact_zeros() -> None:
    problem = EVERYTHING.make(FP32)
    silent = type(problem)(problem.case, problem.call, torch.zeros_like(problem.dy), torch.zeros_like(problem.dlse))
    result = run(silent)
    for name in problem.call.gradients:
        assert not result[name].any(), name


def test_third_derivative_says_no() -> None:
    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    y = backlight.attention(q, q, q, causal=True)
    (grad,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no third derivative"):
        second.sum().backward()


def test_retained_graph_gives_the_same_twice() -> None:
    problem = EVERYTHING.make(FP32)
    inputs = leaves(problem.call)
    y, _ = forward(problem.call, inputs)
    first = torch.autograd.grad(y, list(inputs.values()), problem.dy, retain_graph=True)
    second = torch.autograd.grad(y, list(inputs.values()), problem.dy)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, list(inputs.values()), problem.dy)


def test_changed_input_is_noticed() -> None:
    """A saved tensor overwritten before backward is an error, not a wrong gradient."""
    q = torch.randn(1, 1, 4, 4, requires_grad=True)
    k, v = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4)
    y = backlight.attention(q, k, v)
    k.zero_()
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


def test_gradients_accumulate_in_leaves() -> None:
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    backlight.attention(q, q, q).sum().backward()
    once = q.grad.clone()
    backlight.attention(q, q, q).sum().backward()
    assert torch.equal(q.grad, 2 * once)


def test_checkpointing() -> None:
    problem = EVERYTHING.make(FP32)
    inputs = leaves(problem.call)
    names = list(inputs)

    def attend(*tensors: Tensor) -> Tensor:
        return forward(problem.call, dict(zip(names, tensors, strict=True)))[0]

    y = checkpoint(attend, *inputs.values(), use_reentrant=False)
    grads = torch.autograd.grad(y, list(inputs.values()), problem.dy)
    plain = run(type(problem)(problem.case, problem.call, problem.dy, None))
    assert all(torch.equal(grad, plain[f"d{name}"]) for name, grad in zip(names, grads, strict=True))


def test_parameters_in_the_dtype_of_q() -> None:
    """bias, sink and tau may be bf16 too; their gradients come back in bf16 and pass the gate."""
    case = compose("causal", "bias", "sink", "tau", "gqa", tau=(-0.5, 0.5, -1.5, 0.25))
    problem = case.make(BF16)
    call = problem.call
    half = {name: getattr(call, name).to(BF16) for name in ("bias", "sink", "tau")}
    call = type(call)(call.spec, call.q, call.k, call.v, **half)
    result = run(type(problem)(case, call, problem.dy, None))
    for name in ("dbias", "dsink", "dtau"):
        assert result[name].dtype == BF16
    verdict = judge(call, problem.dy, None, result)
    assert not verdict.defects, verdict


# --- modes ----------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode) -> None:
    problem = EVERYTHING.make(FP32)
    inputs = leaves(problem.call)
    expected_y, expected_lse = forward(problem.call, inputs)
    with mode():
        y, lse = forward(problem.call, inputs)
    assert not y.requires_grad
    assert not lse.requires_grad
    assert y.grad_fn is None
    assert torch.equal(y, expected_y)
    assert torch.equal(lse, expected_lse)


def test_inference_tensors_as_inputs() -> None:
    with torch.inference_mode():
        q = torch.randn(1, 2, 5, 4)
        y = backlight.attention(q, q, q, causal=True)
    assert torch.equal(y, backlight.attention(q.clone(), q.clone(), q.clone(), causal=True))


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=case_id)
def test_autocast(dtype: torch.dtype) -> None:
    """fp32 inputs run in the autocast dtype; gradients come back in fp32, learned terms stay fp32 throughout."""
    problem = compose("causal", "bias", "sink", "tau", "gate").make(dtype)
    inputs = {name: x.detach().float().requires_grad_() for name, x in leaves(problem.call).items()}
    with torch.autocast("cpu", dtype):
        y, lse = forward(problem.call, inputs)
    assert y.dtype == dtype
    assert lse.dtype == FP32
    grads = torch.autograd.grad(y, list(inputs.values()), problem.dy)
    assert all(grad.dtype == FP32 for grad in grads)
    low = run(problem)
    assert torch.equal(y, low["y"])
    for name, grad in zip(inputs, grads, strict=True):
        assert torch.equal(grad, low[f"d{name}"].float()), name


def test_autocast_leaves_float64_alone() -> None:
    q = torch.randn(1, 1, 4, 4, dtype=FP64)
    with torch.autocast("cpu", BF16):
        assert backlight.attention(q, q, q).dtype == FP64


def test_autocast_switched_off_inside() -> None:
    q = torch.randn(1, 1, 4, 4)
    with torch.autocast("cpu", BF16), torch.autocast("cpu", enabled=False):
        assert backlight.attention(q, q, q).dtype == FP32


# --- repeats ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
def test_deterministic_repeats_bitwise(dtype: torch.dtype) -> None:
    problem = EVERYTHING.make(dtype)
    first = run(problem, deterministic=True)
    for _ in range(10):
        again = run(problem, deterministic=True)
        assert all(torch.equal(again[name], value) for name, value in first.items())


def test_global_deterministic_mode_with_poisoned_allocations() -> None:
    """PyTorch's own deterministic mode: refuses nondeterministic kernels, and fills C++ allocations with NaN as well."""
    problem = EVERYTHING.make(FP32)
    expected = run(problem, deterministic=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        result = run(problem, deterministic=None)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(result[name], value) for name, value in expected.items())


def test_two_calls_in_either_order() -> None:
    """No state survives a call: a large one before or after leaves a small one as it is."""
    small_problem, large_problem = EVERYTHING.make(FP32), BY_NAME["everything,s=200"].make(FP32)
    alone = run(small_problem)
    run(large_problem)
    after = run(small_problem)
    assert all(torch.equal(after[name], value) for name, value in alone.items())


def test_threads_do_not_meet() -> None:
    problems = [EVERYTHING.make(FP32, seed) for seed in range(4)]
    expected = [run(problem) for problem in problems]
    got: dict[int, dict[str, Tensor]] = {}

    def work(index: int) -> None:
        for _ in range(3):
            got[index] = run(problems[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, result in got.items():
        assert all(torch.equal(result[name], value) for name, value in expected[index].items()), index
    assert len(got) == 4


# --- what is hidden has no influence ----------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [compose("causal", "sq<sk"), compose("window", "sq<sk", window=(5, 2)), compose("causal", "tau")], ids=case_id
)
def test_hidden_keys_do_not_leak(case: Case) -> None:
    """Keys and values that a row cannot see may hold anything finite: its outputs stay bitwise the same."""
    problem = case.make(FP32)
    call = problem.call
    sq, sk = call.q.shape[2], call.k.shape[2]
    row = sq // 2
    hidden = ~call.spec.allowed(sq, sk)[row]
    assert bool(hidden.any())
    loud_k, loud_v = call.k.clone(), call.v.clone()
    loud_k[:, :, hidden] = 1e3
    loud_v[:, :, hidden] = -1e4
    loud = type(call)(call.spec, call.q, loud_k, loud_v, tau=call.tau)
    quiet_y, quiet_lse = forward(call, leaves(call))
    loud_y, loud_lse = forward(loud, leaves(loud))
    assert torch.equal(quiet_y[:, :, row], loud_y[:, :, row])
    assert torch.equal(quiet_lse[:, :, row], loud_lse[:, :, row])


def test_neighbours_in_a_pack_do_not_leak() -> None:
    problem = compose("causal", "varlen").make(FP32)
    call = problem.call
    before = run(problem)
    first, last = call.segments()[0], call.segments()[-1]
    loud = [x.clone() for x in (call.q, call.k, call.v)]
    for x in loud:
        x[:, :, last.q0 : last.q1] = 1e3
    changed = type(call)(call.spec, *loud, cu_seqlens_q=call.cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k)
    after = run(type(problem)(problem.case, changed, problem.dy, None))
    for name in ("y", "lse", "dq", "dk", "dv"):
        assert torch.equal(before[name][:, :, first.q0 : last.q0], after[name][:, :, first.q0 : last.q0]), name
