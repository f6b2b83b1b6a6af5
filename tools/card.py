"""The tests that need a GPU, in many processes at once: PYTHONPATH=src python tools/card.py --out card.json

    python tools/card.py --processes 15 --limit 500 -k "hopper or triton"
    python tools/card.py tests/conformance/test_gpu.py

Each process takes every n-th test, so that cases and backends are spread evenly, and ends by itself at the limit. The record
counts what passed, what a backend refused (with its reason, which the test saw), what failed and what the limit left out.
Ends with 1 if a test failed or none ran.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARD, ENDS, LINES = "BACKLIGHT_SHARD", "BACKLIGHT_SHARD_ENDS", "BACKLIGHT_SHARD_LINES"


# --- inside a process: a plugin of pytest ------------------------------------------------------------------------------------


# after -k and -m: what they leave is shared out evenly
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    mine, count = map(int, os.environ[SHARD].split("/"))
    items[:] = items[mine::count]


def pytest_runtest_setup(item: Any) -> None:
    if time.time() > float(os.environ[ENDS]):
        pytest.skip("the limit is over")


def pytest_runtest_logreport(report: Any) -> None:
    if report.when != "call" and report.passed:
        return
    refused = dict(report.user_properties).get("refused")
    outcome = "refused" if refused and report.passed else "left out" if report.skipped else report.outcome
    line = {"test": report.nodeid, "outcome": outcome, **({"why": refused} if refused else {})}
    with open(os.environ[LINES], "a") as file:
        file.write(json.dumps(line) + "\n")


# --- outside -----------------------------------------------------------------------------------------------------------------


def group(test: str) -> str:
    """The test without its case, with its backend where the name ends with one."""
    name, _, case = test.partition("[")
    backend = re.search(r"(?:^|-)(hopper|triton|tiled)\]$", case)
    return f"{name}, {backend[1]}" if backend else name


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    counts: dict[str, Counter[str]] = {}
    for line in lines:
        counts.setdefault(group(line["test"]), Counter())[line["outcome"]] += 1
    reasons = Counter(line["why"] for line in lines if line["outcome"] == "refused")
    failed = [line["test"] for line in lines if line["outcome"] == "failed"]
    return {
        "counts": {name: dict(found) for name, found in sorted(counts.items())},
        "failed": failed,
        "refused": dict(sorted(reasons.items())),
    }


def run(tests: list[str], chosen: str, processes: int, limit: int, folder: Path) -> list[dict[str, Any]]:
    """What every test came to."""
    begun = []
    for mine in range(processes):
        lines, log = folder / f"{mine}.jsonl", (folder / f"{mine}.log").open("w")
        given = {SHARD: f"{mine}/{processes}", ENDS: str(time.time() + limit), LINES: str(lines), "OMP_NUM_THREADS": "1"}
        path = os.pathsep.join([str(ROOT / "tools"), os.environ.get("PYTHONPATH", "src")])
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "card",
            "-p",
            "no:cacheprovider",
            "-m",
            "gpu",
            "-k",
            chosen,
            *tests,
        ]
        given = {**os.environ, **given, "PYTHONPATH": path}
        begun.append(subprocess.Popen(command, cwd=ROOT, env=given, stdout=log, stderr=subprocess.STDOUT))
    for each in begun:
        each.wait()
    found = [line for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    for path in sorted(folder.glob("*.log")):
        text = path.read_text()
        print(text.rstrip().rsplit("\n", 1)[-1])
        if " failed" in text:
            print(text[text.find("= FAILURES") :][:4000])
    return [json.loads(line) for line in found]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tests", nargs="*", default=["tests"])
    options.add_argument("-k", dest="chosen", default="", help="as pytest's -k")
    options.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    options.add_argument("--limit", type=int, default=500, help="seconds after which no test begins")
    options.add_argument("--out", type=Path, help="the record, JSON")
    asked = options.parse_args()

    import torch

    from backlight.bench.machine import machine as describe

    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        lines = run(asked.tests, asked.chosen, asked.processes, asked.limit, Path(folder))
    machine = describe(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    kept = ("date", "card", "driver", "torch", "triton", "ptxas", "python", "commit")
    record = {
        "machine": {name: machine[name] for name in kept if name in machine},
        "tests": asked.tests,
        "chosen": asked.chosen,
        "seconds": round(time.time() - begun),
        **summary(lines),
    }
    print(json.dumps(record, indent=1))
    if asked.out:
        asked.out.write_text(json.dumps(record, indent=1) + "\n")
    return int(not lines or bool(record["failed"]))


if __name__ == "__main__":
    sys.exit(main())
