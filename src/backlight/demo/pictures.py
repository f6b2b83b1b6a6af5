"""Pictures of a training run: files when matplotlib is there, sparklines when it is not."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from backlight.demo.history import History, Moment

BARS = "▁▂▃▄▅▆▇█"
COLOURS = {"softmax": "#57606a", "lazy": "#b3321b", "entmax": "#2c7a4b"}
LAYER_COLOURS = ("#0b4f8a", "#c4681a", "#2c7a4b", "#6f42a1")


def sparkline(values: Sequence[float], width: int = 72) -> str:
    """Values as a line of bars, at most `width` of them (means of neighbours); a non-finite value is drawn as `?`."""
    step = max(1, math.ceil(len(values) / width))
    means = [sum(chunk) / len(chunk) for chunk in (values[i : i + step] for i in range(0, len(values), step))]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    span = (high - low) or 1.0
    return "".join(BARS[round((len(BARS) - 1) * (mean - low) / span)] if math.isfinite(mean) else "?" for mean in means)


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def report(console: Console, found: dict[str, History], out: Path) -> None:
    """Write `train_lm` and `train_entmax` as png and svg under `out`, or draw the biases in the terminal without matplotlib."""
    if not has_matplotlib():
        console.print("matplotlib is not installed (extra `report`): the learned biases as text, distance 0 on the left")
        last = found["lazy"].lazy_moments[-1]
        for layer, (tables, taus) in enumerate(zip(last.bias.tolist(), last.tau.tolist(), strict=True)):
            for head, (table, tau) in enumerate(zip(tables, taus, strict=True)):
                console.print(f"  layer {layer} head {head}  {sparkline(table)}  tau {tau:+.3f}")
        return
    out.mkdir(parents=True, exist_ok=True)
    for path in draw(found, out):
        console.print(f"wrote {path}")


def draw(found: dict[str, History], out: Path) -> list[Path]:
    """Of softmax and Lazy Attention one figure: losses; tau and density of every head over training; every head's bias by
    distance. Of entmax another: losses of all, alpha and density of every head."""
    import matplotlib

    paths = []
    with matplotlib.rc_context({"svg.hashsalt": "backlight", "svg.fonttype": "none", "font.size": 8, "axes.titlesize": 9}):
        for name, figure in (("train_lm", _figure(found)), ("train_entmax", _entmax_figure(found))):
            for path in (out / f"{name}.{kind}" for kind in ("png", "svg")):
                figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix == ".svg" else None)
                paths.append(path)
    return paths


def _entmax_figure(found: dict[str, History]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6), layout="constrained", facecolor="white")
    losses, alphas, densities = figure.subplots(1, 3)
    moments = found["entmax"].entmax_moments
    _held_out(losses, found)
    _over_training(alphas, moments, "alpha", "alpha per head: larger is sparser")
    _over_training(densities, moments, "density", "share of visible keys alive, per head")
    return figure


def _held_out(axes: Any, found: dict[str, History]) -> None:
    axes.set(title="loss, nats per character, on held-out text", xlabel="step")
    for kind, history in found.items():
        steps, losses = zip(*((moment.step, moment.loss) for moment in history.moments), strict=True)
        axes.plot(steps, losses, color=COLOURS[kind], linewidth=1.4, label=kind)
    axes.legend(frameon=False)


def _figure(found: dict[str, History]) -> Any:
    from matplotlib.figure import Figure

    found = {kind: found[kind] for kind in ("softmax", "lazy")}
    layers, heads, _ = found["lazy"].lazy_moments[-1].bias.shape
    figure = Figure(figsize=(11, 2.9 + 1.9 * layers), layout="constrained", facecolor="white")
    grid = figure.add_gridspec(1 + layers, 3 * heads, height_ratios=[1.5] + [1] * layers)
    third = heads
    _losses(figure.add_subplot(grid[0, :third]), found)
    moments = found["lazy"].lazy_moments
    _over_training(figure.add_subplot(grid[0, third : 2 * third]), moments, "tau", "tau per head: negative prunes")
    _over_training(figure.add_subplot(grid[0, 2 * third :]), moments, "density", "share of visible keys alive, per head")
    for layer in range(layers):
        for head in range(heads):
            axes = figure.add_subplot(grid[1 + layer, 3 * head : 3 * head + 3])
            _bias(axes, found["lazy"], layer, head)
    return figure


def _losses(axes: Any, found: dict[str, History]) -> None:
    axes.set(title="loss, nats per character", xlabel="step")
    for kind, history in found.items():
        axes.plot(range(1, len(history.losses) + 1), history.losses, color=COLOURS[kind], linewidth=0.6, alpha=0.35)
        steps, losses = zip(*((moment.step, moment.loss) for moment in history.moments), strict=True)
        axes.plot(steps, losses, color=COLOURS[kind], linewidth=1.6, marker="o", markersize=2.5, label=f"{kind}, held out")
    axes.legend(frameon=False)


def _over_training(axes: Any, moments: Iterable[Moment], name: str, title: str) -> None:
    axes.set(title=title, xlabel="step")
    steps, values = zip(*((moment.step, getattr(moment, name)) for moment in moments), strict=True)
    for layer in range(values[0].shape[0]):
        for head in range(values[0].shape[1]):
            label = f"layer {layer}" if head == 0 else None
            colour = LAYER_COLOURS[layer % len(LAYER_COLOURS)]
            axes.plot(steps, [float(value[layer, head]) for value in values], color=colour, linewidth=1.1, label=label)
    axes.legend(frameon=False)


def _bias(axes: Any, history: History, layer: int, head: int) -> None:
    first, last = history.lazy_moments[0], history.lazy_moments[-1]
    axes.set(title=f"layer {layer}, head {head}: bias by distance")
    axes.axhline(0, color="0.85", linewidth=0.8)
    axes.plot(first.bias[layer, head].tolist(), color="0.7", linewidth=1)
    axes.plot(last.bias[layer, head].tolist(), color=LAYER_COLOURS[layer % len(LAYER_COLOURS)], linewidth=1.2)
    axes.set_xlabel("distance i - j")
