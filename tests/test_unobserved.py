"""Calls that nobody looks at skip the operators: same numbers, and whoever looks still sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import backlight
from backlight import api, direct, operators, registry, running
from backlight.call import Call
from backlight.spec import GRADIENTS
from cases import BY_NAME, FP32, SINGLES, TOGETHER, Case, case_id
from running import leaves, run

NAMES = ("backlight::attention", "backlight::attention_backward")


class Seen(TorchDispatchMode):
    """Operators of ours that went by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "backlight":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Wrapped(Tensor):
    pass


def qkv(**options: Any) -> list[Tensor]:
    return [torch.randn(1, 2, 8, 8, requires_grad=True, **options) for _ in range(3)]


@pytest.fixture
def crossings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that reached a backend below the dispatcher: only its kernels unpack operator arguments."""
    found: list[str] = []
    honest = operators.unpack
    monkeypatch.setattr(operators, "unpack", lambda args: (found.append("operator"), honest(args))[1])
    return found


@pytest.mark.parametrize("case", [*SINGLES, *TOGETHER], ids=case_id)
def test_the_same_numbers(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = case.make(FP32)
    unobserved = run(problem)
    monkeypatch.setattr(direct, "unobserved", lambda tensors: False)
    through_operators = run(problem)
    assert unobserved.keys() == through_operators.keys()
    for name, value in through_operators.items():
        assert torch.equal(unobserved[name], value), name


def test_no_operator_is_crossed(crossings: list[str]) -> None:
    q, k, v = qkv()
    y = backlight.attention(q, k, v, causal=True)
    torch.autograd.grad(y.sum(), (q, k, v))
    with torch.no_grad():
        backlight.attention(q, k, v)
    assert crossings == []


def test_a_mode_sees_both_directions() -> None:
    with Seen() as seen:
        q, k, v = qkv()
        torch.autograd.grad(backlight.attention(q, k, v).sum(), (q, k, v))
    assert seen.names == list(NAMES)


def test_a_mode_around_the_backward_alone_sees_it() -> None:
    q, k, v = qkv()
    y = backlight.attention(q, k, v, return_lse=True)
    plain = torch.autograd.grad([x.sum() for x in y], (q, k, v), retain_graph=True)
    with Seen() as seen:
        observed = torch.autograd.grad([x.sum() for x in y], (q, k, v))
    assert seen.names == [NAMES[1]]
    assert all(map(torch.equal, plain, observed))


def test_the_backward_of_a_mode_without_some_gradients() -> None:
    q, k, v = qkv()
    y = backlight.attention(q.detach(), k, v.detach())
    with Seen():
        (dk,) = torch.autograd.grad(y.sum(), k)
    assert torch.equal(dk, torch.autograd.grad(backlight.attention(q.detach(), k, v.detach()).sum(), k)[0])


class Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "looking",
    [
        pytest.param(lambda: torch.profiler.profile(), id="profiler"),
        pytest.param(lambda: Nothing(), id="function mode"),
        pytest.param(lambda: Seen(), id="dispatch mode"),
    ],
)
def test_whoever_looks_gets_the_operator(looking: Callable[[], Any], crossings: list[str]) -> None:
    q, k, v = qkv()
    with looking():
        backlight.attention(q, k, v)
    assert crossings == ["operator"]


def test_a_profile_shows_the_operators() -> None:
    q, k, v = qkv()
    with torch.profiler.profile() as profile:
        torch.autograd.grad(backlight.attention(q, k, v).sum(), (q, k, v))
    assert set(NAMES) <= {event.key for event in profile.key_averages()}


def test_subclasses_get_the_operator(crossings: list[str]) -> None:
    q, k, v = (x.detach().as_subclass(Wrapped) for x in qkv())
    assert type(backlight.attention(q, k, v)) is Wrapped
    assert crossings == ["operator"]


def test_parameters_are_plain(crossings: list[str]) -> None:
    q, k, v = (torch.nn.Parameter(x.detach()) for x in qkv())
    backlight.attention(q, k, v).sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
    assert crossings == []


def test_transforms_and_what_they_leave_behind(crossings: list[str]) -> None:
    """A tensor that outlives its transform is a dead wrapper around the one that kernels can read."""
    q, k, v = (x.detach() for x in qkv())
    kept = []

    def loss(q: Tensor) -> Tensor:
        kept.append(q)
        return backlight.attention(q, k, v).sum()

    torch.func.grad(loss)(q)
    assert "operator" in crossings
    assert torch.equal(backlight.attention(kept[0], k, v), backlight.attention(q, k, v))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients() -> None:
    """`is_grads_batched` puts an axis of its own under gradients of an ordinary type."""
    q, k, v = qkv()
    y, lse = backlight.attention(q, k, v, causal=True, return_lse=True)
    dy, dlse = torch.randn(3, *y.shape), torch.randn(3, *lse.shape)
    batched = torch.autograd.grad((y, lse), (q, k, v), (dy, dlse), is_grads_batched=True, retain_graph=True)
    for n in range(3):
        one = torch.autograd.grad((y, lse), (q, k, v), (dy[n], dlse[n]), retain_graph=True)
        for found, wanted in zip(batched, one, strict=True):
            torch.testing.assert_close(found[n], wanted)


def test_tracing() -> None:
    q, k, v = (x.detach() for x in qkv())
    traced = torch.jit.trace(lambda q: backlight.attention(q, k, v, causal=True), q)
    assert "backlight::attention" in str(traced.graph)
    other = torch.randn_like(q)
    assert torch.equal(traced(other), backlight.attention(other, k, v, causal=True))


def test_meta_tensors_have_shapes() -> None:
    q, k, v = qkv(device="meta")
    y, lse = backlight.attention(q, k, v, return_lse=True)
    assert (y.shape, lse.shape) == (q.shape, q.shape[:3])
    assert y.device.type == "meta"


def test_saved_tensors_go_through_hooks() -> None:
    """What a hook gives back is what the backward reads."""
    problem = BY_NAME["everything,batched,sq<sk"].make(FP32)
    packed: list[Tensor] = []

    def pack(x: Tensor) -> tuple[Tensor]:
        packed.append(x)
        return (x.clone(),)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box[0]):
        hooked = run(problem)
    assert len(packed) >= len(leaves(problem.call)) + 2
    plain = run(problem)
    for name, value in plain.items():
        assert torch.equal(hooked[name], value), name


def test_changed_inputs_are_noticed() -> None:
    q, k, v = qkv()
    y = backlight.attention(q, k, v)
    with torch.no_grad():
        k.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("through_operators", [False, True])
def test_second_derivatives_are_the_same(through_operators: bool) -> None:
    q, k, v = qkv()
    with Seen() if through_operators else nullcontext():
        (dq,) = torch.autograd.grad(backlight.attention(q, k, v).square().sum(), q, create_graph=True)
    found = torch.autograd.grad(dq.sum(), (q, k, v))
    y = (q @ k.mT * 8**-0.5).softmax(-1) @ v
    (dq,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(dq.sum(), (q, k, v)))


# --- GPUs that are not the current one ---------------------------------------------------------------------------------------


def test_kernels_start_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]
    ran: list[tuple[str, int]] = []

    class OnDevice:
        def __init__(self, device: torch.device):
            self.index = device.index

        def __enter__(self) -> None:
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_: object) -> None:
            current[0] = self.before

    class Backend:
        def forward(self, call: Any, save_u: bool) -> Any:
            ran.append(("forward", current[0]))

        def backward(self, *args: Any) -> Any:
            ran.append(("backward", current[0]))

    monkeypatch.setattr(running, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", OnDevice)
    monkeypatch.setattr(registry, "choose", lambda call, name: Backend())
    for index in (0, 1):
        q = SimpleNamespace(is_cuda=True, device=torch.device("cuda", index), get_device=lambda index=index: index)
        call = Call(api.call_of(*qkv()).spec, q, q, q)
        running.forward(call, None, False)
        running.backward(call, None, q, q, None, q, None, (True,) * len(GRADIENTS))
    assert ran == [("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)]
    assert current == [0]


# --- packed ------------------------------------------------------------------------------------------------------------------


def packed(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Tensor]:
    return [torch.randn(8, 2, 8, dtype=dtype, requires_grad=True) for _ in range(3)], torch.tensor([0, 3, 8])


def test_packed_tensors_have_one_node(crossings: list[str]) -> None:
    """The views that make a batch of them, and its results packed again, are not autograd's business."""
    qkv, cu = packed()
    y, lse = backlight.attention_varlen(*qkv, cu, return_lse=True)
    assert y.grad_fn is lse.grad_fn
    assert {type(node).__name__ for node, _ in y.grad_fn.next_functions if node is not None} == {"AccumulateGrad"}
    assert not y._is_view()
    torch.autograd.grad([y.sum(), lse.sum()], qkv)
    assert crossings == []


