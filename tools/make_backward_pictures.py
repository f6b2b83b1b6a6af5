"""Draw docs/images/{jacobian,elastic,tiles}.svg for docs/backward.md and docs/kernels.md, from the package's own numbers.

Run from the repository root: python tools/make_backward_pictures.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import torch
from compact import crisp, shrink
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from backlight.spec import AttentionSpec

INK, GREY = "#1f2328", "#57606a"
SIGNED = LinearSegmentedColormap.from_list("signed", ["#0b4f8a", "#5aa5d6", "#ffffff", "#f0956a", "#a3260f"])


def matrix(axes: Axes, values: Tensor, title: str, note: str) -> None:
    limit = float(values.abs().max())
    axes.imshow(crisp(values), cmap=SIGNED, vmin=-limit, vmax=limit, interpolation="none")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10, fontweight="bold", color=INK)
    axes.set_xlabel(note, fontsize=7.5, color=GREY)


def jacobian() -> Figure:
    """One row of eight weights: the Jacobian is diagonal minus rank one, and what it does to a gradient."""
    s = torch.tensor([0.3, 1.6, -0.4, 0.8, 2.1, -1.0, 0.2, 1.1])
    p = s.softmax(0)
    full = p.diag() - p[:, None] * p
    dp = torch.tensor([1.0, -0.4, 0.6, 0.2, -0.9, 0.5, 0.8, -0.2])
    ds = full @ dp
    figure = Figure(figsize=(9.6, 2.7), layout="constrained", facecolor="white")
    left, middle, right, bars = figure.subplots(1, 4, width_ratios=[1, 1, 1, 1.6])
    matrix(left, p.diag(), "diag(p)", "a key against itself")
    matrix(middle, -p[:, None] * p, "- p pᵀ", "every key against every other")
    matrix(right, full, "dp / ds", "symmetric; rows and columns sum to 0")
    places = torch.arange(8)
    bars.axhline(0, color="0.8", linewidth=0.8)
    bars.axhline(float(p @ dp), color="#c4681a", linewidth=1, linestyle="--", label="delta = p . dp")
    bars.bar(places - 0.2, dp, width=0.38, color="#c3d3e6", label="dp")
    bars.bar(places + 0.2, 4 * ds, width=0.38, color="#a3260f", label="ds = p (dp - delta), 4x")
    bars.set_title("what a row does with dp", fontsize=10, fontweight="bold", color=INK)
    bars.set_xlabel("key j", fontsize=7.5, color=GREY)
    bars.legend(frameon=False, fontsize=7)
    return figure


def elastic() -> Figure:
    """relu(p + tau / n) over the weights of one row, for three taus."""
    p = torch.tensor([1.4, 1.1, 0.6, 0.2, -0.1, -0.5, -0.9, -1.3, -1.8, -2.4]).softmax(0)
    figure = Figure(figsize=(9.6, 2.4), layout="constrained", facecolor="white")
    places = torch.arange(len(p))
    for axes, tau in zip(figure.subplots(1, 3, sharey=True), (0.5, 0.0, -0.9), strict=True):
        a = torch.relu(p + tau / len(p))
        axes.bar(places, p, color="#e4e8ec", label="p")
        axes.bar(places, a, width=0.5, color="#b3321b", label="a = relu(p + tau/n)")
        axes.axhline(max(0.0, -tau / len(p)), color=GREY, linewidth=0.8, linestyle=":")
        kept = int((a > 0).sum())
        axes.set_title(f"tau = {tau:+.1f}", fontsize=10, fontweight="bold", color=INK)
        axes.set_xlabel(f"{kept} of {len(p)} keys alive, mass {float(a.sum()):.2f}", fontsize=7.5, color=GREY)
        axes.set_xticks([])
    axes.legend(frameon=False, fontsize=7)
    return figure


def tiles() -> Figure:
    """Which tiles a kernel visits, from the spec's own ranges: skipped, masked, free of masks."""
    figure = Figure(figsize=(9.6, 3.3), layout="constrained", facecolor="white")
    colours = {"not visited": "#f3f4f6", "edge: the mask is applied": "#f2b24c", "free of masks": "#7fb08f"}
    cases = (
        ("causal", AttentionSpec(causal=True), 48, 48),
        ("causal, Sq < Sk", AttentionSpec(causal=True), 24, 48),
        ("window=(17, 0)", AttentionSpec(causal=True, window=(17, 0)), 48, 48),
    )
    block = 8
    for axes, (title, spec, sq, sk) in zip(figure.subplots(1, 3), cases, strict=True):
        for i0 in range(0, sq, block):
            first, end = spec.key_range(i0, i0 + block, sq, sk)
            free_from, free_to = spec.full_key_range(i0, i0 + block, sq, sk)
            for j0 in range(0, sk, block):
                kind = "not visited"
                if first < j0 + block and j0 < end:
                    free = free_from <= j0 and j0 + block <= free_to
                    kind = "free of masks" if free else "edge: the mask is applied"
                axes.add_patch(Rectangle((j0, i0), block, block, facecolor=colours[kind], edgecolor="white", linewidth=1.5))
        for i in range(sq):
            first, last = spec.first_key(i, sq, sk), spec.last_key(i, sq, sk)
            axes.plot([first, last + 1], [i + 0.5, i + 0.5], color=INK, linewidth=0.5, alpha=0.45)
        axes.set(xlim=(0, sk), ylim=(sq, 0), aspect="equal", xticks=[], yticks=[])
        axes.set_title(title, fontsize=10, fontweight="bold", color=INK)
        axes.set_xlabel("keys", fontsize=7.5, color=GREY)
        axes.set_ylabel("rows", fontsize=7.5, color=GREY)
    handles = [Rectangle((0, 0), 1, 1, facecolor=colour) for colour in colours.values()]
    figure.legend(handles, list(colours), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def main() -> None:
    images = Path(__file__).parents[1] / "docs" / "images"
    with matplotlib.rc_context({"svg.hashsalt": "backlight", "svg.fonttype": "none", "font.size": 8}):
        for draw in (jacobian, elastic, tiles):
            path = images / f"{draw.__name__}.svg"
            draw().savefig(path, metadata={"Date": None})
            shrink(path)


if __name__ == "__main__":
    main()
