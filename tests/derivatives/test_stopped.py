"""Beside a stopped tangent the backward is the ordinary one: operators are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from test_tangent import tangents_of
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import jvp
from torch.utils._python_dispatch import TorchDispatchMode

import backlight
from cases import BY_NAME, FP64, small
from running import leaves, options

Inputs = dict[str, Tensor]


class Operators(TorchDispatchMode):
    """Counts calls of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "backlight":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def by_call(attend: Callable[..., object], inputs: Inputs, tangents: Inputs) -> tuple[Tensor, Tensor]:
    return attend.jvp(**inputs, **{f"t{name}": t for name, t in tangents.items()})


def by_transform(attend: Callable[..., object], inputs: Inputs, tangents: Inputs) -> tuple[Tensor, Tensor]:
    names = list(inputs)
    return jvp(lambda *x: attend(**dict(zip(names, x, strict=True))), tuple(inputs.values()), tuple(tangents.values()))


def by_dual_numbers(attend: Callable[..., object], inputs: Inputs, tangents: Inputs) -> tuple[Tensor, Tensor]:
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(x, tangents[name]) for name, x in inputs.items()}
        return tuple(forward_ad.unpack_dual(attend(**duals)))


class Attend:
    """A case's call, and its tangent as a call of its own."""

    def __init__(self, name: str):
        self.call = small(BY_NAME[name]).make(FP64).call

    def __call__(self, **inputs: Tensor) -> Tensor:
        return backlight.attention(**inputs, **options(self.call))

    def jvp(self, **both: Tensor) -> tuple[Tensor, Tensor]:
        return backlight.attention_jvp(**both, **options(self.call))


WAYS = {"attention_jvp": by_call, "torch.func.jvp": by_transform, "dual numbers": by_dual_numbers}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "name", ["causal+gqa", "everything,batched,sq<sk", "pair,two entries share", "entmax,everything,batched"]
)
def test_one_backward_and_nothing_else(name: str, way: str) -> None:
    attend = Attend(name)
    inputs = leaves(attend.call)
    tangents = tangents_of({each: x.detach() for each, x in inputs.items()})
    y, ty = WAYS[way](attend, inputs, tangents)
    loss = (y - (y + ty).detach()).square().sum()
    with Operators() as seen:
        found = torch.autograd.grad(loss, list(inputs.values()))
    assert seen.counts == {"attention_backward": 1}
    plain = attend(**inputs)
    wanted = torch.autograd.grad((plain - (plain + ty).detach()).square().sum(), list(inputs.values()))
    torch.testing.assert_close(found, wanted)


def test_a_loss_on_the_tangent_is_counted() -> None:
    """The test above can fail."""
    attend = Attend("causal+gqa")
    inputs = leaves(attend.call)
    _, ty = by_call(attend, inputs, tangents_of({name: x.detach() for name, x in inputs.items()}))
    with Operators() as seen:
        ty.sum().backward()
    assert seen.counts == {"attention_second": 1}


@pytest.mark.parametrize("name", ["causal+gqa", "entmax+gqa"])
@pytest.mark.parametrize("way", WAYS)
def test_what_the_forward_costs(way: str, name: str) -> None:
    """The call of its own is one operator; transforms make y first and its tangent from it."""
    attend = Attend(name)
    inputs = leaves(attend.call, requires_grad=False)
    with Operators() as seen:
        WAYS[way](attend, inputs, tangents_of(inputs))
    assert seen.counts == Counter(["attention_jvp"] + (["attention"] if way != "attention_jvp" else []))
