"""What a warmed call does on the host, counted: launches, allocations, descriptors, Python functions. Nothing is timed.

Kernels stand still: a launch is written down and leaves its outputs as they were.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from cards import Everything
from counting import functions_entered, memory_operations
from standing_still import Blocks, Jitted, Machine, address_of, problem, role, step
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import backlight
from backlight import binding
from backlight._private import names
from backlight._private import triton as private_triton
from backlight.backends import hopper
from backlight.backends.hopper import compiled, launch
from backlight.backends.hopper.config import BackwardConfig, ForwardConfig
from backlight.backends.hopper.forward import host as forward
from backlight.backends.replaying import program, replay
from backlight.call import Call, Memory
from backlight.config import override
from backlight.spec import AttentionSpec

# whatever the two directions import
hopper.host()
MODULES = [module for name, module in sys.modules.items() if name.startswith("backlight.backends.hopper.")]
PLAIN = ["_fwd_kernel", "_prepass_kernel", "_bwd_kernel", "_dq_convert_kernel"]
# 52 when it was set; 353 before decisions were remembered
MOST_FUNCTIONS = 58


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A Hopper GPU that takes CPU tensors and computes nothing."""
    there = Machine()
    for module in MODULES:
        for name, value in list(vars(module).items()):
            if name.startswith("_") and name.endswith("_kernel"):
                monkeypatch.setattr(module, name, Jitted(value.fn.__name__, value.arg_names, there))
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(replay, "_maps", Memory())
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda device: 7))
    monkeypatch.setattr(launch, "_known", Memory())
    monkeypatch.setattr(program, "_programs", Memory())
    monkeypatch.setattr(program, "_once", Everything())
    monkeypatch.setattr(binding, "_bound", Memory())
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(hopper, "missing", lambda: ())
    monkeypatch.setattr(hopper, "_reasons", Memory())
    monkeypatch.setattr(hopper.HopperBackend, "_find_reasons", lambda self, call: ())
    return there


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    there = Blocks()
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, partial(there.allocate, getattr(torch, name)))
    return there


# --- launches ----------------------------------------------------------------------------------------------------------------


def test_a_warmed_call_asks_triton_nothing(machine: Machine) -> None:
    step(problem())
    assert [(role(name), asked) for name, asked, _, _ in machine.launches] == [(name, True) for name in PLAIN]
    del machine.launches[:]
    step(problem())
    assert [(role(name), asked) for name, asked, _, _ in machine.launches] == [(name, False) for name in PLAIN]


@pytest.mark.parametrize("views", [("bhsd",), ("one tensor", "bhsd"), ("bhsd", "one tensor")], ids=str)
def test_a_remembered_launch_gets_the_tensors_of_its_own_call(machine: Machine, views: tuple[str, ...]) -> None:
    for view in views * 3:
        del machine.launches[:]
        tensors = problem(view=view)
        step(tensors)
        told = {role(name): args for name, _, _, args in machine.launches}
        for key, x in zip(("q_desc", "k_desc", "v_desc"), tensors, strict=False):
            assert address_of(told["_fwd_kernel"][key]) == address_of(told["_bwd_kernel"][key]) == x.data_ptr()
        dy = tensors[3].data_ptr()
        assert address_of(told["_prepass_kernel"]["dy_ptr"]) == address_of(told["_bwd_kernel"]["do_desc"]) == dy
        assert address_of(told["_prepass_kernel"]["lse2_ptr"]) == address_of(told["_bwd_kernel"]["lse_desc"])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({}, {"causal": False}),
        ({}, {"window": (5, 0)}),
        ({}, {"scale": 0.5}),
        ({}, {"deterministic": True}),
        ({}, {"lse": True}),
        ({"wanted": "kv"}, {}),
        ({"rows": 200}, {}),
        ({"rows": 4000}, {}),
        ({"heads": 2}, {}),
        ({"view": "bshd"}, {}),
        ({"view": "expanded do"}, {}),
        ({"dtype": torch.float16}, {}),
        ({}, {"bias": torch.zeros(4, 8)}),
        ({}, {"sink": torch.zeros(4)}),
        ({}, {"tau": torch.zeros(4)}),
        ({}, {"hooks": True}),
    ],
    ids=str,
)
def test_a_remembered_call_is_the_call_of_a_fresh_process(machine: Machine, shape: Any, options: Any) -> None:
    """Whatever ran before, kernels are told what they would be told if nothing had run."""
    fresh = machine.took(lambda: step(problem(**shape), **options))
    for memory in (binding._bound, program._programs, launch._known, compiled._compiled):
        memory.clear()
    plain = machine.took(lambda: step(problem()))
    assert fresh != plain
    for _ in range(3):
        assert machine.took(lambda: step(problem(**shape), **options)) == fresh
        assert machine.took(lambda: step(problem())) == plain


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"bias": torch.zeros(4, 8)}, 1 + 1 + 5),
        ({"bias": torch.zeros(8, 4).T, "tau": torch.zeros(4)}, 1 + 1 + 6),
        ({"sink": torch.zeros(4)}, 1 + 4),
        ({"tau": torch.zeros(4), "sink": torch.zeros(4)}, 1 + 5),
        ({"gate": torch.zeros(1, 4, 128, 64, dtype=torch.bfloat16)}, 1 + 3),
        ({"softcap": 3.0}, 1 + 3),
        ({"cu_seqlens_q": torch.tensor([0, 50, 128])}, 2 + 4),
        ({"cu_seqlens_q": torch.tensor([0, 50, 128]), "bias": torch.zeros(4, 8)}, 3 + 6),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
