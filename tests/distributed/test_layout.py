"""Cutting sequences over ranks and putting them together again; no process group."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backlight.distributed import ContextParallel, simulate
from backlight.distributed.layout import LAYOUTS, assemble, cut, lengths, pieces, positions_of

sizes = {"layout": st.sampled_from(sorted(LAYOUTS)), "length": st.integers(0, 60), "world": st.integers(1, 7)}


@given(**sizes)
def test_every_position_is_held_once(layout: str, length: int, world: int) -> None:
    held = torch.cat([positions_of(ranges) for ranges in pieces(layout, length, world)])
    assert held.sort().values.tolist() == list(range(length))
    assert [len(positions_of(ranges)) for ranges in pieces(layout, length, world)] == list(lengths(layout, length, world))


@given(**sizes)
def test_positions_ascend_on_every_rank(layout: str, length: int, world: int) -> None:
    for ranges in pieces(layout, length, world):
        held = positions_of(ranges)
        assert bool((held.diff() > 0).all())


@given(**sizes, dim=st.integers(0, 2))
def test_cut_and_assemble_are_inverse(layout: str, length: int, world: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = length
    whole = torch.randn(shape)
    shards = [cut(whole, dim, ranges) for ranges in pieces(layout, length, world)]
    assert torch.equal(assemble(shards, dim, layout), whole)


def test_contiguous_is_the_rule_of_torch_chunk() -> None:
    whole = torch.arange(22)
    shards = [cut(whole, 0, ranges) for ranges in pieces("contiguous", 22, 4)]
    assert all(torch.equal(a, b) for a, b in zip(shards, whole.chunk(4), strict=True))


def test_zigzag_holds_an_early_and_a_late_chunk() -> None:
    assert pieces("zigzag", 12, 3) == (((0, 2), (10, 12)), ((2, 4), (8, 10)), ((4, 8),))


def test_unknown_layout() -> None:
    with pytest.raises(ValueError, match="layout must be one of contiguous, zigzag, got 'striped'"):
        pieces("striped", 8, 2)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_helpers_of_the_context(layout: str) -> None:
    """shard, unshard, positions and labels agree with what a rank's tokens are in the whole sequence."""
    tokens = torch.randint(0, 99, (2, 21))
    cu_seqlens = torch.tensor([0, 4, 4, 15, 21])

    def examine(communicator: object) -> None:
        context = ContextParallel(communicator, layout)
        own = context.shard(tokens, 1)
        positions = context.positions(21)
        assert torch.equal(own, tokens[:, positions])
        following = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
        assert torch.equal(context.labels(tokens), following[:, positions])
        starts = torch.tensor([0] * 4 + [4] * 11 + [15] * 6)
        assert torch.equal(context.positions(21, cu_seqlens), (torch.arange(21) - starts)[positions])
        assert torch.equal(context.unshard(own, 1), tokens)
        assert torch.equal(context.unshard(own.T, 0), tokens.T)

    simulate(4, examine)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_hold_what_is_ignored(dtype: torch.dtype) -> None:
    """-100 is no uint8: it used to wrap to 156, a token like any other."""
    tokens = torch.tensor([[7, 120, 3, 4]], dtype=dtype)
    (labels,) = simulate(1, lambda rank: ContextParallel(rank).labels(tokens))
    assert labels.tolist() == [[120, 3, 4, -100]]
    assert labels.dtype == (torch.int64 if dtype == torch.uint8 else dtype)
    (labels,) = simulate(1, lambda rank: ContextParallel(rank).labels(tokens, ignored=200))
    assert labels.tolist() == [[120, 3, 4, 200]]
    (kept,) = simulate(1, lambda rank: ContextParallel(rank).labels(tokens, ignored=100))
    assert kept.dtype == dtype


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_labels_of_nothing(shape: tuple[int, ...]) -> None:
    (labels,) = simulate(1, lambda rank: ContextParallel(rank).labels(torch.zeros(shape, dtype=torch.int64)))
    assert labels.shape == shape
