"""What both GPU backends prepare for a direction of a call beside its own tensors, once each: first tiles and borders of packed
sequences, sums over heads, outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backlight.backends.replaying.program import check_borders
from backlight.call import Call


class Preparing:
    """`small`: the module with the backend's small kernels."""

    small: Any

    def __init__(self, call: Call):
        self.call = call
        check_borders(call)
        self._first_tiles: dict[tuple[int, int], Tensor] = {}
        self._borders: dict[int, Tensor] = {}

    def start_small(self, kernel: Any, programs: int, args: Sequence[Any], which: str) -> None:
        """One launch of a small kernel; one that a call launches more than once says `which`."""
        raise NotImplementedError

    def tiles(self, length: int, cu_seqlens: Tensor | None, block: int) -> int:
        """Tiles of one head. Packed: an upper bound that needs no value of cu_seqlens; programs beyond the last tile return."""
        return -(-length // block) if cu_seqlens is None else length // block + cu_seqlens.shape[0] - 1

    def packing(self, cu_seqlens: Tensor | None, block: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """Borders of rows and of keys, first tiles of `block` along `cu_seqlens`, number of sequences."""
        if cu_seqlens is None:
            # what is compiled in never reads them
            return self.call.q, self.call.q, self.call.q, 0
        first = self.first_tiles(cu_seqlens, block)
        cu_q, cu_k = (self.borders(cu, block) for cu in (self.call.cu_seqlens_q, self.call.cu_seqlens_k))
        return cu_q, cu_k, first, cu_seqlens.shape[0] - 1

    def first_tiles(self, cu_seqlens: Tensor, block: int) -> Tensor:
        """Tiles of one head before each packed sequence, and in all: [Z + 1] int32."""
        key = (id(cu_seqlens), block)
        if key not in self._first_tiles:
            first = torch.empty(cu_seqlens.shape, dtype=torch.int32, device=cu_seqlens.device)
            borders = self._borders.get(id(cu_seqlens))
            if borders is None:
                borders = self._borders[id(cu_seqlens)] = torch.empty_like(first)
            side, x = ("keys", self.call.k) if cu_seqlens is self.call.cu_seqlens_k else ("rows", self.call.q)
            args = (cu_seqlens, first, borders, x.shape[2], cu_seqlens.shape[0] - 1, block)
            self.start_small(self.small._first_tiles_kernel, 1, args, f"{side} {block}")
            self._first_tiles[key] = first
        return self._first_tiles[key]

    def borders(self, cu_seqlens: Tensor | None, block: int) -> Tensor:
        """cu_seqlens as kernels follow them (`_first_tiles_kernel`); they come with the first tiles, of whatever block."""
        assert cu_seqlens is not None
        if id(cu_seqlens) not in self._borders:
            self.first_tiles(cu_seqlens, block)
        return self._borders[id(cu_seqlens)]

    def head_sums(self, parts: Tensor, dtype: torch.dtype, which: str) -> Tensor:
        """[Hq] sums of parts [B, Hq, tiles]."""
        batch, heads, tiles = parts.shape
        out = torch.empty(heads, dtype=dtype, device=parts.device)
        if heads:
            self.start_small(self.small._head_sums_kernel, heads, (parts, out, batch, heads, tiles), which)
        return out

    def empty_rows(self, width: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised [B,Hq,Sq,width] in the dimension order of q's strides."""
        q = self.call.q
        return torch.empty_like(q, dtype=dtype) if width == q.shape[-1] else q.new_empty(*q.shape[:3], width, dtype=dtype)
