"""Columns that do not lie side by side: features of a convolution, [B, H, D, S], seen as [B, H, S, D].

Kernels wrote rows of adjacent columns into memory laid out like that, over one another: y and every gradient were wrong, and no
test on a CPU ran the Triton kernels on such inputs.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

import backlight
from backlight.spec import SEQUENCE_OF

NAMES = ("q", "k", "v", "gate")


def drawn(dv: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    widths = {"q": 8, "k": 8, "v": dv, "gate": dv}
    return {name: torch.randn(2, 2, 5, width, generator=generator) for name, width in widths.items()}


def columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT


def derivatives(inputs: dict[str, Tensor], **terms: Tensor) -> list[Tensor]:
    """y, lse, gradients, the tangent, and second derivatives."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    y, lse = backlight.attention(**leaves, **terms, causal=True, return_lse=True, backend="triton")
    grads = torch.autograd.grad((y * y).sum() + lse.sum(), list(leaves.values()), create_graph="tau" not in terms)
    assert [grad.stride() for grad in grads] == [x.stride() for x in leaves.values()]
    found = [y, lse, *grads]
    if "tau" not in terms:
        found += torch.autograd.grad(sum((grad * grad).sum() for grad in grads), list(leaves.values()))
    tangents = {f"t{name}": x for name, x in inputs.items()}
    return [*found, *backlight.attention_jvp(**inputs, **tangents, **terms, causal=True, backend="triton")]


@pytest.mark.parametrize("apart", [("q",), ("k", "gate"), NAMES], ids="+".join)
@pytest.mark.parametrize(("dv", "terms"), [(8, {}), (5, {}), (8, {"tau": torch.tensor([-0.3, 0.2])})], ids=["", "dv=5", "tau"])
def test_columns_apart(apart: tuple[str, ...], dv: int, terms: dict[str, Tensor]) -> None:
    assert {*NAMES} == {*SEQUENCE_OF}
    inputs = drawn(dv)
    wanted = derivatives(inputs, **terms)
    found = derivatives({name: columns(x) if name in apart else x for name, x in inputs.items()}, **terms)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_negative_views() -> None:
    """`z.conj().imag` and its like hold numbers with the other sign and a bit that says so, which kernels do not read."""
    q, k, v, dy = torch.randn(4, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    results = []
    for view in (torch._neg_view, torch.neg):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        y = backlight.attention(view(leaves[0]), leaves[1], view(leaves[2]), causal=True, backend="triton")
        assert view(dy).is_neg() == (view is torch._neg_view)
        results.append((y, *torch.autograd.grad(y, leaves, view(dy))))
        with torch.no_grad():
            assert torch.equal(backlight.attention(view(q), k, view(v), causal=True, backend="triton"), y)
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted)