def test_every_kind_of_call_is_a_program(machine: Machine, options: dict[str, Any], launches: int) -> None:
    """Nothing but allocations and launches: the padded table, sums over heads and first tiles are small kernels."""
    given = {
        name: x.clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in options.items()
    }

    def run() -> None:
        q, k, v, dy = (x.detach() for x in problem())
        if "cu_seqlens_q" in given:
            into = [x[0].transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)]
            y, dy = backlight.attention_varlen(*into, causal=True, backend="hopper", **given), dy[0].transpose(0, 1)
        else:
            into = [x.requires_grad_() for x in (q, k, v)]
            y = backlight.attention(*into, causal=True, backend="hopper", **given)
        torch.autograd.grad(y, [*into, *(x for x in given.values() if isinstance(x, Tensor) and x.requires_grad)], dy)

    run()
    assert [p is not None for p in program._programs.values()] == [True, True]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch.Launch, "__init__", None)
        assert len(machine.took(run)) == launches


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("forward", ForwardConfig(64, 2)),
        ("backward", BackwardConfig(64, 128)),
        ("backward", BackwardConfig(64, 64, split=True)),
    ],
    ids=str,
)
def test_a_forced_configuration_is_neither_remembered_nor_missed(machine: Machine, name: str, config: Any) -> None:
    plain = machine.took(lambda: step(problem()))
    with override(f"hopper.{name}", config):
        forced = machine.took(lambda: step(problem()))
        assert forced != plain
        assert machine.took(lambda: step(problem())) == forced
    assert machine.took(lambda: step(problem())) == plain


def test_tensors_in_the_wrong_order_are_caught(machine: Machine) -> None:
    q, k, _, _ = problem()
    here = launch.Launch(Call(AttentionSpec(), q, k, k))
    kernel = Jitted("kernel", ["a", "b"], machine)
    for tensors, caught in (
        ((q, k), nullcontext()),
        ((k, q), pytest.raises(AssertionError)),
        ((q,), pytest.raises(AssertionError)),
    ):
        here.known.clear()
        with caught:
            here.start(kernel, tensors, lambda: {"grid": (1,), "args": [q, k], "constants": {}})


# --- how much of everything --------------------------------------------------------------------------------------------------


@pytest.mark.clean_memory
def test_allocations_of_a_warmed_call(machine: Machine) -> None:
    """y, lse | dq, dk, dv, and memory for lse2, delta and the accumulator of dq; nothing is filled or copied."""
    tensors = problem()
    step(tensors)
    assert memory_operations(lambda: step(tensors)) == {"empty_strided": 6}


