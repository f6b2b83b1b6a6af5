"""Two runs against each other: which contender on which case became slower than its own spread explains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backlight.bench.results import TIMED

# two runs of the same code differ by a few percent even when each of them repeats better: 1 to 7 % were seen
RUN_TO_RUN = 0.03


@dataclass(frozen=True)
class Change:
    """new / old time of one phase; `allowed` is the ratio that spread alone explains."""

    case: str
    contender: str
    phase: str
    ratio: float
    allowed: float

    @property
    def slower(self) -> bool:
        return self.ratio > self.allowed

    @property
    def faster(self) -> bool:
        return self.ratio < 1 / self.allowed


def spread(times: dict[str, Any]) -> float:
    """Relative half-width of the samples: of the 20 to 80 % range, or of the medians of the rounds if they differ more."""
    middle, rounds = times["median_ms"], times["round_medians_ms"]
    return max(times["p80_ms"] - times["p20_ms"], max(rounds) - min(rounds)) / 2 / middle


def changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Change]:
    """Every phase that both runs timed, in the order of the new one."""
    before = {(row["case"], row["contender"]): row for row in old["rows"] if row["status"] in TIMED}
    for row in new["rows"]:
        earlier = before.get((row["case"], row["contender"]))
        if row["status"] not in TIMED or earlier is None:
            continue
        for phase, times in row.get("times", {}).items():
            if phase in earlier.get("times", {}):
                was = earlier["times"][phase]
                allowed = 1 + RUN_TO_RUN + spread(was) + spread(times)
                yield Change(row["case"], row["contender"], phase, times["median_ms"] / was["median_ms"], allowed)


def lost(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(case, contender, what it is now) where the old run had a time and the new one tried and has none."""
    now = {(row["case"], row["contender"]): row for row in new["rows"]}
    gone = []
    for row in old["rows"]:
        later = now.get((row["case"], row["contender"]))
        if row["status"] in TIMED and later is not None and later["status"] not in TIMED:
            gone.append((row["case"], row["contender"], f"{later['status']}: {later.get('reason', '')}"))
    return gone


def gone_without_a_try(old: dict[str, Any], new: dict[str, Any]) -> int:
    """How many rows with a time the new run did not try at all: they are neither slower nor lost."""
    tried = {(row["case"], row["contender"]) for row in new["rows"]}
    return sum(row["status"] in TIMED and (row["case"], row["contender"]) not in tried for row in old["rows"])


def other_device(old: dict[str, Any], new: dict[str, Any]) -> str:
    """Why times of the two runs say nothing about the code: they were taken on different devices; '' when they were not."""
    was, now = old["machine"], new["machine"]
    names = ("device", "cpu" if "cpu" in (was.get("device"), now.get("device")) else "card")
    differ = [f"{name} {was.get(name)} and {now.get(name)}" for name in names if was.get(name) != now.get(name)]
    return f"the records are of different devices: {', '.join(differ)}" if differ else ""


def comparable(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What makes the two runs hard to compare, in words."""
    names = ("card", "cpu", "cpu_threads", "torch", "triton", "driver", "power_cap_w")
    pairs = ((name, old["machine"].get(name), new["machine"].get(name)) for name in names)
    return [f"{name} differs: {was} and {now}" for name, was, now in pairs if was != now]
