"""The host side of the Triton backend: a call like one before it is a list of launches, and each is what Triton would start.

Triton's own classes of the installed version run here, down to the compiled launcher and the encoder of tensor maps, and
compile for a Hopper card. CPU tensors stand in for its memory.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
from cards import Card, Everything, flat
from counting import functions_entered, memory_operations
from triton.backends.compiler import GPUTarget

import backlight
from backlight import binding, mask
from backlight._private.triton import kernels_lack
from backlight.backends import triton as backend
from backlight.backends.intervals import tiles
from backlight.backends.replaying import program, replay
from backlight.backends.triton import dbias, delta, dkdv, dpair, dq, elastic, forward, fused, launch, members, small, table
from backlight.backends.triton.config import KernelConfig
from backlight.call import Call, Memory
from backlight.config import override
from backlight.spec import AttentionSpec

MODULES = [forward, elastic, delta, dq, dkdv, dbias, dpair, fused, table, small, launch, tiles]
if not kernels_lack():
    from backlight.backends.hopper.pair import host as pair

    MODULES.append(pair)
KERNELS = [
    kernel for module in MODULES for name, kernel in vars(module).items() if name.startswith("_") and name.endswith("_kernel")
]
PLAIN = ["_fwd_kernel", "_delta_kernel", "_dq_kernel", "_dkdv_kernel"]
# see tests/hopper/test_host_work.py
MOST_FUNCTIONS = 58
# small tiles, which compile in no time
D, TILES = 16, KernelConfig(16, 16, 1, 1, tma=True)


class Watched(Card):
    def took(self, work: Callable[[], Any]) -> list[tuple[str, list[Any]]]:
        """Kernels started during the work, with their arguments."""
        del self.launches[:], self.names[:]
        work()
        return list(zip(self.names, map(flat, self.launches), strict=True))


@pytest.fixture(scope="module")
def driven() -> Iterator[Watched]:
    """A Hopper card that computes nothing; kernels stay compiled from one test to the next."""
    there = Watched()
    for kernel in KERNELS:
        kernel.device_caches.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.driver, "_active", there.driver)
        yield there
        # compiled kernels unload themselves, while the driver that loaded them is there
        for kernel in KERNELS:
            kernel.device_caches.clear()
        gc.collect()


@pytest.fixture
def card(driven: Watched, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    """It takes CPU tensors, and nothing is remembered of earlier tests."""
    monkeypatch.setattr(replay, "_maps", Memory())
    monkeypatch.setattr(program, "_programs", Memory())
    monkeypatch.setattr(program, "_once", Everything())
    monkeypatch.setattr(binding, "_bound", Memory())
    monkeypatch.setattr(launch, "hopper", lambda tensor: True)
    monkeypatch.setattr("backlight.backends.triton.config.heuristic", lambda kernel, call, device: TILES)
    monkeypatch.setattr(backend, "on_gpu", lambda: True)
    monkeypatch.setattr(backend.TritonBackend, "why_not", lambda self, call: ())
    yield driven
    program._programs.clear()
    binding._bound.clear()
    del driven.launches[:], driven.names[:]


def problem(rows: int = 96, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """q, k, v, dy."""
    *qkv, dy = (torch.randn(1, 4, rows, D, dtype=dtype) for _ in range(4))
    return [*(x.requires_grad_() for x in qkv), dy]


def step(tensors: list[Tensor], **options: Any) -> None:
    q, k, v, dy = tensors
    y = backlight.attention(q, k, v, **{"causal": True, "backend": "triton", **options})
    terms = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    torch.autograd.grad(y, [x for x in (q, k, v, *terms) if x.requires_grad], dy)


def step_packed(tensors: list[Tensor], **options: Any) -> None:
    q, k, v, dy = (x.detach()[0].transpose(0, 1).contiguous().requires_grad_() for x in tensors)
    y = backlight.attention_varlen(q, k, v, torch.tensor([0, 40, 96]), **{"causal": True, "backend": "triton", **options})
    torch.autograd.grad(y, [q, k, v], dy)


@contextmanager
def without_jit() -> Iterator[None]:
    """Inside, asking Triton for a kernel fails, and so does running a host function of the backend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.JITFunction, "run", None)
        patch.setattr(launch.Launch, "__init__", None)
        yield


