"""The table of variant costs on the kernels page, from its record: python docs/make_triton_table.py --write (into the page)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200" / "triton-variants-20261115.json"
PAGE = Path(__file__).with_name("kernels.md")
MARKER, AFTER = "<!-- table: python docs/make_triton_table.py --write -->", "Tile sizes are measured"
NAMES = {
    "bias": "bias, table of 512",
    "lazy": "bias and tau",
    "sink": "sink",
    "gate": "gate",
    "softcap": "softcap 20",
    "window": "window 1024, over its share of the pairs",
}
PHASES = ("forward", "backward", "both")


def table() -> str:
    record = json.loads(RECORD.read_text())
    ratio = {(cell["variant"], cell["d"]): cell["ratio"] for cell in record["cells"]}
    lines = ["| time over plain causal | D | forward | backward | both |", "|---|---|---|---|---|"]
    for variant, what in NAMES.items():
        for d in (64, 128):
            if (variant, d) in ratio:
                cells = " | ".join(f"{ratio[variant, d][phase]:.2f}" for phase in PHASES)
                lines.append(f"| {what} | {d} | {cells} |")
    against = [cell["against_flex"] for cell in record["d256_backward"]]
    best = f"{min(against):.2f} to {max(against):.2f}"
    lines += ["", f"At D = 256 the backward is {best} times as fast as compiled FlexAttention's."]
    if record["note"]:
        lines += ["", record["note"]]
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with the table in its place, between the marker and the next paragraph of its own."""
    before, rest = text.split(MARKER)
    return before + MARKER + "\n" + table() + "\n\n" + rest[rest.index(AFTER) :]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print(table())
