"""Tokens per second of a small Llama of transformers, random weights: sdpa, sdpa with `backlight.activate()`, "backlight".

    PYTHONPATH=src python tools/transformers_speed.py [--lengths 4096 16384] [--steps 5]

Losses and gradients of the three are compared before a time is printed: the distance to float32 arithmetic on sdpa may be twice
that of sdpa in bfloat16. Rows of the last batch are padded on the left. Without a CUDA device the model is tiny, nothing is
activated, and the times say nothing: it shows that the script runs.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import backlight
from backlight.integrations.transformers import register

WAYS = ("sdpa", "sdpa, activated", "backlight")
VOCABULARY = 32000 if torch.cuda.is_available() else 100


def made(device: str) -> nn.Module:
    import transformers

    wide, layers = (1024, 8) if device == "cuda" else (64, 2)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=wide, intermediate_size=11 * wide // 4, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=1 << 17,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16)


def step(model: Any, tokens: Tensor, mask: Tensor | None) -> Tensor:
    model.zero_grad()
    labels = tokens if mask is None else tokens.masked_fill(mask == 0, -100)
    loss = model(tokens, attention_mask=mask, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach()


def way(model: Any, name: str) -> Any:
    """The model with that attention, and what must be active around it."""
    model.set_attn_implementation(name.partition(",")[0])
    return backlight.activated() if "activated" in name and torch.cuda.is_available() else nullcontext()


def numbers(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """The gradient of the first layer's query projection, where every later layer shows."""
    loss = step(model, tokens, mask)
    grad = model.model.layers[0].self_attn.q_proj.weight.grad
    return torch.cat([loss.double().reshape(1), grad.double().flatten() / grad.double().norm()])


def check(model: nn.Module, tokens: Tensor, mask: Tensor | None) -> dict[str, float]:
    """Distance of each way to float32; AssertionError where ours is more than twice as far as sdpa."""
    found = {}
    for name in WAYS:
        with way(model, name):
            found[name] = numbers(model, tokens, mask)
    model.float()
    with way(model, "sdpa"):
        exact = numbers(model, tokens, mask)
    model.bfloat16()
    distance = {name: float((x - exact).norm()) for name, x in found.items()}
    for name in WAYS:
        assert distance[name] <= 2 * distance["sdpa"] + 1e-6, distance
    return distance


def speed(model: nn.Module, name: str, tokens: Tensor, mask: Tensor | None, steps: int) -> float:
    wait = torch.cuda.synchronize if tokens.is_cuda else lambda: None
    with way(model, name):
        for _ in range(2):
            step(model, tokens, mask)
        wait()
        begin = time.perf_counter()
        for _ in range(steps):
            step(model, tokens, mask)
        wait()
    return steps * tokens.numel() / (time.perf_counter() - begin)


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384] if device == "cuda" else [64])
    parser.add_argument("--steps", type=int, default=5)
    asked = parser.parse_args()
    register()
    torch.manual_seed(0)
    model, console = made(device), Console()
    place = torch.cuda.get_device_name() if device == "cuda" else device
    console.print(f"{place}, torch {torch.__version__}, {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters")
    for length, padded in [(n, False) for n in asked.lengths] + [(asked.lengths[0], True)]:
        tokens = torch.randint(VOCABULARY, (max(1, max(asked.lengths) // length), length), device=device)
        mask = None
        if padded:
            ahead = torch.arange(len(tokens), device=device)[:, None] * length // (len(tokens) + 1)
            mask = (torch.arange(length, device=device) >= ahead).long()
        name = f"{len(tokens)} x {length}{', padded' if padded else ''}"
        console.print(f"{name}: distances { ({k: float(f'{x:.2g}') for k, x in check(model, tokens, mask).items()}) }")
        for _ in range(2):
            for kind in WAYS:
                console.print(f"{name}: {kind}: {speed(model, kind, tokens, mask, asked.steps):,.0f} tokens/s")


if __name__ == "__main__":
    main()
