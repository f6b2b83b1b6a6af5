"""The cost model: its limits, and that the page quotes it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from types import ModuleType

import pytest

from backlight.distributed.blocks import Shards
from backlight.distributed.cost import Machine, cost, flops, memory
from backlight.distributed.rule import Shape
from backlight.spec import AttentionSpec

SHAPE = Shape(batch=1, heads=8, kv_heads=8, d=64, dv=64, element=2)
MACHINE = Machine("test", forward=1e12, backward=0.8e12, bandwidth=1e10, latency=1e-5, memory=1e12, block=1e-5)
CAUSAL = AttentionSpec(causal=True)


def shards(world: int, layout: str = "zigzag", length: int = 4096, spec: AttentionSpec = CAUSAL) -> Shards:
    return Shards(spec, layout, world, length, length)


def test_flops_are_those_of_the_accounting() -> None:
    """Eq. 41 in the limit of long causal rows: 4 B H S^2 D / 2, and 2.5 times that backward."""
    pairs = CAUSAL.visible_pairs(4096, 4096)
    forward = flops(SHAPE, pairs, False)
    assert forward == pytest.approx(2 * 8 * 4096**2 * 64, rel=1e-3)
    assert flops(SHAPE, pairs, True) == 2.5 * forward


@pytest.mark.parametrize("backward", [False, True])
def test_a_free_wire_leaves_the_computation(backward: bool) -> None:
    free = replace(MACHINE, bandwidth=1e30, latency=0.0, memory=1e30, block=0.0)
    one = cost(SHAPE, shards(1), free, "ring", backward)
    for world in (2, 4, 8):
        for strategy in ("ring", "all_to_all"):
            found = cost(SHAPE, shards(world), free, strategy, backward)
            assert found.seconds == pytest.approx(one.seconds / world, rel=0.01), (world, strategy)
            assert found.exposed == pytest.approx(0, abs=1e-9)


def test_a_slow_wire_is_what_one_waits_for() -> None:
    slow = replace(MACHINE, bandwidth=1e6)
    found = cost(SHAPE, shards(4), slow, "ring")
    assert found.seconds == pytest.approx(found.wire, rel=0.05)
    assert found.exposed > 0.9 * found.seconds


def test_a_wire_as_fast_as_the_computation_is_hidden() -> None:
    found = cost(SHAPE, shards(4), replace(MACHINE, bandwidth=1e12), "ring")
    assert found.exposed == 0
    assert found.wire > 0


def test_contiguous_waits_for_its_last_rank() -> None:
    """Rank W - 1 of W sees 2 - 1/W times the mean number of pairs."""
    machine = replace(MACHINE, bandwidth=1e30, latency=0.0, memory=1e30, block=0.0)
    balanced, unbalanced = (cost(SHAPE, shards(8, layout), machine, "ring").seconds for layout in ("zigzag", "contiguous"))
    assert unbalanced / balanced == pytest.approx(2 - 1 / 8, rel=0.01)


def test_a_window_waits_for_one_message() -> None:
    spec = AttentionSpec(causal=True, window=(255, 0))
    found = cost(SHAPE, shards(8, "contiguous", spec=spec), MACHINE, "ring")
    assert found.wire == pytest.approx(512 * 8 * 128 * 2 / MACHINE.bandwidth + MACHINE.latency)


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_memory_halves_with_the_world(strategy: str) -> None:
    held = [memory(SHAPE, shards(world), 0, strategy) for world in (2, 4, 8, 16)]
    assert [held[0] / x for x in held] == [1, 2, 4, 8]


def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    return importlib.import_module("make_distributed_pictures")


def test_the_page_quotes_the_model() -> None:
    """Tables of docs/distributed.md are what the model and the records give today (the slow test checks the long ones)."""
    module = pictures()
    page = module.PAGE.read_text()
    for name in ("cpu", "constants", "memory"):
        assert module.table(name) in page, f"{name}: run python tools/make_distributed_pictures.py"


@pytest.mark.slow
def test_the_long_tables_too() -> None:
    module = pictures()
    assert module.filled(module.PAGE.read_text()) == module.PAGE.read_text()
