"""Bad arguments drawn by hypothesis, for every entry of the main call: one sentence each that names argument, value and what
was expected, raised by a check of ours; none is silent, none comes from inside."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import backlight

HEADS, KV_HEADS, D, DV = 4, 2, 8, 5
BATCH, LENGTH, KEYS = 2, 6, 7
ROWS, ROWS_K = 6, 9
AT_LEAST = 120
# where checks live: what is raised elsewhere was not checked
CHECKS = {
    "api.py",
    "arguments.py",
    "contexts.py",
    "binding.py",
    "call.py",
    "spec.py",
    "registry.py",
    "attention_statistics.py",
    "operators.py",
    "checking.py",
}


def good(packed: bool) -> dict[str, Any]:
    if not packed:
        shapes = {"q": (BATCH, HEADS, LENGTH, D), "k": (BATCH, KV_HEADS, KEYS, D), "v": (BATCH, KV_HEADS, KEYS, DV)}
        return {name: torch.zeros(shape) for name, shape in shapes.items()}
    shapes = {"q": (ROWS, HEADS, D), "k": (ROWS_K, KV_HEADS, D), "v": (ROWS_K, KV_HEADS, DV)}
    borders = {"cu_seqlens_q": torch.tensor([0, 2, ROWS]), "cu_seqlens_k": torch.tensor([0, 4, ROWS_K])}
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | borders


def term(name: str, packed: bool) -> Tensor:
    """A good bias, sink, tau or gate."""
    rows = (ROWS, HEADS, DV) if packed else (BATCH, HEADS, LENGTH, DV)
    return torch.zeros({"bias": (HEADS, 9), "sink": (HEADS,), "tau": (HEADS,), "gate": rows}[name])


ENTRIES: dict[str, tuple[Callable[..., Any], tuple[bool, ...]]] = {
    "attention": (backlight.attention, (False,)),
    "attention_varlen": (backlight.attention_varlen, (True,)),
    "explain": (backlight.explain, (False, True)),
    "statistics": (backlight.statistics, (False, True)),
}
TERMS = ("bias", "sink", "tau", "gate")
BORDERS = ("cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class Bad:
    """A call with one argument changed; `shown` must stand in the message beside the argument's name."""

    entry: str
    packed: bool
    argument: str
    value: Any
    shown: str
    # others whose name will do: two tensors that do not fit together
    partners: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        value = self.value
        if isinstance(value, Tensor):
            borders = self.argument in BORDERS and value.device.type == "cpu"
            value = f"{tuple(value.shape)} {value.dtype} {value.device} {value.layout} {value.tolist() if borders else ''}"
        return (self.entry, str(self.packed), self.argument, type(self.value).__name__, str(value))

    def call(self) -> Any:
        return ENTRIES[self.entry][0](**(good(self.packed) | {self.argument: self.value}))


NO_TENSORS = st.sampled_from([1, 1.5, "x", [1.0], (1,), {}, True, b"", 2j]).map(lambda x: (x, type(x).__name__))
NO_NUMBERS = st.sampled_from(["0.5", [1.0], (1.0,), {}, True, 2j, torch.zeros(()), b"1"]).map(lambda x: (x, type(x).__name__))
NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf]).map(lambda x: (x, str(x)))
NO_FLAGS = st.sampled_from([0, 1, "yes", 1.0, [True], torch.ones(2)]).map(lambda x: (x, type(x).__name__))
NO_FLOATS = st.sampled_from([torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64])
OTHER_FLOATS = st.sampled_from([torch.float16, torch.bfloat16, torch.float64])
SIZE = st.integers(0, 9)


@st.composite
def rank(draw: st.DrawFn, wanted: int) -> tuple[Tensor, str]:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=0, max_size=6).filter(lambda x: len(x) != wanted)))
    return torch.zeros(shape), str(shape)


@st.composite
def resized(draw: st.DrawFn, x: Tensor, free: tuple[int, ...] = ()) -> tuple[Tensor, str]:
    """One size changed, but for those that may have any."""
    axis = draw(st.sampled_from([axis for axis in range(x.dim()) if axis not in free]))
    shape = list(x.shape)
    shape[axis] = draw(SIZE.filter(lambda n: n != shape[axis]))
    return x.new_zeros(shape), str(shape[axis])


