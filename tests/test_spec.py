"""Geometry and options: the spec against a brute-force reading of eq. 1-3 and 30."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backlight.spec import AttentionSpec, Segment, packed_segments

lengths = st.integers(0, 17)
reach = st.none() | st.integers(0, 12)
specs = st.builds(AttentionSpec, causal=st.booleans(), window=st.tuples(reach, reach), bias_origin=st.integers(-9, 9))


def brute_force(spec: AttentionSpec, sq: int, sk: int) -> list[list[bool]]:
    """eq. 1, 2 word by word."""
    left, right = spec.window
    seen = []
    for i in range(sq):
        position = i + sk - sq
        seen.append(
            [
                (left is None or j >= position - left)
                and (right is None or j <= position + right)
                and (not spec.causal or j <= position)
                for j in range(sk)
            ]
        )
    return seen


@st.composite
def row_tiles(draw) -> tuple[AttentionSpec, int, int, int, int]:
    spec, sq, sk = draw(specs), draw(st.integers(1, 17)), draw(lengths)
    i0 = draw(st.integers(0, sq - 1))
    return spec, sq, sk, i0, draw(st.integers(i0 + 1, sq))


@st.composite
def key_tiles(draw) -> tuple[AttentionSpec, int, int, int, int]:
    spec, sq, sk = draw(specs), draw(lengths), draw(st.integers(1, 17))
    j0 = draw(st.integers(0, sk - 1))
    return spec, sq, sk, j0, draw(st.integers(j0 + 1, sk))


@settings(max_examples=150)
@given(specs, lengths, lengths)
def test_allowed_is_equation_2(spec: AttentionSpec, sq: int, sk: int) -> None:
    allowed = spec.allowed(sq, sk)
    assert allowed.shape == (sq, sk)
    assert allowed.dtype == torch.bool
    assert allowed.tolist() == brute_force(spec, sq, sk)


@settings(max_examples=150)
@given(specs, lengths, lengths)
def test_counts_are_row_sums(spec: AttentionSpec, sq: int, sk: int) -> None:
    expected = [sum(row) for row in brute_force(spec, sq, sk)]
    assert spec.visible_counts(sq, sk).tolist() == expected
    assert spec.visible_pairs(sq, sk) == sum(expected)


@settings(max_examples=150)
@given(specs, lengths, lengths)
def test_first_and_last_key(spec: AttentionSpec, sq: int, sk: int) -> None:
    """Both forms, of one row and of all rows, bracket exactly the visible keys; crossed where there is none."""
    i = torch.arange(sq)
    first, last = spec.first_key(i, sq, sk).tolist(), spec.last_key(i, sq, sk).tolist()
    for row, seen in enumerate(brute_force(spec, sq, sk)):
        assert (first[row], last[row]) == (spec.first_key(row, sq, sk), spec.last_key(row, sq, sk))
        keys = [j for j, visible in enumerate(seen) if visible]
        assert keys == list(range(first[row], last[row] + 1))


@settings(max_examples=150)
@given(row_tiles(), st.data())
def test_allowed_tile_is_a_cut_of_allowed(tile, data) -> None:
    spec, sq, sk, i0, i1 = tile
    j0 = data.draw(st.integers(0, sk))
    j1 = data.draw(st.integers(j0, sk))
    assert torch.equal(spec.allowed_tile(i0, i1, j0, j1, sq, sk), spec.allowed(sq, sk)[i0:i1, j0:j1])


@settings(max_examples=150)
@given(row_tiles())
def test_key_range_is_tight(tile) -> None:
    """No visible key outside; the ends are visible to some row."""
    spec, sq, sk, i0, i1 = tile
    seen = spec.allowed(sq, sk)[i0:i1].any(dim=0).nonzero().flatten().tolist()
    j0, j1 = spec.key_range(i0, i1, sq, sk)
    if seen:
        assert (j0, j1) == (seen[0], seen[-1] + 1)
    else:
        assert j0 >= j1


@settings(max_examples=150)
@given(key_tiles())
def test_row_range_is_tight(tile) -> None:
    spec, sq, sk, j0, j1 = tile
    seen = spec.allowed(sq, sk)[:, j0:j1].any(dim=1).nonzero().flatten().tolist()
    i0, i1 = spec.row_range(j0, j1, sq, sk)
    if seen:
        assert (i0, i1) == (seen[0], seen[-1] + 1)
    else:
        assert i0 >= i1


@settings(max_examples=150)
@given(row_tiles())
def test_full_key_range_is_what_every_row_sees(tile) -> None:
    spec, sq, sk, i0, i1 = tile
    everywhere = spec.allowed(sq, sk)[i0:i1].all(dim=0).nonzero().flatten().tolist()
    j0, j1 = spec.full_key_range(i0, i1, sq, sk)
    assert everywhere == list(range(j0, j1))


@settings(max_examples=150)
@given(row_tiles(), st.data())
def test_bias_columns_are_the_extreme_distances(tile, data) -> None:
    spec, sq, sk, i0, i1 = tile
    if sk == 0:
        return
    j0 = data.draw(st.integers(0, sk - 1))
    j1 = data.draw(st.integers(j0 + 1, sk))
    columns = [i + sk - sq - j + spec.bias_origin for i in range(i0, i1) for j in range(j0, j1)]
    assert spec.bias_columns(i0, i1, j0, j1, sq, sk) == (min(columns), max(columns) + 1)


@settings(max_examples=150)
@given(st.lists(st.tuples(lengths, lengths), max_size=5))
def test_packed_segments(pairs: list[tuple[int, int]]) -> None:
    cu_q, cu_k = [0], [0]
    for sq, sk in pairs:
        cu_q.append(cu_q[-1] + sq)
        cu_k.append(cu_k[-1] + sk)
    segments = packed_segments(tuple(cu_q), tuple(cu_k))
    assert [(segment.sq, segment.sk) for segment in segments] == pairs
    assert all(segment.batch == 0 for segment in segments)
    assert [segment.q0 for segment in segments] == cu_q[:-1]
    assert [segment.k0 for segment in segments] == cu_k[:-1]


# --- pictures of the docstring ----------------------------------------------------------------


def picture(spec: AttentionSpec, sq: int, sk: int) -> list[str]:
    return ["".join("x" if visible else "." for visible in row) for row in spec.allowed(sq, sk).tolist()]


def test_causal_aligns_to_the_bottom_right() -> None:
    assert picture(AttentionSpec(causal=True), 3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert picture(AttentionSpec(causal=True), 5, 3) == ["...", "...", "x..", "xx.", "xxx"]


def test_window_includes_both_ends() -> None:
    assert picture(AttentionSpec(window=(2, 0)), 5, 5) == ["x....", "xx...", "xxx..", ".xxx.", "..xxx"]
    assert picture(AttentionSpec(window=(1, 1)), 4, 4) == ["xx..", "xxx.", ".xxx", "..xx"]
    assert picture(AttentionSpec(window=(0, 0)), 2, 4) == ["..x.", "...x"]


def test_causal_cuts_the_right_side_of_a_window() -> None:
    assert AttentionSpec(causal=True, window=(3, 5)).right == 0
    assert AttentionSpec(causal=True, window=(3, None)).right == 0
    assert picture(AttentionSpec(causal=True, window=(1, 2)), 3, 3) == ["x..", "xx.", ".xx"]


# --- options ----------------------------------------------------------------


def test_spec_is_a_value() -> None:
    spec = AttentionSpec(causal=True, window=(3, None), softcap=30.0, bias=True)
    assert spec == spec.replace()
    assert hash(spec) == hash(spec.replace())
    assert spec.replace(causal=False) != spec
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.causal = False  # type: ignore[misc]


def test_terms_follow_the_signature() -> None:
    assert AttentionSpec().terms == ()
    assert AttentionSpec(bias=True, sink=True, tau=True, gate=True).terms == ("bias", "sink", "tau", "gate")
    assert AttentionSpec(gate=True, bias=True).terms == ("bias", "gate")


def test_masked() -> None:
    assert not AttentionSpec().masked
    for spec in (AttentionSpec(causal=True), AttentionSpec(window=(3, None)), AttentionSpec(window=(None, 0))):
        assert spec.masked


def test_scale_defaults_to_the_root_of_the_head_dimension() -> None:
    assert AttentionSpec().resolve_scale(64) == 0.125
    assert AttentionSpec(scale=0.0).resolve_scale(64) == 0.0
    assert AttentionSpec(scale=-2.0).resolve_scale(64) == -2.0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"window": 5}, ValueError, ["window", "pair", "5"]),
        ({"window": (1, 2, 3)}, ValueError, ["window", "pair", "(1, 2, 3)"]),
        ({"window": [1, 2]}, ValueError, ["window", "pair", "[1, 2]"]),
        ({"window": (-1, 0)}, ValueError, ["window left", ">= 0", "-1"]),
        ({"window": (0, -3)}, ValueError, ["window right", ">= 0", "-3"]),
        ({"window": (1.5, 0)}, TypeError, ["window left", "int", "1.5"]),
        ({"window": (0, True)}, TypeError, ["window right", "int", "True"]),
        ({"softcap": 0.0}, ValueError, ["softcap", "> 0", "0.0"]),
        ({"softcap": -2.0}, ValueError, ["softcap", "> 0", "-2.0"]),
        ({"softcap": float("nan")}, ValueError, ["softcap", "finite", "nan"]),
        ({"scale": float("inf")}, ValueError, ["scale", "finite", "inf"]),
        ({"bias_origin": 1.0}, TypeError, ["bias_origin", "int", "1.0"]),
        ({"bias_origin": True}, TypeError, ["bias_origin", "int", "True"]),
    ],
    ids=str,
)
def test_bad_options_are_named(options: dict, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        AttentionSpec(**options)
    for word in words:
        assert word in str(raised.value)


def test_segment_lengths() -> None:
    segment = Segment(batch=0, q0=2, q1=7, k0=4, k1=4)
    assert (segment.sq, segment.sk) == (5, 0)