@pytest.mark.parametrize("view", ["bhsd", "bshd", "expanded dy"])
def test_a_warmed_call_is_its_launches(card: Watched, view: str) -> None:
    """Of the same tensors: what is allocated lies elsewhere, all else the compiled launcher gets is what Triton gave it."""
    tensors = problem()
    if view == "bshd":
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(x.requires_grad) for x in tensors]
    if view == "expanded dy":
        tensors[3] = torch.randn(1, dtype=torch.bfloat16).expand(tensors[0].shape)
    extra = ["_copy_kernel"] if view == "expanded dy" else []
    by_triton = card.took(lambda: step(tensors))
    assert sorted(name for name, _ in by_triton) == sorted([*PLAIN, *extra])
    given = {x.data_ptr() for x in tensors}
    for _ in range(3):
        with without_jit():
            again = card.took(lambda: step(tensors))
        assert [name for name, _ in again] == [name for name, _ in by_triton]
        for (name, theirs), (_, ours) in zip(by_triton, again, strict=True):
            assert [type(x) for x in theirs] == [type(x) for x in ours], name
            for a, b in zip(theirs, ours, strict=True):
                assert a == b or memory(a, b, given), f"{name}: {a} {b}"
            assert {x for x in theirs if x in given} == {x for x in ours if x in given}
    launches = [again for found in program._programs.values() if found is not None for again, _ in found.launches]
    assert len(launches) == len(by_triton)
    assert all(again.direct is not None for again in launches)


def memory(a: Any, b: Any, given: set[int]) -> bool:
    """Addresses of what was allocated, or tensor maps of it."""
    if isinstance(a, tuple):
        return a[2:] == b[2:] and memory(a[1], b[1], given)
    return type(a) is int and min(a, b) > 1 << 20 and a not in given and b not in given


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({"bias": torch.zeros(4, 8)}, 2 + 6),
        ({"bias": torch.zeros(8, 4).T, "tau": torch.zeros(4)}, 3 + 7),
        ({"sink": torch.zeros(4)}, 1 + 4),
        ({"tau": torch.zeros(4), "sink": torch.zeros(4)}, 2 + 5),
        ({"gate": torch.zeros(1, 4, 96, D, dtype=torch.bfloat16)}, 1 + 3),
        # copied before the program, and its gradient after it
        ({"gate": torch.zeros(1, 4, D, 96, dtype=torch.bfloat16).mT}, 1 + 3),
        ({"softcap": 3.0}, 1 + 3),
        ({"deterministic": True}, 1 + 3),
        ({"mask": mask.chunks(40, 96)}, 3 + 6),
        ({"mask": mask.chunks(40, 96), "tau": torch.zeros(4)}, 5 + 8),
        ({"mask": mask.tree([-1, *range(95)]), "tau": torch.zeros(4), "causal": False}, 6 + 11),
        ({"pair_bias": torch.zeros(1, 4, 96, 96)}, 1 + 3),
        ({"pair_bias": torch.zeros(1, 1, 96, 96).mT, "causal": False}, 1 + 4),
        ({"pair_bias": torch.zeros(1, 4, 1, 96)}, 1 + 4),
        ({"packed": True}, 2 + 5),
        ({"packed": True, "bias": torch.zeros(4, 8)}, 3 + 8),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else str(value),
)
def test_every_kind_of_call_is_a_program(card: Watched, options: dict[str, Any], launches: int) -> None:
    """Nothing but allocations and launches: copies, sums over heads and first tiles are small kernels."""
    given = {name: x.clone().requires_grad_() if isinstance(x, Tensor) else x for name, x in options.items()}
    if "gate" in given:
        given["gate"] = options["gate"].detach().requires_grad_()
    run = step_packed if given.pop("packed", False) else step
    run(problem(), **given)
    assert [found is not None for found in program._programs.values()] == [True, True]
    with without_jit():
        assert len(card.took(lambda: run(problem(), **given))) == launches


