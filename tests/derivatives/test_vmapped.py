"""`vmap` over `attention_jvp`, forward mode and double backward: each entry as if it came alone."""

from __future__ import annotations

import pytest
import torch
from test_tangent import tangents_of
from torch import Tensor
from torch.func import grad, jvp, vmap

import backlight
from cases import BY_NAME, FP64, small
from running import leaves, options

ENTRIES = 3


def directions(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [tangents_of(inputs, seed=seed) for seed in range(ENTRIES)]


NAMES = ("causal+gqa", "everything,batched,sq<sk", "mask,pos,causal", "pair,everything,sq<sk", "entmax+gqa", "entmax,pair,own")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", ["inputs", "nothing", "all but q"])
def test_every_derivative(name: str, shared: str) -> None:
    """Entries share the inputs and differ in directions, as in a Jacobian; or have their own, or one of them."""
    call = small(BY_NAME[name]).make(FP64).call
    inputs = leaves(call, requires_grad=False)
    names, keywords = list(inputs), options(call)
    own = {"inputs": [], "nothing": names, "all but q": ["q"]}[shared]
    stacked = [torch.stack([x * (1 + i / 8) for i in range(ENTRIES)]) if n in own else x for n, x in inputs.items()]
    along = [torch.stack([each[n] for each in directions(inputs)]) for n in names]

    def attend(*x: Tensor) -> Tensor:
        return backlight.attention(**dict(zip(names, x, strict=True)), **keywords)

    def loss(*x: Tensor) -> Tensor:
        return attend(*x).square().sum()

    def derivatives(x: tuple[Tensor, ...], t: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = dict(zip(names, x, strict=True)) | {f"t{n}": each for n, each in zip(names, t, strict=True)}
        y, ty = backlight.attention_jvp(**given, **keywords)
        pushed = jvp(attend, x, t)[1]
        every = tuple(range(len(x)))
        product = jvp(grad(loss, argnums=every), x, t)[1]

        def penalty(*x: Tensor) -> Tensor:
            return sum((g * each).sum() for g, each in zip(grad(loss, argnums=every)(*x), t, strict=True))

        through = grad(lambda *x: (jvp(attend, x, t)[1] * y).sum(), argnums=every)(*x)
        return (y, ty, pushed, *product, *grad(penalty, argnums=every)(*x), *through)

    axes = tuple(0 if n in own else None for n in names)
    found = vmap(derivatives, in_dims=(axes, 0))(tuple(stacked), tuple(along))
    for i in range(ENTRIES):
        alone = tuple(x[i] if n in own else x for n, x in zip(names, stacked, strict=True))
        wanted = derivatives(alone, tuple(t[i] for t in along))
        torch.testing.assert_close(tuple(x[i] for x in found), wanted)


@pytest.mark.parametrize("shape", [(1, 0, 1), (0, 2, 3), (1, 2, 0)], ids=["no rows", "no batch", "no keys"])
def test_results_without_elements_have_the_axis_of_vmap(shape: tuple[int, int, int]) -> None:
    """They passed for placeholders: y kept the heads of all entries on one axis."""
    batch, rows, keys = shape
    q, k, v = torch.randn(3, batch, 4, rows, 8), torch.randn(3, batch, 2, keys, 8), torch.randn(3, batch, 2, keys, 8)
    y, lse = torch.func.vmap(lambda q, k, v: backlight.attention(q, k, v, return_lse=True))(q, k, v)
    assert (y.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert torch.func.vmap(lambda k: backlight.attention(q[0], k, v[0]))(k).shape == q.shape
    grads = torch.func.grad(lambda q, k: backlight.attention(q, k, v[0]).sum(), argnums=(0, 1))
    assert [x.shape for x in torch.func.vmap(grads)(q, k)] == [q.shape, k.shape]
