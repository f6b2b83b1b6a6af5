"""What the constructors of masks are given, as tensors of whole numbers: one sentence for each way to get it wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from backlight.arguments import INTEGERS, check_device, check_whole, place, shown
from backlight.mask.mask import Mask, as_int32

Wholes = Tensor | Sequence[int] | Sequence[Sequence[int]] | int


def wholes(name: str, value: Any, device: torch.device | str | None = None) -> Tensor:
    """Whole numbers as a tensor of their own dtype: a tensor of them on its own device, others on `device`."""
    if not isinstance(value, Tensor):
        value = _tensor(name, value, device)
    if value.dtype not in INTEGERS:
        raise TypeError(f"{name} must be whole numbers, got {value.dtype}")
    return value


def _tensor(name: str, value: Any, device: torch.device | str | None) -> Tensor:
    where = place(device)
    try:
        made = torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be whole numbers or a tensor of them, got {shown(value)}") from None
    # a copy that blocks would wait for all that the device still has to do
    return (made if made.numel() else made.long()).to(where, non_blocking=True)


def of_entries(name: str, value: Any, length: int, device: torch.device | str | None) -> tuple[int | Tensor, torch.device]:
    """(number, device) of one number for all batch entries, which stays on the host and within [0, length], or of [B, 1, 1]."""
    if type(value) is int:
        return min(max(value, 0), length), place(device)
    found = wholes(name, value, device)
    if found.dim() > 1:
        raise ValueError(f"{name} must be a number or [B], got shape {tuple(found.shape)}")
    return found.reshape(-1, 1, 1), found.device


def per_key(name: str, value: Any, device: torch.device | str | None = None) -> Tensor:
    """[Sk], [B, Sk] or [B, H, Sk] as [B, H, Sk]."""
    found = wholes(name, value, device)
    if not 1 <= found.dim() <= 3:
        raise ValueError(f"{name} must be [Sk], [B, Sk] or [B, H, Sk], got shape {tuple(found.shape)}")
    return _with_heads(found)


def _with_heads(found: Tensor) -> Tensor:
    if found.dim() == 1:
        return found[None, None]
    return found[:, None] if found.dim() == 2 else found


def per_entry(name: str, value: Any, letter: str, device: torch.device | str | None = None) -> Tensor:
    """A list [n], or one for each batch entry [B, n], as [B, n]."""
    found = wholes(name, value, device)
    if not 1 <= found.dim() <= 2:
        raise ValueError(f"{name} must be [{letter}] or [B, {letter}], got shape {tuple(found.shape)}")
    return found[None] if found.dim() == 1 else found


def keys(length: int, device: torch.device, ahead: int = 0) -> Tensor:
    """0, 1, ... of all keys, int32 [1, 1, length], or positions that lie so far ahead of them."""
    return torch.arange(ahead, ahead + length, dtype=torch.int32, device=device)[None, None]


def check_length(length: Any) -> None:
    check_whole("length", length, least=0)


def same_device(name: str, tensor: Tensor, owner: str, other: Tensor) -> None:
    check_device(name, tensor, owner, other.device)


def one_run(first: Tensor, end: Tensor) -> Mask:
    """The mask of one interval for each key, from [B|1, H|1, Sk] each."""
    first, end = torch.broadcast_tensors(first, end)
    return Mask(as_int32(torch.stack([first, end], dim=2)))
