"""What attention does with its keys: density, surviving mass, dead rows, head by head.

Weights are formed for a few rows at a time, without gradients, so that a long sequence costs time and not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import backlight
from backlight.nn.attention import Attention
from backlight.spec import AttentionSpec, Segment, packed_segments

# weights held at a time
WEIGHTS = 2**22


@dataclass(frozen=True, slots=True)
class AttentionStatistics:
    """Per query head, over all rows that see at least one key.

    density:   share of visible keys that keep a weight above zero (1 without tau).
    mass:      mean sum of a row's weights (1 for plain softmax; less with a sink or a negative tau, more with a positive one).
    dead_rows: share of rows that keep no key at all.
    """

    density: Tensor
    mass: Tensor
    dead_rows: Tensor


@contextmanager
def statistics(model: nn.Module) -> Iterator[dict[str, AttentionStatistics]]:
    """Inside the block every forward of an attention layer in `model` leaves its statistics under the layer's name.

    with backlight.nn.statistics(model) as found:
        model(tokens)
    found["blocks.0.attention"].density
    """
    found: dict[str, AttentionStatistics] = {}

    def watch(name: str) -> Any:
        def hook(layer: Attention, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            if options.get("cache") is not None:
                raise ValueError("statistics are taken from a whole pass, without a cache")
            found[name] = layer_statistics(
                layer, *args, cu_seqlens=options.get("cu_seqlens"), positions=options.get("positions")
            )

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
    layer: Attention, x: Tensor, *, cu_seqlens: Tensor | None = None, positions: Tensor | None = None
) -> AttentionStatistics:
    """Statistics of one layer on one input, arguments as in its forward."""
    q, k, v = layer.project(x, cu_seqlens=cu_seqlens, positions=positions)
    options = layer.options()
    if cu_seqlens is None:
        _, lse = backlight.attention(q, k, v, return_lse=True, **options)
        segments: tuple[Segment, ...] = (Segment(0, 0, q.shape[2], 0, k.shape[2]),)
    else:
        _, lse = backlight.attention_varlen(q, k, v, cu_seqlens, return_lse=True, **options)
        q, k, lse = q.transpose(0, 1)[None], k.transpose(0, 1)[None], lse[None]
        borders = tuple(cu_seqlens.tolist())
        segments = packed_segments(borders, borders)
    sums = torch.zeros(4, layer.heads, dtype=torch.float64, device=x.device)
    for segment in segments:
        step = max(1, WEIGHTS // max(1, q.shape[0] * q.shape[1] * segment.sk))
        for i0 in range(0, segment.sq, step):
            sums += _count(layer.spec, q, k, lse, layer.terms(), segment, i0, min(i0 + step, segment.sq))
    alive, mass, dead, rows = sums
    visible = q.shape[0] * sum(layer.spec.visible_pairs(segment.sq, segment.sk) for segment in segments)
    return AttentionStatistics(
        density=alive / max(visible, 1), mass=mass / rows.clamp(min=1), dead_rows=dead / rows.clamp(min=1)
    )


def _count(
    spec: AttentionSpec, q: Tensor, k: Tensor, lse: Tensor, terms: dict[str, Tensor], segment: Segment, i0: int, i1: int
) -> Tensor:
    """[4, Hq] over rows [i0, i1) of a segment in every batch entry: weights above zero, their sum, rows without one, rows that
    see a key."""
    sq, sk = segment.sq, segment.sk
    j0, j1 = spec.key_range(i0, i1, sq, sk)
    batch, heads, group = q.shape[0], q.shape[1], q.shape[1] // k.shape[1]
    here = slice(segment.q0 + i0, segment.q0 + i1)
    keys = k[:, :, segment.k0 + j0 : segment.k0 + j1].to(lse.dtype).repeat_interleave(group, dim=1)
    s = q[:, :, here].to(lse.dtype) @ keys.mT * spec.resolve_scale(q.shape[-1])
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    distance = spec.distance(i0, i1, j0, j1, sq, sk, q.device)
    if "bias" in terms:
        column = distance + spec.bias_origin
        inside = (column >= 0) & (column < terms["bias"].shape[1])
        s = s + (terms["bias"][:, column.clamp(0, terms["bias"].shape[1] - 1)] * inside).to(lse.dtype)
    visible = spec.allowed_distance(distance)
    weight = torch.exp(s - lse[:, :, here, None])
    n = spec.visible_counts(sq, sk, q.device, i0, i1)
    if "sink" not in terms:
        # the kink of eq. 10 is judged with p exactly 1 where one key is visible
        weight = weight.masked_fill((n == 1)[:, None], 1)
    if "tau" in terms:
        weight = weight + (terms["tau"][:, None] / n.clamp(min=1)).to(lse.dtype)[..., None]
        visible = visible & ((weight > 0) | (terms["tau"] >= 0)[:, None, None])
    weight = weight.masked_fill(~visible, 0)
    survivors = visible.expand_as(weight).sum(dim=-1)
    sees = (n > 0).expand(batch, heads, -1)
    counts = (survivors, weight.sum(dim=-1), (survivors == 0) & sees, sees)
    return torch.stack([count.to(torch.float64).sum(dim=(0, 2)) for count in counts])
