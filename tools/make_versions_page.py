"""Tables of docs/versions.md, from what `make matrix` recorded: python tools/make_versions_page.py --write (into the page)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"
DATA = DOCS / "data" / "versions.json"
PAGE = DOCS / "versions.md"
BEGIN, END = "<!-- tables: python tools/make_versions_page.py --write -->", "<!-- end of tables -->"
PARTS = {
    "cli": "command line, demo, reports",
    "interpreter": "Triton kernels, interpreted",
    "compile": "compile tests, sm_90a",
    "kernels": "facts of kernels",
    "host": "all other tests",
}
ORDER = ("torch-2.11", "torch-2.12", "torch-2.13", "torch-2.14", "torch-2.15", "lowest")
COLUMNS = ("registers", "spills", "shared", "BAR.SYNC", "BAR.ARV", "WARPGROUP.ARRIVE", "HGMMA")
# bwd_apart: how records of earlier versions call bwd_narrow
MAIN = ("fwd", "bwd", "bwd_apart", "bwd_narrow", "dq")


def cell(result: dict[str, Any] | None) -> str:
    """What came of one part, in a few words."""
    if result is None:
        return "not run"
    if "rows" in result:
        return f"{len(result['rows'])} kernels" if result["ok"] else "**did not compile**"
    counts = result["counts"]
    bad = counts.get("failed", 0) + counts.get("error", 0)
    if not result["ok"] and not bad:
        return "**broke off**"
    repaired = len(repairs(result))
    words = f"{counts.get('passed', 0)} passed" + (f", {repaired} after a repair" if repaired else "")
    return f"{words}, **{bad - repaired} failed**" if bad > repaired else words


def repairs(result: dict[str, Any]) -> list[str]:
    """Tests that failed and have passed since."""
    return [test for test in result["failed"] if "again" in result and test not in result["again"]["failed"]]


def runs(data: dict[str, Any]) -> list[str]:
    lines = [f"| environment | torch | Triton | Python | {' | '.join(PARTS.values())} |", "|---" * (4 + len(PARTS)) + "|"]
    for name in (each for each in ORDER if each in data):
        versions, parts = data[name]["versions"], data[name]["parts"]
        cells = [cell(parts.get(part)) for part in PARTS]
        known = [versions[key] for key in ("torch", "triton", "python")]
        lines.append(f"| {name} | {' | '.join(known)} | {' | '.join(cells)} |")
    return lines


def failures(data: dict[str, Any]) -> list[str]:
    """The tests that failed, by name: a table that hides them is no table."""
    lines = []
    for name in (each for each in ORDER if each in data):
        for part, result in data[name]["parts"].items():
            for test in result.get("failed", ()):
                since = f", passes since at {result['again']['commit']}" if test in repairs(result) else ""
                lines.append(f"* {name}, {part}: `{test}`{since}")
    return ["", "Failed:", "", *lines] if lines else []


def floors(data: dict[str, Any]) -> list[str]:
    if "lowest" not in data:
        return []
    versions = data["lowest"]["versions"]
    return ["", f"`lowest` is {', '.join(f'{name} {version}' for name, version in versions.items())}."]


def kernels(data: dict[str, Any]) -> list[str]:
    """Numbers of the main kernels, one line each per Triton; those of one Triton under several torches are the same."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name in (each for each in ORDER if each in data):
        versions, parts = data[name]["versions"], data[name]["parts"]
        facts = parts.get("kernels", {"columns": [], "rows": []})
        for row in (dict(zip(facts["columns"], values, strict=True)) for values in facts["rows"]):
            if row["kernel"] in MAIN:
                found.setdefault((row["call"], row["kernel"]), {})[versions["triton"]] = row
    lines = [f"| call | kernel | Triton | {' | '.join(COLUMNS)} |", "|---" * (3 + len(COLUMNS)) + "|"]
    for (call, kernel), by_triton in found.items():
        for triton, row in sorted(by_triton.items()):
            numbers = " | ".join("-" if row[column] is None else str(row[column]) for column in COLUMNS)
            lines.append(f"| {call} | {kernel} | {triton} | {numbers} |")
    return lines if found else ["Not recorded yet."]


def tables() -> str:
    data = json.loads(DATA.read_text())
    head = ["## What was run", "", *runs(data), *floors(data), *failures(data)]
    return "\n".join([*head, "", "## What each Triton makes of the Hopper kernels", "", *kernels(data)])


def written(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(tables())
