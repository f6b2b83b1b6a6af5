"""What ranks send, what they keep, and what they say when somebody is missing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from test_memory import memory_of
from torch import Tensor

import backlight
from backlight import api
from backlight.distributed import ContextParallel, rule, simulate
from backlight.distributed.autograd import SHARED, Strategy, backward, options_of
from backlight.distributed.blocks import Shards
from backlight.distributed.simulation import Alone, Simulated
from backlight.spec import AttentionSpec

FULL = frozenset({"dq", "dk", "dv"})
GEOMETRY = {
    "causal": {"causal": True},
    "full": {},
    "window": {"window": (9, 0), "causal": True},
    "two-sided window": {"window": (5, 5)},
}


def prepared(rank: Simulated, whole: Tensor, layout: str, strategy: str, options: dict) -> tuple[Strategy, object]:
    context = ContextParallel(rank, layout, strategy)
    own = context.shard(whole, 2)
    chosen, call, _ = context.prepare(partial(api.call_of, own, own, own, **options), None)
    return chosen, call


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
@pytest.mark.parametrize("geometry", GEOMETRY)
def test_bytes_are_those_of_the_rule(layout: str, strategy: str, geometry: str) -> None:
    """The rule counts from the geometry what the strategies really send, forward and backward, rank by rank."""
    options, world = GEOMETRY[geometry], 4
    whole = torch.randn(2, 4, 50, 8, dtype=torch.bfloat16)
    sent_by = {"ring": rule.sent_by_ring, "all_to_all": rule.sent_by_all_to_all}[strategy]

    def measure(rank: Simulated) -> tuple[int, int]:
        chosen, call = prepared(rank, whole, layout, strategy, options)
        y, _, kept = chosen.forward(call)
        forward = rank.bytes_sent
        backward(chosen, options_of(call, True), tuple(kept), torch.ones_like(y), None, FULL)
        return forward, rank.bytes_sent - forward

    measured = simulate(world, measure)
    shards = Shards(api.call_of(whole, whole, whole, **options).spec, layout, world, 50, 50)
    shape = rule.Shape(batch=2, heads=4, kv_heads=4, d=8, dv=8, element=2)
    assert measured == [(sent_by(shape, shards, r), sent_by(shape, shards, r, True)) for r in range(world)]


def test_a_narrow_window_sends_to_one_neighbour() -> None:
    spec = AttentionSpec(causal=True, window=(15, 0))
    shape = rule.Shape(batch=1, heads=4, kv_heads=4, d=8, dv=8, element=2)
    narrow, wide = (Shards(s, "contiguous", 8, 256, 256) for s in (spec, spec.replace(window=(None, None))))
    assert rule.sent_by_ring(shape, narrow, 0) == rule.sent_by_ring(shape, wide, 0) / 7
    assert rule.sent_by_ring(shape, narrow, 7) == 0


def test_the_rule() -> None:
    """Fewer bytes win; a tie and heads that do not divide go to the ring."""
    shape = rule.Shape(batch=1, heads=8, kv_heads=8, d=64, dv=64, element=2)
    causal = Shards(AttentionSpec(causal=True), "zigzag", 8, 1024, 1024)
    assert rule.choose(shape, causal) == "all_to_all"
    assert rule.choose(replace(shape, kv_heads=4), causal) == "ring"
    grouped = replace(shape, heads=32)
    assert rule.choose(grouped, causal) == "all_to_all"
    assert rule.choose(grouped, replace(causal, spec=AttentionSpec(causal=True, window=(15, 0)), layout="contiguous")) == "ring"
    assert rule.choose(grouped, replace(causal, world=2)) == "ring"


# --- learned terms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_learned_gradients_summed_or_left_alone(strategy: str) -> None:
    """sum_learned=False leaves each rank its share; the shares add up to what sum_learned=True gives every rank."""
    torch.manual_seed(0)
    q, bias, sink, tau = torch.randn(1, 2, 24, 8), torch.randn(2, 9), torch.randn(2), torch.tensor([-0.5, 0.3])

    def gradients(sum_learned: bool, rank: Simulated) -> list[Tensor]:
        context = ContextParallel(rank, strategy=strategy, sum_learned=sum_learned)
        terms = {n: x.clone().requires_grad_() for n, x in (("bias", bias), ("sink", sink), ("tau", tau))}
        own = context.shard(q, 2)
        y = backlight.attention(own, own, own, causal=True, **terms, context=context)
        return list(torch.autograd.grad(y.square().sum(), list(terms.values())))

    summed, shares = (simulate(2, partial(gradients, whole)) for whole in (True, False))
    # neither a pair bias nor entmax goes with tau: tests/pair_bias, tests/test_entmax_calls.py
    assert len(summed[0]) == len(SHARED) - 2
    for first, second, one, other in zip(*summed, *shares, strict=True):
        assert torch.equal(first, second)
        torch.testing.assert_close(one + other, first)
        assert not torch.equal(one, other)


# --- memory ------------------------------------------------------------------------------------------------------------------


def memory(world: int, strategy: str, whole: Tensor) -> tuple[int, int]:
    """(bytes kept for the backward, peak bytes of a training step beyond the inputs) of one rank."""
    context = ContextParallel(Alone(0, world), strategy=strategy)
    q, k, v = (context.shard(whole, 2).clone().requires_grad_() for _ in range(3))
    kept: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    def train() -> None:
        y = backlight.attention(q, k, v, causal=True, context=context)
        torch.autograd.grad(y, [q, k, v], torch.ones_like(y))

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        train()
    return sum(kept.values()), memory_of(train).peak


@pytest.mark.parametrize("strategy", ["ring", "all_to_all"])
def test_memory_falls_with_the_world(strategy: str) -> None:
    """What is kept is exactly 1 / world; the peak, with keys in flight and fp32 sums, falls to 0.6 or less per doubling."""
    whole = torch.randn(1, 8, 2048, 16)
    kept, peak = zip(*(memory(world, strategy, whole) for world in (1, 2, 4, 8)), strict=True)
    assert [kept[0] / x for x in kept] == [1, 2, 4, 8], kept
    # a world of one has nothing in flight
    assert peak[1] <= peak[0], peak
    assert all(later <= 0.6 * earlier for earlier, later in pairwise(peak[1:])), peak


# --- failures (those of real processes: checks.py) ---------------------------------------------------------------------------


def test_a_rank_that_leaves_is_named_with_the_step() -> None:
    """Rank 1 agrees on the call and then goes away."""
    q = torch.randn(1, 2, 16, 8)

    def work(rank: Simulated) -> None:
        chosen, call = prepared(rank, q, "zigzag", "ring", {})
        if rank.rank == 0:
            chosen.forward(call)

    with pytest.raises(TimeoutError, match=r"rank 0: waited for 0.5 s for rank 1 in step 'forward 1 of 1, keys'"):
        simulate(2, work, timeout=0.5)


def test_one_sentence_per_disagreement() -> None:
    q = torch.randn(1, 4, 16, 8)
    table = torch.randn(4, 3)
    ways = {
        "causal: rank 0 has False, rank 1 has True": lambda r: {"causal": bool(r)},
        "window left: rank 0 has None, rank 1 has 3": lambda r: {"window": (3, 0) if r else (None, 0)},
        "scale: rank 0 has 0.5, rank 1 has 0.25": lambda r: {"scale": 0.25 if r else 0.5},
        "softcap: rank 0 has None, rank 1 has 2": lambda r: {"softcap": 2.0 if r else None},
        "the length of bias: rank 0 has None, rank 1 has 3": lambda r: {"bias": table if r else None},
        "sink: rank 0 has not given, rank 1 has given": lambda r: {"sink": torch.zeros(4) if r else None},
        "deterministic: rank 0 has False, rank 1 has True": lambda r: {"deterministic": bool(r)},
        "the inputs that require gradients: rank 0 has nothing, rank 1 has sink": lambda r: {
            "sink": torch.zeros(4, requires_grad=bool(r))
        },
    }
    for sentence, options in ways.items():

        def work(rank: Simulated, options=options) -> str:
            try:
                prepared(rank, q, "zigzag", "ring", options(rank.rank))
            except ValueError as error:
                return str(error)
            return ""

        said = simulate(2, work)
        assert said == [f"context parallel: ranks disagree on {sentence}"] * 2


def test_the_shape_of_the_shards_is_named() -> None:
    def work(rank: Simulated) -> str:
        own = torch.randn(1, 2, 5 + rank.rank, 8)
        try:
            backlight.attention(own, own, own, context=ContextParallel(rank, "contiguous"))
        except ValueError as error:
            return str(error)
        return ""

    sentence = "context parallel: shards of q must have 6, 5 positions on ranks 0 to 1 (layout contiguous, 11 in all), got 5, 6"
    assert simulate(2, work) == [sentence] * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layout": "striped"}, "layout must be one of contiguous, zigzag, got 'striped'"),
        ({"strategy": "tree"}, "strategy must be one of auto, ring, all_to_all, got 'tree'"),
        ({"check": "never"}, "check must be one of always, first, got 'never'"),
    ],
)
def test_wrong_settings(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ContextParallel(Alone(0, 2), **settings)


def test_wrong_mesh() -> None:
    with pytest.raises(TypeError, match="mesh must be a DeviceMesh, a process group or a Communicator, got 4"):
        ContextParallel(4)


def test_all_to_all_by_name_needs_heads_that_divide() -> None:
    q = torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match="needs heads of k that divide by the ranks, got 3 heads for 2 ranks"):
        simulate(2, lambda rank: prepared(rank, q, "zigzag", "all_to_all", {}))


@pytest.mark.parametrize(("check", "steps"), [("always", "fbfbfbfb"), ("first", "fbffbf")])
def test_what_is_compared_when(check: str, steps: str) -> None:
    """Options before every call; under check="first" a backward only once per kind of call, the same on every rank.

    Shards of 21 and of 24 are equally long on one of two ranks: what is new must not be judged by a rank's own shard.
    """
    wholes = [torch.randn(1, 2, length, 8) for length in (21, 24)]

    def work(rank: Simulated) -> str:
        counted: list[str] = []
        gather = rank.gather_numbers
        rank.gather_numbers = lambda row, step: counted.append(step) or gather(row, step)
        context = ContextParallel(rank, strategy="ring", check=check)
        for whole in (wholes[0], wholes[0], wholes[1], wholes[1]):
            own = context.shard(whole, 2).detach()
            strategy, call, _ = context.prepare(partial(api.call_of, own, own, own), None)
            y, _, kept = strategy.forward(call)
            options = options_of(call, True, number=context._calls, compared=context._backward_compared)
            backward(strategy, options, tuple(kept), torch.ones_like(y), None, frozenset(("dq",)))
        return "".join(step[0] if step.startswith("b") else "f" for step in counted)

    assert simulate(2, work) == [steps, steps]


def test_a_backend_that_one_rank_misspells_is_told_to_the_others() -> None:
    """They wait for its call: it must not raise before they have heard of it."""
    q = torch.randn(1, 2, 8, 4)

    def work(rank: Simulated) -> str:
        context = ContextParallel(rank, strategy="ring")
        try:
            backlight.attention(q, q, q, context=context, backend="tield" if rank.rank == 0 else None)
        except ValueError as error:
            return str(error)
        return "ran"

    mine, other = simulate(2, work, timeout=20.0)
    assert mine.startswith("backend must be one of")
    assert other == "context parallel: rank 0 refused the call; see the message there"