@pytest.mark.clean_memory
def test_a_short_call_with_a_pair_bias_is_three_launches(card: Watched) -> None:
    """y, lse | dq, dk, dv, dpair_bias, and memory for its parts."""
    tensors, pair_bias = problem(16), torch.zeros(1, 1, 16, 16, dtype=torch.bfloat16).requires_grad_()

    def run() -> None:
        step(tensors, pair_bias=pair_bias, causal=False)

    for _ in range(2):
        run()
    with without_jit():
        assert [name for name, _ in card.took(run)] == ["_fwd_kernel", "_fused_kernel", "_pair_sums_kernel"]
    assert memory_operations(run) == {"empty_strided": 7}
    # the layout of one tensor more is asked for in both directions; an address that a program has not met is remembered first
    # (`Memory.__setitem__`), and in a crowded heap each run brings some
    entered = functions_entered(run, but=("replay.py", "triton.py"))
    assert sum(times for name, times in entered.items() if name != "call.py:__setitem__") <= MOST_FUNCTIONS, entered


@pytest.mark.skipif(bool(kernels_lack()), reason="the kernel is written in Gluon")
def test_a_bias_that_many_heads_share_is_one_sweep_less_on_hopper(card: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """dq and dpair_bias from one kernel, and the call is a program like any other."""
    monkeypatch.setattr(members, "on_hopper", lambda device: True)
    q, k, v, dy = (torch.randn(16, 1, 96, D, dtype=torch.bfloat16) for _ in range(4))
    tensors = [*(x.requires_grad_() for x in (q, k, v)), dy]
    pair_bias = torch.zeros(1, 1, 96, 96, dtype=torch.bfloat16).requires_grad_()
    wanted = ["_fwd_kernel", "_delta_kernel", "_pair_rows_kernel", "_pair_parts_kernel", "_dkdv_kernel"]

    def run() -> None:
        step(tensors, pair_bias=pair_bias, causal=False)

    for _ in range(2):
        assert [name for name, _ in card.took(run)] == wanted
    assert [found is not None for found in program._programs.values()] == [True, True]
    with without_jit():
        assert [name for name, _ in card.took(run)] == wanted
        # without its gradient too, where the bias does not learn
        pair_bias.requires_grad_(False)
    assert [name for name, _ in card.took(run)] == ["_fwd_kernel", "_delta_kernel", "_pair_rows_kernel", "_dkdv_kernel"]


@pytest.mark.clean_memory
def test_allocations_and_functions_of_a_warmed_call(card: Watched) -> None:
    """y, lse | dq, dk, dv, and memory for minus_lse2 and delta; no more Python of ours than `hopper` needs."""
    tensors = problem()
    for _ in range(2):
        step(tensors)
    assert memory_operations(lambda: step(tensors)) == {"empty_strided": 6}
    # what is prepared for new addresses is left out: the allocator of a card hands out the old ones
    entered = functions_entered(lambda: step(tensors), but=("replay.py", "triton.py"))
    assert sum(entered.values()) <= MOST_FUNCTIONS, entered.most_common()


def test_tensors_of_the_call_itself(card: Watched) -> None:
    for _ in range(3):
        tensors = problem()
        told = card.took(lambda given=tensors: step(given))
        q, k, v, dy = (x.data_ptr() for x in tensors)
        for name, wanted in zip(PLAIN, [{q, k, v}, {dy}, {q, k, v, dy}, {q, k, v, dy}], strict=True):
            (row,) = [row for which, row in told if which == name]
            maps = {x[1] for x in row if isinstance(x, tuple)}
            assert wanted <= maps | {x for x in row if type(x) is int}, name
            assert maps <= {q, k, v, dy}


def test_maps_are_made_once_for_an_address(card: Watched) -> None:
    tensors = problem()
    counts = []
    for _ in range(4):
        before = len(card.encoded)
        step(tensors)
        counts.append(len(card.encoded) - before)
    # k and v in the forward; k, v, q and dy in the backward
    assert counts == [6, 6, 0, 0]


@pytest.mark.parametrize(
    "options", [{"causal": False}, {"window": (5, 0)}, {"scale": 0.5}, {"bias": torch.zeros(4, 8)}, {"rows": 200}], ids=str
)
def test_another_call_is_another_program(card: Watched, options: dict[str, Any]) -> None:
    rows = {"rows": options["rows"]} if "rows" in options else {}
    terms = {name: x for name, x in options.items() if name != "rows"}

    def told(work: Callable[[], None]) -> list[Any]:
        """Kernels and all that they were told but addresses."""
        return [
            (name, [x[2:] if isinstance(x, tuple) else x for x in row if type(x) is not int or x < 1 << 20])
            for name, row in card.took(work)
        ]

    def other() -> None:
        step(problem(**rows), **terms)

    def usual() -> None:
        step(problem())

    fresh = told(other)
    program._programs.clear()
    binding._bound.clear()
    plain = told(usual)
    assert fresh != plain
    for _ in range(3):
        assert told(other) == fresh
        assert told(usual) == plain


def test_tf32_is_looked_at_in_every_call(card: Watched) -> None:
    """fp32 products: a kernel compiled for one precision must not run once the other is asked for."""
    tensors = problem(32, torch.float32)

    def precisions() -> set[str]:
        told = card.took(lambda: step(tensors))
        return {x for _, row in told for x in row if x in ("ieee", "tf32")}

    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for _ in range(3):
            for allowed, precision in ((False, {"ieee"}), (True, {"tf32"})):
                torch.backends.cuda.matmul.allow_tf32 = allowed
                assert precisions() == precision
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_forced_configuration_is_neither_remembered_nor_missed(card: Watched) -> None:
    tensors = problem(128)

    def grid() -> list[Any]:
        return [row[:3] for name, row in card.took(lambda: step(tensors)) if name == "_dq_kernel"]

    plain = grid()
    with override("triton.dq", KernelConfig(32, 16, 1, 1)):
        forced = [grid(), grid()]
    assert plain == [[8, 4, 1]]
    assert forced == [[[4, 4, 1]]] * 2
    assert grid() == plain


def test_nothing_of_a_call_stays(card: Watched) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        tensors = problem(32, dtype)
        for _ in range(3):
            step(tensors)
        watched = [weakref.ref(x) for x in tensors]
        del tensors
        card.launches.clear()
        gc.collect()
        assert [ref() for ref in watched] == [None] * 4


def test_another_vendors_launcher_is_used_whole(card: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arguments are built otherwise: calls are remembered, each launch goes through Triton's function."""
    monkeypatch.setattr(replay.Direct, "of", lambda *args: None)
    tensors = problem()
    by_triton = card.took(lambda: step(tensors))
    monkeypatch.setattr(replay.Direct, "prepared", None)
    again = card.took(lambda: step(tensors))
    assert [name for name, _ in again] == [name for name, _ in by_triton]
    assert [len(row) for _, row in again] == [len(row) for _, row in by_triton]


def test_hip_is_another_vendor(card: Watched) -> None:
    step(problem())
    found = next(iter(program._programs.values()))
    assert found is not None
    ((again, _),) = found.launches
    assert again.direct is not None
    made = next(cell.cell_contents for cell in again.run.__closure__ if hasattr(cell.cell_contents, "metadata"))
    fields = made.metadata._asdict() | {"target": GPUTarget("hip", "gfx942", 64)}
    elsewhere = SimpleNamespace(run=made.run, metadata=SimpleNamespace(**fields))
    assert replay.Direct.of(made, (1, 1, 1), again.args, len(again.constants)) is not None
    assert replay.Direct.of(elsewhere, (1, 1, 1), again.args, len(again.constants)) is None


def test_parts_of_a_larger_problem(card: Watched) -> None:
    """With tau the lse of whole rows and their counts come with the call; they are its inputs like others."""
    from backlight.call import Part

    q, k, v, _ = (x.detach() for x in problem())
    for _ in range(2):
        lse, n = torch.zeros(1, 4, 96), torch.ones(96, dtype=torch.int32)
        call = Call(AttentionSpec(tau=True), q, k, v, tau=torch.zeros(4), part=Part(lse, n))
        told = card.took(lambda call=call: backend.BACKEND.forward(call, False))
        assert [name for name, _ in told] == ["_elastic_kernel"]
        assert {lse.data_ptr(), n.data_ptr()} <= {x for x in told[0][1] if type(x) is int}
    assert [found is not None for found in program._programs.values()] == [True]
    needs = frozenset({"dq"})
    for _ in range(2):
        # the backward is given the same lse twice
        args = (q.float(), lse, q.float(), q.clone(), None, needs)
        told = card.took(lambda args=args: backend.BACKEND.backward(call, *args))
        assert [name for name, _ in told] == ["_delta_kernel", "_head_sums_kernel", "_dq_kernel"]
    assert [found is not None for found in program._programs.values()] == [True, True]
