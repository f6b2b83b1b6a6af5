"""Masks that are neither geometry nor padding, as row intervals: mask functions of a model, and dense masks of a caller.

A dense mask that says more than what is hidden, that has a gradient, or that intervals cannot say, is a bias of pairs.
Both say everything by themselves: the causal flag and the window of a layer do not come on top of them. Finding intervals waits
for the device, so it is done once for a mask, and never in a graph: there a dense mask is a bias of pairs, as with SDPA, but
intervals that were found before it are taken.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from backlight import intervals
from backlight.integrations.transformers.refusing import NAME
from backlight.integrations.transformers.tracing import blind
from backlight.mask import Mask, from_dense, from_mask_mod
from backlight.spec import AttentionSpec

# dtype of a mask [B or 1, H or 1, 2 or 4, Sk] that is intervals; numbers of sequences have others
INTERVALS = torch.int32

Window = tuple[int | None, int | None]


def of_function(
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    sizes: tuple[int, int, int],
    offsets: tuple[int | Tensor, int],
    device: torch.device | str,
    use_vmap: bool = False,
) -> Tensor:
    """Intervals [B, 1, 2 or 4, Sk] of a mask function with the padding mask [B, seen keys] on top of it; a dense mask
    [B, 1, Sq, Sk] in a graph, and for a function that intervals cannot say.

    sizes: B, Sq, Sk. offsets: where the function counts the first row and the first key. use_vmap: it takes single indices.
    """
    (batch, sq, sk), (row, key) = sizes, offsets
    real = None
    if padding is not None:
        real = torch.nn.functional.pad(padding, (0, max(0, sk + key - padding.shape[-1]))).to(device, torch.bool)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = mask_function(b, h, q + row, k + key)
        return seen if real is None else seen & real[b, k + key]

    if not blind(torch.empty(0, device=device)):
        try:
            return from_mask_mod(mask_mod, batch, None, sq, sk, device).rows
        except ValueError:
            # a key with three runs of rows or more
            pass
    return dense_of_function(mask_function, padding, sizes, offsets, device, use_vmap)


def dense_of_function(
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    sizes: tuple[int, int, int],
    offsets: tuple[int | Tensor, int],
    device: torch.device | str,
    use_vmap: bool = False,
) -> Tensor:
    """bool [B, 1, Sq, Sk], as transformers makes it for SDPA; no value is looked at."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(
        *(*sizes, *offsets, mask_function, padding),
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        use_vmap=use_vmap,
        device=device,
    )


def keywords_of(mask: Tensor, query: Tensor, key: Tensor) -> dict[str, Any]:
    """causal, window, mask and pair_bias of the call, for intervals or a dense mask; NotImplementedError for anything else."""
    check_given(mask, query, key)
    if mask.dtype == INTERVALS:
        return {"causal": False, "mask": Mask(mask)}
    found = None if mask.requires_grad or blind(mask) else _remembered(mask, query.shape[2])
    return {"causal": False, "pair_bias": as_pair_bias(mask, query)} if found is None else found


def check_given(mask: Tensor, query: Tensor, key: Tensor) -> None:
    if not _fits(mask, query, key):
        dense = "dense masks [batch, head, row, key] of bool or floats"
        known = f"padding masks [batch, length], {dense}, intervals [batch, head, 2 or 4, key] of int32"
        raise NotImplementedError(f"{NAME} takes {known}, got a mask of shape {tuple(mask.shape)} and {mask.dtype}")


def as_pair_bias(mask: Tensor, query: Tensor) -> Tensor:
    """A dense mask as a pair bias, in a dtype that goes with query."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -torch.inf)
    return mask if mask.dtype in (query.dtype, torch.float32) else mask.to(torch.float32)


def _fits(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    (batch, heads, sq, _), sk = query.shape, key.shape[2]
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[1] not in (1, heads) or mask.shape[3] != sk:
        return False
    if mask.dtype == INTERVALS:
        return mask.shape[2] in (2, 4)
    return (mask.dtype == torch.bool or mask.is_floating_point()) and mask.shape[2] in (1, sq)


# --- dense masks -------------------------------------------------------------------------------------------------------------

# The layers of a model share one mask. (version, rows of q, keywords) of each, keywords of None for a pair bias; a tensor of
# inference mode has no version that would tell of a change, and is read again.
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _remembered(mask: Tensor, sq: int) -> dict[str, Any] | None:
    if mask.is_inference():
        return _read(mask, sq)
    known = _known.get(mask)
    if known is None or known[:2] != (mask._version, sq):
        known = _known[mask] = (mask._version, sq, _read(mask, sq))
    return known[2]


def _read(mask: Tensor, sq: int) -> dict[str, Any] | None:
    """Keywords of what a mask hides; None where it does more, or hides what intervals cannot say."""
    visible = _visible(mask)
    if visible is None:
        return None
    dense = visible.expand(*visible.shape[:2], sq, visible.shape[3])
    try:
        found = from_dense(dense)
    except ValueError:
        # a key with three runs of rows or more
        return None
    window = _window(dense, found.rows)
    if window is None:
        return {"causal": False, "mask": found}
    causal = window[1] == 0
    return {"causal": causal, "window": None if window[0] is None and (causal or window[1] is None) else window}


def _visible(mask: Tensor) -> Tensor | None:
    """Where a mask lets a row see a key: a boolean one says it, a float one adds 0 there and what hides elsewhere; None for a
    float one with other values."""
    if mask.dtype == torch.bool:
        return mask
    # the least number of bfloat16 is still that in a wider dtype
    hides = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    seen = mask == 0
    return seen if bool((seen | (mask <= hides)).all()) else None


def _window(visible: Tensor, rows: Tensor) -> Window | None:
    """(left, right) where the mask is that window for every batch entry and head, None for an open side; None if it is none.

    Causal is (None, 0), and what sees everything (None, None).
    """
    sq, sk = visible.shape[-2:]
    if rows.shape[2] != 2 or not (rows.shape[0] and sq and sk):
        return None
    # first key of the last row, keys after the last one of the first row
    oldest, hidden = torch.stack([visible[0, 0, -1].byte().argmax(), visible[0, 0, 0].flip(0).byte().argmax()]).tolist()
    left, right = sk - 1 - oldest if oldest else None, sq - 1 - hidden if hidden else None
    if right is not None and right < 0:
        return None
    everything = rows.new_tensor([0, sq])[None, None, :, None].expand(1, 1, 2, sk)
    wanted = intervals.fold_rows(everything, AttentionSpec(window=(left, right)), sq, sk)
    same = intervals.fold_rows(rows, AttentionSpec(), sq, sk) == wanted
    return (left, right) if bool(same.all()) else None
