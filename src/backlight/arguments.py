"""Checks of plain arguments, for whatever stands around the call: layers, drop-ins, integrations, meshes.

Every sentence names the argument, what was expected and what came. Tensors of the call itself are checked in `binding`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BORDERS = (torch.int32, torch.int64)
# of an entmax: below, the gradient by alpha has e ** 2 = (alpha - 1) ** -2 before a difference
ALPHAS = (1.05, 2.0)
# uint16 to uint64 of torch have no arithmetic
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_whole(name: str, value: Any, least: int | None = None, optional: bool = False) -> None:
    """An int, not a bool; at least `least`; None where `optional`."""
    if optional and value is None:
        return
    wanted = "an int" + (f" >= {least}" if least is not None else "") + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
    if least is not None and value < least:
        raise ValueError(f"{name} must be {wanted}, got {value}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must be {wanted} of 64 bits, got {value}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {shown(value)}")


def check_number(name: str, value: Any, above: float | None = None, least: float | None = None, optional: bool = False) -> None:
    """A finite int or float, not a bool; greater than `above`, at least `least`; None where `optional`."""
    if optional and value is None:
        return
    bound = f" > {above:g}" if above is not None else f" >= {least:g}" if least is not None else ""
    wanted = f"a finite number{bound}" + (" or None" if optional else "")
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name} must be {wanted}, got {shown(value)}")
    inside = (above is None or value > above) and (least is None or value >= least)
    if not (inside and -math.inf < value < math.inf):
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_alpha(name: str, value: Any) -> None:
    """A number that `entmax` takes."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, a tensor [Hq] or None, got {shown(value)}")
    if value != 1 and not ALPHAS[0] <= value <= ALPHAS[1]:
        raise ValueError(f"{name} must be 1 (softmax) or from {ALPHAS[0]} to {ALPHAS[1]:g}, got {value}")


def check_tensor(name: str, value: Any, layout: str | None = None) -> None:
    """A tensor; with a layout such as "[B, S, H, D]", of that many dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {shown(value)}")
    if layout is not None and value.dim() != layout.count(",") + 1:
        raise ValueError(f"{name} must be {layout}, got shape {tuple(value.shape)}")


def check_dtype(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in dtypes:
        names = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        raise TypeError(f"{name} must be {', '.join(names[:-1])} or {names[-1]}, got {tensor.dtype}")


def check_device(name: str, tensor: Tensor, owner: str, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{name} must be on the device of {owner}, {device}, got {tensor.device}")


def place(device: torch.device | str | None) -> torch.device:
    """The device by its name; None is torch's default."""
    try:
        return torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch.device, its name or None, got {shown(device)}") from error


def check_borders(name: str, value: Any, device: torch.device | None = None) -> None:
    """Borders of packed sequences [Z + 1]; their values are checked where they are read."""
    check_tensor(name, value)
    check_dtype(name, value, BORDERS)
    if value.dim() != 1 or value.shape[0] == 0:
        raise ValueError(f"{name} must be one-dimensional with at least one entry, got shape {tuple(value.shape)}")
    if device is not None:
        check_device(name, value, "the packed rows", device)


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")


def shown(value: Any) -> str:
    """A value short enough for a sentence."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value).partition("\n")[0]
    return text if len(text) <= 60 else f"{text[:60]}... ({type(value).__name__})"
