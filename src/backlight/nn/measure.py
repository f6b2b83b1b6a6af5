"""Statistics of every attention layer of a model (`backlight.statistics`), taken while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import backlight
from backlight import AttentionStatistics
from backlight.arguments import shown
from backlight.mask import Mask
from backlight.nn.attention import Attention


@contextmanager
def statistics(model: nn.Module) -> Iterator[dict[str, AttentionStatistics]]:
    """Inside the block every forward of an attention layer in `model` leaves its statistics under the layer's name.

    with backlight.nn.statistics(model) as found:
        model(tokens)
    found["blocks.0.attention"].density
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {shown(model)}")
    if not any(isinstance(layer, Attention) for layer in model.modules()):
        raise ValueError(f"model must hold a backlight.nn.Attention, got {type(model).__name__} without one")
    found: dict[str, AttentionStatistics] = {}

    def watch(name: str) -> Any:
        def hook(layer: Attention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if options.get("cache") is not None:
                raise ValueError("cache must be None where statistics are taken, got a KVCache: they are of a whole pass")
            given: dict[str, Any] = {each: options.get(each) for each in ("cu_seqlens", "positions", "mask")}
            found[name] = layer_statistics(layer, *args, **given)

        return hook

    handles = [
        layer.register_forward_pre_hook(watch(name), with_kwargs=True)
        for name, layer in model.named_modules()
        if isinstance(layer, Attention)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def layer_statistics(
    layer: Attention, x: Tensor, *, cu_seqlens: Tensor | None = None, positions: Tensor | None = None, mask: Mask | None = None
) -> AttentionStatistics:
    """Statistics of one layer on one input, arguments as in its forward."""
    q, k, v = layer.project(x, cu_seqlens=cu_seqlens, positions=positions)
    return backlight.statistics(q, k, v, cu_seqlens, mask=mask, **layer.options())
