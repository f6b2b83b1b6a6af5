"""Every public entry under every transform: the derivative of a plain definition in float64, or one sentence that says no.

A derivative that does not exist reads as zero when nobody refuses it: each refusal here was a wrong number once, or could be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from entries import ENTRIES, B, D, Entry, H, K, Layer, S, V, draw, plain
from torch import Tensor
from torch.autograd import functional
from torch.func import functional_call, grad, hessian
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transforms import REFUSED, SECOND, SENTENCE, VALUES, backward_into, by_autograd, dual, pushed

import backlight
from backlight import compat
from backlight._private.torch import dispatch_modes
from backlight.distributed.simulated import simulated_attention

pytestmark = [
    pytest.mark.clean_memory,
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
    pytest.mark.filterwarnings("ignore:.*jit.script.*:DeprecationWarning"),
]


def test_every_entry_is_here() -> None:
    # a cache is written in place, and has no gradients
    assert set(compat.__all__) - {"flash_attn_with_kvcache"} <= set(ENTRIES)


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


# other signatures of the same call need no second way through it
WAYS = [
    (name, way) for name in ENTRIES for way in ("direct", "observed") if way == "direct" or not name.startswith("flash_attn")
]


@pytest.fixture(params=WAYS, ids=", ".join)
def entry(request: pytest.FixtureRequest) -> Iterator[Entry]:
    """Nobody looks, and the operators are left out where there is no transform; or somebody does."""
    name, way = request.param
    with nullcontext() if way == "direct" else Looking():
        yield ENTRIES[name]


@pytest.mark.parametrize("transform", VALUES)
def test_values(entry: Entry, transform: str) -> None:
    x = draw(*entry.shape, seed=7)
    torch.testing.assert_close(VALUES[transform](entry.ours, x), VALUES[transform](entry.truth, x))


class OnlyForward(TorchFunctionMode):
    """Leaves while torch works, and so does not see what a backward recomputes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["attention, q", "attention, terms", "nn.Attention", "nn.LazyAttention"])
def test_checkpoints_that_run_by_the_operators_and_recompute_without(name: str, reentrant: bool) -> None:
    entry = ENTRIES[name]
    x = draw(*entry.shape, seed=7)
    with OnlyForward():
        found = backward_into(entry.ours, x, reentrant)
    torch.testing.assert_close(found, backward_into(entry.truth, x, reentrant))


@pytest.mark.parametrize("kind", ["plain", "lazy"])
def test_functional_calls(kind: str) -> None:
    """Gradients with respect to the parameters of a layer."""
    layer = Layer(kind)
    parameters = {name: x.detach() for name, x in layer.layer.named_parameters()}
    x = draw(B, S, H * 2, seed=7)
    found = grad(lambda p: functional_call(layer.layer, p, (x,)).square().sum())(parameters)
    wanted = torch.autograd.grad(layer.truth(x).square().sum(), list(layer.layer.parameters()))
    for name, want in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(found[name], want, msg=lambda text, name=name: f"{name}: {text}")


# torch's older vmap, which has no rule for what autograd does to tensors that it saves while a mode looks
OLD_VMAP = ("functional.jacobian, forward", "functional.hessian, forward")
# other names for the same number, where torch has trouble with the plain definition or takes long over it
SAME = {"functional.hessian, forward": "functional.hessian", "linearize": "jvp"}


@pytest.mark.parametrize("transform", SECOND)
def test_second_values(entry: Entry, transform: str) -> None:
    if transform in OLD_VMAP and dispatch_modes():
        pytest.skip("torch's own: no batching rule for aten::detach under a mode")
    x = draw(*entry.shape, seed=7)
    torch.testing.assert_close(SECOND[transform](entry.ours, x), SECOND[SAME.get(transform, transform)](entry.truth, x))


@pytest.mark.parametrize("transform", ["hessian", "penalty of others", "functional.hvp", "dual numbers"])
def test_these_values_are_not_zero(transform: str) -> None:
    found = SECOND[transform](ENTRIES["attention, one tensor"].truth, draw(B, H, S, D, seed=7))
    found = found[1] if isinstance(found, tuple) else found
    assert found.abs().max() > 1e-3


@pytest.mark.parametrize("transform", REFUSED)
def test_refusals(entry: Entry, transform: str) -> None:
    x = draw(*entry.shape, seed=7)
    with pytest.raises(NotImplementedError, match=SENTENCE) as caught:
        REFUSED[transform](entry.ours, x)
    assert len(str(caught.value).splitlines()) == 1


SHARDED = ("penalty upstream", "penalty of others", "penalty of itself", "functional.hessian")


@pytest.mark.parametrize("transform", [*SHARDED, "jvp of grad", "grad of jvp", "grad of grad", "linearize"])
@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_refusals_of_sharded_calls(transform: str, strategy: str) -> None:
    def sharded(x: Tensor) -> Tensor:
        return simulated_attention(x, K, V, world=2, layout="contiguous", strategy=strategy, causal=True)

    x = draw(B, H, S, D, seed=7)
    wanted = by_autograd(lambda x: plain(x, K, V), x)
    for name in ("autograd with create_graph", "grad"):
        torch.testing.assert_close(VALUES[name](sharded, x), wanted)
    torch.testing.assert_close(pushed(sharded, x), pushed(lambda x: plain(x, K, V), x))
    torch.testing.assert_close(dual(sharded, x), pushed(lambda x: plain(x, K, V), x))
    with pytest.raises(NotImplementedError, match=SENTENCE):
        SECOND[transform](sharded, x)


def test_an_attention_beside_what_is_differentiated() -> None:
    """Tangents and second derivatives of something else pass a call by that has no part in them."""
    x = draw(B, H, S, D, seed=7)

    def beside(x: Tensor) -> Tensor:
        return (x.sin() * backlight.attention(K, K, V, causal=True)).sum()

    fixed = plain(K, K, V)
    torch.testing.assert_close(pushed(beside, x), (x.cos() * fixed).sum())
    torch.testing.assert_close(hessian(beside)(x).reshape(x.numel(), -1).diagonal(), (-x.sin() * fixed).flatten())
    torch.testing.assert_close(functional.hessian(beside, x).reshape(x.numel(), -1).diagonal(), (-x.sin() * fixed).flatten())
