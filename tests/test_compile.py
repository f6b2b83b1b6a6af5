"""The operators in front of PyTorch's compilers: schema, fake kernels, whole graphs in both directions, dynamic lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import backlight
from backlight import operators
from backlight.spec import LEARNED
from cases import BF16, BY_NAME, FP32, Case, Problem, case_id
from running import forward, leaves, run

# compilers look into the allocators that the other tests poison
pytestmark = pytest.mark.clean_memory

NAMES = (
    "causal",
    "causal+gqa",
    "bias+tau",
    "everything,batched,sq<sk",
    "everything,sq>sk",
    "rows without keys,sink,dlse",
    "sq=0",
    "sk=0",
)
CASES = [BY_NAME[name] for name in NAMES]


@pytest.fixture(autouse=True)
def no_leftovers():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operator_arguments(problem: Problem, requires_grad: bool) -> tuple[object, ...]:
    args = operators.pack(problem.call, None)
    return tuple(
        x.detach().clone().requires_grad_(requires_grad and x.is_floating_point()) if isinstance(x, Tensor) else x for x in args
    )


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=case_id)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_opcheck_forward(case: Case, dtype: torch.dtype) -> None:
    arguments = operator_arguments(case.make(dtype), requires_grad=True)
    torch.library.opcheck(torch.ops.backlight.attention.default, (*arguments, False))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_opcheck_backward(case: Case) -> None:
    problem = case.make(FP32)
    arguments = operator_arguments(problem, requires_grad=False)
    y, lse, u, _ = torch.ops.backlight.attention(*arguments, True)
    given = [getattr(problem.call, name) is not None for name in LEARNED]
    torch.library.opcheck(
        torch.ops.backlight.attention_backward.default, (*arguments, y, lse, u, problem.dy, problem.dlse, given)
    )


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_fake_kernel_promises_the_strides_of_the_real_one(layout: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for name in ("everything,batched,sq<sk", "causal,d=16,dv=40"):
        problem = BY_NAME[name].make(FP32)
        arguments = list(operator_arguments(problem, requires_grad=False))
        if layout == "transposed":
            arguments = [
                x.transpose(1, 2).contiguous().transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x
                for x in arguments
            ]
        real = torch.ops.backlight.attention(*arguments, True)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = torch.ops.backlight.attention(
                *(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments), True
            )
        for a, b in zip(real, fake, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("case", [BY_NAME[name] for name in NAMES if name != "sq=0"], ids=case_id)
def test_compiled_in_one_graph(case: Case) -> None:
    """fullgraph=True, forward and backward, the numbers of the plain call."""
    problem = case.make(FP32)
    inputs = leaves(problem.call)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y, lse = forward(problem.call, tensors)
        return 2 * y, lse

    y, lse = attend(inputs)
    outputs, incoming = [y], [problem.dy.transpose(1, 2)[0] if case.varlen else problem.dy]
    if problem.dlse is not None:
        outputs.append(lse)
        incoming.append(problem.dlse[0] if case.varlen else problem.dlse)
    grads = torch.autograd.grad(outputs, list(inputs.values()), incoming)
    plain = run(Problem(case, problem.call, 2 * problem.dy, problem.dlse))
    for name, grad in zip(inputs, grads, strict=True):
        grad = grad.transpose(0, 1)[None] if case.varlen and grad.dim() == 3 else grad
        torch.testing.assert_close(grad, plain[f"d{name}"], msg=lambda text, name=name: f"{name}: {text}")


def test_compiled_inside_a_model() -> None:
    """Projections around the call, a parameter inside it: one graph, gradients of everything."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = torch.nn.Linear(16, 48)
            self.bias = torch.nn.Parameter(torch.randn(4, 9))
            self.tau = torch.nn.Parameter(torch.tensor([-0.5, 0.25, 0.5, -0.25]))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).transpose(1, 3).unbind(2)
            y = backlight.attention(q, k, v, causal=True, bias=self.bias, tau=self.tau)
            return y.transpose(1, 2).flatten(2)

    layer = Layer()
    x = torch.randn(2, 9, 16)
    layer(x).square().sum().backward()
    plain = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(x).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, plain[name], msg=lambda text, name=name: f"{name}: {text}")


def test_lengths_do_not_recompile() -> None:
    """One dynamic graph serves every length, forward and backward."""

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backlight.attention(q, k, v, causal=True)

    def step(sq: int, sk: int) -> None:
        q = torch.randn(2, 4, sq, 8, requires_grad=True)
        k, v = torch.randn(2, 2, sk, 8, requires_grad=True), torch.randn(2, 2, sk, 8, requires_grad=True)
        attend(q, k, v).sum().backward()
        expected = torch.autograd.grad(backlight.attention(q, k, v, causal=True).sum(), (q, k, v))
        for x, grad in zip((q, k, v), expected, strict=True):
            torch.testing.assert_close(x.grad, grad)

    step(9, 13)
    with torch.compiler.set_stance("fail_on_recompile"):
        for sq, sk in ((17, 33), (64, 65), (5, 200)):
            step(sq, sk)


def test_packed_lengths_do_not_recompile() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attend(q: Tensor, cu: Tensor) -> Tensor:
        return backlight.attention_varlen(q, q, q, cu, causal=True)

    def step(lengths: list[int]) -> None:
        cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        q = torch.randn(sum(lengths), 2, 8, requires_grad=True)
        attend(q, cu).sum().backward()
        (expected,) = torch.autograd.grad(backlight.attention_varlen(q, q, q, cu, causal=True).sum(), q)
        torch.testing.assert_close(q.grad, expected)

    step([3, 9, 4])
    with torch.compiler.set_stance("fail_on_recompile"):
        step([5, 6, 17, 2])
        step([30, 1, 8, 8, 2])


