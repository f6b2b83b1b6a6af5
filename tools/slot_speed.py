"""One line before and after: steps of a small decoder on SDPA, then the same with `backlight.activate()`; needs a CUDA device.

    PYTHONPATH=src python tools/slot_speed.py [--length 8192] [--compile]

Prints tokens per second of both, in turns, the distance of both losses, and who answered the calls.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import backlight


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(1024, 8) for _ in range(8)]).to("cuda", torch.bfloat16)
    step = torch.compile(model, fullgraph=True) if asked.compile else model
    x = torch.randn(16384 // asked.length or 1, asked.length, 1024, device="cuda", dtype=torch.bfloat16)

    def run(steps: int) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            model.zero_grad()
            loss = step(x).float().square().mean()
            loss.backward()
        torch.cuda.synchronize()
        return steps * x.shape[0] * x.shape[1] / (time.perf_counter() - begin), loss.item()

    console = Console()
    for _ in range(3):
        torch.compiler.reset()
        run(3)
        before, loss_before = run(asked.steps)
        with backlight.activated() as counts:
            torch.compiler.reset()
            run(3)
            after, loss_after = run(asked.steps)
        console.print(f"{before:,.0f} tokens/s before, {after:,.0f} after ({after / before:.2f}x)")
        console.print(f"loss {loss_before:.6f} before, {loss_after:.6f} after; {counts}")
    console.print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, length {asked.length}, compiled: {asked.compile}"
    )


if __name__ == "__main__":
    main()
