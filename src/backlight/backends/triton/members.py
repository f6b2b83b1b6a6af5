"""Heads that share a pair bias, on Hopper GPUs: Gluon kernels that keep the bias in shared memory and go from head to head.

One of them makes dq and dpair_bias in one sweep, the other dk and dv (`backends/hopper/pair`). Sums have a fixed order.
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
    """Whether these kernels take the call."""
    call = launch.call
    if call.pair_bias is None or call.q.dtype == torch.float32 or not on_hopper(call.q.device):
        return False
    return takes(call) and all(x.stride(-1) == 1 and describable(x) for x in (call.q, call.k, call.v, rows.do))


def walk(launch: Launch, rows: RowState, needs: frozenset[str], out: dict[str, Tensor]) -> None:
    """Fills dq, dk, dv and dpair_bias of `out` as far as they are needed."""
    # with it comes Gluon
    from backlight.backends.hopper.pair.host import Walk

    def start(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any]) -> None:
        launch.start(kernel, grid, *args, **named)

    kernels = Walk(start, launch.call, rows.do, rows.minus_lse2, rows.delta)
    if needs & {"dq", "dpair_bias"}:
        out["dq"], dpair_bias = kernels.dq_and_dpair("dpair_bias" in needs)
        if dpair_bias is not None:
            out["dpair_bias"] = dpair_bias
    if needs & {"dk", "dv"}:
        out["dk"], out["dv"] = kernels.dk_and_dv()
