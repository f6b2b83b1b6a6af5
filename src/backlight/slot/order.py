"""Which kernel SDPA asks first: on Hopper torch prefers cuDNN, and the slot would stay empty."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.attention import SDPBackend

from backlight._private.torch import kernel_order, set_kernel_order, which_kernel

FLASH = int(SDPBackend.FLASH_ATTENTION.value)


def flash_first() -> Callable[[], None]:
    """Makes SDPA ask for the flash kernel first; returns what takes that back."""
    if kernel_order is None or set_kernel_order is None or which_kernel is None:
        enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        return partial(torch.backends.cuda.enable_cudnn_sdp, enabled)
    # the first question of a process puts cuDNN first, and would do it later if it had not been asked
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
    which_kernel(x, x, x)
    before = list(kernel_order())
    ours = [FLASH, *[kernel for kernel in before if kernel != FLASH]]
    set_kernel_order(ours)
    return partial(_put_back, before, ours)


def _put_back(before: list[int], ours: list[int]) -> None:
    # somebody else may have chosen since
    if list(kernel_order()) == ours:
        set_kernel_order(before)
