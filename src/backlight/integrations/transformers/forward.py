"""transformers' attention interface."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor, nn

import backlight
from backlight.arguments import check_borders, check_flag, check_number, check_tensor, check_whole, shown
from backlight.integrations.transformers.dropped import Dropped, count
from backlight.integrations.transformers.given import keywords_of
from backlight.integrations.transformers.masks import PADDING
from backlight.integrations.transformers.packing import intervals_of, packing_of
from backlight.integrations.transformers.position_bias import bias_of, check_bias, moved
from backlight.integrations.transformers.refusing import NAME, require
from backlight.integrations.transformers.seeing import of_borders, of_geometry, of_given, of_numbers
from backlight.integrations.transformers.tracing import blind
from backlight.mask import Mask
from backlight.spec import AttentionSpec


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer.

    Args:
        query, key, value: [B, Hq, Sq, D], [B, Hkv, Sk, D], [B, Hkv, Sk, Dv].
        attention_mask: None; the sequence numbers or intervals made by `attention_mask` of this package; intervals made by
            `backlight.mask`, int32 [B or 1, Hq or 1, 2 or 4, Sk]; or a dense mask [B or 1, Hq or 1, Sq or 1, Sk], True or 0
            where a row sees a key, False, -inf or the least number of the dtype where it does not. Dense masks of other
            numbers, and those with a gradient, are added to the scores (`pair_bias`). Intervals and dense masks say everything:
            is_causal and sliding_window do not come on top.
        dropout: of the weights. Anything but 0 runs on torch's own attention, with a warning and a count in `fallbacks`.
        options: what a model passes besides. Of these the following count, and others are not read:
            softcap: as in `backlight.attention`.
            sliding_window: keys a row may look back on, itself included.
            s_aux: [Hq] attention sinks.
            position_bias: [1, Hq, Sq, Sk] with equal values at equal distances, or [B or 1, Hq, Sq, Sk] with any; its gradient
                comes back.
            cu_seq_lens_q, cu_seq_lens_k: borders of packed sequences, when the caller has them; then B = 1.
            output_attentions: the weights are never formed: a warning says so, as with "sdpa".
            cache: refused.

    Returns:
        [B, Sq, Hq, Dv] and None in the place of the probabilities.
    """
    window, cu_q, cu_k = (options.get(name) for name in ("sliding_window", "cu_seq_lens_q", "cu_seq_lens_k"))
    _check(query, key, value, attention_mask, dropout, is_causal, window)
    _check_borders(query, cu_q, cu_k)
    _refuse(options)
    _warn(options)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    keywords: dict[str, Any] = {"causal": causal, "scale": scaling}
    keywords |= {"softcap": options.get("softcap"), "sink": options.get("s_aux")}
    if dropout:
        count()
        return _attend_dropped((query, key, value), attention_mask, dropout, keywords, options).transpose(1, 2), None
    if options.get("position_bias") is not None:
        keywords |= bias_of(module, options["position_bias"], query, key, causal)
    if attention_mask is not None and not _is_numbers(attention_mask, query, key):
        _refuse_borders(attention_mask, cu_q)
        keywords = _with_mask(keywords, keywords_of(attention_mask, query, key))
        return backlight.attention(query, key, value, **keywords).transpose(1, 2), None
    if window is not None:
        keywords["window"] = _sides(window, causal)
    if cu_q is not None:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return backlight.attention_varlen(q, k, v, cu_q, cu_k, **keywords)[None], None
    if attention_mask is None:
        return backlight.attention(query, key, value, **keywords).transpose(1, 2), None
    return _attend_padded(query, key, value, attention_mask, keywords), None


def _with_mask(keywords: dict[str, Any], masked: dict[str, Any]) -> dict[str, Any]:
    """A mask on top of the rest: where both have a bias of pairs, their sum."""
    if "pair_bias" in keywords and "pair_bias" in masked:
        masked["pair_bias"] = masked["pair_bias"] + keywords["pair_bias"]
    return keywords | masked


def _sides(window: int, causal: bool) -> tuple[int, int]:
    return window - 1, 0 if causal else window - 1


