"""transformers' attention interface."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import backlight
from backlight._private.torch import assert_in_graph
from backlight.arguments import check_borders, check_flag, check_number, check_tensor, check_whole, shown
from backlight.integrations.transformers.packing import packing_of

NAME = "attn_implementation='backlight'"


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
    _check(query, key, value, attention_mask, dropout, is_causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
    if position_bias is not None:
        _check_position_bias(position_bias, query, key)
    _refuse(query, key, attention_mask, dropout, options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    batch, _, sq, _ = query.shape
    sk = key.shape[2]
    keywords: dict[str, Any] = {"causal": causal, "scale": scaling, "softcap": softcap, "sink": s_aux}
    if sliding_window is not None:
        keywords["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if position_bias is not None and not _absent(module, position_bias, causal):
        if position_bias.requires_grad and not hasattr(module, "_relative_position_bucket"):
            raise NotImplementedError(
                f"{NAME} differentiates position biases made from distances alone, as T5 does; "
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
            raise NotImplementedError(f"{NAME}: padding with a window or a bias needs rows like keys")
        packing = packing_of(attention_mask, sk, aligned)
        if by_place:
            _require(packing.gaps, False, f"{NAME}: a window or a bias needs padding at the ends only")
        if "bias" in keywords:
            keywords["bias"] = _moved(keywords["bias"], packing.room)
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


def _check(
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: Any,
    is_causal: Any,
    sliding_window: Any,
    cu_seq_lens_q: Any,
    cu_seq_lens_k: Any,
) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[B, H, S, D]")
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
    check_number("dropout", dropout, least=0)
    if is_causal is not None:
        check_flag("is_causal", is_causal)
    check_whole("sliding_window", sliding_window, least=1, optional=True)
    if cu_seq_lens_q is None:
        if cu_seq_lens_k is not None:
            raise ValueError(f"cu_seq_lens_q must be given with cu_seq_lens_k, got None and {shown(cu_seq_lens_k)}")
        return
    check_borders("cu_seq_lens_q", cu_seq_lens_q, query.device)
    if cu_seq_lens_k is not None:
        check_borders("cu_seq_lens_k", cu_seq_lens_k, query.device)
    if query.shape[0] != 1:
        # the other entries of the batch would be left out
        raise ValueError(f"query must have a batch of 1 with cu_seq_lens_q, got shape {tuple(query.shape)}")


def _check_position_bias(position_bias: Any, query: Tensor, key: Tensor) -> None:
    check_tensor("position_bias", position_bias, "[1, Hq, Sq, Sk]")
    (_, heads, sq, _), sk = query.shape, key.shape[2]
    _, own_heads, rows, columns = position_bias.shape
    if own_heads != heads or rows != sq or columns < sk:
        shape = tuple(position_bias.shape)
        raise ValueError(f"position_bias must be [1, {heads}, {sq}, {sk}], one value for each row and key, got shape {shape}")


def _refuse(query: Tensor, key: Tensor, attention_mask: Tensor | None, dropout: float, options: dict[str, Any]) -> None:
    if dropout:
        raise NotImplementedError(f"{NAME} has no attention dropout, got {dropout}: set it to 0 in the config")
    weights = options.get("output_attentions")
    if not (weights is None or weights is False):
        raise NotImplementedError(f"{NAME} never forms the attention weights: output_attentions needs 'eager'")
    if options.get("cache") is not None:
        came = shown(options["cache"])
        raise NotImplementedError(f"cache must be None, got {came}: {NAME} does not read paged caches")
    numbers = (query.shape[0], 1, 1, key.shape[2] + query.shape[2])
    if attention_mask is not None and (attention_mask.is_floating_point() or tuple(attention_mask.shape) != numbers):
        shape = tuple(attention_mask.shape)
        raise NotImplementedError(f"{NAME} takes padding masks [batch, length], not dense masks, got shape {shape}")


def _require(value: bool | Tensor, wanted: bool, message: str) -> None:
    """Raises unless value is `wanted`; in a graph when it runs, since it has no values before."""
    if isinstance(value, Tensor) and torch.compiler.is_compiling():
        assert_in_graph(value if wanted else ~value, message)
    elif bool(value) != wanted:
        raise NotImplementedError(message)


def _absent(module: nn.Module, position_bias: Tensor, causal: bool) -> bool:
    """Zeros that stand for no bias: no parameter behind them. Zeros of a parameter have a gradient to come."""
    if not torch.compiler.is_compiling():
        return position_bias.is_leaf and not bool(position_bias.any())
    # T5 and its kin: rows of a decoder have no distance to the keys of an encoder
    absent = not causal and bool(getattr(module, "is_decoder", False)) and not position_bias.requires_grad
    if absent:
        _require(position_bias.any(), False, f"{NAME} takes no position bias between decoder and encoder under torch.compile")
    return absent


def _moved(table: Tensor, room: int | Tensor) -> Tensor:
    """The table [H, n] of a dense bias whose last `room` keys lie behind the last row: column c is what column c + room was.

    Rows align to the last key that is seen; the dense bias counts on to the end of the cache.
    """
    if isinstance(room, int) and not room:
        return table
    columns = torch.arange(table.shape[1], device=table.device) + room
    # what comes in from the right belongs to distances between no row and no key
    return table.index_select(1, columns.clamp(max=table.shape[1] - 1))


def by_distance(position_bias: Tensor) -> Tensor:
    """The table [H, Sq + Sk - 1] of a dense bias [1, H, Sq, Sk] that depends on distance alone, differentiable.

    Every distance is read at one place, so the gradient arrives there whole; whatever made the dense bias from distances passes
    it on to the same parameters as the sum over all places.
    """
    if position_bias.shape[0] != 1:
        raise NotImplementedError(f"{NAME} takes one position bias for the whole batch, got {tuple(position_bias.shape)}")
    dense = position_bias[0]
    along = (dense[:, 1:, 1:] == dense[:, :-1, :-1]).all()
    _require(along, True, f"{NAME} takes position biases that depend on distance alone")
    # row 0 backwards, then column 0 downwards: distances 1 - Sq .. Sk - 1
    return torch.cat([dense[:, 0].flip(-1), dense[:, 1:, 0]], dim=-1)
