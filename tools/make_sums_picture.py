"""docs/images/signed-errors.svg from a record of `benchmarks/extras.py` or `benchmarks/sums_short.py`:

    python tools/make_sums_picture.py RECORD.json

Rows: inputs; columns: o, delta and dq; lines: kernels. Signed errors (g - 1) over the length, on a scale that is linear
around 0. Text is text.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "docs" / "images" / "signed-errors.svg"
QUANTITIES = ("o", "delta", "dq")
COLOURS = ("#1f6feb", "#d1571b", "#2da44e", "#8250df", "#6e7781", "#bf3989")
WIDTH, HEIGHT, LEFT, TOP, GAP = 220, 130, 62, 34, 34
# below this an error is drawn in proportion, beyond it by its logarithm
LINEAR = 1e-6


def place(error: float, largest: float) -> float:
    """From -1 to 1."""
    scale = math.log10(1 + largest / LINEAR)
    return math.copysign(math.log10(1 + abs(error) / LINEAR) / scale, error)


def panel(rows: list[dict[str, Any]], kernels: list[str], quantity: str, x0: float, y0: float) -> list[str]:
    lengths = sorted({row["length"] for row in rows})
    largest = max(max(abs(row[quantity]["signed"]) for row in rows), LINEAR)
    across = {length: x0 + WIDTH * n / max(1, len(lengths) - 1) for n, length in enumerate(lengths)}
    middle = y0 + HEIGHT / 2
    out = [f'<path d="M{x0} {y0}v{HEIGHT}h{WIDTH}M{x0} {middle}h{WIDTH}" fill="none" stroke="#999"/>']
    for sign in (1, -1):
        at = middle - sign * HEIGHT / 2
        out.append(f'<text x="{x0 - 4}" y="{at + 4}" text-anchor="end">{sign * largest:+.0e}</text>')
    out += [f'<text x="{x:.0f}" y="{y0 + HEIGHT + 13}" text-anchor="middle">{length}</text>' for length, x in across.items()]
    for kernel, colour in zip(kernels, COLOURS, strict=False):
        points = [
            f"{across[row['length']]:.0f},{middle - place(row[quantity]['signed'], largest) * HEIGHT / 2:.1f}"
            for row in sorted(rows, key=lambda row: row["length"])
            if row["kernel"] == kernel
        ]
        out.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return out


def picture(errors: list[dict[str, Any]]) -> str:
    kinds, kernels = list(dict.fromkeys(row["inputs"] for row in errors)), list(dict.fromkeys(row["kernel"] for row in errors))
    body = []
    for line, kind in enumerate(kinds):
        rows = [row for row in errors if row["inputs"] == kind]
        for column, quantity in enumerate(QUANTITIES):
            x0, y0 = LEFT + column * (WIDTH + LEFT), TOP + line * (HEIGHT + GAP + TOP)
            body += [f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{kind}: {quantity}</text>']
            body += panel(rows, kernels, quantity, x0, y0)
    bottom = len(kinds) * (HEIGHT + GAP + TOP) + 6
    for n, (kernel, colour) in enumerate(zip(kernels, COLOURS, strict=False)):
        x, y = LEFT + n % 3 * (WIDTH + LEFT), bottom + n // 3 * 18
        body += [
            f'<path d="M{x} {y}h22" stroke="{colour}" stroke-width="3"/>',
            f'<text x="{x + 28}" y="{y + 4}">{kernel}</text>',
        ]
    width, height = LEFT + 3 * (WIDTH + LEFT), bottom + 18 * -(-len(kernels) // 3) + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *body, "</svg>\n"])


if __name__ == "__main__":
    TARGET.write_text(picture(json.loads(Path(sys.argv[1]).read_text())["errors"]))
