"""What the pictures share: colours of contenders, families of cases, axes over lengths, legends."""

from __future__ import annotations

from typing import Any

from backlight.bench.contender import BARE
from backlight.bench.contenders.ours import OURS
from backlight.bench.table import contenders

OURS_COLOUR = "#d1421f"
NAMED_COLOUR = "#eb9c7d"
PEER_COLOURS = ("#3b6fb6", "#2f8f5b", "#8a5fb0", "#c08a1e", "#4a9fb5", "#7a7f87", "#b05a86", "#5c6b2f", "#a0785a")
MARKERS = "osD^vP*X<>"
PHASE_PANELS = ("forward", "backward")


def figure_of(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styles_of(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Line style of each contender: ours thick and red, our backends by name paler, bare operators dashed."""
    bare = {row["contender"] for row in data["rows"] if row.get("path") == BARE}
    styles: dict[str, dict[str, Any]] = {}
    peers = [name for name in contenders(data) if not name.startswith(OURS)]
    for name in contenders(data):
        mine = name.startswith(OURS)
        place = 0 if mine else 1 + peers.index(name)
        ours = OURS_COLOUR if name == OURS else NAMED_COLOUR
        styles[name] = {
            "color": ours if mine else PEER_COLOURS[(place - 1) % len(PEER_COLOURS)],
            "linewidth": 2.2 if name == OURS else 1.2,
            "linestyle": "--" if name in bare else "-",
            "marker": MARKERS[place % len(MARKERS)],
            "markersize": 4,
            "label": f"{name} (bare op)" if name in bare else name,
        }
    return styles


def _family(case: dict[str, Any]) -> tuple[Any, ...]:
    """Cases that differ in length alone: what a line over S connects."""
    options = case["case"]
    lengths = ("name", "b", "sq", "sk")
    return (case["dtype"], tuple(sorted((k, str(v)) for k, v in options.items() if k not in lengths)))


def families_of(data: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Families with at least two lengths, each in order of length."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for case in data["cases"]:
        if "lengths_q" not in case["case"]:
            found.setdefault(_family(case), []).append(case)
    return [
        sorted(cases, key=lambda case: case["rows"]) for cases in found.values() if len({case["rows"] for case in cases}) > 1
    ]


def family_title(case: dict[str, Any]) -> str:
    options = case["case"]
    skipped = ("name", "b", "hq", "hkv", "sq", "sk", "d", "causal")
    extra = [f"{name}={value}" for name, value in options.items() if name not in skipped]
    grouped = [f"{options['hq']}:{options['hkv']} heads"] if options["hq"] != options["hkv"] else []
    return ", ".join([f"D={options['d']}", "causal" if options["causal"] else "full", case["dtype"], *grouped, *extra])


def log2_lengths(axes: Any, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{s // 1024}k" if s >= 1024 and s % 1024 == 0 else str(s) for s in lengths])
    axes.minorticks_off()


def legend(figure: Any, panels: Any) -> None:
    labels: dict[str, Any] = {}
    for line in panels:
        for axes in line:
            labels |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if labels:
        figure.legend(labels.values(), labels.keys(), loc="outside upper center", ncols=min(6, len(labels)), frameon=False)