def _attend_dropped(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, dropout: float, keywords: dict[str, Any], options: dict[str, Any]
) -> Tensor:
    """[B, Hq, Sq, Dv] with dropout, which is torch's; keywords: causal, scale, softcap, sink."""
    query, key, _ = qkv
    window, cu_q, bias = (options.get(name) for name in ("sliding_window", "cu_seq_lens_q", "position_bias"))
    causal, kept = keywords["causal"], Dropped(dropout, keywords["scale"], keywords["softcap"], keywords["sink"])
    if bias is not None:
        check_bias(bias, query, key)
        bias = bias[..., : key.shape[2]]
    spec = AttentionSpec(causal=causal, window=(None, None) if window is None else _sides(window, causal))
    if mask is not None and not _is_numbers(mask, query, key):
        _refuse_borders(mask, cu_q)
        seen, added = of_given(mask, query, key)
        return kept.attend(qkv, seen, added if bias is None else bias if added is None else added + bias, False)
    if cu_q is not None:
        cu_k = options.get("cu_seq_lens_k")
        return kept.attend(qkv, of_borders(cu_q, cu_q if cu_k is None else cu_k, spec, query, key), bias, False)
    if mask is not None:
        return kept.attend(qkv, of_numbers(mask, spec, key.shape[2]), bias, False)
    if causal and window is None and bias is None and query.shape[2] == key.shape[2]:
        return kept.attend(qkv, None, None, True)
    return kept.attend(qkv, of_geometry(spec, query, key), bias, False)


def _attend_padded(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, keywords: dict[str, Any]) -> Tensor:
    """[B, Sq, Hq, Dv] of a batch with hidden rows and keys."""
    sq, sk = query.shape[2], key.shape[2]
    by_place = "bias" in keywords or "window" in keywords or "pair_bias" in keywords
    aligned = by_place and not keywords["causal"]
    if by_place and mask.dtype == PADDING and (_stays_in_place(mask, sq, sk, keywords) or packing_of(mask, sk, aligned).gaps):
        rows = intervals_of(mask, sk, keywords["causal"], keywords.pop("window", None))
        return backlight.attention(query, key, value, **keywords | {"causal": False, "mask": Mask(rows)}).transpose(1, 2)
    if "pair_bias" in keywords:
        raise NotImplementedError(f"{NAME}: packed sequences beside a bias of pairs must be given as a dense mask")
    packing = packing_of(mask, sk, aligned)
    if by_place:
        require(packing.gaps, False, f"{NAME}: a window or a bias needs packed sequences without gaps")
    if "bias" in keywords:
        keywords = keywords | {"bias": moved(keywords["bias"], packing.room)}
    q, k, v = packing.pack_rows(query), packing.pack_keys(key), packing.pack_keys(value)
    y = backlight.attention_varlen(q, k, v, packing.cu_seqlens_q, packing.cu_seqlens_k, **keywords)
    return packing.unpack_rows(y, query.shape[0], sq)


def _stays_in_place(mask: Tensor, sq: int, sk: int, keywords: dict[str, Any]) -> bool:
    """Whether padded rows and keys must not be packed: a bias of pairs has places, rows that see ahead have none unless there
    are as many as keys, and a graph cannot know whether padding is at the ends only."""
    return "pair_bias" in keywords or (not keywords["causal"] and sq != sk) or blind(mask)


def _check(query: Any, key: Any, value: Any, attention_mask: Any, dropout: Any, is_causal: Any, sliding_window: Any) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x, "[B, H, S, D]")
    if attention_mask is not None:
        check_tensor("attention_mask", attention_mask)
    check_number("dropout", dropout, least=0)
    if dropout > 1:
        raise ValueError(f"dropout must be at most 1, got {dropout}")
    if is_causal is not None:
        check_flag("is_causal", is_causal)
    check_whole("sliding_window", sliding_window, least=1, optional=True)


def _check_borders(query: Tensor, cu_seq_lens_q: Any, cu_seq_lens_k: Any) -> None:
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


def _is_numbers(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Sequence numbers of keys, then of rows."""
    return not mask.is_floating_point() and tuple(mask.shape) == (query.shape[0], 1, 1, key.shape[2] + query.shape[2])


def _refuse_borders(mask: Tensor, cu_seq_lens_q: Tensor | None) -> None:
    if cu_seq_lens_q is not None:
        came = f"got both, the mask of shape {tuple(mask.shape)}"
        raise NotImplementedError(f"{NAME} takes cu_seq_lens_q or a mask of rows and keys, not both, {came}")


def _refuse(options: dict[str, Any]) -> None:
    if options.get("cache") is not None:
        came = shown(options["cache"])
        raise NotImplementedError(f"cache must be None, got {came}: {NAME} does not read paged caches")


def _warn(options: dict[str, Any]) -> None:
    if options.get("output_attentions"):
        never = "never forms the attention weights: output_attentions gets None in their place, and needs 'eager'"
        warnings.warn(f"{NAME} {never}", stacklevel=3)
