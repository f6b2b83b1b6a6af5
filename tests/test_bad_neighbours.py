"""Everything around the call is as strict as the call: one sentence that names the argument, what came and what was expected.

None is silent, and none comes out of the inside of torch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_arguments import DROP_INS, LAYERS, Entry
from bad_arguments_around import INTERFACES, MESHES
from hypothesis import given
from hypothesis import strategies as st

import backlight
from backlight.nn import Attention, KVCache

SOURCE = Path(backlight.__file__).parent
ENTRIES = (*LAYERS, *DROP_INS, *MESHES, *INTERFACES)
CASES = [(entry, *mistake) for entry in ENTRIES for mistake in entry.mistakes()]
# the words that say what would be right
EXPECTS = (" must ", " needs ", " takes ", " has no ")


def sentence(work: Callable[[], Any]) -> str:
    """The message of what `work` raises: one line, from code of this package."""
    with pytest.raises((TypeError, ValueError, NotImplementedError, RuntimeError)) as raised:
        work()
    message = str(raised.value)
    assert message
    assert "\n" not in message, f"more than one sentence: {message}"
    assert not message.endswith("."), f"a sentence of ours has no full stop: {message}"
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    assert Path(last.filename).is_relative_to(SOURCE), f"raised in {last.filename}: {message}"
    assert any(word in message for word in EXPECTS), f"what was expected? {message}"
    return message


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_good(entry: Entry) -> None:
    """Every mistake is one change away from a call that runs."""
    if entry.name == "register":
        pytest.importorskip("transformers")
    entry.call(**entry.good)


@pytest.mark.parametrize(("entry", "argument", "value", "shown"), CASES, ids=[f"{e.name}: {a}: {s}" for e, a, _, s in CASES])
def test_bad(entry: Entry, argument: str, value: Any, shown: str) -> None:
    message = sentence(lambda: entry.call(**(entry.good | {argument: value})))
    assert entry.named.get(argument, argument) in message, f"{argument} is not named: {message}"
    assert shown in message, f"{shown} is not shown: {message}"


def test_there_are_enough_of_them() -> None:
    distinct = {(entry.name, argument, shown) for entry, argument, _, shown in CASES}
    assert len(distinct) >= 300
    assert len({entry.name for entry in ENTRIES}) >= 20


# --- drawn at random ---------------------------------------------------------------------------------------------------------

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**63, -(2**70), 1e300]),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.lists(st.integers(-2, 2), max_size=3),
    st.tuples(st.integers(-2, 2)),
    st.dictionaries(st.text(max_size=1), st.integers(), max_size=1),
    st.sampled_from([torch.float32, torch.zeros(2, 2), torch.zeros(()), torch.zeros(1, dtype=torch.int64), object(), int, len]),
)
ARGUMENTS = [(entry, argument) for entry in ENTRIES for argument in entry.bad]


@given(chosen=st.sampled_from(range(len(ARGUMENTS))), value=anything)
def test_anything_in_any_argument(chosen: int, value: Any) -> None:
    """Whatever is put in the place of one argument: the call runs, or says so in a sentence of its own."""
    entry, argument = ARGUMENTS[chosen]
    try:
        entry.call(**(entry.good | {argument: value}))
    except (TypeError, ValueError, NotImplementedError, RuntimeError):
        sentence(lambda: entry.call(**(entry.good | {argument: value})))


@given(
    shape=st.lists(st.integers(1, 3), min_size=0, max_size=4), dtype=st.sampled_from([torch.int64, torch.int32, torch.float32])
)
def test_positions_of_any_shape(shape: list[int], dtype: torch.dtype) -> None:
    """Positions fit the rows or are refused; nothing is stretched."""
    layer, x = Attention(8, 2), torch.zeros(2, 3, 8)
    positions = torch.zeros(shape, dtype=dtype)
    if tuple(shape) in ((3,), (2, 3)) and not dtype.is_floating_point:
        assert layer(x, positions=positions).shape == x.shape
    else:
        assert "positions must be" in sentence(lambda: layer(x, positions=positions))


@given(k=st.lists(st.integers(1, 2), min_size=4, max_size=4), v=st.lists(st.integers(1, 2), min_size=4, max_size=4))
def test_keys_and_values_of_any_shape(k: list[int], v: list[int]) -> None:
    """A cache takes keys and values that fit each other and those it holds; else it stays as it is."""
    cache = KVCache()
    cache.append(torch.zeros(2, 2, 1, 2), torch.zeros(2, 2, 1, 2))
    if k[:3] == v[:3] and k[:2] == [2, 2] and k[3] == v[3] == 2:
        cache.append(torch.zeros(k), torch.zeros(v))
        assert cache.length == 1 + k[2]
    else:
        assert sentence(lambda: cache.append(torch.zeros(k), torch.zeros(v)))
        assert cache.length == 1