def test_packed_results_may_be_changed_in_place_where_they_are_not_needed() -> None:
    qkv, cu = packed()
    with torch.no_grad():
        backlight.attention_varlen(*qkv, cu).mul_(2)
    y = backlight.attention_varlen(*qkv, cu)
    y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_mode_around_the_backward_of_packed_tensors() -> None:
    qkv, cu = packed()
    gate = torch.randn(8, 2, 8, requires_grad=True)
    y, lse = backlight.attention_varlen(*qkv, cu, gate=gate, return_lse=True)
    into, loss = (*qkv, gate), [y.square().sum(), lse.sum()]
    plain = torch.autograd.grad(loss, into, retain_graph=True)
    with Seen() as seen:
        observed = torch.autograd.grad(loss, into)
    assert seen.names == [NAMES[1]]
    assert all(map(torch.equal, plain, observed))
    assert all(grad.shape == x.shape for grad, x in zip(plain, into, strict=True))


def test_packed_tensors_under_autocast_get_their_gradients() -> None:
    qkv, cu = packed()
    with torch.autocast("cpu", torch.bfloat16):
        y = backlight.attention_varlen(*qkv, cu)
    assert y.dtype == torch.bfloat16
    assert [grad.dtype for grad in torch.autograd.grad(y.sum(), qkv)] == [torch.float32] * 3


def test_packed_tensors_have_a_second_derivative() -> None:
    qkv, cu = packed()
    (dq,) = torch.autograd.grad(backlight.attention_varlen(*qkv, cu).square().sum(), qkv[0], create_graph=True)
    found = torch.autograd.grad(dq.sum(), qkv)
    with Seen():
        (dq,) = torch.autograd.grad(backlight.attention_varlen(*qkv, cu).square().sum(), qkv[0], create_graph=True)
    assert all(map(torch.equal, found, torch.autograd.grad(dq.sum(), qkv)))
    assert all(bool(x.any()) for x in found)
