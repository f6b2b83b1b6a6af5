"""dq and dpair_bias of heads that share a pair bias, on Hopper GPUs: a Gluon kernel that keeps the bias in shared memory and
goes from head to head makes both in one sweep (`backends/hopper/pair`). Sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from backlight.backends.hopper import CAPABILITY, missing
from backlight.backends.hopper.pair.config import takes
from backlight.backends.triton.delta import RowState
from backlight.backends.triton.launch import Launch, describable


@cache
def on_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not missing() and torch.cuda.get_device_capability(device) == CAPABILITY


def walks(launch: Launch, rows: RowState) -> bool:
    """Whether the kernel takes the call."""
    call = launch.call
    if call.pair_bias is None or call.entmax is not None or call.q.dtype == torch.float32 or not on_hopper(call.q.device):
        return False
    return takes(call) and all(x.stride(-1) == 1 and describable(x) for x in (call.q, call.k, call.v, rows.do))


def dq_and_dpair_of(launch: Launch, rows: RowState, want_dpair: bool) -> dict[str, Tensor]:
    """dq, and dpair_bias where it is wanted."""
    # with it comes Gluon
    from backlight.backends.hopper.pair.host import Walk

    def start(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any]) -> None:
        launch.start(kernel, grid, *args, **named)

    dq, dpair_bias = Walk(start, launch.call, rows.do, rows.minus_lse2, rows.delta).dq_and_dpair(want_dpair)
    return {"dq": dq} if dpair_bias is None else {"dq": dq, "dpair_bias": dpair_bias}