@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_numbers_that_differ_from_call_to_call(option: str) -> None:
    """The second value makes the compiler try one graph for all of them: a symbol stands there in every check."""

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, number: float) -> Tensor:
        return backlight.attention(q, q, q, causal=True, **{option: number})

    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    for number in (0.5, 0.75, 2.0):
        (found,) = torch.autograd.grad(attend(q, number).square().sum(), q)
        (wanted,) = torch.autograd.grad(backlight.attention(q, q, q, causal=True, **{option: number}).square().sum(), q)
        torch.testing.assert_close(found, wanted)
    for number in (float("nan"), float("inf")):
        with pytest.raises(Exception, match=f"{option} must be finite, got {number}"):
            attend(q, number)


def test_layers_with_scales_of_their_own() -> None:
    class Layer(torch.nn.Module):
        def __init__(self, scale: float):
            super().__init__()
            self.scale = scale

        def forward(self, q: Tensor) -> Tensor:
            return backlight.attention(q, q, q, scale=self.scale)

    q = torch.randn(1, 2, 9, 4)
    for scale in (0.5, 0.25, 0.75):
        layer = Layer(scale)
        torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(q), layer(q))


def test_compiled_error_is_still_a_sentence() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor) -> Tensor:
        return backlight.attention(q, k, k)

    with pytest.raises(Exception, match="k must have the head dimension of q, 8, got 4"):
        attend(torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 4))


def test_meta_tensors_have_shapes() -> None:
    q, k, v = (torch.randn(2, 4, 5, d, device="meta") for d in (8, 8, 6))
    y, lse = backlight.attention(q, k, v, return_lse=True)
    assert (y.shape, lse.shape, y.device.type) == ((2, 4, 5, 6), (2, 4, 5), "meta")


# --- as quiet as SDPA --------------------------------------------------------------------------------------------------------


def graphs(function: Any, calls: list[tuple[Any, ...]]) -> int:
    """How many graphs all the calls take; each is checked against the function without a compiler."""
    found = 0

    def count(module: Any, inputs: Any) -> Any:
        nonlocal found
        found += 1
        return module

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=count)
    for call in calls:
        torch.testing.assert_close(compiled(*call), function(*call))
    return found


def packed(lengths: list[int]) -> tuple[Tensor, Tensor]:
    return torch.randn(sum(lengths), 2, 8), torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def qkv(batch: int, rows: int, keys: int) -> tuple[Tensor, ...]:
    return torch.randn(batch, 4, rows, 8), torch.randn(batch, 2, keys, 8), torch.randn(batch, 2, keys, 8)


LENGTHS = ([3, 9, 4], [5, 6, 17, 2], [30, 1, 8, 8, 2], [4, 4], [1, 2, 3])
CHANGING: dict[str, tuple[Any, list[tuple[Any, ...]]]] = {
    "rows and keys": (lambda q, k, v: backlight.attention(q, k, v, causal=True), [qkv(2, n, n) for n in (9, 17, 64, 5)]),
    "keys": (lambda q, k, v: backlight.attention(q, k, v, causal=True), [qkv(2, 7, n) for n in (9, 17, 64, 8)]),
    "batch": (lambda q, k, v: backlight.attention(q, k, v), [qkv(n, 9, 9) for n in (2, 3, 5, 8)]),
    "borders": (lambda q, cu: backlight.attention_varlen(q, q, q, cu, causal=True), [packed(each) for each in LENGTHS]),
    "window": (lambda q, w: backlight.attention(q, q, q, window=(w, w)), [(torch.randn(1, 2, 20, 8), w) for w in (2, 3, 7, 5)]),
    "causal window": (
        lambda q, w: backlight.attention(q, q, q, causal=True, window=(w, None)),
        [(torch.randn(1, 2, 20, 8), w) for w in (2, 3, 7, 5)],
    ),
    "window and borders": (
        lambda q, cu, w: backlight.attention_varlen(q, q, q, cu, window=(w, 0)),
        [(*packed(each), w) for each, w in zip(LENGTHS, (2, 3, 4, 5, 6), strict=True)],
    ),
    "origin": (
        lambda q, bias, n: backlight.attention(q, q, q, bias=bias, bias_origin=n),
        [(torch.randn(1, 2, 20, 8), torch.randn(2, 9), n) for n in (2, 3, 5, 7)],
    ),
}


@pytest.mark.parametrize("what", CHANGING)
def test_two_graphs_serve_everything(what: str) -> None:
    """The second value tells the compiler that there are more: one graph for the first, one for all others. A window in the
    operator's schema as a plain integer took a graph for each."""
    assert graphs(*CHANGING[what]) <= 2


@pytest.mark.parametrize("option", ["scale", "softcap"])
def test_a_graph_for_each_float_as_with_sdpa(option: str) -> None:
    """torch's operators have plain floats, and a graph for each: ours take no more."""
    q, numbers = torch.randn(1, 2, 9, 8), (0.5, 0.75, 2.0, 0.3)
    ours = graphs(lambda q, n: backlight.attention(q, q, q, **{option: n}), [(q, n) for n in numbers])
    theirs = graphs(lambda q, n: torch.nn.functional.scaled_dot_product_attention(q, q, q, scale=n), [(q, n) for n in numbers])
    assert ours <= theirs
