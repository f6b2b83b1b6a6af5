"""Keys and values of the past, for generation.

With a window of `left` keys the cache forgets what no later row can see. Bottom-right alignment makes that exact: visible keys,
their number and their distances are the same whether or not older keys are still there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from backlight.arguments import FLOATS, check_device, check_dtype, check_tensor, check_whole


class Staged(NamedTuple):
    """A cache as it will be: its rooms, and the columns [begin, end) of them that hold keys."""

    k: Tensor
    v: Tensor
    begin: int
    end: int
    seen: int

    @property
    def held(self) -> tuple[Tensor, Tensor]:
        return self.k[:, :, self.begin : self.end], self.v[:, :, self.begin : self.end]


class KVCache:
    """What one layer has seen so far: keys [B, Hkv, S, D] and values [B, Hkv, S, Dv], one cache per layer.

    Room is taken in one piece and doubled when it runs out, so that nearly every step copies only what is new. All sequences of
    the batch advance together.

    Args:
        capacity: keys to make room for at the first `append`; grows when needed.
    """

    def __init__(self, capacity: int = 128):
        check_whole("capacity", capacity, least=1)
        self.capacity = capacity
        self.clear()

    def __repr__(self) -> str:
        return f"KVCache({self.length} keys seen, {self.kept} kept)"

    def clear(self) -> None:
        """Forget everything."""
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        # the keys held lie in columns [_begin, _end) of the room
        self._begin = self._end = self._seen = 0

    @property
    def length(self) -> int:
        """Keys seen, forgotten ones included: the position of the next row."""
        return self._seen

    @property
    def kept(self) -> int:
        """Keys still held."""
        return self._end - self._begin

    def append(self, k: Tensor, v: Tensor, left: int | None = None) -> tuple[Tensor, Tensor]:
        """Add k [B, Hkv, S, D] and v [B, Hkv, S, Dv]; returns all keys and values a row of these S may see, as views.

        left: reach of the window to the left; keys beyond the reach of the first new row are left out, and forgotten.
        """
        staged = self.stage(k, v, left)
        self.commit(staged)
        return staged.held

    def stage(self, k: Tensor, v: Tensor, left: int | None = None) -> Staged:
        """What `append` would make of the cache, which stays as it is until `commit`: a call that fails adds nothing."""
        self._check(k, v, left)
        first, needed = self._seen - self.kept, 0 if left is None else max(0, self._seen - left)
        if first > needed:
            raise ValueError(
                f"left must be at most {self._seen - first}, the keys that the cache still holds of the {self._seen} it has "
                f"seen, got {left}: what a smaller window or a crop left out does not come back"
            )
        begin = self._begin if left is None else max(self._begin, self._end - left)
        k_room, v_room, begin, end = self._rooms(k, v, begin)
        after = end + k.shape[2]
        # columns behind the end belong to nobody
        k_room[:, :, end:after] = k
        v_room[:, :, end:after] = v
        return Staged(k_room, v_room, begin, after, self._seen + k.shape[2])

    def commit(self, staged: Staged) -> None:
        self._k, self._v, self._begin, self._end, self._seen = staged

    def crop(self, length: int) -> None:
        """Go back to the first `length` keys seen, for instance when guessed tokens were refused.

        With a window, keys that the next row would see may be forgotten already: `append` says so.
        """
        check_whole("length", length)
        first = self._seen - self.kept
        if not first <= length <= self._seen:
            raise ValueError(f"length must lie between {first} and {self._seen}, which the cache still holds, got {length}")
        self._end -= self._seen - length
        self._seen = length

    def reorder(self, rows: Tensor) -> None:
        """Sequence b of the batch becomes what sequence rows[b] was; for beam search. rows: int64 [B], read on the host."""
        check_tensor("rows", rows, "[B]")
        check_dtype("rows", rows, (torch.int32, torch.int64))
        if self._k is None or self._v is None:
            return
        batch = self._k.shape[0]
        if rows.shape[0] != batch:
            raise ValueError(f"rows must be [{batch}], one for each sequence of the batch, got shape {tuple(rows.shape)}")
        check_device("rows", rows, "the cache", self._k.device)
        if batch and not (int(rows.min()) >= 0 and int(rows.max()) < batch):
            raise ValueError(f"rows must name sequences 0 to {batch - 1} of the batch, got {rows.tolist()}")
        self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)

    def _check(self, k: Tensor, v: Tensor, left: int | None) -> None:
        for name, x in (("k", k), ("v", v)):
            check_tensor(name, x, "[B, Hkv, S, D]")
            check_dtype(name, x, FLOATS)
        if v.shape[:3] != k.shape[:3]:
            shape = tuple(v.shape)
            raise ValueError(f"v must have the batch, heads and length of k, {tuple(k.shape[:3])}, got shape {shape}")
        if v.dtype != k.dtype:
            raise TypeError(f"v must have the dtype of k, {k.dtype}, got {v.dtype}")
        check_device("v", v, "k", k.device)
        check_whole("left", left, least=0, optional=True)
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a KVCache keeps no gradients: generate under torch.no_grad() or torch.inference_mode()")
        if self._k is not None and self._v is not None:
            self._check_fits(self._k, k, self._v, v)

    @staticmethod
    def _check_fits(old_k: Tensor, k: Tensor, old_v: Tensor, v: Tensor) -> None:
        if old_k.shape[:2] != k.shape[:2]:
            held, came = tuple(old_k.shape[:2]), tuple(k.shape[:2])
            raise ValueError(
                f"k must have the batch and heads the cache holds, {held}, got {came}: use one cache per layer and per batch"
            )
        for name, old, x in (("k", old_k, k), ("v", old_v, v)):
            if x.shape[3] != old.shape[3]:
                raise ValueError(f"{name} must have the head dimension the cache holds, {old.shape[3]}, got {x.shape[3]}")
            if x.dtype != old.dtype:
                raise TypeError(f"{name} must have the dtype the cache holds, {old.dtype}, got {x.dtype}")
            check_device(name, x, "the cache", old.device)
            if old.is_inference() and not torch.is_inference_mode_enabled():
                raise RuntimeError(f"{name} must be appended under torch.inference_mode(), as what the cache holds was")

    def _rooms(self, k: Tensor, v: Tensor, begin: int) -> tuple[Tensor, Tensor, int, int]:
        """Rooms with columns for the new keys, and where the kept ones lie: the rooms there are, or ones twice as large."""
        kept = self._end - begin
        wanted = kept + k.shape[2]
        if self._k is not None and self._v is not None and self._end + k.shape[2] <= self._k.shape[2]:
            return self._k, self._v, begin, self._end
        size = self.capacity if self._k is None else self._k.shape[2]
        # moving up pays when half of the room becomes free; otherwise it would soon be done again
        while size < wanted if self._k is None else size < 2 * wanted:
            size *= 2
        rooms = []
        for x, old in ((k, self._k), (v, self._v)):
            room = x.new_zeros(*x.shape[:2], size, x.shape[3])
            if old is not None:
                room[:, :, :kept] = old[:, :, begin : self._end]
            rooms.append(room)
        return rooms[0], rooms[1], 0, kept
