"""Any strides, same numbers: layouts of the incoming gradient, of q, k, v, and of the gradients that come back.

The story behind the first half: a kernel addressed dO with q's head stride. `out.sum().backward()` hands over a dO expanded
from one element, so head 0 read the right value and every other head read past it; contiguous tests saw nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from backlight import registry
from backlight.spec import SEQUENCE_OF
from cases import BF16, BY_NAME, FP32, Problem, case_id
from gate import judge
from running import forward, leaves, packed, run

SENTINEL = 1e4
CASES = [BY_NAME[name] for name in ("causal", "causal+gqa", "everything,batched,sq<sk", "everything,sq>sk")]

cases = pytest.mark.parametrize("case", CASES, ids=case_id)
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
backends = pytest.mark.parametrize("backend", registry.names())


def supported(backend: str, problem: Problem) -> None:
    reasons = registry.why_not(registry.get(backend), problem.call)
    if reasons:
        pytest.skip("; ".join(reasons))


# --- views with the same values ----------------------------------------------------------------


def swapped(x: Tensor) -> Tensor:
    """Stored with the second and third dimension from the left exchanged: [B,S,H,D] seen as [B,H,S,D]."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def columns(x: Tensor) -> Tensor:
    """Stored with the last two dimensions exchanged: the last dimension is not contiguous."""
    return x.mT.contiguous().mT


def inside(x: Tensor) -> Tensor:
    """A window into a larger buffer of sentinels: offset, gaps between rows, heads and batches."""
    buffer = x.new_full([size + 3 for size in x.shape], SENTINEL)
    view = buffer[tuple(slice(2, 2 + size) for size in x.shape)]
    view.copy_(x)
    return view


def every_other(x: Tensor) -> Tensor:
    """Stride 2 in the last dimension."""
    buffer = x.new_full([*x.shape[:-1], 2 * x.shape[-1]], SENTINEL)
    buffer[..., ::2] = x
    return buffer[..., ::2]


def batch_innermost(x: Tensor) -> Tensor:
    return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2) if x.dim() == 4 else swapped(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": swapped,
    "column-major": columns,
    "sliced": inside,
    "strided": every_other,
    "batch innermost": batch_innermost,
}


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor], exactly: bool) -> None:
    for name, value in expected.items():
        if exactly:
            assert torch.equal(got[name], value), name
        else:
            # another stride may pick another matmul kernel: the last bits of fp32 arithmetic, then one rounding
            size = torch.finfo(value.dtype).eps * float(value[torch.isfinite(value)].abs().max())
            torch.testing.assert_close(got[name], value, rtol=0, atol=4 * size, msg=lambda text, name=name: f"{name}: {text}")


# --- the incoming gradient ----------------------------------------------------------------


@backends
@dtypes
@cases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_do(backend: str, case, dtype: torch.dtype, layout: str) -> None:
    problem = case.make(dtype)
    supported(backend, problem)
    dy = packed(problem.dy) if case.varlen else problem.dy
    view = LAYOUTS[layout](dy)
    assert torch.equal(view, dy)
    assert view.stride() != dy.contiguous().stride()
    # a transposed operand is another matmul; every other layout leaves the arithmetic as it is
    assert_same(run(problem, backend, dy=view), run(problem, backend), exactly=layout != "column-major")


@backends
@dtypes
@cases
@pytest.mark.parametrize("axes", [(0, 1, 2, -1), (1,), (0, -2), (-1,)], ids=["sum", "heads", "batch and rows", "columns"])
def test_expanded_do(backend: str, case, dtype: torch.dtype, axes: tuple[int, ...]) -> None:
    """Stride 0 on some dimensions, in a buffer whose other values are a finite sentinel."""
    problem = case.make(dtype)
    supported(backend, problem)
    dy = packed(problem.dy) if case.varlen else problem.dy
    kept = dy
    for axis in axes:
        kept = kept.narrow(axis, 0, 1)
    expanded = inside(kept).expand(dy.shape)
    assert 0 in expanded.stride()
    assert_same(run(problem, backend, dy=expanded), run(problem, backend, dy=expanded.contiguous()), exactly=True)


@backends
@cases
def test_sum_backward_reaches_every_head(backend: str, case) -> None:
    """`out.sum().backward()` itself, judged by the oracle."""
    problem = case.make(FP32)
    supported(backend, problem)
    inputs = leaves(problem.call)
    y, _lse = forward(problem.call, inputs, backend)
    y.sum().backward()
    ones = torch.ones_like(problem.dy)
    got = run(Problem(problem.case, problem.call, ones, None), backend)
    for name, leaf in inputs.items():
        grad = got[f"d{name}"]
        expected = packed(grad) if case.varlen and name in SEQUENCE_OF else grad
        assert torch.equal(leaf.grad, expected), name
    verdict = judge(problem.call, ones, None, got)
    assert verdict.ok, verdict


@backends
@cases
def test_expanded_dlse(backend: str, case) -> None:
    """`lse.sum()` expands the other gradient."""
    problem = case.make(FP32)
    supported(backend, problem)
    inputs = leaves(problem.call)
    lse = forward(problem.call, inputs, backend)[1]
    expanded = torch.autograd.grad(lse.sum(), list(inputs.values()))
    lse = forward(problem.call, inputs, backend)[1]
    dense = torch.autograd.grad(lse, list(inputs.values()), torch.ones_like(lse))
    assert any(bool(grad.any()) for grad in dense)
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


