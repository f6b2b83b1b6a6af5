"""What is remembered of a call, on a GPU: streams, addresses and CUDA graphs change under it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import backlight

pytestmark = pytest.mark.gpu
Step = Callable[[], tuple[Tensor, ...]]
KINDS = ["plain", "lazy", "sink and gate", "packed"]


def taken_by(backend: str) -> None:
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    reasons = backlight.explain(q, q, q).reasons[backend]
    if reasons:
        pytest.skip("; ".join(reasons))


def step_of(kind: str, backend: str) -> tuple[list[Tensor], Step]:
    """Leaves, and a forward and backward of them."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"causal": True, "backend": backend}
    shape = (200, 2, 64) if kind == "packed" else (2, 2, 200, 64)
    q, k, v, dy = (torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4))
    terms: dict[str, Tensor] = {}
    if kind == "lazy":
        terms = {"bias": torch.randn(2, 32, device="cuda"), "tau": torch.full((2,), -0.3, device="cuda")}
    elif kind == "sink and gate":
        terms = {"sink": torch.randn(2, device="cuda"), "gate": torch.randn_like(q)}
    leaves = [x.requires_grad_() for x in (q, k, v, *terms.values())]
    cu = torch.tensor([0, 70, 70, 200], dtype=torch.int32, device="cuda")

    def step() -> tuple[Tensor, ...]:
        if kind == "packed":
            y = backlight.attention_varlen(q, k, v, cu, **options)
        else:
            y = backlight.attention(q, k, v, **options, **terms)
        return (y.detach(), *torch.autograd.grad(y, leaves, dy))

    return leaves, step


def far(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> float:
    """The dq of one call and the next differ in the order of their sums."""
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_forward_and_backward_in_a_cuda_graph(kind: str, backend: str) -> None:
    """Nothing of the graph of autograd may be alive from before: its leaves would pull the default stream into the capture."""
    taken_by(backend)
    leaves, step = step_of(kind, backend)
    gc.collect()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(2):
        with torch.no_grad():
            for x in leaves[:3]:
                x.copy_(torch.randn_like(x))
        for x in got:
            x.fill_(torch.nan)
        graph.replay()
        want = step()
        torch.cuda.synchronize()
        assert far(got, want) < 2e-3


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_addresses_streams_and_shared_tensors_change(backend: str) -> None:
    taken_by(backend)
    torch.manual_seed(0)
    first = [torch.randn(1, 2, 100, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3)]
    dy, side, held = torch.randn_like(first[0]), torch.cuda.Stream(), []
    for turn in range(24):
        # elsewhere in memory every time
        held.append(torch.empty(1000 * (turn % 5) + 1, device="cuda"))
        q, k, v = (x.clone().requires_grad_() for x in first)
        if turn % 3 == 2:
            k = v = q
        into = [q] if k is q else [q, k, v]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if turn % 2 else nullcontext():
            got = torch.autograd.grad(backlight.attention(q, k, v, causal=True, backend=backend), into, dy)
        torch.cuda.current_stream().wait_stream(side)
        want = torch.autograd.grad(backlight.attention(q, k, v, causal=True, backend="tiled"), into, dy)
        assert far(got, want) < 1e-2
