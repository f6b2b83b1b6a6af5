"""Launches below Triton's Python: what its compiled launcher gets from us is what it gets from Triton.

Triton's own classes of the installed version run here, down to the compiled launcher and the encoder of tensor maps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl
from cards import Card, flat
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from backlight.backends.hopper import compiled, launch
from backlight.backends.hopper.launch import tile_descriptor
from backlight.backends.replaying import replay
from backlight.call import Memory


@gluon.jit(do_not_specialize=["n"])
def _described_kernel(a_desc, out_ptr, n, b_desc, scale, BLOCK: gl.constexpr):
    gl.store(out_ptr, n + BLOCK)


@triton.jit(do_not_specialize=["n"])
def _plain_kernel(out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr, n + BLOCK)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    there = Card()
    monkeypatch.setattr(compiled, "_compiled", {})
    monkeypatch.setattr(replay, "_maps", Memory())
    monkeypatch.setattr(launch, "_known", Memory())
    monkeypatch.setattr(triton.runtime.driver, "_active", there.driver)
    for kernel in (_described_kernel, _plain_kernel):
        kernel.device_caches.clear()
    yield there
    # compiled kernels unload themselves, while the driver that loaded them is there
    compiled._compiled.clear()
    launch._known.clear()
    for kernel in (_described_kernel, _plain_kernel):
        kernel.device_caches.clear()
    gc.collect()


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    a, b = (torch.zeros(1, 2, 64, 64, dtype=torch.float16) for _ in range(2))
    return a, torch.zeros(4, dtype=torch.int32), b


def described(a: Tensor, out: Tensor, b: Tensor) -> dict[str, Any]:
    args = [tile_descriptor(a, 64, 64, False), out, 11, tile_descriptor(b, 32, 64, False), 0.5]
    return {"grid": (3, 2), "args": args, "constants": {"BLOCK": 16}, "num_warps": 4}


def start(here: tuple[Tensor, Tensor, Tensor]) -> replay.Replay:
    arguments = described(*here)
    made = compiled.start(_described_kernel, **arguments)
    return replay.Replay(_described_kernel, made, arguments["grid"], arguments["args"], arguments["constants"])


def test_the_compiled_launcher_gets_the_same(card: Card) -> None:
    here = tensors()
    again = start(here)
    assert again.direct is not None
    for _ in range(2):
        again(here)
    by_triton, recorded, remembered = card.launches
    assert flat(by_triton) == flat(recorded) == flat(remembered)
    assert [type(x) for x in flat(by_triton)] == [type(x) for x in flat(remembered)]
    assert here[1].data_ptr() in flat(remembered)


def test_maps_are_made_once_for_an_address(card: Card) -> None:
    here, there = tensors(), tensors()
    again = start(here)
    counts = []
    for which in (here, here, there, here, there):
        before = len(card.encoded)
        again(which)
        counts.append(len(card.encoded) - before)
        a, out, b = which
        maps = [x for x in flat(card.launches[-1]) if isinstance(x, tuple)]
        assert [x[1] for x in maps] == [a.data_ptr(), b.data_ptr()]
        assert out.data_ptr() in flat(card.launches[-1])
    assert counts == [2, 0, 2, 0, 0]


def test_every_call_launches_once_however_few_maps_are_kept(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    class One(Memory[Any]):
        MOST = 1

    monkeypatch.setattr(replay, "_maps", One())
    here = tensors()
    again = start(here)
    for _ in range(3):
        again(here)
    assert len(card.launches) == 4
    assert len({str(flat(args)) for args in card.launches}) == 1


def test_a_kernel_without_descriptors(card: Card) -> None:
    out, other = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    made = compiled.start(_plain_kernel, (5,), [out, 3], {"BLOCK": 8}, num_warps=1)
    again = replay.Replay(_plain_kernel, made, (5,), [out, 3], {"BLOCK": 8})
    assert again.direct is not None
    again([out])
    again([other])
    by_triton, first, second = (flat(args) for args in card.launches)
    assert by_triton == first
    assert [other.data_ptr() if x == out.data_ptr() else x for x in first] == second
    assert first != second


def test_the_stream_of_the_moment(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tensors()
    again = start(here)
    again(here)
    monkeypatch.setattr(triton.runtime.driver.active, "get_current_stream", lambda device: 99)
    again(here)
    assert [args[replay.STREAM] for args in card.launches] == [7, 7, 99]


def test_no_tensor_is_kept(card: Card) -> None:
    here = tensors()
    again = start(here)
    for _ in range(2):
        again(here)
    watched = [weakref.ref(x) for x in here]
    card.launches.clear()
    del here
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3
    assert again.direct is not None


def test_hooks_are_called(card: Card) -> None:
    here = tensors()
    again = start(here)
    again(here)
    hook = triton.knobs.runtime.launch_enter_hook

    def heard(metadata: Any) -> None:
        raise AssertionError("only the compiled launcher calls it")

    hook.add(heard)
    try:
        again(here)
    finally:
        hook.remove(heard)
    again(here)
    passed = [any(x is hook for x in args) for args in card.launches]
    assert passed == [True, False, True, False]


@pytest.mark.parametrize("unlike", ["no launch", "another function", "scratch memory", "sanitizer"])
def test_another_launcher_is_left_alone(card: Card, unlike: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton is not built as expected, or a kernel needs memory of its own, every launch is Triton's."""
    here = tensors()
    arguments = described(*here)
    made = compiled.start(_described_kernel, **arguments)
    if unlike == "no launch":
        made = SimpleNamespace(run=SimpleNamespace(), metadata=made.metadata)
    elif unlike == "another function":
        monkeypatch.setattr(made.run, "launch", lambda *args: None)
    elif unlike == "sanitizer":
        monkeypatch.setattr(made.run, "gsan_enabled", True, raising=False)
    else:
        sizes = made.metadata._asdict() | {"global_scratch_size": 8}
        made = SimpleNamespace(run=made.run, metadata=SimpleNamespace(**sizes))
    assert replay.Direct.of(made, (1, 1, 1), tuple(arguments["args"]), 1) is None


def test_memory_starts_anew_when_full() -> None:
    class Small(Memory[int]):
        MOST = 3

    memory = Small()
    for n in range(3):
        memory[(n,)] = n
    assert len(memory) == 3
    memory[(3,)] = 3
    assert dict(memory) == {(3,): 3}
