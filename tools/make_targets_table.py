"""What the Triton kernels take of each card, on the kernels page: python tools/make_targets_table.py --write (into the page).

The record, docs/data/triton-targets.json.gz, is written by tests/triton_backend/targets.py, which compiles kernels for cards
that are not there.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from records import load

DOCS = Path(__file__).parents[1] / "docs"
RECORD = DOCS / "data" / "triton-targets.json.gz"
PAGE = DOCS / "kernels.md"
MARKER, AFTER = "<!-- table: python tools/make_targets_table.py --write -->", "## Reading a backend"
# works out what is known per row, once for each
ROWS_KERNEL = "_delta_kernel"


def table() -> str:
    record = load(RECORD)
    # card, kernel, tiles, bytes of shared memory, bytes spilled
    rows = [(row["card"], *kernel) for row in record["rows"] for kernel in row["kernels"]]
    counted = Counter(card for card, *_ in rows)
    lines = [
        f"{len(rows)} kernels compiled with Triton {record['triton']} ({record['date']}), {min(counted.values())} or more for",
        "each kind of card:",
        "",
        "| card | tiles | shared memory of a program, KiB | most taken | most spilled, bytes a thread | of row kernels |",
        "|---|---|---|---|---|---|",
    ]
    for name, card in record["cards"].items():
        own = [row[1:] for row in rows if row[0] == name]
        most = max(shared for _, _, shared, _ in own)
        spilled = [
            max(bytes_ for kernel, _, _, bytes_ in own if (kernel == ROWS_KERNEL) == of_rows) for of_rows in (False, True)
        ]
        tiles = card["table"].partition(",")[0]
        cells = (f"{name} ({card['name']})", tiles, f"{card['shared'] / 1024:g}", f"{most / 1024:.1f}", *map(str, spilled))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    if "--write" not in sys.argv:
        print(table())
        return
    text = PAGE.read_text()
    begin, end = text.index(MARKER) + len(MARKER), text.index(AFTER)
    PAGE.write_text(text[:begin] + "\n" + table() + "\n\n" + text[end:])


if __name__ == "__main__":
    main()
