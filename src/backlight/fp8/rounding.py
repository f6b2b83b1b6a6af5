"""Tensors into e4m3: by kernels where they can (`backends.triton.quantise`), by torch operations elsewhere (`quantising`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backlight.quantising import (
    Keys,
    Quantised,
    Tiles,
    check_keys,
    check_queries,
    dequantized,
    keys_in_torch,
    queries_in_torch,
    rotation,
    tiles_of,
)

NO_TILES = None, None


def _kernels(*tensors: Tensor) -> Any:
    """The module with the kernels, or None where they cannot run."""
    if not tensors[0].is_cuda:
        return None
    try:
        from backlight.backends.triton import quantise
    except ImportError:
        return None
    return quantise if quantise.takes(*tensors) else None


def quantize_keys(k: Tensor, v: Tensor, *, centred: bool = True) -> Keys:
    """k and v [B, Hkv, Sk, D] in e4m3, to be kept for many queries.

    centred: take the mean of the keys off before they are rounded. Calls with a softcap need keys that are not centred.
    """
    check_keys(k, v)
    kernels = _kernels(k, v)
    return (keys_in_torch if kernels is None else kernels.keys_of)(k, v, centred, None)


def quantize_queries(q: Tensor, keys: Keys, scale: float | None = None) -> Quantised:
    """q [B, Hq, Sq, D] in e4m3, for keys that are."""
    check_queries(q, keys.k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kernels = _kernels(q)
    return (queries_in_torch if kernels is None else kernels.queries_of)(q, keys, scale, None)


def quantize(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, *, centred: bool = True) -> Quantised:
    """q, k and v [B, H, S, D] in e4m3; `backlight.attention` takes what comes back in the place of q.

    scale: of the scores, default D ** -0.5. centred: as in `quantize_keys`.
    """
    return quantised(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, centred, NO_TILES)


def quantised(
    q: Tensor, k: Tensor, v: Tensor, scale: float, centred: bool, tiles: tuple[Tiles | None, Tiles | None]
) -> Quantised:
    check_keys(k, v)
    check_queries(q, k)
    kernels = _kernels(q, k, v)
    if kernels is not None:
        return kernels.quantised(q, k, v, scale, centred, tiles)
    return queries_in_torch(q, keys_in_torch(k, v, centred, tiles[1]), scale, tiles[0])


def rounded(
    q: Tensor, k: Tensor, v: Tensor, scale: float, centred: bool, tiles: tuple[Tiles | None, Tiles | None]
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """(q, k, v as e4m3 rounds them, q and k turned, in the dtype of q; offset of rows; mean of keys)."""
    kernels = _kernels(q, k, v)
    if kernels is not None:
        return kernels.rounded(q, k, v, scale, centred, tiles)
    given = queries_in_torch(q, keys_in_torch(k, v, centred, tiles[1]), scale, tiles[0])
    return rounded_of(given)


def rounded_of(given: Quantised) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """`rounded` of what is quantised already."""
    q, k, v = (x.to(given.dtype) for x in dequantized(given))
    return (q, k, v), given.offset, given.keys.mean


def turned_back(x: Tensor) -> Tensor:
    """Gradients of turned rows as those of rows."""
    kernels = _kernels(x)
    if kernels is not None:
        return kernels.turned_back(x)
    return (x.float() @ rotation(x.shape[-1], x.device).T).to(x.dtype)


def tiles_of_call(call: Any) -> tuple[Tiles | None, Tiles | None]:
    """Tiles of the rows and of the keys of a call, None where they are not packed."""
    if call.cu_seqlens_q is None:
        return NO_TILES
    q_tiles = tiles_of(call.cu_seqlens_q, call.q.shape[2])
    shared = call.cu_seqlens_k is call.cu_seqlens_q and call.k.shape[2] == call.q.shape[2]
    return q_tiles, q_tiles if shared else tiles_of(call.cu_seqlens_k, call.k.shape[2])
