"""Attention over a cache that is written in place, as FlashAttention 2 and 3 have it. It has no gradients, as there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.arguments import check_borders, check_device, check_flag, check_tensor, check_whole
from backlight.compat.flash_arguments import check_per_sequence
from backlight.compat.flash_calls import Options, Seen, attend, attend_packed
from backlight.compat.flash_rotary import check_rotary, rotated
from backlight.compat.flash_runs import Runs


@dataclass(frozen=True)
class Cache:
    """A cache and what of it a call reads.

    k, v: [Bc, Sc, Hkv, D or Dv].
    length: keys that are there, one number or [B]; None = Sc.
    entry: [B], which entries the batch has; None = the first ones.
    leftpad: [B], keys before it are not read; None = 0.
    """

    k: Tensor
    v: Tensor
    length: int | Tensor | None
    entry: Tensor | None
    leftpad: Tensor | None

    def check(self, q: Tensor, batch: int) -> None:
        self._check_tensor("k_cache", self.k, q)
        if self.k.shape[3] != q.shape[-1]:
            raise ValueError(f"k_cache must have the columns of q, {q.shape[-1]}, got shape {tuple(self.k.shape)}")
        if q.shape[-2] % max(self.k.shape[2], 1):
            raise ValueError(f"heads of q must be a multiple of those of k_cache, {self.k.shape[2]}, got {q.shape[-2]}")
        if self.entry is None and self.k.shape[0] < batch:
            raise ValueError(f"k_cache must have an entry for each of the batch, {batch}, got {self.k.shape[0]}")
        self._check_tensor("v_cache", self.v, q)
        if self.v.shape[:3] != self.k.shape[:3]:
            shapes = tuple(self.k.shape), tuple(self.v.shape)
            raise ValueError(f"v_cache must be as k_cache is, shape {shapes[0]}, but for the columns, got {shapes[1]}")
        if isinstance(self.length, Tensor):
            check_per_sequence("cache_seqlens", self.length, batch, q)
        else:
            check_whole("cache_seqlens", self.length, least=0, optional=True)
        for name, x in (("cache_batch_idx", self.entry), ("cache_leftpad", self.leftpad)):
            if x is not None:
                check_per_sequence(name, x, batch, q)

    @staticmethod
    def _check_tensor(name: str, x: Any, q: Tensor) -> None:
        check_tensor(name, x, "[B, S, H, D]")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        check_device(name, x, "q", q.device)

    def check_room(self, new: int) -> None:
        """Of numbers that can be read without waiting for a device."""
        room = self.k.shape[1] - new
        numbers: list[int] = []
        if not isinstance(self.length, Tensor):
            numbers = [] if self.length is None else [self.length]
        elif self.length.device.type == "cpu" and not torch.compiler.is_compiling():
            numbers = self.length.tolist()
        if any(not 0 <= number <= room for number in numbers):
            raise ValueError(
                f"cache_seqlens must lie between 0 and {room}, the keys of k_cache less the new ones, got {numbers}"
            )

    def lengths(self, batch: int) -> Tensor:
        """[B], int64."""
        if isinstance(self.length, Tensor):
            return self.length.long()
        length = self.k.shape[1] if self.length is None else self.length
        return torch.full((batch,), length, device=self.k.device)


@dataclass(frozen=True)
class Rotary:
    """cos, sin: [S, R / 2] or both None; start [B]: position of the first new key, None where it is the length of the cache."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    start: Tensor | None = None


