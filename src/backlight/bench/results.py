"""The record of a run: one JSON file, valid after every row, from which tables and pictures are made.

Schema 1. Top level: schema, suite, kind, status (running, interrupted, stopped, complete), machine, ceilings, settings, parts,
cases, rows, profiles. `parts` has one entry for every process that worked at the record, and a case says which. A row is one
contender on one case: `status` is ok, suspect (between the gate's two limits), wrong, refused or failed; only the first two
have `times`. Times are milliseconds, rates TFLOP/s by math.md eq. 42, memory bytes beyond the inputs.
"""

from __future__ import annotations

import gzip
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backlight.bench.record import BadRecord, check
from backlight.bench.workload import Workload

SCHEMA = 1
TIMED = ("ok", "suspect")
# writing a long record takes some 30 ms, in which a card cools down
SAVE_EVERY_S = 2.0


class Results:
    """A run being recorded at `path`."""

    def __init__(self, path: Path, suite: str, kind: str, **head: Any):
        self.path = path
        self.saved_at = -SAVE_EVERY_S
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "suite": suite,
            "kind": kind,
            "status": "running",
            **head,
            "parts": [],
            "cases": [],
            "rows": [],
            "profiles": [],
        }

    @staticmethod
    def resumed(path: Path, data: dict[str, Any]) -> Results:
        """A run that goes on from an earlier record."""
        results = Results(path, data["suite"], data["kind"])
        results.data |= data | {"status": "running"}
        return results

    def add_part(self, **facts: Any) -> None:
        """Another process begins to work at this record."""
        self.data["parts"].append(facts)

    def add_case(self, workload: Workload) -> dict[str, Any]:
        part = {"part": len(self.data["parts"]) - 1} if self.data["parts"] else {}
        self.data["cases"].append(describe(workload) | part)
        return self.data["cases"][-1]

    def drop_case(self, workload: Workload) -> None:
        """Forget a case that was not finished."""
        self.data["cases"] = [case for case in self.data["cases"] if case["id"] != workload.id]
        self.data["rows"] = [row for row in self.data["rows"] if row["case"] != workload.id]

    def arrange(self, workloads: Sequence[Workload]) -> None:
        """Cases and rows in the order of the suite, however many runs they came from."""
        place = {workload.id: number for number, workload in enumerate(workloads)}
        self.data["cases"].sort(key=lambda case: place.get(case["id"], len(place)))
        self.data["rows"].sort(key=lambda row: place.get(row["case"], len(place)))

    def row(self, workload: Workload, contender: str) -> dict[str, Any]:
        """The row of this contender on this workload; made when asked for first."""
        for row in self.data["rows"]:
            if row["case"] == workload.id and row["contender"] == contender:
                return row
        row = {"case": workload.id, "contender": contender, "status": "running"}
        self.data["rows"].append(row)
        return row

    def status(self, workload: Workload, contender: str) -> str | None:
        """What is known of this contender on this workload; None = nothing."""
        found = (row["status"] for row in self.data["rows"] if (row["case"], row["contender"]) == (workload.id, contender))
        return next(found, None)

    def save_soon(self) -> None:
        """Save unless that was done a moment ago: for places where the next save is not far."""
        if time.monotonic() - self.saved_at >= SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Replace the file in one step: whoever reads it sees the run before or after, never half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        partial.replace(self.path)
        self.saved_at = time.monotonic()

    def finish(self, status: str) -> None:
        self.data["rows"] = [row for row in self.data["rows"] if row["status"] != "running"]
        self.data["status"] = status
        self.save()


def describe(workload: Workload) -> dict[str, Any]:
    """A case as recorded: enough to draw it again and to count its operations without this package."""
    return {
        "id": workload.id,
        **workload.to_json(),
        "rows": workload.sq,
        "keys": workload.sk,
        "flops": workload.flops(),
        "least_bytes": workload.least_bytes(),
        "input_bytes": workload.input_bytes(),
    }


def read(path: Path) -> str:
    """A record's text; those that are kept are compressed (.json.gz)."""
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def load(path: Path) -> dict[str, Any]:
    """A recorded run; `BadRecord` with one sentence when the file is something else, cut short or changed by hand."""
    try:
        data = json.loads(read(Path(path)))
    except OSError as error:
        raise BadRecord(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise BadRecord(f"{path} must be a bench result of schema {SCHEMA}, got {found!r:.60}")
    try:
        check(data)
    except BadRecord as error:
        raise BadRecord(f"{path}: {error}") from None
    return data


def rates(times: dict[str, Any], flops: dict[str, int]) -> dict[str, float]:
    """TFLOP/s of each timed phase that counts operations."""
    return {phase: flops[phase] / found["median_ms"] / 1e9 for phase, found in times.items() if phase in flops}


def add_costs(data: dict[str, Any]) -> None:
    """Give each timed row of a variant `over_plain`: its time over that of the same contender on plain of the same shape.

    Ours is timed on plain in the same race (`plain_times`); a peer's plain is a case of its own in the same run.
    """
    plain_of = {case["id"]: case["plain"] for case in data["cases"] if "plain" in case}
    rows = {(row["case"], row["contender"]): row for row in data["rows"] if row["status"] in TIMED}
    for (case, name), row in rows.items():
        other = rows.get((plain_of.get(case, ""), name), {})
        mine, plain = row.get("times", {}), row.get("plain_times") or other.get("times", {})
        found = {phase: mine[phase]["median_ms"] / plain[phase]["median_ms"] for phase in mine if phase in plain}
        if case in plain_of and found:
            row["over_plain"] = found
