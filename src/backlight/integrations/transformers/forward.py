"""transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import backlight
from backlight.integrations.transformers.packing import packing_of


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        query, key, value: [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv].
        attention_mask: None, or the sequence numbers made by `attention_mask` of this package.
        sliding_window: keys a row may look back on, itself included.
        s_aux: [Hq] attention sinks.
        position_bias: [1, Hq, Sq, Sk] with equal values at equal distances; its gradient comes back.
        cu_seq_lens_q, cu_seq_lens_k: borders of packed sequences, when the caller has them; then B = 1.

    Returns:
        [B, Sq, Hq, Dv] and None in the place of the probabilities.
    """
    _refuse(query, key, attention_mask, dropout, options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    batch, _, sq, _ = query.shape
    sk = key.shape[2]
    keywords: dict[str, Any] = {"causal": causal, "scale": scaling, "softcap": softcap, "sink": s_aux}
    if sliding_window is not None:
        keywords["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if position_bias is not None and not _absent(position_bias):
        if position_bias.requires_grad and not hasattr(module, "_relative_position_bucket"):
            raise NotImplementedError(
                "attn_implementation='backlight' differentiates position biases made from distances alone, as T5 does; "
                f"whether {type(module).__name__} does is not known"
            )
        keywords |= {"bias": by_distance(position_bias[..., :sk]), "bias_origin": sq - 1}
    by_place = "bias" in keywords or "window" in keywords
    if cu_seq_lens_q is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        y = backlight.attention_varlen(q, k, v, cu_seq_lens_q, cu_seq_lens_k, **keywords)[None]
    elif attention_mask is None:
        y = backlight.attention(query, key, value, **keywords).transpose(1, 2)
    else:
        aligned = not causal and by_place
        if aligned and sq != sk:
            raise NotImplementedError("attn_implementation='backlight': padding with a window or a bias needs rows like keys")
        packing = packing_of(attention_mask, sk, aligned)
        if packing.gaps and by_place:
            raise NotImplementedError("attn_implementation='backlight': a window or a bias needs padding at the ends only")
        y = backlight.attention_varlen(
            packing.pack_rows(query),
            packing.pack_keys(key),
            packing.pack_keys(value),
            packing.cu_seqlens_q,
            packing.cu_seqlens_k,
            **keywords,
        )
        y = packing.unpack_rows(y, batch, sq)
    return y, None


def _refuse(query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    start = "attn_implementation='backlight'"
    if dropout:
        raise NotImplementedError(f"{start} has no attention dropout, got {dropout}: set it to 0 in the config")
    if options.get("output_attentions"):
        raise NotImplementedError(f"{start} never forms the attention weights: output_attentions needs 'eager'")
    if options.get("cache") is not None:
        raise NotImplementedError(f"{start} does not read paged caches")
    numbers = (query.shape[0], 1, 1, key.shape[2] + query.shape[2])
    if attention_mask is not None and (attention_mask.is_floating_point() or tuple(attention_mask.shape) != numbers):
        shape = tuple(attention_mask.shape)
        raise NotImplementedError(f"{start} takes padding masks [batch, length], not dense masks, got shape {shape}")


def _absent(position_bias: Tensor) -> bool:
    """Zeros that stand for no bias: no parameter behind them. Zeros of a parameter have a gradient to come."""
    return position_bias.is_leaf and not bool(position_bias.any())


def by_distance(position_bias: Tensor) -> Tensor:
    """The table [H, Sq + Sk - 1] of a dense bias [1, H, Sq, Sk] that depends on distance alone, differentiable.

    Every distance is read at one place, so the gradient arrives there whole; whatever made the dense bias from distances passes
    it on to the same parameters as the sum over all places.
    """
    if position_bias.dim() != 4 or position_bias.shape[0] != 1:
        raise NotImplementedError(
            f"attn_implementation='backlight' takes one position bias for the whole batch, got {tuple(position_bias.shape)}"
        )
    dense = position_bias[0]
    if not bool((dense[:, 1:, 1:] == dense[:, :-1, :-1]).all()):
        raise NotImplementedError("attn_implementation='backlight' takes position biases that depend on distance alone")
    # row 0 backwards, then column 0 downwards: distances 1 - Sq .. Sk - 1
    return torch.cat([dense[:, 0].flip(-1), dense[:, 1:, 0]], dim=-1)
