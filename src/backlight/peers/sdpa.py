"""PyTorch's scaled_dot_product_attention, with its own choice of backend or restricted to one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backlight.peers.features import features_of
from backlight.spec import AttentionSpec

BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
KNOWN = ("causal", "window", "scale", "bias", "bias_origin", "pair_bias")


def restricted_to(backend: str | None) -> AbstractContextManager[Any]:
    return nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend])


def prepared(spec: AttentionSpec, sq: int, sk: int, grouped: bool, device: torch.device) -> Callable[..., Tensor]:
    """attend(q, k, v, bias=None, pair_bias=None). The causal flag of SDPA aligns to the top left, so windows, biases of either
    kind and unequal lengths travel as a dense mask."""
    flag = spec.causal and spec.window == (None, None) and sq == sk and not (spec.bias or spec.pair_bias)
    visible = spec.allowed(sq, sk, device) if spec.masked and not flag else None

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, pair_bias: Tensor | None = None) -> Tensor:
        mask = visible
        if bias is not None or pair_bias is not None:
            added = None if bias is None else dense_bias(bias, spec, sq, sk).to(q.dtype)
            if pair_bias is not None:
                pairs = shared_pairs(pair_bias, q.shape[0]).to(q.dtype)
                added = pairs if added is None else added + pairs
            assert added is not None
            mask = added if visible is None else added.masked_fill(~visible, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=flag, scale=spec.scale, enable_gqa=grouped)

    return attend


def dense_bias(bias: Tensor, spec: AttentionSpec, sq: int, sk: int) -> Tensor:
    """[Hq, n] table by distance -> [Hq, Sq, Sk], differentiable; zero outside the table."""
    column = spec.distance(0, sq, 0, sk, sq, sk, bias.device) + spec.bias_origin
    inside = (column >= 0) & (column < bias.shape[1])
    return bias[:, column.clamp(0, bias.shape[1] - 1)] * inside


def shared_pairs(pair_bias: Tensor, batch: int) -> Tensor:
    """A pair bias as PyTorch broadcasts it: a copy for each batch entry, unless it has one for all."""
    entries = pair_bias.shape[0]
    return pair_bias if entries in (1, batch) else pair_bias.repeat_interleave(batch // entries, dim=0)


def attention(q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = None, **given: Any) -> Tensor:
    """One call with the project's keywords."""
    asked = features_of("sdpa", given, KNOWN)
    attend = prepared(asked.spec, q.shape[2], k.shape[2], q.shape[1] != k.shape[1], q.device)
    with restricted_to(backend):
        return attend(q, k, v, asked.bias, asked.pair_bias)
