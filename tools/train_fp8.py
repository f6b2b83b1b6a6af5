"""A small language model trained three times from one seed, attention in fp32, bf16 and e4m3: losses, errors of gradients.

python tools/train_fp8.py [STEPS] prints a line a run and writes docs/data/fp8-training.json and docs/images/fp8-training.svg.
The text is the source of this repository's pages, letter by letter.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import backlight

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "data" / "fp8-training.json"
PICTURE = ROOT / "docs" / "images" / "fp8-training.svg"
WIDTH, HEADS, KV_HEADS, LAYERS, LENGTH, BATCH = 128, 2, 1, 2, 128, 4
D = WIDTH // HEADS
KINDS = ("fp32", "bf16", "fp8")


def attend(kind: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    if kind == "fp32":
        return backlight.attention(q, k, v, causal=True)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    return backlight.attention(q, k, v, causal=True, precision="fp8" if kind == "fp8" else None).float()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * KV_HEADS * D, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm, self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(D), nn.RMSNorm(D)
        self.kind = "fp32"

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q_norm(self.q(h).unflatten(-1, (HEADS, D))).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, KV_HEADS, D)).unbind(2)
        y = attend(self.kind, q, self.k_norm(k).transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, letters)

    def forward(self, x: Tensor, kind: str) -> Tensor:
        h = self.embed(x) + self.place.weight
        for layer in self.layers:
            layer.kind = kind
            h = layer(h)
        return self.head(h)


def text() -> Tensor:
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    letters = sorted(set(pages))
    numbers = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([numbers[letter] for letter in pages])


def loss_of(model: Model, data: Tensor, at: Tensor, kind: str) -> Tensor:
    windows = data[at[:, None] + torch.arange(LENGTH + 1)]
    return nn.functional.cross_entropy(model(windows[:, :-1], kind).flatten(0, 1), windows[:, 1:].flatten())


def gradients(model: Model, data: Tensor, at: Tensor, kind: str) -> dict[str, Tensor]:
    """Of the first layer's projections into q, k and v, together."""
    layer = model.layers[0]
    dq, dkv = torch.autograd.grad(loss_of(model, data, at, kind), (layer.q.weight, layer.kv.weight))
    dk, dv = dkv.chunk(2)
    return {"q": dq, "k": dk, "v": dv}


def train(kind: str, data: Tensor, steps: int) -> tuple[list[float], dict[str, dict[str, float]]]:
    """Losses; at the end, errors of gradients of bf16 and e4m3 against fp32 at the weights that came out."""
    torch.manual_seed(0)
    model = Model(int(data.max()) + 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    draw = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        at = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=draw)
        loss = loss_of(model, data, at, kind)
        optimiser.zero_grad()
        loss.backward()
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20) * (1 - step / steps)
        optimiser.step()
        losses.append(round(float(loss.detach()), 4))
    exact = gradients(model, data, at, "fp32")
    errors = {}
    for other in ("bf16", "fp8"):
        found = gradients(model, data, at, other)
        errors[other] = {name: float((found[name] - x).norm() / x.norm()) for name, x in exact.items()}
    return losses, errors


def means(losses: list[float]) -> list[float]:
    """Of ten steps each."""
    return [round(sum(losses[i : i + 10]) / 10, 4) for i in range(0, len(losses) - 9, 10)]


def draw(curves: dict[str, list[float]]) -> str:
    """Losses over steps."""
    colours = {"fp32": "#888888", "bf16": "#1f77b4", "fp8": "#d62728"}
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    n = len(next(iter(curves.values())))
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" font-family="sans-serif" font-size="13">']
    parts.append('<rect width="640" height="300" fill="white"/>')
    for i, (kind, values) in enumerate(curves.items()):
        heights = [260 - 230 * (x - low) / (high - low) for x in values]
        points = " ".join(f"{50 + 560 * j / (n - 1):.0f},{height:.1f}" for j, height in enumerate(heights))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colours[kind]}" stroke-width="1.5"/>')
        parts.append(f'<text x="480" y="{50 + 20 * i}" fill="{colours[kind]}">attention in {kind}</text>')
    parts.append('<path d="M50 30V260H610" fill="none" stroke="black"/>')
    parts.append(f'<text x="8" y="36">{high:.1f}</text><text x="8" y="262">{low:.1f}</text>')
    parts.append(f'<text x="50" y="280">0</text><text x="560" y="280">{10 * n} steps</text><text x="56" y="26">loss</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main(steps: int) -> None:
    torch.set_num_threads(1)
    data, record = text(), {}
    errors: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        record[kind], found = train(kind, data, steps)
        errors = found if kind == "bf16" else errors
        print(kind, "last 20 steps:", round(sum(record[kind][-20:]) / 20, 4), flush=True)
    ratios = {name: errors["fp8"][name] / errors["bf16"][name] for name in errors["fp8"]}
    print("errors of gradients", errors, "as multiples of bf16's", ratios)
    curves = {kind: means(losses) for kind, losses in record.items()}
    RECORD.write_text(json.dumps({"losses": curves, "errors": errors}, separators=(",", ":")) + "\n")
    PICTURE.write_text(draw(curves))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
