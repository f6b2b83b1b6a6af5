"""A sharded problem's blocks, drawn at random, against the dense visibility of the whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from backlight.distributed.blocks import Block, Shards
from backlight.distributed.layout import LAYOUTS, positions_of
from backlight.spec import AttentionSpec, Segment, packed_segments

UNSEEN, NO_BIAS = -1000, -1


@st.composite
def problems(draw: st.DrawFn) -> Shards:
    reach = st.sampled_from([None, 0, 1, 3, 9, 30])
    spec = AttentionSpec(
        causal=draw(st.booleans()),
        window=(draw(reach), draw(reach)),
        bias=draw(st.booleans()),
        bias_origin=draw(st.sampled_from([0, 5, -3, 20])),
    )
    n_bias = draw(st.sampled_from([1, 3, 10, 40])) if spec.bias else 0
    layout, world = draw(st.sampled_from(sorted(LAYOUTS))), draw(st.integers(1, 4))
    if draw(st.booleans()):
        return Shards(spec, layout, world, draw(st.integers(0, 40)), draw(st.integers(0, 40)), n_bias=n_bias)
    sides = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=6))
    equal = draw(st.booleans())
    cu_q, cu_k = (tuple(itertools.accumulate((s[0 if equal else side] for s in sides), initial=0)) for side in (0, 1))
    return Shards(spec, layout, world, cu_q[-1], cu_k[-1], (cu_q, cu_k), n_bias)


def columns(spec: AttentionSpec, segment: Segment, n_bias: int) -> Tensor:
    """Per visible pair the column of the bias table it reads, NO_BIAS where it reads none; UNSEEN elsewhere."""
    sq, sk = segment.sq, segment.sk
    column = spec.distance(0, sq, 0, sk, sq, sk) + spec.bias_origin
    inside = (column >= 0) & (column < n_bias) & spec.bias
    return torch.where(spec.allowed(sq, sk), torch.where(inside, column, NO_BIAS), UNSEEN)


def segments_of(block: Block) -> Iterator[Segment]:
    if block.borders is None:
        return iter([Segment(0, 0, block.q1 - block.q0, 0, block.k1 - block.k0)])
    return iter(packed_segments(*block.borders))


@settings(max_examples=300)
@given(problems())
def test_blocks_cover_what_is_visible_exactly_once(shards: Shards) -> None:
    wanted = torch.full((shards.sq, shards.sk), UNSEEN)
    for z in shards.segments:
        wanted[z.q0 : z.q1, z.k0 : z.k1] = columns(shards.spec, z, shards.n_bias)
    found, times = torch.full_like(wanted, UNSEEN), torch.zeros_like(wanted)
    for rank, source in itertools.product(range(shards.world), repeat=2):
        rows, keys = positions_of(shards.rows(rank)), positions_of(shards.keys(source))
        for block in shards.blocks(rank, source):
            for z in segments_of(block):
                at = rows[block.q0 + z.q0 : block.q0 + z.q1][:, None], keys[block.k0 + z.k0 : block.k0 + z.k1][None]
                read = columns(block.spec, z, shards.n_bias)
                times[at] += read != UNSEEN
                found[at] = torch.maximum(found[at], read)
    assert torch.equal(times, (wanted != UNSEEN).long())
    assert torch.equal(found, wanted)
    for rank in range(shards.world):
        own = wanted[positions_of(shards.rows(rank))] != UNSEEN
        assert torch.equal(shards.counts(rank, torch.device("cpu")).long(), own.sum(1))
        assert shards.pairs(rank) == int(own.sum())


@pytest.mark.parametrize("world", [2, 3, 8])
def test_causal_zigzag_is_balanced_and_one_call_per_step(world: int) -> None:
    shards = Shards(AttentionSpec(causal=True), "zigzag", world, 48 * world, 48 * world)
    assert len({shards.pairs(rank) for rank in range(world)}) == 1
    assert all(len(shards.blocks(r, s)) == 1 for r, s in itertools.product(range(world), repeat=2))


def test_contiguous_causal_is_not_balanced() -> None:
    shards = Shards(AttentionSpec(causal=True), "contiguous", 4, 64, 64)
    work = [shards.pairs(rank) for rank in range(4)]
    assert work == sorted(work)
    assert work[-1] == 7 * 256 / 2 + 8


def test_a_window_asks_only_its_neighbours() -> None:
    """Rows of rank r see keys of ranks r - 1 and r when the window is narrower than a shard."""
    shards = Shards(AttentionSpec(causal=True, window=(15, 0)), "contiguous", 8, 128, 128)
    seen = {(r, s) for r, s in itertools.product(range(8), repeat=2) if shards.sees(r, s)}
    assert seen == {(r, s) for r in range(8) for s in (r - 1, r) if s >= 0}


def test_packed_sequences_on_other_ranks_are_not_asked_for() -> None:
    cu = (0, 16, 40, 64)
    shards = Shards(AttentionSpec(causal=True), "contiguous", 4, 64, 64, (cu, cu))
    seen = {(r, s) for r, s in itertools.product(range(4), repeat=2) if shards.sees(r, s) and r != s}
    assert seen == {(2, 1), (3, 2)}


def test_whole_sequences_of_a_rank_are_one_packed_call() -> None:
    cu = tuple(range(0, 65, 4))
    shards = Shards(AttentionSpec(causal=True), "contiguous", 2, 64, 64, (cu, cu))
    (block,) = shards.blocks(0, 0)
    assert block.borders == (tuple(range(0, 33, 4)),) * 2
    assert shards.blocks(0, 1) == ()
