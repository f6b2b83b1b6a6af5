"""The counts of docs/distributed.md are those of the runs on a card."""

from __future__ import annotations

import json
from pathlib import Path

from backlight.bench.results import read

DOCS = Path(__file__).parents[2] / "docs"


def test_page_counts_the_runs() -> None:
    runs = [json.loads(line) for line in read(DOCS / "data" / "distributed-h200.jsonl.gz").splitlines()]
    checks = [run for run in runs if run["kind"] == "check"]
    right = {name: [run for run in checks if run["ok"] and run["backend"] == name] for name in ("triton", "hopper")}
    page = (DOCS / "distributed.md").read_text()
    cases = len({run["case"] for run in right["triton"]})
    assert f"passed {len(right['triton'])} calls on the `triton` backend ({cases} cases" in page
    assert f"and {len(right['hopper'])} on the `hopper` backend" in page
    assert not [run for run in checks if run["ok"] is False]
