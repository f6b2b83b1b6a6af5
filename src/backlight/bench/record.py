"""Whether a file is a record of this package's, field by field: tables, pictures and comparisons may then trust it.

A message names the file, the field, what came and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

KINDS = ("speed", "memory", "overhead", "profile")
STATUSES = ("running", "interrupted", "stopped", "complete")
ROW_STATUSES = ("ok", "suspect", "wrong", "refused", "failed", "running")
TIMES = ("median_ms", "p20_ms", "p80_ms")

Check = Callable[[Any, str], None]


class BadRecord(ValueError):
    """The file is no record, or one that was changed by hand or cut short."""


def check(data: Any) -> None:
    """Raises `BadRecord` for the first field that is not what a run writes."""
    _mapping(data, "the record")
    text_fields: dict[str, Check] = {"suite": text, "kind": one_of(KINDS), "status": one_of(STATUSES)}
    for name, test in (text_fields | {"machine": _machine, "ceilings": _ceilings, "settings": _settings}).items():
        test(_field(data, name, ""), name)
    for name in ("cases", "rows", "profiles", "parts"):
        members(_mapping)(data.get(name, []) if name in ("profiles", "parts") else _field(data, name, ""), name)
    for number, case in enumerate(data["cases"]):
        _case(case, f"cases[{number}]")
    ids = _distinct(((case["id"],) for case in data["cases"]), "cases")
    for number, row in enumerate(data["rows"]):
        _row(row, f"rows[{number}]", {found[0] for found in ids}, data["kind"])
    _distinct(((row["case"], row["contender"]) for row in data["rows"]), "rows")
    for number, found in enumerate(data.get("profiles", [])):
        _profile(found, f"profiles[{number}]")


# --- kinds of values --------------------------------------------------------------------------------------------------------


def _bad(place: str, wanted: str, value: Any) -> NoReturn:
    raise BadRecord(f"{place} must be {wanted}, got {repr(value)[:60]}")


def text(value: Any, place: str) -> None:
    if not isinstance(value, str):
        _bad(place, "text", value)


def text_or_none(value: Any, place: str) -> None:
    if value is not None:
        text(value, place)


def number(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        _bad(place, "a number that is not negative", value)


def positive(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        _bad(place, "a positive number", value)


def number_or_none(value: Any, place: str) -> None:
    if value is not None:
        number(value, place)


def count(value: Any, place: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        _bad(place, "a whole number above 0", value)


def flag(value: Any, place: str) -> None:
    if not isinstance(value, bool):
        _bad(place, "true or false", value)


def one_of(known: Iterable[str]) -> Check:
    def test(value: Any, place: str) -> None:
        if not isinstance(value, str) or value not in known:
            _bad(place, f"one of {', '.join(known)}", value)

    return test


def members(test: Check, least: int = 0) -> Check:
    """A list whose members pass."""

    def test_all(value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) < least:
            _bad(place, "a list" if not least else f"a list of at least {least}", value)
        for index, member in enumerate(value):
            test(member, f"{place}[{index}]")

    return test_all


def values(test: Check) -> Check:
    """An object whose values pass."""

    def test_all(value: Any, place: str) -> None:
        _mapping(value, place)
        for name, member in value.items():
            test(member, f"{place}.{name}")

    return test_all


def _mapping(value: Any, place: str) -> None:
    if not isinstance(value, Mapping):
        _bad(place, "an object", value)


def _field(data: Mapping[str, Any], name: str, place: str) -> Any:
    if name not in data:
        raise BadRecord(f"{place or 'the record'} has no {name}")
    return data[name]


def _fields(data: Any, place: str, required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> None:
    _mapping(data, place)
    for name, test in required.items():
        test(_field(data, name, place), f"{place}.{name}")
    for name, test in (optional or {}).items():
        if name in data:
            test(data[name], f"{place}.{name}")


def _distinct(keys: Iterable[tuple[str, ...]], place: str) -> set[tuple[str, ...]]:
    seen: set[tuple[str, ...]] = set()
    for key in keys:
        if key in seen:
            raise BadRecord(f"{place} must hold {' of '.join(map(repr, key[::-1]))} once, got it twice")
        seen.add(key)
    return seen


# --- parts of a record ------------------------------------------------------------------------------------------------------


def _machine(value: Any, place: str) -> None:
    _mapping(value, place)
    # a run killed before its first case knows neither its machine nor the ceilings of it
    if not value:
        return
    _fields(value, place, {"device": text, "torch": text, "triton": text, "date": text, "commit": text_or_none})
    own = {"card": text} if value["device"] == "cuda" else {"cpu": text, "cpu_threads": count, "cpu_kernels": text}
    _fields(value, place, own)


def _ceilings(value: Any, place: str) -> None:
    required: dict[str, Check] = {"matmul_tflops": values(positive), "copy_tb_s": positive} if value else {}
    _fields(value, place, required)


def _settings(value: Any, place: str) -> None:
    _fields(value, place, {"contenders": members(text)}, {"rounds": count, "quick": flag})


def _case(value: Any, place: str) -> None:
    known: dict[str, Check] = {"input_bytes": number, "least_bytes": _number_or_numbers, "flops": values(number), "plain": text}
    _fields(value, place, {"id": text}, known)


def _number_or_numbers(value: Any, place: str) -> None:
    (values(number) if isinstance(value, Mapping) else number)(value, place)


def _row(value: Any, place: str, cases: set[str], kind: str) -> None:
    known: dict[str, Check] = {
        "times": values(_times),
        "plain_times": values(_times),
        "tflops": values(number),
        "over_plain": values(positive),
        "untimed": values(text),
        "reason": text,
        "memory": _mapping,
    }
    _fields(value, place, {"case": text, "contender": text, "status": one_of(ROW_STATUSES)}, known)
    _fields(value.get("memory", {}), f"{place}.memory", {}, {"peak_bytes": number, "relative": number})
    if value["case"] not in cases:
        _bad(f"{place}.case", "the id of one of the cases", value["case"])
    rates = value.get("tflops", {})
    for phase in value.get("times", {}) if kind == "speed" else ():
        _field(rates, phase, f"{place}.tflops")


def _times(value: Any, place: str) -> None:
    required: dict[str, Check] = dict.fromkeys(TIMES, positive)
    _fields(value, place, required | {"round_medians_ms": members(positive, least=1)})
    if not value["p20_ms"] <= value["median_ms"] <= value["p80_ms"]:
        _bad(f"{place}.median_ms", f"between p20_ms {value['p20_ms']} and p80_ms {value['p80_ms']}", value["median_ms"])


def _profile(value: Any, place: str) -> None:
    measured: dict[str, Check] = {"time_ms": number, "tflops": number_or_none, "of_ceiling": number_or_none}
    named: dict[str, Check] = {"case": text, "contender": text, "detail": text}

    def part(value: Any, place: str) -> None:
        _fields(value, place, measured | {"name": text, "calls": number, "share": number})

    def phase(value: Any, place: str) -> None:
        _fields(value, place, measured | {"parts": members(part)})

    def compiled(value: Any, place: str) -> None:
        spent: dict[str, Check] = dict.fromkeys(("registers", "spills", "shared_bytes", "warps", "stages"), number_or_none)
        _fields(value, place, {"kernel": text} | spent)

    _fields(value, place, named | {"phases": values(phase), "compiled": members(compiled)})
