"""Where packed sequences lie: the geometry behind cu_seqlens, seqused and caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Runs:
    """Sequence z owns rows first_z .. first_z + count_z - 1 of `total`, in this order; rows between runs belong to nobody."""

    first: Tensor
    count: Tensor
    total: int

    @staticmethod
    def of_borders(cu_seqlens: Tensor, total: int, used: Tensor | None = None) -> Runs:
        """used [Z]: how many rows of each sequence, from its first, count."""
        count = cu_seqlens.diff() if used is None else used.to(cu_seqlens.dtype)
        return Runs(cu_seqlens[:-1], count, total)

    @staticmethod
    def of_batch(batch: int, length: int, device: torch.device, first: Tensor | int = 0, end: Tensor | None = None) -> Runs:
        """Rows first_b .. end_b - 1 of each of `batch` entries of `length` rows, one entry after another."""
        origin = torch.arange(batch, device=device) * length
        count = (torch.full_like(origin, length) if end is None else end) - first
        return Runs(origin + first, count, batch * length)

    def places(self) -> tuple[Tensor, Tensor]:
        """Of each row the sequence at or before it, and its place there: at least `count` where it belongs to nobody."""
        row = torch.arange(self.total, dtype=self.first.dtype, device=self.first.device)
        z = torch.searchsorted(self.first.contiguous(), row, right=True) - 1
        return z, row - self.first[z]

    def longest(self) -> int:
        """Rows of the longest run; `total` where reading it would break a graph."""
        if torch.compiler.is_compiling() or self.count.device.type == "meta" or self.count.shape[0] == 0:
            return self.total
        return min(self.total, int(self.count.max()))

    def padded(self, length: int) -> tuple[Tensor, Tensor]:
        """[Z, length] rows of each run, its last row in the last column; and which of them are its own."""
        column = torch.arange(length, device=self.first.device)
        place = column - length + self.count[:, None]
        return (self.first[:, None] + place).clamp(min=0, max=max(self.total - 1, 0)), place >= 0


def borders(q: Runs, k: Runs) -> tuple[Tensor, Tensor]:
    """cu_seqlens of both sides, in which the rows and keys of nobody are sequences too: rows that have no keys, keys that have
    no rows. Nothing is moved, nothing waits for the device, and what lies there is not read."""
    end_q, end_k = q.first + q.count, k.first + k.count
    zero_q, zero_k = q.first.new_zeros(1), k.first.new_zeros(1)
    before_k = torch.cat([zero_k, end_k[:-1]])
    # for each sequence: rows of nobody before it, keys of nobody before it, itself
    rows = torch.stack([q.first, q.first, end_q], dim=1).flatten()
    keys = torch.stack([before_k, k.first, end_k], dim=1).flatten()
    cu_q = torch.cat([zero_q, rows, zero_q + q.total, zero_q + q.total])
    cu_k = torch.cat([zero_k, keys, end_k[-1:], zero_k + k.total])
    return cu_q.to(torch.int32), cu_k.to(torch.int32)
