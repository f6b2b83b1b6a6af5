"""Pictures that need the machine: the roofline under the ceilings of the same run, and the stacked bars of a profile."""

from __future__ import annotations

from typing import Any

from backlight.bench.plot_style import PHASE_PANELS, figure_of, styles_of
from backlight.bench.results import TIMED
from backlight.bench.suites import OVERHEAD
from backlight.bench.table import unit


def roofline(data: dict[str, Any]) -> Any:
    """Rates against operations per byte that must move, under the ceilings measured in the same run."""
    points = [
        (case["flops"][phase] / case["least_bytes"][phase], row["tflops"][phase], row["contender"], phase)
        for case in data["cases"]
        for row in data["rows"]
        if row["case"] == case["id"] and row["status"] in TIMED
        for phase in PHASE_PANELS
        if phase in row.get("tflops", {})
    ]
    if not points or data["kind"] == OVERHEAD:
        return None
    figure = figure_of(5.6, 4.0)
    axes = figure.subplots()
    copy, styles, (word, factor) = data["ceilings"]["copy_tb_s"], styles_of(data), unit(data)
    roofs = data["ceilings"]["matmul_tflops"]
    knees = [rate / copy for rate in roofs.values()]
    low, high = min([x for x, *_ in points] + knees) / 3, max([x for x, *_ in points] + knees) * 2
    for (name, rate), knee in zip(roofs.items(), knees, strict=True):
        axes.plot([low, knee, high], [low * copy * factor, rate * factor, rate * factor], color="0.3", lw=1)
        axes.text(high, rate * factor, f"{name} matmul {rate * factor:.4g}", fontsize=6, va="bottom", ha="right")
    for name, style in styles.items():
        for phase, filled in zip(PHASE_PANELS, (True, False), strict=True):
            mine = [(x, y * factor) for x, y, who, when in points if who == name and when == phase]
            if mine:
                face = style["color"] if filled else "none"
                label = f"{style['label']}, {phase}"
                xs, ys = zip(*mine, strict=True)
                axes.scatter(xs, ys, s=16, marker=style["marker"], edgecolors=style["color"], facecolors=face, label=label)
    title = f"measured roofs, copy {copy * 1e3:.4g} GB/s"
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte that must move", ylabel=word, title=title)
    axes.grid(alpha=0.2, which="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=6)
    return figure


def profile(data: dict[str, Any]) -> Any:
    """One stacked bar for each profiled contender and phase: where its time goes."""
    from matplotlib import colormaps

    bars = [(f"{one['contender']}, {phase}", found) for one in data["profiles"] for phase, found in one["phases"].items()]
    if not bars:
        return None
    names = list(dict.fromkeys(part["name"] for _, found in bars for part in found["parts"]))
    figure = figure_of(9.5, 1.4 + max(0.6 * len(bars), 0.13 * len(names)))
    axes = figure.subplots()
    longest = max(found["time_ms"] for _, found in bars)
    colours = colormaps["tab20"]
    for y, (_, found) in enumerate(bars):
        left = 0.0
        for part in found["parts"]:
            colour = colours(names.index(part["name"]) % 20)
            axes.barh(y, part["time_ms"], left=left, color=colour, edgecolor="white", linewidth=0.4)
            if part["time_ms"] >= 0.05 * longest:
                axes.text(left + part["time_ms"] / 2, y, f"{part['share']:.0%}", ha="center", va="center", fontsize=6)
            left += part["time_ms"]
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(data["profiles"][0]["case"])
    handles = [axes.barh(0, 0, color=colours(i % 20), label=name[:60]) for i, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=6)
    return figure
