"""Documents of known lengths as packed sequences: the same attention, on kernels whose tiles begin at borders.

Calls in and out are those of `attention`: tensors in the order of `spec.TENSORS`, [B, H, S, D]. A mask that carries its borders
(`mask.Mask.borders`) says no more than they do, so the call leaves its intervals out and takes borders instead. One batch entry
is a packed call as it lies. Several become one: their heads beside one another, or their rows one after another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import transforms_active
from backlight.binding import FIRST_BORDER, Tensors, plain
from backlight.spec import PER_HEAD, TENSOR_NAMES, TENSORS

# Positions of a document, on average, below which intervals take over: packed sequences have a tile of their own each, and
# visit as many as intervals do where a document fills half of it.
SHORTEST = 64
# beyond these widths and in fp64 the one backend left reads borders on the host, which waits for the device
WIDEST = 256
# borders of an entry beside those of its documents: the first, and where there are two lines those of padding
BESIDE = {1: 1, 2: 3}

_NAMED = {name: place for place, name in enumerate(TENSOR_NAMES)}
_LIKE_Q = tuple(place for place, each in enumerate(TENSORS) if each.like_q)
_OF_HEADS = tuple(_NAMED[name] for name in PER_HEAD)
# the first tensor of a mask; its borders come last
_ROWS = _NAMED["rows"]


def against(mask: Any, tensors: Tensors, packed: bool, backend: str | None, by_batch: bool = False) -> str | None:
    """Why a call runs by the intervals of a mask with borders; None where it runs as packed sequences.

    by_batch: how long other documents are must not decide.
    """
    q, k, v = tensors[:3]
    if packed:
        return "the call is packed already"
    if not mask.agrees:
        return "its rows or its borders were written in place, and not the other (Mask.copy_ writes both)"
    if not all(isinstance(x, Tensor) and x.dim() == 4 for x in _present(tensors)) or not _fits(mask, q, k):
        return "it is not one of as many rows as keys"
    if tensors[_NAMED["pair_bias"]] is not None:
        return "its pair_bias has rows and keys of the batch, not of each document"
    if transforms_active():
        return "transforms of torch.func are at work"
    entries, length = mask.rows.shape[0], k.shape[2]
    documents = mask.borders.shape[1] - BESIDE[mask.borders.shape[0]] * entries
    if documents * SHORTEST > entries * length and not by_batch:
        return f"its documents are shorter than {SHORTEST} positions on average"
    if not _read_on_the_device(q, v, backend):
        return "the backend would wait for the device to read borders"
    if way(mask, tensors) is None:
        return "batch entries do not lie side by side in memory as packed sequences do"
    return None


def _present(tensors: Tensors) -> list[Any]:
    """q, k, v and the gate, if there is one."""
    return [tensors[place] for place in _LIKE_Q if place < 3 or tensors[place] is not None]


def _fits(mask: Any, q: Tensor, k: Tensor) -> bool:
    """What does not fit is refused where the call is bound."""
    sizes = q.shape[2] == k.shape[2] == mask.rows.shape[3] and mask.rows.shape[0] in (1, q.shape[0])
    return sizes and q.shape[0] > 0 and q.device == mask.borders.device


def _read_on_the_device(q: Tensor, v: Tensor, backend: str | None) -> bool:
    if q.device.type in ("cpu", "meta"):
        return True
    narrow = q.shape[3] <= WIDEST and v.shape[3] <= WIDEST
    return q.device.type == "cuda" and backend != "tiled" and q.dtype != torch.float64 and narrow


def way(mask: Any, tensors: Tensors) -> str | None:
    """How batch entries become one, without a copy: "alone", "heads", "rows", or None where none is."""
    if tensors[0].shape[0] == 1:
        return "alone"
    given = _present(tensors)
    shared = mask.rows.shape[0] == 1 and all(tensors[place] is None for place in _OF_HEADS)
    if shared and all(x.stride(0) == x.shape[1] * x.stride(1) for x in given):
        return "heads"
    return "rows" if all(x.stride(0) == x.shape[2] * x.stride(2) for x in given) else None


def as_packed(mask: Any, tensors: Tensors, options: dict[str, Any]) -> tuple[Tensors, dict[str, Any], bool]:
    """Tensors and options of the call without the mask, and whether the tensors are packed, [T, H, D]."""
    if mask.causal and plain(options["causal"]) is False:
        options = options | {"causal": True}
    found, how = list(tensors), way(mask, tensors)
    batch, _, length, _ = tensors[0].shape
    for place in _LIKE_Q:
        x = found[place]
        if x is None or how == "alone":
            continue
        found[place] = x.flatten(0, 1)[None] if how == "heads" else x.transpose(1, 2).flatten(0, 1)
    lines = mask.borders
    if how == "rows" and mask.rows.shape[0] == 1:
        first = torch.arange(0, batch * length, length, dtype=torch.int32, device=lines.device)
        lines = (lines[:, None] + first[:, None]).flatten(1)
    cu_q, *cu_k = lines.contiguous().unbind(0)
    return (*found[:_ROWS], *[None] * (FIRST_BORDER - _ROWS), cu_q, cu_k[0] if cu_k else cu_q), options, how == "rows"


def as_batched(y: Tensor, batch: int, packed: bool) -> Tensor:
    """The result of a packed call as that of `batch` entries: y, or lse, which has no columns."""
    if batch == 1:
        return y
    if not packed:
        return y[0].unflatten(0, (batch, -1))
    if y.dim() == 3:
        return y.unflatten(0, (batch, -1)).transpose(1, 2)
    return y.unflatten(1, (batch, -1)).transpose(0, 1)
