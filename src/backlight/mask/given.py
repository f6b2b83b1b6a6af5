"""Masks from intervals, from a boolean tensor and from a function of FlexAttention (eq. 66)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backlight import intervals
from backlight.arguments import check_whole, place, shown
from backlight.mask.inputs import Wholes, per_entry, per_key, same_device
from backlight.mask.mask import Mask, as_int32

# entries of a function's mask that are held at a time
STRIP = 2**24


def rows(
    first: Wholes, end: Wholes, first2: Wholes | None = None, end2: Wholes | None = None, pos: Wholes | None = None
) -> Mask:
    """Key j is seen by rows first_j <= i < end_j and, if there is a second interval, by rows first2_j <= i < end2_j.

        rows(first=[0, 2, 1], end=[2, 4, 3])         rows([0, 1, 1], [1, 3, 4], [3, 4, 0], [4, 4, 0])
            x . .                                         x . .
            x . x                                         . x x
            . x x                                         . x x
            . x .                                         x . x

    first, end, first2, end2: [Sk], [B, Sk] or [B, Hq, Sk].
    pos: [Sq] or [B, Sq]: row i is compared as pos_i.
    """
    if (first2 is None) != (end2 is None):
        raise TypeError("first2 and end2 must come together, got one of them")
    lead = per_key("first", first)
    given = [("first", lead), ("end", per_key("end", end, lead.device))]
    if first2 is not None:
        given += [("first2", per_key("first2", first2, lead.device)), ("end2", per_key("end2", end2, lead.device))]
    for name, x in given[1:]:
        same_device(name, x, "first", lead)
        if x.shape[2] != lead.shape[2]:
            raise ValueError(f"{name} must have as many keys as first, {lead.shape[2]}, got {x.shape[2]}")
    try:
        ends = torch.broadcast_tensors(*[x for _, x in given])
    except RuntimeError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given)
        raise ValueError(f"the ends of a mask must agree in batch and heads, got {shapes}") from None
    positions = None if pos is None else as_int32(per_entry("pos", pos, "Sq", lead.device))
    return Mask(as_int32(torch.stack(ends, dim=2)), positions)


def from_dense(visible: Tensor) -> Mask:
    """The mask of a boolean tensor, exactly: [Sq, Sk], [B, Sq, Sk] or [B, Hq, Sq, Sk], True where a row sees a key.

    A key whose rows are more than two runs has no intervals, and the sentence about it names the key. Waits for the device.

        visible        first  end  first2  end2
        x . x          0      2    3       4       key 0: rows 0, 1 and 3
        x . x          0      0    0       0       key 1: none
        . . x          0      4    0       0       key 2: all
        x . x
    """
    if not isinstance(visible, Tensor) or visible.dtype != torch.bool:
        came = visible.dtype if isinstance(visible, Tensor) else shown(visible)
        raise TypeError(f"visible must be a boolean tensor, got {came}")
    if not 2 <= visible.dim() <= 4:
        raise ValueError(f"visible must be [Sq, Sk], [B, Sq, Sk] or [B, H, Sq, Sk], got shape {tuple(visible.shape)}")
    if visible.dim() < 4:
        visible = visible[(None,) * (3 - visible.dim())][:, None]
    found, runs = _runs(visible)
    _refuse(runs)
    return Mask(_narrowest(found))


def from_mask_mod(
    mask_mod: Callable[..., Tensor],
    B: int | None,
    H: int | None,
    Sq: int,
    Sk: int,
    device: torch.device | str = "cuda",
) -> Mask:
    """The mask of a function of FlexAttention, exactly: mask_mod(b, h, q_idx, kv_idx), with the arguments of `create_mask`.

    B, H: None where the function does not look at batch or head. Every entry is asked for once, some columns at a time; a key
    whose rows are more than two runs is refused. Waits for the device.

        from_mask_mod(lambda b, h, q, k: (q >= k) & (document[q] == document[k]), None, None, S, S, device)
    """
    for name, size in (("B", B), ("H", H)):
        check_whole(name, size, least=1, optional=True)
    for name, size in (("Sq", Sq), ("Sk", Sk)):
        check_whole(name, size, least=0)
    if not callable(mask_mod):
        raise TypeError(f"mask_mod must be a function (b, h, q_idx, kv_idx), got {shown(mask_mod)}")
    batch, heads, where = B or 1, H or 1, place(device)
    width = max(1, STRIP // max(1, batch * heads * Sq))
    parts = []
    for j0 in range(0, Sk, width):
        columns = torch.arange(j0, min(j0 + width, Sk), device=where)
        found, runs = _runs(_evaluate(mask_mod, batch, heads, Sq, columns))
        _refuse(runs, j0)
        parts.append(found)
    blank = torch.zeros(batch, heads, 4, 0, dtype=torch.int32, device=where)
    return Mask(_narrowest(torch.cat([blank, *parts], dim=-1)))


def _evaluate(mask_mod: Callable[..., Tensor], batch: int, heads: int, sq: int, columns: Tensor) -> Tensor:
    """bool [B, H, Sq, columns]."""
    function: Any = mask_mod
    for axis in range(3, -1, -1):
        function = torch.vmap(function, in_dims=tuple(0 if each == axis else None for each in range(4)))
    b, h, q = (torch.arange(size, device=columns.device) for size in (batch, heads, sq))
    found = function(b, h, q, columns)
    if not isinstance(found, Tensor) or found.dtype != torch.bool:
        came = found.dtype if isinstance(found, Tensor) else shown(found)
        raise TypeError(f"mask_mod must return a boolean tensor, got {came}")
    return found


def _runs(visible: Tensor) -> tuple[Tensor, Tensor]:
    """Eq. 66: the first two runs of rows of each key, int32 [B, H, 4, Sk], and how many it has, [B, H, Sk]."""
    sq = visible.shape[-2]
    edge = visible.new_zeros(*visible.shape[:-2], 1, visible.shape[-1])
    rise = visible & ~torch.cat([edge, visible[..., :-1, :]], dim=-2) if sq else visible
    fall = visible & ~torch.cat([visible[..., 1:, :], edge], dim=-2) if sq else visible
    ends = []
    for nth in (1, 2):
        for change, after in ((rise, 0), (fall, 1)):
            there = change & (change.cumsum(dim=-2, dtype=torch.int32) == nth)
            # a key with fewer runs has no such row
            row = there.to(torch.uint8).argmax(dim=-2) + after if sq else edge[..., 0, :].long()
            ends.append(torch.where(there.any(dim=-2), row, 0))
    return torch.stack(ends, dim=-2).to(torch.int32), rise.sum(dim=-2)


def _refuse(runs: Tensor, j0: int = 0) -> None:
    """A sentence about the first key with more than two runs, if there is one."""
    many = (runs > 2).nonzero()
    if not len(many):
        return
    b, h, j = many[0].tolist()
    found = f"key {j0 + j} (batch entry {b}, head {h}) is seen by {int(runs[b, h, j])} runs of rows"
    raise ValueError(f"{found}; a mask by intervals has at most 2 for a key")


def _narrowest(rows: Tensor) -> Tensor:
    """Without the second intervals if all of them are empty."""
    first, end = intervals.pairs(rows)
    return rows if bool((first[..., 1, :] < end[..., 1, :]).any()) else rows[..., :2, :].contiguous()
