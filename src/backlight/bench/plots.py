"""Pictures of a run, made from its JSON alone: rates by length, ratios to the peers, memory, roofline, and profiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any

from backlight.bench.contenders.ours import OURS
from backlight.bench.machine import machine_line
from backlight.bench.plot_style import PHASE_PANELS, families_of, family_title, figure_of, legend, log2_lengths, styles_of
from backlight.bench.plots_machine import profile, roofline
from backlight.bench.suites import MEMORY
from backlight.bench.table import contenders, costs, phases, ratio, rows_by, unit

FORMATS = ("png", "svg")
# text stays text: outlines of letters are most of a picture's bytes
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "backlight",
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# beyond a factor of 2**DEEP the colours are dark and the figures on them light
DEEP = 1.3
MEMORY_COLUMNS = 6


def draw(data: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Every picture this run has data for, as PNG and SVG under `folder`; returns the paths written."""
    import matplotlib

    pictures: dict[str, Callable[[dict[str, Any]], Any]] = {
        "rates": rates,
        "ratios": ratios,
        "costs": cost_bars,
        "memory": memory,
        "roofline": roofline,
        "profile": profile,
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(STYLE):
        for name, make in pictures.items():
            figure = make(data)
            if figure is None:
                continue
            # about 16 characters of this size to the inch
            line = fill(machine_line(data["machine"]), int(16 * figure.get_figwidth()))
            figure.supxlabel(line, fontsize=6, color="0.45")
            for kind in FORMATS:
                paths.append(folder / f"{stem}-{name}.{kind}")
                figure.savefig(paths[-1], dpi=130, metadata={"Date": None} if kind == "svg" else None)
    return paths


# --- rates -------------------------------------------------------------------------------------------------------------------


def rates(data: dict[str, Any]) -> Any:
    """TFLOP/s by S, a panel for each D and mask; or bars by case where lengths do not vary."""
    if not any(row.get("tflops") for row in data["rows"]):
        return None
    families = families_of(data)
    # a suite of variants may hold two lengths of one of them: lines would leave out the others
    return _rate_lines(data, families) if 2 * sum(map(len, families)) > len(data["cases"]) else _rate_bars(data)


def _rate_lines(data: dict[str, Any], families: list[list[dict[str, Any]]]) -> Any:
    figure = figure_of(2.6 * len(families) + 0.6, 5.2)
    panels = figure.subplots(len(PHASE_PANELS), len(families), squeeze=False, sharex="col")
    rows, styles, (word, factor) = rows_by(data), styles_of(data), unit(data)
    for column, cases in enumerate(families):
        for line, phase in enumerate(PHASE_PANELS):
            axes = panels[line][column]
            for name, style in styles.items():
                points = [(case["rows"], rows.get((case["id"], name), {}).get("tflops", {}).get(phase)) for case in cases]
                seen = [(s, rate * factor) for s, rate in points if rate is not None]
                if seen:
                    axes.plot(*zip(*seen, strict=True), **style)
            log2_lengths(axes, [case["rows"] for case in cases])
            axes.set_ylim(0, 1.06 * axes.get_ylim()[1])
            axes.grid(alpha=0.25)
            axes.set_title(family_title(cases[0]) if line == 0 else "")
            if column == 0:
                axes.set_ylabel(f"{phase}, {word}")
    panels[-1][0].set_xlabel("S")
    legend(figure, panels)
    return figure


def _rate_bars(data: dict[str, Any]) -> Any:
    names, cases, rows, styles, (word, factor) = contenders(data), data["cases"], rows_by(data), styles_of(data), unit(data)
    figure = figure_of(max(5.0, 1.1 * len(cases)), 5.0)
    panels = figure.subplots(len(PHASE_PANELS), 1, squeeze=False, sharex=True)
    width = 0.8 / max(1, len(names))
    for line, phase in enumerate(PHASE_PANELS):
        axes = panels[line][0]
        for place, name in enumerate(names):
            heights = [rows.get((case["id"], name), {}).get("tflops", {}).get(phase, 0.0) * factor for case in cases]
            at = [x + (place - (len(names) - 1) / 2) * width for x in range(len(cases))]
            axes.bar(at, heights, width, color=styles[name]["color"], label=styles[name]["label"])
        axes.set_ylabel(f"{phase}, {word}")
        axes.set_xticks(range(len(cases)), [case["id"] for case in cases], rotation=25, ha="right")
    legend(figure, panels)
    return figure


# --- ratios ------------------------------------------------------------------------------------------------------------------


def ratios(data: dict[str, Any]) -> Any:
    """Our speed over each peer's, a cell for each case, peer and phase."""
    rows = rows_by(data)
    timed = phases(data)
    peers = [name for name in contenders(data) if name != OURS]
    cells = {(c["id"], p, f): ratio(rows, c["id"], p, f) for c in data["cases"] for p in peers for f in timed}
    if not any(value is not None for value in cells.values()):
        return None
    figure = figure_of(2.0 + 0.75 * len(peers) * len(timed), 1.6 + 0.24 * len(data["cases"]))
    panels = figure.subplots(1, len(timed), squeeze=False, sharey=True)[0]
    styles = styles_of(data)
    for axes, phase in zip(panels, timed, strict=True):
        grid = [[cells[case["id"], peer, phase] for peer in peers] for case in data["cases"]]
        image = axes.imshow(
            [[math.nan if value is None else max(-2.0, min(2.0, math.log2(value))) for value in line] for line in grid],
            cmap="RdYlGn",
            vmin=-2,
            vmax=2,
            aspect="auto",
        )
        for y, line in enumerate(grid):
            for x, value in enumerate(line):
                status = rows.get((data["cases"][y]["id"], peers[x]), {}).get("status", "")
                word = f"{value:.2f}" if value is not None else status if status in ("wrong", "failed") else ""
                deep = value is not None and abs(math.log2(value)) > DEEP
                axes.text(x, y, word, ha="center", va="center", fontsize=6, color="white" if deep else "black")
        axes.set_xticks(range(len(peers)), [styles[peer]["label"] for peer in peers], rotation=35, ha="right")
        axes.set_title(phase)
    panels[0].set_yticks(range(len(data["cases"])), [case["id"] for case in data["cases"]])
    bar = figure.colorbar(image, ax=list(panels), ticks=[-2, -1, 0, 1, 2], shrink=0.8)
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.set_label("our speed / the peer's")
    return figure


# --- what a term costs ------------------------------------------------------------------------------------------------------


def cost_bars(data: dict[str, Any]) -> Any:
    """Time of each variant over the same contender's plain of the same shape, forward and backward together."""
    found, styles = costs(data), styles_of(data)
    names = [name for name in styles if any("both" in by_name.get(name, {}) for by_name in found.values())]
    if not names:
        return None
    figure = figure_of(7.0, 1.4 + 0.16 * len(names) * len(found))
    axes = figure.subplots()
    height = 0.8 / len(names)
    for place, name in enumerate(names):
        at = [y + (place - (len(names) - 1) / 2) * height for y in range(len(found))]
        bars = [
            (y, by_name[name]["both"]) for y, by_name in zip(at, found.values(), strict=True) if "both" in by_name.get(name, {})
        ]
        # from 1, so that what is dearer than plain points right and what is cheaper points left
        lengths = [cost - 1.0 for _, cost in bars]
        axes.barh([y for y, _ in bars], lengths, height, left=1.0, color=styles[name]["color"], label=styles[name]["label"])
        for y, cost in bars:
            axes.text(cost, y, f" {cost:.2f} ", va="center", ha="left" if cost >= 1 else "right", fontsize=6)
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_yticks(range(len(found)), list(found))
    axes.invert_yaxis()
    axes.set_xlabel("forward and backward / plain of the same shape, same contender")
    legend(figure, [[axes]])
    return figure


# --- memory ------------------------------------------------------------------------------------------------------------------


def memory(data: dict[str, Any]) -> Any:
    """Peak bytes beyond the inputs by S, in units of q, k and v."""
    families = families_of(data)
    rows, styles = rows_by(data), styles_of(data)
    known = any("peak_bytes" in row.get("memory", {}) for row in data["rows"])
    if not families or not known or data["kind"] not in (MEMORY, "speed"):
        return None
    columns = min(MEMORY_COLUMNS, len(families))
    lines = -(-len(families) // columns)
    figure = figure_of(2.8 * columns + 0.6, 0.8 + 2.6 * lines)
    panels = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for axes in panels.flat[len(families) :]:
        axes.set_axis_off()
    for axes, cases in zip(panels.flat, families, strict=False):
        for name, style in styles.items():
            points = [(case["rows"], rows.get((case["id"], name), {}).get("memory", {}).get("relative")) for case in cases]
            seen = [(s, value) for s, value in points if value is not None]
            if seen:
                axes.plot(*zip(*seen, strict=True), **style)
        axes.set_yscale("log", base=2)
        log2_lengths(axes, [case["rows"] for case in cases])
        axes.grid(alpha=0.25)
        axes.set_title(family_title(cases[0]))
        axes.set_xlabel("S")
    for line in panels:
        line[0].set_ylabel("peak beyond inputs / bytes of q, k, v")
    legend(figure, panels)
    return figure
