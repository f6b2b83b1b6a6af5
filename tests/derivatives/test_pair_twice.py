"""Derivatives of a pair bias that q of five axes, or entries of `vmap`, share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import backlight

FP64 = torch.float64


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=FP64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pairs", [(2, 1, 2, 4, 4), (1, 1, 1, 4, 4), (2, 3, 2, 1, 4)], ids=str)
def test_five_axes(pairs: tuple[int, ...]) -> None:
    """Triangle attention: the call of its own, and forward mode through the ordinary one."""
    inputs = [drawn(2, 3, 2, 4, 5, seed=seed) for seed in range(3)] + [drawn(*pairs, seed=3)]
    along = [drawn(*x.shape, seed=10 + place) for place, x in enumerate(inputs)]

    def attend(*x: Tensor) -> tuple[Tensor, ...]:
        return backlight.attention(*x[:3], pair_bias=x[3], return_lse=True)

    found = backlight.attention_jvp(*inputs[:3], *along[:3], pair_bias=inputs[3], tpair_bias=along[3], return_lse=True)
    torch.testing.assert_close(found, jvp(attend, tuple(inputs), tuple(along)))
    with pytest.raises(ValueError, match="tpair_bias must have the shape of pair_bias"):
        backlight.attention_jvp(*inputs[:3], pair_bias=inputs[3], tpair_bias=along[3][:1, :1, :1, :1, :2])


@pytest.mark.parametrize("heads", [1, 4])
def test_vmap(heads: int) -> None:
    """Entries share the bias or have one each; its tangent and second derivatives are theirs."""
    q, b = drawn(3, 2, 4, 5, 8), drawn(2, heads, 5, 5, seed=1)
    tq, tb = drawn(*q.shape, seed=2), drawn(*b.shape, seed=3)

    def loss(q: Tensor, b: Tensor) -> Tensor:
        return backlight.attention(q, q, q, pair_bias=b).square().sum()

    def along(q: Tensor, b: Tensor, tq: Tensor, tb: Tensor) -> tuple[Tensor, ...]:
        both = backlight.attention_jvp(q, q, q, tq, tq, tq, pair_bias=b, tpair_bias=tb)
        product = jvp(grad(loss, argnums=(0, 1)), (q, b), (tq, tb))[1]
        penalty = grad(lambda q, b: grad(loss, argnums=1)(q, b).square().sum(), argnums=(0, 1))(q, b)
        return (*both, *product, *penalty)

    shared = vmap(along, in_dims=(0, None, 0, None))(q, b, tq, tb)
    own = vmap(along)(q, torch.stack([b, 2 * b, 3 * b]), tq, torch.stack([tb, tb, -tb]))
    for i in range(3):
        torch.testing.assert_close(tuple(x[i] for x in shared), along(q[i], b, tq[i], tb))
        torch.testing.assert_close(tuple(x[i] for x in own), along(q[i], (i + 1) * b, tq[i], -tb if i == 2 else tb))
