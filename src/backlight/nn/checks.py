"""What layers ask of their arguments, before anything is computed."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from backlight import api
from backlight.arguments import FLOATS, INTEGERS, check_borders, check_device, check_dtype, check_tensor, shown
from backlight.mask import Mask
from backlight.nn.cache import KVCache
from backlight.spec import AttentionSpec


class Layer(Protocol):
    """What the checks read of a layer."""

    dim: int
    qkv: nn.Linear
    spec: AttentionSpec


# the layer whose keys a cache holds
_owners: weakref.WeakKeyDictionary[KVCache, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def check_known(options: Iterable[str], known: Iterable[str]) -> None:
    """No option of a layer is misspelt."""
    unknown = sorted({*options} - {*known})
    if unknown:
        raise TypeError(f"a layer has no option {unknown[0]!r}; beside its own there are {', '.join(known)}")


def check_factory(backend: Any, device: Any, dtype: Any) -> None:
    """The arguments of a layer that do not touch its mathematics."""
    api.check_backend(backend)
    if not (dtype is None or dtype in FLOATS):
        raise TypeError(f"dtype must be fp16, bf16, fp32, fp64 or None, got {shown(dtype)}")
    if device is None:
        return
    try:
        torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"device must be a torch.device, its name or None, got {shown(device)}") from error


def check_input(layer: Layer, x: Any, cu_seqlens: Any) -> None:
    """x [B, S, dim], or packed [T, dim] with its borders, such as the projection takes."""
    check_tensor("x", x)
    wanted = 3 if cu_seqlens is None else 2
    if x.dim() != wanted or x.shape[-1] != layer.dim:
        layout = f"[B, S, {layer.dim}]" if cu_seqlens is None else f"[T, {layer.dim}] with cu_seqlens"
        raise ValueError(f"x must be {layout}, got shape {tuple(x.shape)}")
    check_dtype("x", x, FLOATS)
    if cu_seqlens is not None:
        check_borders("cu_seqlens", cu_seqlens, x.device)
    # wrappers (FSDP, adapters, quantisation) replace the projection and cast for themselves
    plain = type(layer.qkv) is nn.Linear and type(layer.qkv.weight) in (nn.Parameter, Tensor)
    if plain and not layer.qkv._forward_pre_hooks:
        weight = layer.qkv.weight
        check_device("x", x, "the layer", weight.device)
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"x must have the dtype of the layer, {weight.dtype}, got {x.dtype}")


def check_positions(positions: Any, x: Tensor) -> None:
    """Integers [S] or [B, S]; packed, [T]. A length that fits only by broadcasting is a mistake."""
    if positions is None:
        return
    check_tensor("positions", positions)
    check_dtype("positions", positions, INTEGERS)
    rows = x.shape[:-1]
    if positions.shape not in (rows, rows[-1:]):
        layouts = " or ".join(str(list(shape)) for shape in dict.fromkeys((tuple(rows[-1:]), tuple(rows))))
        raise ValueError(f"positions must be {layouts}, one for each row of x, got shape {tuple(positions.shape)}")
    check_device("positions", positions, "x", x.device)


def check_cache(layer: Layer, cache: Any, cu_seqlens: Tensor | None) -> None:
    if cache is None:
        return
    if not isinstance(cache, KVCache):
        raise TypeError(f"cache must be a backlight.nn.KVCache or None, got {shown(cache)}")
    if cu_seqlens is not None:
        raise ValueError("cache must be None with cu_seqlens, got a KVCache: it goes with batched x [B, S, dim]")
    if not layer.spec.causal:
        raise ValueError("cache needs a causal layer: the rows of the past would have to see the new keys")
    if cache.length and not torch.compiler.is_compiling():
        owner = _owners.get(cache, lambda: None)()
        if owner is not None and owner is not layer:
            raise ValueError("cache must be one of this layer, and it holds keys of another layer: use one cache per layer")


def remember_owner(layer: Layer, cache: KVCache) -> None:
    """The keys of a cache are of this layer. Not written into the cache, which is copied and saved."""
    if not torch.compiler.is_compiling():
        _owners[cache] = weakref.ref(layer)


def held_mask(mask: Any, seen: int, held: int) -> Mask | None:
    """Of a mask for all keys that a cache has seen, that of the keys it holds. Anything else is for the call to refuse."""
    if not isinstance(mask, Mask):
        return mask
    if mask.rows.shape[3] != seen:
        raise ValueError(f"mask must be of the {seen} keys that the cache has seen with those of x, got {mask.rows.shape[3]}")
    return mask if seen == held else Mask(mask.rows[..., seen - held :], mask.pos)
