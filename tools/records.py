"""The records of benchmarks/results that tables and pictures are made from."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "nvidia-h200"


def load(path: Path) -> dict[str, Any]:
    raw = path.read_bytes()
    return json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)


def timed(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that passed their gate and have times."""
    return [row for row in data["rows"] if row["status"] == "ok"]


def newest(suite: str, what: str = "", fits: Callable[[dict[str, Any]], bool] = bool) -> Path:
    """The newest record of a suite that fits; `what` says in words which one was looked for."""
    for path in sorted(RESULTS.glob(f"{suite}-2*.json.gz"), reverse=True):
        if fits(load(path)):
            return path
    raise FileNotFoundError(f"no record of {suite} {what}".rstrip())
