"""Rows and keys with sequence numbers, packed for `backlight.attention_varlen` and unpacked again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.weak import WeakIdKeyDictionary

from backlight.integrations.transformers.given import INTERVALS, Window
from backlight.integrations.transformers.masks import PADDING
from backlight.integrations.transformers.tracing import blind


@dataclass(frozen=True, slots=True)
class Packing:
    """Which rows and keys of a padded batch are real, and where their sequences begin.

    rows, keys:                 int64, places in the flattened [B * Sq] and [B * Sk].
    cu_seqlens_q, cu_seqlens_k: int64 [Z + 1].
    gaps:                       hidden keys between visible ones of a sequence: distances are then not what they were.
    room:                       hidden keys behind the last row: a cache that is not full. Distances count from before them.

    In a graph (`in_graph`) the last two are tensors, and nothing is left out: hidden rows are a sequence without keys, so that
    they come out as 0, and hidden keys one without rows.
    """

    rows: Tensor
    keys: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    gaps: bool | Tensor
    room: int | Tensor

    @classmethod
    def of(cls, row_numbers: Tensor, key_numbers: Tensor) -> Packing:
        """From sequence numbers [B, Sq] and [B, Sk]: 0 = hidden, else growing along each row of the batch."""
        span = 1 + max(int(numbers.max()) if numbers.numel() else 0 for numbers in (row_numbers, key_numbers))
        rows, cu_seqlens_q, _ = _sequences(row_numbers, span)
        keys, cu_seqlens_k, sequence = _sequences(key_numbers, span)
        gaps = (keys.diff() != 1) & (sequence.diff() == 0)
        room = int(room_of(row_numbers, key_numbers))
        return cls(rows, keys, cu_seqlens_q, cu_seqlens_k, gaps=bool(gaps.any()), room=room)

    @classmethod
    def in_graph(cls, row_numbers: Tensor, key_numbers: Tensor, span: int) -> Packing:
        """The same in shapes that no value decides; numbers are smaller than `span`."""
        # a slot for each number, 0 for hidden rows, and one more for hidden keys
        rows, cu_seqlens_q, _ = _slots(row_numbers.long(), span + 1)
        hidden = key_numbers == 0
        keys, cu_seqlens_k, sequence = _slots(key_numbers.long().masked_fill(hidden, span), span + 1)
        visible = sequence % (span + 1) != span
        gaps = (keys.diff() != 1) & (sequence.diff() == 0) & visible[1:]
        return cls(rows, keys, cu_seqlens_q, cu_seqlens_k, gaps=gaps.any(), room=room_of(row_numbers, key_numbers))

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


def _slots(slots: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The order that brings the entries of each slot together, borders [B * width + 1], and the slot of each."""
    batch = torch.arange(slots.shape[0], device=slots.device)[:, None] * width
    flat = (batch + slots).flatten()
    order = torch.argsort(flat, stable=True)
    counts = flat.new_zeros(slots.shape[0] * width).index_add(0, flat, torch.ones_like(flat))
    return order, pad(counts.cumsum(0), (1, 0)), flat[order]


def room_of(row_numbers: Tensor, key_numbers: Tensor) -> Tensor:
    """Sk - Sq less the key at which row 0 sits: the last row sits at the last key, in every sequence with rows."""
    last_row, last_key = _last(row_numbers), _last(key_numbers)
    sq, sk = row_numbers.shape[1], key_numbers.shape[1]
    return (sk - sq - (last_key - last_row)).masked_fill(last_row < 0, 0).amax() if len(last_row) else last_row.sum()


def _last(numbers: Tensor) -> Tensor:
    """The last place of each row that is not hidden, -1 where all are."""
    places = torch.arange(numbers.shape[1], device=numbers.device)
    return pad(places.expand(numbers.shape).masked_fill(numbers == 0, -1), (1, 0), value=-1).amax(dim=1)


# (version, packings) by mask: the layers of a model share one, and each reading of its values waits for the device
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def packing_of(mask: Tensor, sk: int, aligned: bool) -> Packing:
    """The packing of a mask [B, 1, 1, Sk + Sq] of sequence numbers; `aligned` rows are hidden where their own key is."""
    keys, rows = mask[:, 0, 0, :sk], mask[:, 0, 0, sk:]
    if blind(mask):
        # as many sequences as keys, at most
        return Packing.in_graph(keys if aligned else rows, keys, span=2 if mask.dtype == PADDING else sk + 1)
    # `attention_mask` makes one for each step: those of inference mode, which know no version, are taken to stay as they are
    version = None if mask.is_inference() else mask._version
    found = _known.get(mask)
    if found is None or found[0] != version:
        found = _known[mask] = (version, {})
    known = found[1]
    if aligned not in known:
        known[aligned] = Packing.of(keys if aligned else rows, keys)
    return known[aligned]


def intervals_of(mask: Tensor, sk: int, causal: bool, window: Window | None) -> Tensor:
    """Row intervals [B, 1, 2, Sk] of a mask [B, 1, 1, Sk + Sq] that is padding, with the geometry on top; nothing is packed, so
    that every row and key stays where it is. No value is looked at. Hidden rows at the ends see nothing, as packed ones do."""
    keys, rows = mask[:, 0, 0, :sk], mask[:, 0, 0, sk:]
    sq = rows.shape[1]
    if not causal and sq == sk:
        rows = keys
    # where the first row sits: a cache may have room behind the last one
    start = sk - sq - (room_of(rows, keys) if causal else 0)
    left, right = window or (None, None)
    right = 0 if causal else right
    places = torch.arange(sk, device=mask.device) - start
    first = torch.zeros_like(places) if right is None else places - right
    end = torch.full_like(places, sq) if left is None else places + left + 1
    first_row, end_row = sq - 1 - _last(rows.flip(1)), _last(rows) + 1
    first, end = torch.maximum(first, first_row[:, None]), torch.minimum(end, end_row[:, None])
    seen = (keys != 0) & (first < end)
    return torch.stack([first * seen, end * seen], dim=1)[:, None].to(INTERVALS)
