"""Lazy Attention as a layer: a learned bias by distance and a learned tau per head, both with gradients."""

import torch
from torch import nn

import backlight


class LazyAttention(nn.Module):
    def __init__(self, width: int, heads: int, table: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(heads, table))
        self.tau = nn.Parameter(torch.full((heads,), -0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # [B,S,3,H,D] -> three views [B,H,S,D] of one buffer: nothing is copied
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = backlight.attention(q, k, v, causal=True, bias=self.bias, tau=self.tau)
        return self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(0)
layer = LazyAttention(width=64, heads=4, table=32)
layer(torch.randn(2, 100, 64)).square().mean().backward()

assert layer.bias.grad is not None
assert layer.tau.grad is not None
assert (layer.bias.grad.abs().sum(dim=1) > 0).all(), "every head's bias has a gradient"
assert (layer.tau.grad != 0).all(), "every head's tau has a gradient"
print("gradient of tau, head by head:", layer.tau.grad.tolist())
