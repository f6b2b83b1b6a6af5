"""Lazy Attention's published call, on top of `backlight.attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.arguments import INTEGERS, check_tensor, check_whole


def lazy_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    tau: Tensor,
    window_size: int | None = None,
    varlen: Tensor | None = None,
) -> Tensor:
    """Causal attention with a learned bias by distance and the elastic softmax relu(p + tau / (i + 1)).

    Args:
        q, k, v: [B, H, S, D]; grouped heads may be given as [B, Hkv, S, D] keys and values.
        bias: [H, n], added to the scores of keys 0, 1, ..., n - 1 steps back.
        tau: [H]; negative prunes.
        window_size: distances that get a bias, at most n; None = n. It limits the bias and hides no key.
        varlen: [B] integer lengths of right-padded sequences. Padding is not read: rows behind a length are 0 and have zero
            gradients.

    Returns:
        [B, H, S, Dv].
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, "[B, H, S, D]")
    check_tensor("bias", bias, "[H, n]")
    check_tensor("tau", tau, "[H]")
    if window_size is not None:
        check_whole("window_size", window_size, optional=True)
        if not 1 <= window_size <= bias.shape[-1]:
            raise ValueError(f"window_size must lie between 1 and the columns of bias, {bias.shape[-1]}, got {window_size}")
        bias = bias[:, :window_size]
    if varlen is None:
        return backlight.attention(q, k, v, causal=True, bias=bias, tau=tau)
    return attend_padded(q, k, v, varlen, causal=True, bias=bias, tau=tau)


def attend_padded(q: Tensor, k: Tensor, v: Tensor, varlen: Tensor, **options: Any) -> Tensor:
    """`backlight.attention` of right-padded sequences [B, H, S, D] of these lengths, packed on the way."""
    batch, _, length, _ = q.shape
    _check_lengths(varlen, q, k, v)
    real = torch.arange(length, device=q.device) < varlen.to(q.device)[:, None]
    cu_seqlens = torch.nn.functional.pad(varlen.to(q.device).cumsum(0), (1, 0))
    q, k, v = (x.transpose(1, 2)[real] for x in (q, k, v))
    y = backlight.attention_varlen(q, k, v, cu_seqlens, **options)
    padded = y.new_zeros(batch, length, *y.shape[1:])
    padded[real] = y
    return padded.transpose(1, 2)


def _check_lengths(varlen: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    batch, _, length, _ = q.shape
    check_tensor("varlen", varlen)
    if varlen.shape != (batch,) or varlen.dtype not in INTEGERS:
        raise ValueError(f"varlen must be [{batch}] integer lengths, got shape {tuple(varlen.shape)} of {varlen.dtype}")
    for name, x in (("k", k), ("v", v)):
        if (x.shape[0], x.shape[2]) != (batch, length):
            raise ValueError(f"{name} must have the batch and length of q, {batch} and {length}, got shape {tuple(x.shape)}")
    if batch and not (int(varlen.min()) >= 0 and int(varlen.max()) <= length):
        raise ValueError(f"varlen must lie between 0 and the padded length {length}, got {varlen.tolist()}")
