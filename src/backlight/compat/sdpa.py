"""PyTorch's scaled_dot_product_attention: its name, arguments and conventions, with a gradient of a float mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.arguments import check_flag, check_number, check_tensor
from backlight.mask import rows


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query, key, value: [B, H, S, D], or [H, S, D], or [B, N, H, S, D].
        attn_mask: broadcast to [B, H, Sq, Sk]; True where a row sees a key, or added to the scores: then it has a gradient, of
            its own shape. It is not expanded.
        is_causal: row i sees keys up to i, aligned to the top left, as PyTorch has it; not together with attn_mask.
        enable_gqa: key and value may have fewer heads.

    Returns:
        Shaped like query, with Dv columns. A row that sees nothing is 0.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            raise ValueError(f"{name} must be [B, H, S, D], [H, S, D] or [B, N, H, S, D], as query is, got {tuple(x.shape)}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        check_flag(name, flag)
    check_number("dropout_p", dropout_p)
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0, got {dropout_p}: backlight has no attention dropout")
    check_number("scale", scale, optional=True)
    if query.shape[-3] != key.shape[-3] and not enable_gqa:
        raise ValueError(f"key must have the heads of query unless enable_gqa, {query.shape[-3]}, got {key.shape[-3]}")
    options: dict[str, Any] = {"scale": scale}
    if is_causal:
        if attn_mask is not None:
            raise ValueError("attn_mask must be None with is_causal, got both")
        options |= _causal(query, key)
    elif attn_mask is not None:
        options["pair_bias"] = _pair_bias(attn_mask, query, key)
    single = query.dim() == 3
    if single:
        query, key, value = (x[None] for x in (query, key, value))
    y = backlight.attention(query, key, value, **options)
    return y[0] if single else y


def _causal(query: Tensor, key: Tensor) -> dict[str, Any]:
    sq, sk = query.shape[-2], key.shape[-2]
    if sq == sk:
        return {"causal": True}
    own = torch.arange(sk, device=query.device)
    return {"mask": rows(own, torch.full_like(own, sq))}


def _pair_bias(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """The mask with the axes of query, keys in full; what it shares stays shared where the call can share it."""
    check_tensor("attn_mask", mask)
    axes, sk = max(4, query.dim()), key.shape[-2]
    whole = (1,) * (axes - query.dim()) + (*query.shape[:-1], sk)
    fits = mask.dim() <= axes and all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(whole), strict=False))
    if not fits:
        raise ValueError(f"attn_mask must broadcast to {list(whole[-max(query.dim(), 2) :])}, got shape {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    elif mask.dtype not in (query.dtype, torch.float32):
        raise TypeError(f"attn_mask must be bool, float32 or have the dtype of query, {query.dtype}, got {mask.dtype}")
    mask = mask[(None,) * (axes - mask.dim())]
    mask = mask.expand(*mask.shape[:-1], sk)
    if axes == 5 and mask.shape[1] > 1 and mask.shape[0] < query.shape[0]:
        # entries of N that differ, the same for every B: the call shares neighbours only
        mask = mask.expand(query.shape[0], *mask.shape[1:])
    return mask
