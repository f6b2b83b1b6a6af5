"""Going on with a record: which of its cases are finished, and whether this machine and this code may add the others."""

from __future__ import annotations

from typing import Any

from backlight.bench.results import TIMED
from backlight.bench.suites import Suite

# what must agree for two processes to make one record; the driver may differ between machines of one kind and is noted per part
SAME_MACHINE = ("device", "card", "cpu", "cpu_threads", "torch", "triton", "cuda", "cudnn", "ptxas", "backlight", "commit")
SAME_SETTINGS = ("rounds", "quick", "seed", "timer", "warm_ms", "rep_ms", "contenders")


class CannotResume(ValueError):
    """This machine, this code or these settings are not the record's."""


def differences(data: dict[str, Any], suite: Suite, machine: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Why this process must not go on with the record, in words; empty = it may."""
    pairs: list[tuple[str, Any, Any]] = [("suite", data["suite"], suite.name)]
    pairs += [(name, data["machine"].get(name), machine.get(name)) for name in SAME_MACHINE]
    pairs += [(name, data["settings"].get(name), settings.get(name)) for name in SAME_SETTINGS]
    return [f"{name}: the record has {was}, here it is {now}" for name, was, now in pairs if was != now]


def finished(data: dict[str, Any], case: str, phases: tuple[str, ...]) -> bool:
    """True when every contender has a verdict on this case and every timed one all phases in all rounds."""
    rows = {row["contender"]: row for row in data["rows"] if row["case"] == case}
    rounds, names = data["settings"]["rounds"], data["settings"]["contenders"]
    return all(name in rows and _settled(rows[name], phases, rounds) for name in names)


def _settled(row: dict[str, Any], phases: tuple[str, ...], rounds: int) -> bool:
    if row["status"] == "running":
        return False
    if row["status"] not in TIMED:
        return True
    times, untimed = row.get("times", {}), row.get("untimed", {})
    return all(phase in untimed or len(times.get(phase, {}).get("round_medians_ms", ())) >= rounds for phase in phases)


def missing(data: dict[str, Any], suite: Suite) -> list[str]:
    """Ids of the suite's cases that the record does not hold in full, in the suite's order."""
    held = {case["id"] for case in data["cases"] if finished(data, case["id"], suite.phases)}
    return [workload.id for workload in suite.workloads if workload.id not in held]


def trimmed(data: dict[str, Any], suite: Suite) -> dict[str, Any]:
    """The record without its unfinished cases."""
    gone = set(missing(data, suite))
    kept = {name: [x for x in data[name] if x[key] not in gone] for name, key in (("cases", "id"), ("rows", "case"))}
    return {**data, "parts": data.get("parts", [])} | kept
