"""Dense position biases of transformers' models: as a bias by distance where they are one, else as a bias of pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backlight.arguments import check_tensor
from backlight.integrations.transformers.refusing import NAME, require
from backlight.integrations.transformers.tracing import blind


def bias_of(module: nn.Module, position_bias: Any, query: Tensor, key: Tensor, causal: bool) -> dict[str, Any]:
    """Keywords of the call for a dense bias [1, Hq, Sq, Sk], or longer than the keys; none for zeros that stand for no bias."""
    check_bias(position_bias, query, key)
    if _absent(module, position_bias, causal):
        return {}
    dense = position_bias[..., : key.shape[2]]
    if _is_of_pairs(module, dense):
        return {"pair_bias": dense if dense.dtype in (query.dtype, torch.float32) else dense.to(torch.float32)}
    return {"bias": by_distance(dense, known=not blind(dense)), "bias_origin": query.shape[2] - 1}


def _is_of_pairs(module: nn.Module, dense: Tensor) -> bool:
    """Whether a bias may depend on more than the distance: its values do, it differs from one batch entry to the next, or it
    has a gradient and nobody says, as T5 does, that distances alone made it. A graph has no values, and is told when it runs.
    """
    if dense.shape[0] != 1 or (dense.requires_grad and not hasattr(module, "_relative_position_bucket")):
        return True
    return not blind(dense) and not bool(_along_diagonals(dense[0]))


def check_bias(position_bias: Any, query: Tensor, key: Tensor) -> None:
    check_tensor("position_bias", position_bias, "[1, Hq, Sq, Sk]")
    (_, heads, sq, _), sk = query.shape, key.shape[2]
    _, own_heads, rows, columns = position_bias.shape
    if own_heads != heads or rows != sq or columns < sk:
        shape = tuple(position_bias.shape)
        raise ValueError(f"position_bias must be [1, {heads}, {sq}, {sk}], one value for each row and key, got shape {shape}")


def _absent(module: nn.Module, position_bias: Tensor, causal: bool) -> bool:
    """Zeros that stand for no bias: no parameter behind them. Zeros of a parameter have a gradient to come."""
    if not blind(position_bias):
        return position_bias.is_leaf and not bool(position_bias.any())
    # T5 and its kin: rows of a decoder have no distance to the keys of an encoder
    absent = not causal and bool(getattr(module, "is_decoder", False)) and not position_bias.requires_grad
    if absent:
        require(position_bias.any(), False, f"{NAME} takes no position bias between decoder and encoder under torch.compile")
    return absent


def by_distance(position_bias: Tensor, known: bool = False) -> Tensor:
    """The table [H, Sq + Sk - 1] of a dense bias [1, H, Sq, Sk] that depends on distance alone, differentiable.

    Every distance is read at one place, so the gradient arrives there whole; whatever made the dense bias from distances passes
    it on to the same parameters as the sum over all places. known: that it depends on distance alone was seen before.
    """
    if position_bias.shape[0] != 1:
        raise NotImplementedError(f"{NAME} takes one position bias for the whole batch, got {tuple(position_bias.shape)}")
    dense = position_bias[0]
    require(known or _along_diagonals(dense), True, f"{NAME} takes position biases that depend on distance alone")
    # row 0 backwards, then column 0 downwards: distances 1 - Sq .. Sk - 1
    return torch.cat([dense[:, 0].flip(-1), dense[:, 1:, 0]], dim=-1)


def _along_diagonals(dense: Tensor) -> Tensor:
    """Whether values of [H, Sq, Sk] at equal distances are equal."""
    return (dense[:, 1:, 1:] == dense[:, :-1, :-1]).all()


def moved(table: Tensor, room: int | Tensor) -> Tensor:
    """The table [H, n] of a dense bias whose last `room` keys lie behind the last row: column c is what column c + room was.

    Rows align to the last key that is seen; the dense bias counts on to the end of the cache.
    """
    if isinstance(room, int) and not room:
        return table
    columns = torch.arange(table.shape[1], device=table.device) + room
    # what comes in from the right belongs to distances between no row and no key
    return table.index_select(1, columns.clamp(max=table.shape[1] - 1))
