"""What is remembered of a call, on a GPU: streams, addresses and CUDA graphs change under it."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import backlight

pytestmark = pytest.mark.gpu
Step = Callable[[], tuple[Tensor, ...]]
KINDS = ["plain", "lazy", "sink and gate", "packed"]
BACKENDS = ["hopper", "triton"]


def refused_by(backend: str) -> str:
    q = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16, device="cuda")
    return "; ".join(backlight.explain(q, q, q).reasons[backend])


def taken_by(backend: str) -> None:
    if reason := refused_by(backend):
        pytest.skip(reason)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels into the cache on disk, side by side: one after the other they take longer than all the tests."""
    jobs = [job for job in product(KINDS, BACKENDS) if not refused_by(job[1])]
    with multiprocessing.get_context("spawn").Pool(len(jobs)) as pool:
        pool.starmap(run_once, jobs)


def run_once(kind: str, backend: str) -> None:
    _, step = step_of(kind, backend)
    step()
    torch.cuda.synchronize()


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
@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_call_again_asks_triton_nothing(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch goes to Triton's compiled launcher, and the numbers stay."""
    import triton

    from backlight.backends.replaying import program

    taken_by(backend)
    _, step = step_of(kind, backend)
    # once, and once recorded
    step()
    want = step()
    monkeypatch.setattr(triton.JITFunction, "run", None)
    for _ in range(3):
        assert far(step(), want) < 2e-3
    launches = [again for found in program._programs.values() if found is not None for again, _ in found.launches]
    assert launches
    assert all(again.direct is not None for again in launches)


@pytest.mark.parametrize("view", ["transposed", "expanded", "columns"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_laid_out_otherwise(view: str, backend: str) -> None:
    """Copies of what kernels cannot read in place are made in every call."""
    taken_by(backend)
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 200, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3))
    for _ in range(3):
        if view == "transposed":
            dy = torch.randn(2, 200, 2, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
        elif view == "expanded":
            dy = torch.randn(1, dtype=torch.bfloat16, device="cuda").expand(q.shape)
        else:
            dy = torch.randn(2, 2, 64, 200, dtype=torch.bfloat16, device="cuda").transpose(2, 3)
        got, want = (
            torch.autograd.grad(backlight.attention(q, k, v, causal=True, backend=name), (q, k, v), dy)
            for name in (backend, "tiled")
        )
        assert far(got, want) < 1e-2


@pytest.mark.parametrize("backend", BACKENDS)
def test_inside_a_compiled_function(backend: str) -> None:
    """The operators, as a compiler traces them, replay what they did too."""
    taken_by(backend)
    torch.manual_seed(0)
    leaves = [torch.randn(2, 2, 200, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True) for _ in range(3)]

    def work(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return backlight.attention(q, k, v, causal=True, backend=backend) * 2

    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        dy = torch.randn_like(leaves[0])
        got, want = (torch.autograd.grad(made(*leaves), leaves, dy) for made in (compiled, work))
        assert far(got, want) < 2e-3
