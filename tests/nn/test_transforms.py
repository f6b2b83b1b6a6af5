"""Layers under PyTorch's transforms: compile, checkpoint, vmap, export, FSDP2, CUDA graphs."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from backlight.nn import Attention, KVCache, LazyAttention
from backlight.nn.attention import Attention as Base

# compilers look into the allocators that the other tests poison
pytestmark = pytest.mark.clean_memory

DIM, HEADS = 24, 4
LAYERS = {
    "attention": lambda: Attention(DIM, HEADS, kv_heads=2, qk_norm=True, sink=True, gate=True, window=(6, 0)),
    "lazy": lambda: LazyAttention(DIM, HEADS, distances=7),
}


@pytest.fixture(autouse=True)
def no_leftovers():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> Base:
    layer = LAYERS[request.param]()
    with torch.no_grad():
        if isinstance(layer, LazyAttention):
            layer.bias.normal_()
            layer.tau.copy_(torch.tensor([-0.6, -0.2, 0.3, 0.1]))
    return layer


def gradients(layer: nn.Module, y: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(y.square().sum(), parameters), strict=True))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert set(got) == set(want)
    for name, grad in got.items():
        torch.testing.assert_close(grad, want[name], msg=lambda text, name=name: f"{name}: {text}")


def test_compiled_in_one_graph_for_every_length(layer: Base) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)

    def step(length: int) -> None:
        x = torch.randn(2, length, DIM)
        y = compiled(x)
        torch.testing.assert_close(y, layer(x))
        assert_same(gradients(layer, y), gradients(layer, layer(x)))

    step(9)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (17, 40, 64):
            step(length)


def test_compiled_packed_for_every_set_of_lengths(layer: Base) -> None:
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)

    def step(lengths: list[int]) -> None:
        x, cu = torch.randn(sum(lengths), DIM), torch.tensor([0, *lengths]).cumsum(0)
        y = compiled(x, cu_seqlens=cu)
        torch.testing.assert_close(y, layer(x, cu_seqlens=cu))
        assert_same(gradients(layer, y), gradients(layer, layer(x, cu_seqlens=cu)))

    step([4, 9, 3])
    with torch.compiler.set_stance("fail_on_recompile"):
        step([7, 5, 11, 2])
        step([30, 2, 8])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_compiled_under_autocast(layer: Base) -> None:
    x = torch.randn(2, 9, DIM)
    with torch.autocast("cpu", torch.bfloat16):
        plain = layer(x)
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert compiled.dtype == torch.bfloat16
    torch.testing.assert_close(compiled, plain)


@torch.no_grad()
def test_compiled_generation_gives_the_same(layer: Base) -> None:
    x = torch.randn(1, 12, DIM)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True)
    cache = KVCache()
    steps = torch.cat([compiled(part, cache=cache) for part in x.split(1, dim=1)], dim=1)
    torch.testing.assert_close(steps, layer(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(layer: Base, reentrant: bool) -> None:
    x = torch.randn(2, 9, DIM, requires_grad=True)
    want = gradients(layer, layer(x))
    y = checkpoint(layer, x, use_reentrant=reentrant)
    y.square().sum().backward()
    assert_same({name: p.grad for name, p in layer.named_parameters()}, want)


def test_checkpointed_and_compiled(layer: Base) -> None:
    def run(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False)

    x = torch.randn(2, 9, DIM)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    assert_same(gradients(layer, compiled(x)), gradients(layer, layer(x)))


def test_exported_with_a_free_length(layer: Base) -> None:
    exported = torch.export.export(
        layer, (torch.randn(2, 9, DIM),), dynamic_shapes={"x": {1: torch.export.Dim("length", min=2)}}
    )
    for length in (9, 31):
        x = torch.randn(2, length, DIM)
        torch.testing.assert_close(exported.module()(x), layer(x))


def test_vmap_over_inputs(layer: Base) -> None:
    x = torch.randn(3, 2, 9, DIM)
    y = torch.func.vmap(layer)(x)
    torch.testing.assert_close(y, torch.stack([layer(one) for one in x]))
    assert_same(gradients(layer, y), gradients(layer, torch.stack([layer(one) for one in x])))


def test_vmap_over_an_ensemble(layer: Base) -> None:
    """Models stacked along a new axis, learned terms included."""
    other = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    parameters, buffers = torch.func.stack_module_state([layer, other])
    x = torch.randn(2, 9, DIM)
    y = torch.func.vmap(lambda p, b: torch.func.functional_call(layer, (p, b), (x,)))(parameters, buffers)
    torch.testing.assert_close(y, torch.stack([layer(x), other(x)]))


def test_deep_copies_are_independent(layer: Base) -> None:
    other = copy.deepcopy(layer)
    x = torch.randn(1, 5, DIM)
    with torch.no_grad():
        other.qkv.weight.add_(1.0)
    assert not torch.equal(other(x), layer(x))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_fsdp2_takes_the_same_steps(tmp_path: Path) -> None:
    """Two processes with gloo: parameters after three steps are those of an unsharded model on the whole batch."""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": str(here.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    store = tmp_path / "store"
    command = [sys.executable, str(here / "fsdp_worker.py")]
    workers = [
        subprocess.Popen([*command, str(rank), "2", str(store)], env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=1500)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    assert all((tmp_path / f"store.{rank}").read_text() == "done" for rank in range(2))


@pytest.mark.gpu
def test_cuda_graph() -> None:
    layer, x = LazyAttention(128, 4, distances=16, gate=True).cuda(), torch.randn(2, 64, 128, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    layer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer(x).square().sum().backward()
    x.copy_(torch.randn_like(x))
    graph.replay()
    got = {name: p.grad.clone() for name, p in layer.named_parameters()}
    assert_same(got, gradients(layer, layer(x)))