# --- inputs ----------------------------------------------------------------


def laid_out(problem: Problem, layout: Callable[[Tensor], Tensor], names: tuple[str, ...]) -> dict[str, Tensor]:
    inputs = leaves(problem.call, requires_grad=False)
    return {name: (layout(x) if name in names else x).requires_grad_() for name, x in inputs.items()}


@backends
@dtypes
@cases
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_inputs(backend: str, case, dtype: torch.dtype, layout: str) -> None:
    problem = case.make(dtype)
    supported(backend, problem)
    inputs = laid_out(problem, LAYOUTS[layout], ("q", "k", "v", "gate"))
    assert not inputs["q"].is_contiguous()
    assert_same(run(problem, backend, inputs=inputs), run(problem, backend), exactly=False)


@backends
@cases
@pytest.mark.parametrize("layout", ["sliced", "strided"])
def test_layout_of_parameters(backend: str, case, layout: str) -> None:
    problem = case.make(FP32)
    supported(backend, problem)
    inputs = laid_out(problem, LAYOUTS[layout], ("bias", "sink", "tau"))
    assert_same(run(problem, backend, inputs=inputs), run(problem, backend), exactly=True)


@backends
@dtypes
def test_fused_qkv_views(backend: str, dtype: torch.dtype) -> None:
    """q, k, v as three views of one [B, S, 3, H, D] tensor; its gradient is one tensor too."""
    problem = BY_NAME["causal"].make(dtype)
    supported(backend, problem)
    call = problem.call
    fused = torch.stack([x.transpose(1, 2) for x in (call.q, call.k, call.v)], dim=2).requires_grad_()
    q, k, v = (x.transpose(1, 2) for x in fused.unbind(2))
    y, _ = forward(call, {"q": q, "k": k, "v": v}, backend)
    (grad,) = torch.autograd.grad(y, fused, problem.dy)
    dq, dk, dv = (x.transpose(1, 2) for x in grad.unbind(2))
    assert_same({"y": y.detach(), "dq": dq, "dk": dk, "dv": dv}, without_lse(run(problem, backend)), exactly=False)


@backends
@dtypes
def test_one_tensor_as_q_k_and_v(backend: str, dtype: torch.dtype) -> None:
    problem = BY_NAME["causal"].make(dtype)
    supported(backend, problem)
    x = problem.call.q.clone().requires_grad_()
    y, _ = forward(problem.call, {"q": x, "k": x, "v": x}, backend)
    (got,) = torch.autograd.grad(y, x, problem.dy)
    apart = run(problem, backend, inputs={name: problem.call.q.clone().requires_grad_() for name in "qkv"})
    assert_same({"dx": got}, {"dx": apart["dq"] + apart["dk"] + apart["dv"]}, exactly=False)


@backends
@dtypes
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["batch", "heads", "keys"])
def test_expanded_keys_and_values(backend: str, dtype: torch.dtype, axis: int) -> None:
    """One key or value tensor shared by stride 0; the gradient of the small tensor is the sum autograd makes of it."""
    problem = BY_NAME["causal"].make(dtype)
    supported(backend, problem)
    call = problem.call
    shared = {name: getattr(call, name).narrow(axis, 0, 1).clone() for name in ("k", "v")}
    views = {name: x.expand_as(getattr(call, name)).requires_grad_() for name, x in shared.items()}
    dense = {name: x.detach().contiguous().requires_grad_() for name, x in views.items()}
    q = call.q.clone().requires_grad_()
    got = run(problem, backend, inputs={"q": q, **views})
    expected = run(problem, backend, inputs={"q": q, **dense})
    assert_same(got, expected, exactly=False)


def without_lse(result: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in result.items() if name != "lse"}


# --- what comes back ----------------------------------------------------------------


def dimension_order(x: Tensor) -> list[int]:
    """Dimensions from the slowest to the fastest, those of size 1 left out."""
    return sorted((axis for axis in range(x.dim()) if x.shape[axis] > 1), key=lambda axis: -x.stride(axis))


@backends
@dtypes
@cases
@pytest.mark.parametrize("layout", [None, "transposed", "column-major", "batch innermost"])
def test_gradients_look_like_their_inputs(backend: str, case, dtype: torch.dtype, layout: str | None) -> None:
    problem = case.make(dtype)
    supported(backend, problem)
    inputs = laid_out(problem, LAYOUTS[layout] if layout else torch.Tensor.contiguous, ("q", "k", "v", "gate"))
    y, lse = forward(problem.call, inputs, backend)
    grads = torch.autograd.grad(y, list(inputs.values()), torch.ones_like(y))
    for (name, x), grad in zip(inputs.items(), grads, strict=True):
        assert grad.dtype == x.dtype, name
        assert grad.shape == x.shape, name
        assert dimension_order(grad) == dimension_order(x), name
    assert y.dtype == dtype
    assert lse.dtype == FP32


@backends
def test_inputs_are_left_alone(backend: str) -> None:
    problem = BY_NAME["everything,batched,sq<sk"].make(BF16)
    supported(backend, problem)
    inputs = leaves(problem.call)
    before = {name: x.detach().clone() for name, x in inputs.items()}
    dy = problem.dy.clone()
    run(problem, backend, inputs=inputs, dy=dy)
    assert torch.equal(dy, problem.dy)
    for name, x in inputs.items():
        assert torch.equal(x.detach(), before[name]), name
