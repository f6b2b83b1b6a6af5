"""The call under torch.func: vmap folds into the heads, grad and vjp give what autograd gives, the rest says no."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, vmap

import backlight
from cases import BY_NAME, FP32
from running import forward, leaves

pytestmark = pytest.mark.clean_memory

NAMES = ("causal", "causal+gqa", "bias+tau", "everything,batched,sq<sk", "everything,sq>sk")
N = 3


@pytest.fixture(autouse=True)
def no_fallback():
    """torch's own fallback for vmap is a loop that warns about its speed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="There is a performance drop")
        yield


def stacked(name: str) -> tuple[object, dict[str, Tensor]]:
    """A case and N of each of its tensors."""
    call = BY_NAME[name].make(FP32).call
    one = leaves(call, requires_grad=False)
    return call, {key: torch.stack([x + 0.1 * i for i in range(N)]) for key, x in one.items()}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_vmap_over_everything(name: str, axis: int) -> None:
    call, many = stacked(name)
    moved = {key: x.movedim(0, min(axis, x.dim() - 1)) for key, x in many.items()}
    dims = {key: min(axis, x.dim() - 1) for key, x in moved.items()}
    found = vmap(lambda inputs: forward(call, inputs), in_dims=(dims,))(moved)
    for i in range(N):
        for got, want in zip(found, forward(call, {key: x[i] for key, x in many.items()}), strict=True):
            torch.testing.assert_close(got[i], want)


@pytest.mark.parametrize("batched", ["q", "k", "bias", "tau", "gate"])
def test_vmap_over_one_tensor(batched: str) -> None:
    call, many = stacked("everything,batched,sq<sk")
    fixed = {key: x[0] for key, x in many.items() if key != batched}
    y, _ = vmap(lambda x: forward(call, fixed | {batched: x}))(many[batched])
    for i in range(N):
        torch.testing.assert_close(y[i], forward(call, fixed | {batched: many[batched][i]})[0])


def loss(call: object, inputs: dict[str, Tensor]) -> Tensor:
    y, lse = forward(call, inputs)
    return y.square().sum() + lse.clamp(min=-50).sin().sum()


def by_autograd(call: object, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    fresh = {key: x.detach().clone().requires_grad_() for key, x in inputs.items()}
    return dict(zip(fresh, torch.autograd.grad(loss(call, fresh), list(fresh.values())), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_grad(name: str) -> None:
    call, many = stacked(name)
    inputs = {key: x[0] for key, x in many.items()}
    found, want = grad(lambda inputs: loss(call, inputs))(inputs), by_autograd(call, inputs)
    for key in inputs:
        torch.testing.assert_close(found[key], want[key], msg=lambda text, key=key: f"d{key}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_each_example(name: str) -> None:
    """vmap(grad): examples differ in q, k, v; the learned terms are shared and get one gradient per example."""
    call, many = stacked(name)
    shared = {key: x[0] for key, x in many.items() if key in ("bias", "sink", "tau")}
    own = {key: x for key, x in many.items() if key not in shared}
    found = vmap(grad(lambda own, shared: loss(call, own | shared), argnums=(0, 1)), in_dims=(0, None))(own, shared)
    for i in range(N):
        want = by_autograd(call, {key: x[i] for key, x in own.items()} | shared)
        for key, x in (found[0] | found[1]).items():
            torch.testing.assert_close(x[i], want[key], msg=lambda text, key=key: f"d{key}: {text}")


def test_packed_sequences() -> None:
    cu = torch.tensor([0, 3, 3, 9])
    q = torch.randn(N, 9, 2, 8)
    y = vmap(lambda q: backlight.attention_varlen(q, q, q, cu, causal=True))(q)
    for i in range(N):
        torch.testing.assert_close(y[i], backlight.attention_varlen(q[i], q[i], q[i], cu, causal=True))
    with pytest.raises(NotImplementedError, match="vmap over cu_seqlens_q is not supported"):
        vmap(lambda q, cu: backlight.attention_varlen(q, q, q, cu))(q, cu.expand(N, -1))


def test_gradients_from_outside() -> None:
    q = torch.randn(N, 1, 2, 5, 8, requires_grad=True)
    (found,) = torch.autograd.grad(vmap(lambda q: backlight.attention(q, q, q, causal=True))(q).square().sum(), q)
    (want,) = torch.autograd.grad(torch.stack([backlight.attention(x, x, x, causal=True) for x in q]).square().sum(), q)
    torch.testing.assert_close(found, want)


def test_jacobian() -> None:
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    found = jacrev(lambda q: backlight.attention(q, q, q, causal=True))(q)
    want = torch.autograd.functional.jacobian(lambda q: backlight.attention(q, q, q, causal=True), q)
    torch.testing.assert_close(found, want)


def test_an_ensemble_of_layers() -> None:
    from backlight.nn import LazyAttention

    layers = [LazyAttention(16, 2, distances=4) for _ in range(N)]
    parameters, buffers = torch.func.stack_module_state(layers)
    x = torch.randn(2, 7, 16)
    found = vmap(lambda p, b: functional_call(layers[0], (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(found, torch.stack([layer(x) for layer in layers]))


# --- what does not exist must not read as zero -------------------------------------------------------------------------------


def test_tangents() -> None:
    """A dropped tangent looks like a derivative of zero; it was one before there were tangents."""
    q = torch.randn(1, 1, 3, 4)
    wanted = (q @ q.mT / 2).softmax(-1) @ torch.ones_like(q)
    _, found = jvp(lambda x: backlight.attention(q, q, x), (q,), (torch.ones_like(q),))
    torch.testing.assert_close(found, wanted)
    with forward_ad.dual_level():
        y = backlight.attention(q, q, forward_ad.make_dual(q, torch.ones_like(q)))
        torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, wanted)
        assert backlight.attention(q, q, q).shape == q.shape, "no tangent among the inputs: nothing is lost"


def test_third_derivatives_are_refused() -> None:
    q = torch.randn(1, 1, 3, 4)

    def once(x: Tensor) -> Tensor:
        return backlight.attention(x, q, q).square().sum()

    def twice(x: Tensor) -> Tensor:
        return grad(lambda x: grad(once)(x).sum())(x).sum()

    with pytest.raises(NotImplementedError, match="no third derivative"):
        grad(twice)(q)