def test_no_descriptor_is_checked_again(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    step(problem())
    monkeypatch.setattr(TensorDescriptor, "__post_init__", None)
    monkeypatch.setattr(launch, "usable_strides", None)
    step(problem())


def test_tensor_maps_are_made_once_for_an_address(machine: Machine, blocks: Blocks) -> None:
    tensors = problem()
    for expected in (0, 15, 0, 0):
        before = machine.encoded
        blocks.free()
        step(tensors)
        assert machine.encoded - before == expected
    tensors[0] = tensors[0].detach().clone().requires_grad_()
    blocks.free()
    step(tensors)
    # q alone lies elsewhere; a launch that misses one map makes all of its own
    assert machine.encoded - before == 4 + 9


def test_nothing_of_a_call_stays(machine: Machine) -> None:
    tensors = problem()
    for _ in range(3):
        step(tensors)
    watched = [weakref.ref(x) for x in tensors]
    del tensors
    machine.launches.clear()
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


def test_profilers_hear_of_launches(machine: Machine) -> None:
    """With a hook hung up, launches go through Triton's own function, which calls it."""
    step(problem())
    asked = []
    knob = triton.knobs.runtime.launch_enter_hook
    knob.add(asked.append)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replay.Direct, "prepared", None)
            step(problem())
    finally:
        knob.remove(asked.append)
    assert len(machine.launches) == 8


def test_functions_of_a_warmed_call(machine: Machine, blocks: Blocks) -> None:
    """Python functions of this package entered by one forward and backward."""
    tensors = problem()
    for _ in range(3):
        blocks.free()
        step(tensors)
    blocks.free()
    found = functions_entered(lambda: step(tensors))
    assert sum(found.values()) <= MOST_FUNCTIONS, found.most_common()


# --- without the internals of Triton and torch -------------------------------------------------------------------------------

# what is asked of the compiler, which no launch needs
COMPILER = [
    "triton.backends.nvidia.compiler.CUDAOptions",
    "triton.backends.nvidia.compiler.get_ptxas",
    "triton.runtime.cache.get_cache_manager",
]
LAUNCHES = [
    name for name, cost in private_triton.NAMES.costs.items() if name not in COMPILER and "hopper backend" not in cost.without
]


def door_without(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another copy of the door, which does not find one name."""
    honest = names.find
    monkeypatch.setattr(names, "find", lambda path: None if path == name else honest(path))
    spec = importlib.util.spec_from_file_location("door", private_triton.__file__)
    assert spec is not None
    assert spec.loader is not None
    door = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(door)
    assert list(door.NAMES.missing) == [name]
    return door


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_without_a_name_of_triton(machine: Machine, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are told the same, by Triton's own function, in every call."""
    plain = machine.took(lambda: step(problem()))
    door = door_without(name, monkeypatch)
    for module in (replay, program):
        for function in ("heard", "opened", "stream_of"):
            if hasattr(module, function):
                monkeypatch.setattr(module, function, getattr(door, function))
    if name == "triton.runtime.driver":
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    else:
        # nobody goes below Triton's function
        monkeypatch.setattr(replay.Direct, "prepared", None)
    program._programs.clear()
    for _ in range(3):
        assert machine.took(lambda: step(problem())) == plain


def test_launches_without_a_mode_of_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded; the host function runs in every call."""
    monkeypatch.setattr(program, "SEES", False)
    plain = machine.took(lambda: step(problem()))
    for _ in range(2):
        assert machine.took(lambda: step(problem())) == plain
    assert not program._programs


def test_compilations_without_a_name_of_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked for that this Triton may not have, a record names no assembler of its, and no PTX is rewritten."""
    assert "maxnreg" in private_triton.compiler_options
    assert private_triton.assembler()
    options, assembler, cache = COMPILER
    assert not door_without(options, monkeypatch).compiler_options
    monkeypatch.undo()
    assert door_without(assembler, monkeypatch).assembler() is None
    monkeypatch.undo()
    assert door_without(cache, monkeypatch).kernel_cache is None


@pytest.mark.parametrize("name", [name for name in private_triton.NAMES.costs if name not in LAUNCHES + COMPILER])
def test_kernels_without_a_name_of_triton(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend says that it cannot run here, before its kernels are imported."""
    door = door_without(name, monkeypatch)
    monkeypatch.setattr(private_triton, "kernels_lack", door.kernels_lack)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hopper.missing.__wrapped__() == (f"this Triton has no {name}",)
