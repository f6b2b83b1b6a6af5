"""Pictures of a training run: files when matplotlib is there, sparklines when it is not."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from backlight.demo.model import LAGS

if TYPE_CHECKING:
    from backlight.demo.train import History

BARS = "▁▂▃▄▅▆▇█"


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


def report(console: Console, history: History, out: Path) -> None:
    """Write `lazy_attention.png` and `.svg` under `out`, or draw the biases in the terminal without matplotlib."""
    if not has_matplotlib():
        console.print("matplotlib is not installed (extra `report`): the learned biases as text, distance 0 on the left")
        for head, table in enumerate(history.after.bias.tolist()):
            console.print(f"  head {head}  {sparkline(table)}  tau {history.after.tau[head]:+.3f}")
        return
    out.mkdir(parents=True, exist_ok=True)
    for path in draw(history, out):
        console.print(f"wrote {path}")


def draw(history: History, out: Path) -> list[Path]:
    """One figure: loss, tau of every head, and for every head its bias by distance and its weights."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "backlight", "font.size": 8}):
        figure = _figure(history)
        paths = [out / f"lazy_attention.{kind}" for kind in ("png", "svg")]
        for path in paths:
            figure.savefig(path, dpi=120)
    return paths


def _figure(history: History):  # type: ignore[no-untyped-def]
    from matplotlib.figure import Figure

    before, after = history.before, history.after
    heads = after.tau.numel()
    figure = Figure(figsize=(2.6 * heads, 7.2), layout="constrained")
    grid = figure.add_gridspec(3, 2 * heads)
    loss = figure.add_subplot(grid[0, :heads], title="loss", xlabel="step", yscale="log")
    loss.plot(history.losses, color="tab:blue", linewidth=1)
    tau = figure.add_subplot(grid[0, heads:], title="tau", xlabel="step")
    tau.axhline(0, color="0.8", linewidth=0.8)
    for head in range(heads):
        tau.plot([values[head] for values in history.taus], linewidth=1, label=f"head {head}")
    tau.legend(frameon=False, ncols=heads)
    for head in range(heads):
        columns = slice(2 * head, 2 * head + 2)
        bias = figure.add_subplot(grid[1, columns], title=f"head {head}: bias by distance", xlabel="distance i - j")
        for lag in LAGS:
            bias.axvline(lag, color="tab:orange", linewidth=0.8, linestyle=":")
        bias.plot(before.bias[head].tolist(), color="0.7", linewidth=1)
        bias.plot(after.bias[head].tolist(), color="tab:blue", linewidth=1.2)
        alive = f"weights, {float(after.density[head]):.0%} of visible keys alive"
        weights = figure.add_subplot(grid[2, columns], title=alive, xlabel="key", ylabel="row")
        weights.imshow(after.a[head].float().numpy() ** 0.5, cmap="magma", interpolation="nearest")
    return figure