@torch.no_grad()
def attend_cache(
    q: Tensor,
    cache: Cache,
    new: tuple[Tensor | None, Tensor | None],
    rotary: Rotary,
    options: Options,
    slopes: Tensor | None = None,
    seen: Seen | None = None,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor]:
    """The new k, v [B, Sn, Hkv, D] written behind what the cache holds, then attention of q [B, Sq, Hq, D] to all of it.

    Args:
        cu_seqlens: of a packed q [Tq, Hq, D], and of packed new keys [Tn, Hkv, D].

    Returns:
        y as q lies, with Dv columns; lse [B, Hq, Sq] or [Hq, Tq].
    """
    batch = q.shape[0] if cu_seqlens[0] is None else cu_seqlens[0].shape[0] - 1
    rows, fresh = _runs(q, cu_seqlens[0]), None if new[0] is None else _runs(new[0], cu_seqlens[1])
    lengths, start = cache.lengths(batch), rotary.start
    start = lengths if start is None else start.long()
    flat = q.flatten(0, -3)
    if rotary.cos is not None and rotary.sin is not None:
        ordered = options["causal"] or options["window"] != (None, None) or seen is not None
        flat = _turned(flat, rows, start, rotary, ordered)
    total = lengths
    if fresh is not None and new[0] is not None and new[1] is not None:
        k, v = new[0].flatten(0, -3), new[1].flatten(0, -3)
        if rotary.cos is not None:
            k = _turned(k, fresh, start, rotary, True)
        _write(cache, k, v, fresh, lengths)
        total = lengths + fresh.count
    entries = slice(batch) if cache.entry is None else cache.entry.long()
    k, v = cache.k[entries], cache.v[entries]
    if not isinstance(cache.length, Tensor) and cache.leftpad is None and cu_seqlens[0] is None and cu_seqlens[1] is None:
        # as many keys for every entry: no packed sequences are needed
        end = cache.k.shape[1] if cache.length is None else cache.length + (0 if new[0] is None else new[0].shape[1])
        return attend(flat.view_as(q), k[:, :end], v[:, :end], options, slopes, seen)
    keys = Runs.of_batch(batch, k.shape[1], q.device, 0 if cache.leftpad is None else cache.leftpad.long(), total)
    y, lse = attend_packed(flat, k.flatten(0, 1), v.flatten(0, 1), (rows, keys), options, slopes, seen)
    if cu_seqlens[0] is not None:
        return y, lse
    return y.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


def check_cache_call(q: Any, cache: Cache, k: Any, v: Any, rotary: Rotary, cu_q: Any = None, cu_new: Any = None) -> int:
    """The number of sequences, if all is well."""
    check_tensor("q", q, "[B, S, H, D]" if cu_q is None else "[T, H, D]")
    for name, borders in (("cu_seqlens_q", cu_q), ("cu_seqlens_k_new", cu_new)):
        if borders is not None:
            check_borders(name, borders, q.device)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    if (k is None) != (v is None):
        raise ValueError(f"k and v must be given together, got {'v' if k is None else 'k'} alone")
    cache.check(q, batch)
    if k is not None:
        if cache.length is None:
            raise ValueError("cache_seqlens must say where k and v go, got None")
        _check_new(q, cache, k, v, batch, cu_new)
    # how many of packed keys go to an entry is not read
    cache.check_room(0 if k is None or cu_new is not None else k.shape[1])
    check_flag("rotary_interleaved", rotary.interleaved)
    if rotary.cos is not None and k is None:
        raise ValueError("rotary_cos goes with new keys: k must be given, got None")
    check_rotary(rotary.cos, rotary.sin, q, cache.k.shape[1])
    if rotary.start is not None:
        check_per_sequence("rotary_seqlens", rotary.start, batch, q)
    return batch


def _check_new(q: Tensor, cache: Cache, k: Any, v: Any, batch: int, cu_new: Tensor | None) -> None:
    for name, x, held in (("k", k, cache.k), ("v", v, cache.v)):
        check_tensor(name, x, "[B, S, H, D]" if cu_new is None else "[T, H, D]")
        if x.dtype != q.dtype:
            raise TypeError(f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}")
        check_device(name, x, "q", q.device)
        alike = x.shape[:-2] == k.shape[:-2] and (cu_new is not None or x.shape[0] == batch)
        if not (alike and x.shape[-2:] == held.shape[-2:]):
            raise ValueError(f"{name} must have the batch of q and the heads of its cache, got shape {tuple(x.shape)}")
    if cu_new is not None and cu_new.shape[0] != batch + 1:
        raise ValueError(f"cu_seqlens_k_new must be [{batch + 1}], got shape {tuple(cu_new.shape)}")


def _runs(x: Tensor, cu_seqlens: Tensor | None) -> Runs:
    if cu_seqlens is None:
        return Runs.of_batch(x.shape[0], x.shape[1], x.device)
    return Runs.of_borders(cu_seqlens.long(), x.shape[0])


def _turned(x: Tensor, runs: Runs, start: Tensor, rotary: Rotary, ordered: bool) -> Tensor:
    """ordered: rows follow one another; otherwise all of them sit at the first position."""
    z, place = runs.places()
    position = start[z] + place if ordered else start[z]
    return rotated(x, position, rotary.cos, rotary.sin, rotary.interleaved)  # type: ignore[arg-type]


def _write(cache: Cache, k: Tensor, v: Tensor, fresh: Runs, lengths: Tensor) -> None:
    z, place = fresh.places()
    entry = z if cache.entry is None else cache.entry.long()[z]
    for held, x in ((cache.k, k), (cache.v, v)):
        held.index_put_((entry, lengths[z] + place), x)
