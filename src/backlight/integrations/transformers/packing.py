"""Rows and keys with sequence numbers, packed for `backlight.attention_varlen` and unpacked again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary


@dataclass(frozen=True, slots=True)
class Packing:
    """Which rows and keys of a padded batch are real, and where their sequences begin.

    rows, keys:                 int64, places in the flattened [B * Sq] and [B * Sk].
    cu_seqlens_q, cu_seqlens_k: int64 [Z + 1].
    gaps:                       hidden keys between visible ones of a sequence: distances are then not what they were.
    """

    rows: Tensor
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    gaps: bool

    @classmethod
    def of(cls, row_numbers: Tensor, key_numbers: Tensor) -> Packing:
        """From sequence numbers [B, Sq] and [B, Sk]: 0 = hidden, else growing along each row of the batch."""
        span = 1 + max(int(numbers.max()) if numbers.numel() else 0 for numbers in (row_numbers, key_numbers))
        rows, cu_seqlens_q, _ = _sequences(row_numbers, span)
        keys, cu_seqlens_k, sequence = _sequences(key_numbers, span)
        gaps = (keys.diff() != 1) & (sequence.diff() == 0)
        return cls(rows, keys, cu_seqlens_q, cu_seqlens_k, gaps=bool(gaps.any()))

    def pack_rows(self, x: Tensor) -> Tensor:
        """[B, H, Sq, D] -> [Tq, H, D]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.rows)

    def pack_keys(self, x: Tensor) -> Tensor:
        """[B, H, Sk, D] -> [Tk, H, D]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.keys)

    def unpack_rows(self, y: Tensor, batch: int, sq: int) -> Tensor:
        """[Tq, H, D] -> [B, Sq, H, D], hidden rows 0."""
        return y.new_zeros(batch * sq, *y.shape[1:]).index_copy(0, self.rows, y).unflatten(0, (batch, sq))


def _sequences(numbers: Tensor, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat places of the visible entries, borders [B * span + 1] of their sequences, and the sequence of each."""
    batch = torch.arange(numbers.shape[0], device=numbers.device)[:, None] * span
    places = numbers.flatten().nonzero()[:, 0]
    sequence = (batch + numbers).flatten()[places]
    counts = torch.bincount(sequence, minlength=numbers.shape[0] * span)
    return places, pad(counts.cumsum(0), (1, 0)), sequence


# the layers of a model share one mask, and each reading of its values waits for the device
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packing_of(mask: Tensor, sk: int, aligned: bool) -> Packing:
    """The packing of a mask [B, 1, 1, Sk + Sq] of sequence numbers; `aligned` rows are hidden where their own key is."""
    known = _known.setdefault(mask, {})
    if aligned not in known:
        keys, rows = mask[:, 0, 0, :sk], mask[:, 0, 0, sk:]
        known[aligned] = Packing.of(keys if aligned else rows, keys)
    return known[aligned]
