"""Draw docs/images/backward.svg from the float64 oracle: every panel is a quantity of one small call, under its own name.

Run from the repository root: python tools/make_pictures.py [--png]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib
import torch
from compact import crisp, shrink
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from torch import Tensor

from backlight.call import Call
from backlight.reference import Trace, oracle
from backlight.spec import AttentionSpec

ROWS, HEAD_DIM, TAU = 28, 12, -0.7
SPEC = AttentionSpec(causal=True, window=(13, 0), tau=True)
INK, PAPER, HIDDEN, PRUNED, SEEN = "#1f2328", "#ffffff", "#eceef1", "#c3d3e6", "#f2b24c"
STRENGTH = LinearSegmentedColormap.from_list("strength", ["#fff3d6", "#ffcf6b", "#f58a2c", "#b3321b", "#4d0f12"])
SIGNED = LinearSegmentedColormap.from_list("signed", ["#0b4f8a", "#5aa5d6", "#ffffff", "#f0956a", "#a3260f"])


def traced() -> Trace:
    """Forward and backward of one head: smooth random rows, so that neighbours resemble each other."""
    generator = torch.Generator().manual_seed(4)

    def smooth(width: int) -> Tensor:
        steps = torch.randn(ROWS + 3, width, generator=generator, dtype=torch.float64)
        return steps.unfold(0, 4, 1).mean(-1)[None, None] * 2.4

    q, k, v, dy = (smooth(HEAD_DIM) for _ in range(4))
    return oracle(Call(SPEC, q, k, v, tau=torch.tensor([TAU])), dy)


def heat(axes: Axes, values: Tensor, signed: bool, hidden: Tensor | None, xlabel: str, ylabel: str) -> None:
    limit = float(values.abs().max()) or 1.0
    shown = values.masked_fill(hidden, torch.nan) if hidden is not None else values
    colours = (SIGNED if signed else STRENGTH).with_extremes(bad=HIDDEN)
    axes.imshow(crisp(shown), cmap=colours, vmin=-limit if signed else 0, vmax=limit, interpolation="none")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_color("#c9ced4")


def paint(axes: Axes, where: Tensor, colour: str) -> None:
    cells = torch.ones(where.shape).masked_fill(~where, torch.nan)
    axes.imshow(crisp(cells), cmap=LinearSegmentedColormap.from_list("one", [colour, colour]), interpolation="none")


def name(axes: Axes, quantity: str, formula: str, note: str) -> None:
    axes.text(0, 1.12, quantity, transform=axes.transAxes, fontsize=11, fontweight="bold", va="bottom")
    axes.text(0, 1.03, formula, transform=axes.transAxes, fontsize=7.5, va="bottom", family="monospace", color="#57606a")
    axes.text(0.5, -0.13, note, transform=axes.transAxes, fontsize=7, va="top", ha="center", color="#57606a")


def backward_figure() -> Figure:
    trace = traced()
    hidden = ~SPEC.allowed(ROWS, ROWS)
    survivors = float(trace.m.sum()) / SPEC.visible_pairs(ROWS, ROWS)
    figure = Figure(figsize=(11.2, 6.3), facecolor=PAPER)
    margins = {"left": 0.03, "right": 0.985, "top": 0.865, "bottom": 0.09, "wspace": 0.16, "hspace": 0.58}
    panels = figure.subplots(2, 4, gridspec_kw=margins)
    matrix = {"hidden": hidden, "xlabel": "key j", "ylabel": "row i"}
    vector = {"hidden": None, "xlabel": "column", "ylabel": "row"}

    heat(panels[0, 0], torch.zeros(ROWS, ROWS), False, **matrix)
    paint(panels[0, 0], ~hidden, SEEN)
    name(panels[0, 0], "visible", f"causal, window={SPEC.window}", "what row i may look at")
    heat(panels[0, 1], trace.p[0, 0], False, **matrix)
    name(panels[0, 1], "p", "exp(s - lse)", "softmax weights")
    heat(panels[0, 2], trace.a[0, 0], False, **matrix)
    paint(panels[0, 2], ~hidden & (trace.m[0, 0] == 0), PRUNED)
    name(panels[0, 2], "a", f"relu(p + tau/n), tau={TAU}", f"elastic softmax keeps {survivors:.0%}; blue keys are pruned")
    heat(panels[0, 3], trace.o[0, 0], True, **vector)
    name(panels[0, 3], "o", "a v", "the output")
    heat(panels[1, 3], trace.do[0, 0], True, **vector)
    name(panels[1, 3], "do", "given", "the incoming gradient")
    heat(panels[1, 2], trace.dp[0, 0], True, **matrix)
    name(panels[1, 2], "dp", "do v^T", "what each weight would have changed")
    heat(panels[1, 1], trace.ds[0, 0], True, **matrix)
    name(panels[1, 1], "ds", "p * (m*dp - delta)", "pruned keys still carry gradient; rows sum to 0")
    heat(panels[1, 0], trace.dq[0, 0], True, **vector)
    name(panels[1, 0], "dq", "scale * ds k", "row 0 sees one key: its gradient is exactly 0")
    figure.text(0.985, 0.955, "forward  →", fontsize=12, color=INK, ha="right")
    figure.text(0.985, 0.462, "←  backward", fontsize=12, color=INK, ha="right")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--png", action="store_true", help="also write a PNG, to look at")
    arguments = parser.parse_args()
    images = Path(__file__).parents[1] / "docs" / "images"
    with matplotlib.rc_context({"svg.hashsalt": "backlight", "svg.fonttype": "none", "font.size": 8}):
        figure = backward_figure()
        figure.savefig(images / "backward.svg", dpi=220, metadata={"Date": None})
        shrink(images / "backward.svg")
        if arguments.png:
            figure.savefig(images / "backward.png", dpi=110)


if __name__ == "__main__":
    main()
