"""The record of a run: one JSON file, valid after every row, from which tables and pictures are made.

Schema 1. Top level: schema, suite, kind, status (running, interrupted, complete), machine, ceilings, settings, cases, rows,
profiles. A row is one contender on one case: `status` is ok, suspect (between the gate's two limits), wrong, refused or failed;
only the first two have `times`. Times are milliseconds, rates TFLOP/s by math.md eq. 42, memory bytes beyond the inputs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from backlight.bench.workload import Workload

SCHEMA = 1
TIMED = ("ok", "suspect")


class Results:
    """A run being recorded at `path`."""

    def __init__(self, path: Path, suite: str, kind: str, **head: Any):
        self.path = path
        self.data: dict[str, Any] = {
            "schema": SCHEMA,
            "suite": suite,
            "kind": kind,
            "status": "running",
            **head,
            "cases": [],
            "rows": [],
            "profiles": [],
        }

    def add_case(self, workload: Workload) -> None:
        self.data["cases"].append(describe(workload))

    def row(self, workload: Workload, contender: str) -> dict[str, Any]:
        """The row of this contender on this workload; made when asked for first."""
        for row in self.data["rows"]:
            if row["case"] == workload.id and row["contender"] == contender:
                return row
        row = {"case": workload.id, "contender": contender, "status": "running"}
        self.data["rows"].append(row)
        return row

    def save(self) -> None:
        """Replace the file in one step: whoever reads it sees the run before or after, never half of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(json.dumps(self.data, indent=1, allow_nan=False) + "\n")
        partial.replace(self.path)

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


def load(path: Path) -> dict[str, Any]:
    """A recorded run; ValueError with one sentence when the file is something else."""
    try:
        data = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path} must be a bench result of schema {SCHEMA}, got {found!r}")
    return data


def rates(times: dict[str, Any], flops: dict[str, int]) -> dict[str, float]:
    """TFLOP/s of each timed phase that counts operations."""
    return {phase: flops[phase] / found["median_ms"] / 1e9 for phase, found in times.items() if phase in flops}
