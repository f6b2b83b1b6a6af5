"""Keys and values of the past, for generation.

With a window of `left` keys the cache forgets what no later row can see. Bottom-right alignment makes that exact: visible keys,
their number and their distances are the same whether or not older keys are still there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """What one layer has seen so far: keys [B, Hkv, S, D] and values [B, Hkv, S, Dv], one cache per layer.

    Room is taken in one piece and doubled when it runs out, so that nearly every step copies only what is new. All sequences of
    the batch advance together.

    Args:
        capacity: keys to make room for at the first `append`; grows when needed.
    """

    def __init__(self, capacity: int = 128):
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, got {capacity}")
        self.capacity = capacity
        self.clear()

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
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise RuntimeError("a KVCache keeps no gradients: generate under torch.no_grad() or torch.inference_mode()")
        if self._k is not None and self._k.shape[:2] != k.shape[:2]:
            raise ValueError(
                f"the cache holds batch and heads {tuple(self._k.shape[:2])}, got keys with {tuple(k.shape[:2])}; "
                "use one cache per layer and per batch"
            )
        if left is not None:
            self._begin = max(self._begin, self._end - left)
        self._make_room(k, v)
        assert self._k is not None
        assert self._v is not None
        end = self._end + k.shape[2]
        self._k[:, :, self._end : end] = k
        self._v[:, :, self._end : end] = v
        self._seen += end - self._end
        self._end = end
        return self._k[:, :, self._begin : end], self._v[:, :, self._begin : end]

    def crop(self, length: int) -> None:
        """Go back to the first `length` keys seen, for instance when guessed tokens were refused."""
        first = self._seen - self.kept
        if not first <= length <= self._seen:
            raise ValueError(f"length must lie between {first} and {self._seen}, which the cache still holds, got {length}")
        self._end -= self._seen - length
        self._seen = length

    def reorder(self, rows: Tensor) -> None:
        """Sequence b of the batch becomes what sequence rows[b] was; for beam search. rows: int64 [B]."""
        if self._k is not None and self._v is not None:
            self._k, self._v = self._k.index_select(0, rows), self._v.index_select(0, rows)

    def _make_room(self, k: Tensor, v: Tensor) -> None:
        """Columns for the new keys after `_end`: those there are, those the forgotten ones leave, or twice as many."""
        wanted = self.kept + k.shape[2]
        size = self.capacity if self._k is None else self._k.shape[2]
        if self._k is not None and self._end + k.shape[2] <= size:
            return
        # moving up pays when half of the room becomes free; otherwise it would soon be done again
        while size < wanted if self._k is None else size < 2 * wanted:
            size *= 2
        rooms = []
        for x, old in ((k, self._k), (v, self._v)):
            room = x.new_zeros(*x.shape[:2], size, x.shape[3])
            if old is not None:
                room[:, :, : self.kept] = old[:, :, self._begin : self._end]
            rooms.append(room)
        self._k, self._v = rooms
        self._begin, self._end = 0, self.kept