def divides(change: tuple[Tensor, str], axis: int) -> bool:
    """Another number of heads of q may be right too."""
    return change[0].shape[axis] > 0 and change[0].shape[axis] % KV_HEADS == 0


@st.composite
def main_tensor(draw: st.DrawFn, name: str, packed: bool) -> tuple[Any, str, tuple[str, ...]]:
    x = good(packed)[name]
    heads, length = (1, 0) if packed else (1, 2)
    kind = draw(st.sampled_from(["type", "rank", "size", "dtype", "other dtype", "device", "sparse"]))
    if kind == "type":
        return (*draw(NO_TENSORS), ())
    if kind == "rank":
        return (*draw(rank(x.dim())), ())
    if kind == "size":
        # lengths of q and k are free, heads of q within reason; of v the length is that of k
        free = (length,) if name == "q" and not packed else ((length, x.dim() - 1) if name == "v" and packed else ())
        free = (length, 3) if name == "v" and not packed else free
        changed = draw(
            resized(x, free).filter(lambda c: not (name == "q" and divides(c, heads) and c[0].shape[0] == x.shape[0]))
        )
        return (*changed, ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"))
    if kind == "dtype":
        dtype = draw(NO_FLOATS)
        return x.to(dtype), str(dtype), ()
    if kind == "other dtype":
        dtype = draw(OTHER_FLOATS)
        return x.to(dtype), str(dtype), ("k", "v")
    if kind == "device":
        return x.to("meta"), "meta", ("k", "v", "cu_seqlens_q")
    return x.to_sparse(), "sparse", ()


@st.composite
def learned(draw: st.DrawFn, name: str, packed: bool) -> tuple[Any, str, tuple[str, ...]]:
    x = term(name, packed)
    kind = draw(st.sampled_from(["type", "shape", "dtype", "device", "sparse"]))
    if kind == "type":
        return (*draw(NO_TENSORS), ())
    if kind == "shape":
        changed, _ = draw(st.one_of(rank(x.dim()), resized(x, (1,) if name == "bias" else ())))
        return changed, str(tuple(changed.shape)), ()
    if kind == "dtype":
        dtype = draw(NO_FLOATS)
        return x.to(dtype), str(dtype), ()
    return (x.to("meta"), "meta", ()) if kind == "device" else (x.to_sparse(), "sparse", ())


@st.composite
def borders(draw: st.DrawFn, name: str) -> tuple[Any, str, tuple[str, ...]]:
    total = ROWS if name == "cu_seqlens_q" else ROWS_K
    kind = draw(st.sampled_from(["type", "dtype", "rank", "count", "start", "decreasing", "end", "device"]))
    if kind == "type":
        return (*draw(NO_TENSORS), ())
    if kind == "dtype":
        dtype = draw(st.sampled_from([torch.int8, torch.uint8, torch.int16, torch.float32, torch.bool, torch.float64]))
        return torch.tensor([0, 2, total]).to(dtype), str(dtype), ()
    if kind == "rank":
        shape = draw(st.sampled_from([(), (0,), (1, 3), (3, 1)]))
        return torch.zeros(shape, dtype=torch.int32), str(shape), ()
    if kind == "count":
        more = draw(st.integers(0, 6).filter(lambda n: n != 2))
        return torch.tensor([0] * more + [total]), str(more), BORDERS
    if kind == "start":
        first = draw(st.integers(-9, total).filter(lambda n: n != 0))
        return torch.tensor([first, total, total]), str(first), ()
    if kind == "decreasing":
        middle = draw(st.one_of(st.integers(total + 1, 2**40), st.integers(-(2**40), -1)))
        return torch.tensor([0, middle, total]), str(middle), ()
    if kind == "end":
        last = draw(st.integers(2, 2**40).filter(lambda n: n != total))
        return torch.tensor([0, 2, last]), str(last), ()
    return torch.tensor([0, 2, total], device="meta"), "meta", ()


SIDES = st.one_of(
    st.integers(-(2**70), -1).map(lambda n: (n, str(n))),
    st.sampled_from([1.5, "3", math.nan, True, [1]]).map(lambda x: (x, repr(x))),
)
WINDOWS = st.one_of(
    st.sampled_from([5, "ab c", 1.5, (), (1,), (1, 2, 3), {}, {"left": 1}]).map(lambda x: (x, repr(x))),
    SIDES.map(lambda side: ((side[0], 0), side[1])),
    SIDES.map(lambda side: ((None, side[0]), side[1])),
)
NEGATIVE_CAPS = st.floats(max_value=0, allow_nan=False, allow_infinity=False).map(lambda x: (x, str(x)))
NAMES = st.sampled_from(["cuda", "", "Tiled", 3, ["tiled"], ("tiled",), 1.5, b"tiled"]).map(lambda x: (x, repr(x)))
OPTIONS = {
    "causal": NO_FLAGS,
    "deterministic": st.sampled_from([0, 1, "yes", 1.0, [True]]).map(lambda x: (x, repr(x))),
    "window": WINDOWS,
    "scale": st.one_of(NO_NUMBERS, NOT_FINITE),
    "softcap": st.one_of(NO_NUMBERS, NOT_FINITE, NEGATIVE_CAPS),
    "bias_origin": st.sampled_from([1.5, "3", math.nan, True, None, [1]]).map(lambda x: (x, repr(x))),
    "backend": NAMES,
    "return_lse": NO_FLAGS,
    "context": st.sampled_from([1, "ring", [], 1.5]).map(lambda x: (x, repr(x))),
    "tile": st.sampled_from([3, None, "ab", (), (1,), (0, 4), (1, 2, 3), (1.5, 2), (True, 4), (-1, 8)]).map(
        lambda x: (x, repr(x))
    ),
}
# what an entry has no argument for
ABSENT = {
    "attention": ("tile",),
    "attention_varlen": ("tile",),
    "explain": ("tile",),
    "statistics": ("return_lse", "context"),
}


@st.composite
def bad_calls(draw: st.DrawFn) -> Bad:
    entry = draw(st.sampled_from(list(ENTRIES)))
    packed = draw(st.sampled_from(ENTRIES[entry][1]))
    options = [name for name in OPTIONS if name not in ABSENT[entry]]
    argument = draw(st.sampled_from(["q", "k", "v", *TERMS, *options, *(BORDERS * 2 if packed else ())]))
    if argument in ("q", "k", "v"):
        value, shown, partners = draw(main_tensor(argument, packed))
    elif argument in TERMS:
        value, shown, partners = draw(learned(argument, packed))
    elif argument in BORDERS:
        value, shown, partners = draw(borders(argument))
    else:
        (value, shown), partners = draw(OPTIONS[argument]), ()
    return Bad(entry, packed, argument, value, shown, partners)


def judge(bad: Bad) -> None:
    try:
        bad.call()
    except (TypeError, ValueError) as error:
        message = str(error)
        raised = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    except Exception as error:
        pytest.fail(f"{bad.key}: {type(error).__name__} {error}")
    else:
        pytest.fail(f"{bad.key}: nothing was said")
    assert raised.name in CHECKS, f"{bad.key}: from inside {raised}: {message}"
    assert "\n" not in message, f"{bad.key}: {message}"
    assert any(re.search(rf"\b{name}\b", message) for name in (bad.argument, *bad.partners)), f"{bad.key}: {message}"
    assert "must" in message, f"{bad.key}: {message}"
    assert bad.shown in message, f"{bad.key}: {bad.shown} is missing in {message}"


def test_bad_calls_are_refused_in_one_sentence() -> None:
    seen: set[tuple[str, ...]] = set()

    @settings(max_examples=600, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(bad_calls())
    def examine(bad: Bad) -> None:
        judge(bad)
        seen.add(bad.key)

    examine()
    assert len(seen) >= AT_LEAST
    assert {key[0] for key in seen} == set(ENTRIES)


@pytest.mark.parametrize("entry", ["explain", "statistics"])
def test_borders_of_keys_alone_are_refused(entry: str) -> None:
    """They were passed over in silence, and the call taken for a batched one."""
    with pytest.raises(TypeError, match="cu_seqlens_q must be given with cu_seqlens_k, got None"):
        ENTRIES[entry][0](**good(False), cu_seqlens_k=torch.tensor([0, 2, 6]))


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_good_call_is_one_change_away(entry: str) -> None:
    for packed in ENTRIES[entry][1]:
        ENTRIES[entry][0](**good(packed), **{name: term(name, packed) for name in TERMS})
