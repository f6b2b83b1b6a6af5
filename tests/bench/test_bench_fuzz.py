"""Any one change to a record: it is refused in a sentence, or everything that reads records can read it."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

from bench_records import record, variants_record
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from backlight.bench import regress
from backlight.bench.record import BadRecord, check
from backlight.bench.table import profile_table, render, show_changes

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([float("nan"), float("inf"), -1.0, 0.0, 1e-300, 1e300]),
    st.text(max_size=3),
    st.sampled_from([[], {}, [1], {"x": 1}, ["x"], [[]], [{}]]),
)


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every path into the record."""
    found = [path] if path else []
    steps = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for step, inner in steps:
        found += places(inner, (*path, step))
    return found


RECORDS = {"plain": record(), "variants": variants_record()}
PLACES = {name: [path for path in places(data) if path[0] != "schema"] for name, data in RECORDS.items()}


def changed(name: str, path: tuple[Any, ...], junk: Any, gone: bool) -> dict[str, Any]:
    data = copy.deepcopy(RECORDS[name])
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if gone:
        del place[path[-1]]
    else:
        place[path[-1]] = junk
    return data


def refusal(data: dict[str, Any]) -> str | None:
    try:
        check(data)
    except BadRecord as error:
        return str(error)
    return None


@given(st.sampled_from([(name, path) for name, paths in PLACES.items() for path in paths]), JUNK, st.booleans())
@example(("plain", ("machine", "cpu")), None, False)
@example(("plain", ("machine",)), {}, False)
@example(("plain", ("ceilings",)), {}, False)
@example(("plain", ("profiles", 0, "compiled", 0, "kernel")), None, True)
@example(("plain", ("profiles", 0, "phases", "backward", "parts", 1, "share")), "x", False)
@settings(max_examples=100, deadline=None)
def test_what_passes_the_check_can_be_shown_and_compared(place, junk, gone):
    name, path = place
    data = changed(name, path, junk, gone)
    refused = refusal(data)
    if refused is not None:
        assert refused
        assert "\n" not in refused
        return
    console = Console(file=io.StringIO(), width=200)
    good = RECORDS[name]
    for before, after in ((good, data), (data, good)):
        found, gone_rows = list(regress.changes(before, after)), regress.lost(before, after)
        show_changes(console, found, gone_rows)
        assert all(change.slower != change.faster or not change.slower for change in found)
        assert isinstance(regress.other_device(before, after), str)
        assert isinstance(regress.comparable(before, after), list)
    if "cases" in path and len(path) > 2:
        # fields of a case that only tables and pictures read: `show` says which one it misses
        return
    console.print(render(data))
    for profiled in data.get("profiles", []):
        console.print(profile_table(profiled))


def test_the_records_it_starts_from_are_good():
    for data in RECORDS.values():
        check(json.loads(json.dumps(data)))
