"""Draw docs/images/entmax-{weights,tiles}.svg for docs/entmax.md, from the package's own numbers: plain SVG, text as text.

Run from the repository root: python tools/make_entmax_pictures.py
"""

from __future__ import annotations

from pathlib import Path

import torch
from compact import picture as compact

import backlight

INK, GREY, PALE, ALIVE = "#1f2328", "#57606a", "#eaeef2", "#c2410c"
COLOURS = {1.0: "#57606a", 1.25: "#0b4f8a", 1.5: "#c2410c", 2.0: "#1a7f37"}


def text(x: float, y: float, words: str, colour: str = GREY, size: int = 11, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def picture(width: int, height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *parts, "</svg>\n"])


def weights() -> str:
    """The weights of one row of 24 keys, sorted, for four alphas."""
    torch.manual_seed(4)
    n = 24
    s = (1.4 * torch.randn(n, dtype=torch.float64)).sort(descending=True).values
    q, k, v = torch.ones(1, 1, 1, 1).double(), s.reshape(1, 1, n, 1), torch.eye(n).double()[None, None]
    parts, left, top, wide, tall = [], 46, 20, 540, 190
    highest = 0.6
    for share in (0.0, 0.2, 0.4, 0.6):
        y = top + tall * (1 - share / highest)
        parts += [f'<path d="M{left} {y:g}h{wide}" stroke="{PALE}"/>', text(left - 6, y + 4, f"{share:g}", anchor="end")]
    for row, (alpha, colour) in enumerate(COLOURS.items()):
        p = backlight.attention(q, k, v, scale=1.0, entmax=alpha)[0, 0, 0]
        points = " ".join(
            f"{left + wide * i / (n - 1):.4g},{top + tall * (1 - float(w) / highest):.4g}" for i, w in enumerate(p)
        )
        name = "softmax" if alpha == 1 else f"alpha {alpha:g}"
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(text(left + 300, top + 24 + 18 * row, f"{name}: {int((p > 0).sum())} of {n} keys", colour, 13))
    parts.append(text(left, top + tall + 22, "keys of one row, highest score first"))
    return picture(610, 240, parts)


def tiles() -> str:
    """Which tiles of a causal head live, for scores that fall with distance."""
    torch.manual_seed(1)
    length, size = 768, 32
    q, k = torch.randn(2, 1, 1, length, 16)
    bias = -torch.arange(length, dtype=torch.float32)[None] / 64
    parts: list[str] = []
    cells = length // size
    for column, alpha in enumerate((1.0, 1.25, 1.5, 2.0)):
        x0, y0, step = 14 + column * 152, 30, 5.6
        p = backlight.attention(q, k, torch.eye(length)[None, None], causal=True, bias=bias, entmax=alpha)[0, 0]
        live = (p > 0).unflatten(0, (cells, size)).unflatten(2, (cells, size)).any(dim=3).any(dim=1)
        lines = []
        for i in range(cells):
            parts.append(f'<path d="M{x0} {y0 + i * step:.5g}h{(i + 1) * step:.4g}" stroke="{PALE}" stroke-width="5"/>')
            runs = live[i].tolist()
            for j in range(cells):
                if runs[j] and (j == 0 or not runs[j - 1]):
                    end = next((m for m in range(j, cells) if not runs[m]), cells)
                    lines.append(f"M{x0 + j * step:.4g} {y0 + i * step:.4g}h{(end - j) * step:.4g}")
        parts.append(f'<path d="{"".join(lines)}" stroke="{ALIVE}" stroke-width="5"/>')
        share = float(live.sum()) / (cells * (cells + 1) / 2)
        parts.append(text(x0, 18, "softmax" if alpha == 1 else f"alpha {alpha:g}", INK, 13))
        parts.append(text(x0, y0 + cells * step + 10, f"{share:.0%} of tiles live"))
    return picture(620, 190, parts)


if __name__ == "__main__":
    for name, drawn in (("weights", weights()), ("tiles", tiles())):
        path = Path("docs/images") / f"entmax-{name}.svg"
        path.write_text(compact(drawn))
        print(path, path.stat().st_size)
