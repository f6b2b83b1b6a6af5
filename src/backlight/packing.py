"""Borders of packed sequences whose lengths the host knows: calls with them never wait for a device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from backlight.arguments import INTEGERS, check_whole, place, shown
from backlight.call import know_borders


def cu_seqlens(lengths: Sequence[int] | Tensor, device: torch.device | str | None = None) -> Tensor:
    """cu_seqlens of `attention_varlen` for sequences of these lengths: int32 [Z + 1], on `device`.

        cu_seqlens([2, 3, 4])  ->  [0, 2, 5, 9]

    Borders that were made anywhere else are read and checked once, for which the host waits until the device has come that
    far. The values of these are known, so nobody waits, neither here nor in a call.

    lengths: of each sequence, 0 or more; a tensor of them must be on the CPU.
    device: of q; None is torch's default device.
    """
    counts = _counts(lengths)
    values = tuple(accumulate(counts, initial=0))
    if values[-1] >= 2**31:
        raise ValueError(f"lengths must be less than 2 ** 31 together, got {values[-1]}")
    # a tensor of inference mode has no version, by which a change in place would be noticed
    with torch.inference_mode(False):
        made = torch.tensor(values, dtype=torch.int32, device="cpu")
        # a copy that blocks would wait for all that the device still has to do
        found = made.to(place(device), non_blocking=True)
    if not torch.compiler.is_compiling():
        know_borders(found, values)
    return found


def _counts(lengths: Any) -> list[int]:
    if isinstance(lengths, Tensor):
        if lengths.dim() != 1 or lengths.dtype not in INTEGERS:
            raise ValueError(f"lengths must be whole numbers [Z], got {lengths.dtype} of shape {tuple(lengths.shape)}")
        if lengths.device.type != "cpu":
            raise ValueError(f"lengths must be on the CPU, where they are known without waiting, got {lengths.device}")
        counts = lengths.tolist()
    elif isinstance(lengths, Sequence) and not isinstance(lengths, str):
        counts = list(lengths)
    else:
        raise TypeError(f"lengths must be a sequence of whole numbers or a tensor of them, got {shown(lengths)}")
    for count in counts:
        check_whole("each of lengths", count, least=0)
    return counts
