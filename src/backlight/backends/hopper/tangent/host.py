"""The tangent on the host: the kernel's arguments, its launch."""

from typing import Any

import torch
from torch import Tensor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.compat import LATE_ADDRESSES, OWN_REGISTERS
from backlight.backends.hopper.config import tangent_config
from backlight.backends.hopper.forward.arguments import Terms
from backlight.backends.hopper.forward.host import Schedule
from backlight.backends.hopper.launch import Launch, readable
from backlight.backends.hopper.tangent.arguments import Variant
from backlight.backends.hopper.tangent.kernel import _tangent_kernel
from backlight.call import Call

NO_TERMS = Terms(None, None, None, None, None)


def variant_of(launch: Launch, schedule: Schedule, given: tuple[bool, bool, bool], known: bool) -> Variant:
    config, flags = schedule.config, launch.flags
    even = not schedule.uneven and launch.sk % config.block_n == 0
    return Variant(
        launch.d,
        launch.bd,
        launch.bdv,
        config.block_n,
        config.consumers,
        config.stages,
        **flags,
        MASKED=flags["HAS_LEFT"] or flags["HAS_RIGHT"] or not even,
        PINGPONG=config.pingpong,
        AHEAD=config.ahead,
        LAZY=config.lazy and launch.call.q.dtype == torch.bfloat16,
        TQ=given[0],
        TK=given[1],
        TV=given[2],
        KNOWN=known,
    )


def tangent(
    call: Call,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    y: Tensor | None = None,
    lse: Tensor | None = None,
    choice: None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, lse, ty, tlse) of a call that `why_not` accepts; y and lse may be known; there is no choice (for `replayed`)."""
    tq, tk, tv, y = (None if t is None else readable(t) for t in (tq, tk, tv, y))
    launch = Launch(call, tq, tk, tv, y, lse, choices="tangent")
    known = y is not None
    ty = launch.empty_rows(launch.dv, call.q.dtype)
    tlse = torch.empty(call.q.shape[:3], dtype=torch.float32, device=call.q.device)
    if y is None or lse is None:
        y, lse = launch.empty_rows(launch.dv, call.q.dtype), torch.empty_like(tlse)
        if y.numel() == 0 or launch.sk == 0:
            return y.zero_(), lse.fill_(-torch.inf), ty.zero_(), tlse.zero_()
    elif y.numel() == 0 or launch.sk == 0:
        return y, lse, ty.zero_(), tlse.zero_()
    schedule = launch.once("tangent", lambda: Schedule.of(launch, tangent_config(call)))
    cu_q, cu_k, first_tiles, n_segments = launch.packing(call.cu_seqlens_q, schedule.config.block_m)
    counter = launch.counter(schedule.dynamic)

    def describe() -> dict[str, Any]:
        config = schedule.config
        rows, keys, values = (64, launch.bd), (config.block_n, launch.bd), (config.block_n, launch.bdv)
        tiles = [(call.q, rows), (call.k, keys), (call.v, values), (tq, rows), (tk, keys), (tv, values)]
        args = [
            *(None if x is None else launch.rows(x, *tile) for x, tile in tiles),
            *(launch.rows(x, 64, launch.bdv) for x in (y, ty)),
            lse,
            tlse,
            *schedule.arguments(launch, Packing(cu_q, cu_k, first_tiles), n_segments, counter),
            NO_TERMS,
        ]
        constants = {"V": variant_of(launch, schedule, (tq is not None, tk is not None, tv is not None), known)}
        maxnreg = 168 if config.consumers == 2 else 128
        options = {"num_warps": 4, "maxnreg": maxnreg, **LATE_ADDRESSES, **OWN_REGISTERS}
        return {"grid": (schedule.programs,), "args": args, "constants": constants, **options}

    tensors = (call.q, call.k, call.v, tq, tk, tv, y, ty, lse, tlse, cu_q, cu_k, first_tiles, counter)
    launch.start(_tangent_kernel, tensors, describe)
    return y, lse, ty, tlse
