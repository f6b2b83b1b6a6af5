"""Costs of variants on the kernels page, from the newest records: python tools/make_triton_table.py --write (into the page)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from records import ROOT, load, newest, timed

PAGE = ROOT / "docs" / "kernels.md"
MARKER, AFTER = "<!-- table: python tools/make_triton_table.py --write -->", "Tile sizes are measured"
OURS = "backlight:triton"
NAMES = {
    "bias": "bias, table of 512",
    "lazy": "bias and tau",
    "sink": "sink",
    "gate": "gate",
    "softcap": "softcap 20",
    "window": "window 1024, over its share of the pairs",
}
PHASES = ("forward", "backward")
WINDOW, LENGTH = 1024, 16384
# of the pairs of a causal row block, those that the window keeps
SHARE = (WINDOW * (WINDOW + 1) / 2 + (LENGTH - WINDOW) * WINDOW) / (LENGTH * (LENGTH + 1) / 2)


def newest_with(suite: str, *contenders: str) -> Path:
    """The newest record of a suite in which all of them were timed."""
    return newest(suite, f"with {contenders}", lambda data: set(contenders) <= {row["contender"] for row in timed(data)})


def table() -> str:
    variants, plain = newest_with("variants", OURS), newest_with("plain", OURS, "flex")
    over = {}
    for row in timed(load(variants)):
        case = re.match(r"(\w+),d=(\d+),s=\d+/", row["case"])
        if case and row["contender"] == OURS and "over_plain" in row:
            share = SHARE if case[1] == "window" else 1.0
            ms = [row["times"][phase]["median_ms"] for phase in PHASES]
            ratio = [row["over_plain"][phase] / share for phase in PHASES]
            # of the two, one after the other
            ratio.append(sum(ms) / sum(time / each for time, each in zip(ms, ratio, strict=True)))
            over[case[1], case[2]] = [f"{each:.2f}" for each in ratio]
    lines = [f"Records: `{variants.name}` and, for D = 256, `{plain.name}`.", ""]
    lines += ["| time over plain causal | D | forward | backward | sum |", "|---|---|---|---|---|"]
    for variant, what in NAMES.items():
        lines += [f"| {what} | {d} | {' | '.join(over[variant, d])} |" for d in ("64", "128") if (variant, d) in over]
    times = {(row["case"], row["contender"]): row["times"]["backward"]["median_ms"] for row in timed(load(plain))}
    wide = {case: times[case, "flex"] / ms for (case, name), ms in times.items() if name == OURS and "d=256" in case}
    lengths = sorted({int(found[1]) for case in wide if (found := re.search(r"s=(\d+)", case))})
    speeds = f"{min(wide.values()):.2f} to {max(wide.values()):.2f} times as fast as compiled FlexAttention's"
    lines += ["", f"At D = 256 (S {', '.join(map(str, lengths))}) the backward is {speeds}."]
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
