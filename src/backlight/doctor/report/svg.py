"""Pictures of a report as inline SVG. Colours are CSS classes, so one drawing serves light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape

from backlight.doctor.report import words

HEAT_STEPS = 9
FAR_ULP = 8


def tag(name: str, content: Markup | str = "", **attributes: object) -> Markup:
    """One element; underscores in attribute names become hyphens, `class_` becomes class, None is left out."""
    given = {key.rstrip("_").replace("_", "-"): _short(value) for key, value in attributes.items() if value is not None}
    written = "".join(f' {key}="{escape(value)}"' for key, value in given.items())
    return Markup(f"<{name}{written}>{escape(content)}</{name}>")


def join(parts: Iterable[Markup]) -> Markup:
    return Markup("").join(parts)


def drawing(width: float, height: float, content: Markup, label: str, class_: str = "picture") -> Markup:
    """An `<svg>` that keeps its natural size but shrinks with the page."""
    return tag(
        "svg",
        content,
        viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width,
        height=height,
        class_=class_,
        role="img",
        aria_label=label,
    )


def label(x: float, y: float, content: str, class_: str = "tick", anchor: str = "start") -> Markup:
    return tag("text", content, x=x, y=y, class_=class_, text_anchor=anchor)


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


# --- head x row-tile heat map ------------------------------------------------------------------------------------------------


def heat_step(value: float | None, limit: float) -> str:
    """CSS class of a cell: h0..h3 up to the limit, h4..h8 above it (doubling each time), hx for NaN and infinity."""
    if value is None:
        return "none"
    if not math.isfinite(value):
        return "hx"
    if value <= limit:
        return f"h{min(3, int(4 * max(value, 0.0) / limit))}"
    return f"h{min(HEAT_STEPS - 1, 4 + int(math.log2(value / limit)))}"


def head_tile(data: Mapping[str, Any]) -> Markup:
    """Rows are heads, columns are row tiles, colour is the error against what passes."""
    values: Sequence[Sequence[float | None]] = data["values"]
    heads, tile, limit = data["heads"], int(data["tile"]), float(data["limit"])
    columns = max((len(row) for row in values), default=0)
    wide = max(6.0, min(44.0, 440.0 / max(columns, 1)))
    tall = max(8.0, min(24.0, 420.0 / max(len(values), 1)))
    left, top = 12 + 7.0 * max((len(name) for name in heads), default=2), 22.0
    cells = [
        tag(
            "rect",
            tag("title", f"{name}, rows {t * tile}-{(t + 1) * tile - 1}: {words.ratio(value)}"),
            x=left + t * wide,
            y=top + h * tall,
            width=wide - 1,
            height=tall - 1,
            rx=min(2.0, tall / 6),
            class_=heat_step(value, limit),
        )
        for h, (name, row) in enumerate(zip(heads, values, strict=True))
        for t, value in enumerate(row)
    ]
    every_head, every_tile = math.ceil(11 / tall), math.ceil(34 / wide)
    shown = [(h, name) for h, name in enumerate(heads) if h % every_head == 0]
    names = [label(left - 8, top + h * tall + tall / 2 + 4, name, anchor="end") for h, name in shown]
    starts = [label(left + t * wide, top - 8, str(t * tile)) for t in range(0, columns, every_tile)]
    content = join([*cells, *names, *starts])
    return drawing(left + columns * wide + 4, top + len(values) * tall + 4, content, "error by head and row tile")


def heat_key(limit: float, unit: str) -> Markup:
    """The colour scale of the heat maps."""
    samples = [limit * (step + 0.5) / 4 for step in range(4)] + [limit * 2**step * 1.01 for step in range(5)]
    boxes = [tag("rect", x=i * 22.0, y=2, width=21, height=12, class_=heat_step(v, limit)) for i, v in enumerate(samples)]
    edges = [(0, "0"), (4, words.ratio(limit)), (6, words.ratio(4 * limit)), (8, words.ratio(16 * limit))]
    ticks = [label(i * 22.0, 28, name, anchor="start" if i == 0 else "middle") for i, name in edges]
    return drawing(330, 32, join([*boxes, *ticks, label(206, 12, unit)]), "colour scale", class_="key")


# --- i x j support -----------------------------------------------------------------------------------------------------------

SUPPORT_CLASSES = ("masked", "visible", "leak", "hole")


def support(data: Mapping[str, Any]) -> Markup:
    """Query rows downwards, keys to the right; equal neighbours of a row become one rectangle."""
    cells: Sequence[Sequence[int]] = data["cells"]
    rows, columns = len(cells), max((len(row) for row in cells), default=0)
    size = max(1.0, min(16.0, 360.0 / max(rows, columns, 1)))
    left, top = 40.0, 24.0
    runs = []
    for i, row in enumerate(cells):
        j = 0
        for kind, group in groupby(row):
            n = len(list(group))
            if kind:
                runs.append(_run(left + j * size, top + i * size, n * size, size, SUPPORT_CLASSES[kind]))
            j += n
    # leaks and holes last and a little larger, so that a single diagonal survives on a small screen
    runs.sort(key=lambda run: run[0])
    frame = tag("rect", x=left, y=top, width=columns * size, height=rows * size, class_="masked frame")
    axes = [
        label(left, top - 8, "key j  0"),
        label(left + columns * size, top - 8, str(int(data["sk"]) - 1), anchor="end"),
        label(left - 6, top + 9, "i  0", anchor="end"),
        label(left - 6, top + rows * size, str(int(data["sq"]) - 1), anchor="end"),
    ]
    content = join([frame, *(shape for _, shape in runs), *axes])
    return drawing(left + columns * size + 6, top + rows * size + 6, content, "which cells are filled")


def _run(x: float, y: float, width: float, height: float, kind: str) -> tuple[int, Markup]:
    wrong = kind in ("leak", "hole")
    grow = max(0.0, 2.4 - height) / 2 if wrong else 0.0
    shape = tag("rect", x=x - grow, y=y - grow, width=width + 2 * grow + 0.04, height=height + 2 * grow + 0.04, class_=kind)
    return int(wrong), shape


# --- distances in ULP --------------------------------------------------------------------------------------------------------


def ulp(edges: Sequence[float], counts: Sequence[int]) -> Markup:
    """Elements by distance from the oracle; bar height is the logarithm of the count."""
    step, height, top = 26.0 if len(edges) <= 8 else 35.0, 84.0, 16.0
    tallest = math.log10(1 + max([*counts, 1]))
    parts = []
    for i, (edge, count) in enumerate(zip(edges, counts, strict=True)):
        bar = height * math.log10(1 + count) / tallest
        x = 4 + i * step
        if count:
            kind = "bar far" if edge >= FAR_ULP else "bar"
            title = tag("title", f"{count} elements")
            parts.append(tag("rect", title, x=x, y=top + height - bar, width=step - 4, height=bar, rx=2, class_=kind))
            parts.append(label(x + step / 2 - 2, top + height - bar - 4, _count(count), "count", "middle"))
        closing = "+" if i == len(edges) - 1 else ""
        parts.append(label(x + step / 2 - 2, top + height + 14, f"{_edge(edge)}{closing}", anchor="middle"))
    axis = tag("line", x1=4, x2=len(edges) * step, y1=top + height, y2=top + height, class_="axis")
    return drawing(len(edges) * step + 8, top + height + 20, join([*parts, axis]), "elements by distance in ULP")


def _count(count: int) -> str:
    return str(count) if count < 1000 else f"{count / 1e3:.2g}k" if count < 99_500 else f"{count / 1e6:.2g}M"


def _edge(edge: float) -> str:
    return str(int(edge)) if edge < 1000 and edge == int(edge) else f"{edge:.2g}" if edge < 1000 else f"{edge / 1e3:.2g}k"


# --- gains by head -----------------------------------------------------------------------------------------------------------


def gains(values: Sequence[float]) -> Markup:
    """One bar a head, the line is 1: a broken vector such as 1, 0, 0, 0 is seen at a glance."""
    width, height = max(3.0, min(9.0, 90.0 / max(len(values), 1))), 22.0
    top = max([1.5, *(min(abs(v), 20.0) for v in values if math.isfinite(v))])
    bars = []
    for h, value in enumerate(values):
        finite = math.isfinite(value)
        tall = max(1.5, height * min(abs(value), top) / top) if finite else height
        kind = "bar" if finite and abs(value - 1) <= words.GAIN_SPREAD else "bar wrong" if finite else "bar hx"
        title = tag("title", f"head {h}: {words.gain(value)}")
        bars.append(tag("rect", title, x=h * width, y=height - tall, width=width - 1, height=tall, class_=kind))
    one = tag("line", x1=0, x2=len(values) * width, y1=height - height / top, y2=height - height / top, class_="axis dashed")
    return drawing(len(values) * width, height, join([*bars, one]), "gain by head", class_="spark")
