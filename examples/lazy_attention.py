"""Lazy Attention as a layer: a learned bias by distance and a learned tau per head, both with gradients, and what they do."""

import torch

import backlight.nn

torch.manual_seed(0)
layer = backlight.nn.LazyAttention(dim=64, heads=4, distances=32)
x = torch.randn(2, 100, 64)

with backlight.nn.statistics(layer) as found:
    layer(x).square().mean().backward()

assert layer.bias.grad is not None
assert layer.tau.grad is not None
assert (layer.bias.grad.abs().sum(dim=1) > 0).all(), "every head's bias has a gradient"
assert (layer.tau.grad != 0).all(), "every head's tau has a gradient"
print("gradient of tau, head by head:", layer.tau.grad.tolist())
print("share of visible keys that keep a weight:", found[""].density.tolist())

# half precision for the weights; bias and tau, where sums over whole batches arrive, stay fp32
layer.to(torch.bfloat16)
assert (layer.qkv.weight.dtype, layer.bias.dtype, layer.tau.dtype) == (torch.bfloat16, torch.float32, torch.float32)
