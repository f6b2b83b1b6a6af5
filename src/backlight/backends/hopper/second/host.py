"""Second derivatives on the host: which kernels run, and the arguments of the main one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backlight.backends.hopper.arguments import Packing
from backlight.backends.hopper.backward.dq_convert import convert_dq
from backlight.backends.hopper.backward.launch import numbers
from backlight.backends.hopper.compat import LATE_ADDRESSES, OWN_REGISTERS
from backlight.backends.hopper.config import second_config
from backlight.backends.hopper.launch import Launch, readable
from backlight.backends.hopper.primitives import WM
from backlight.backends.hopper.second.arguments import Units, Variant
from backlight.backends.hopper.second.kernel import _second_kernel
from backlight.backends.hopper.second.prepass import Given, Rows, Values, prepass
from backlight.backends.replaying.program import replayed
from backlight.call import Call
from backlight.spec import LOG2E

Moving = tuple[Tensor | None, Tensor | None, Tensor | None]


def second(
    call: Call,
    tangents: dict[str, Tensor],
    results: tuple[Any, ...],
    incoming: tuple[Any, ...],
    needs: frozenset[str],
    backward: Callable[..., dict[str, Tensor]],
) -> dict[str, Tensor]:
    """The gradients named in `needs`: dq, dk, dv by the inputs and dtq, dtk, dtv by their tangents.

    Gradients at y and lse go through an ordinary `backward`, whose results are added: all of it is linear in what came in. So
    do those at ty and tlse for what is by tangents.
    """
    y, lse, _, ty, tlse, _ = results
    dy, dlse, dty, dtlse = incoming

    def first_order(at_y: Tensor | None, at_lse: Tensor | None, wanted: frozenset[str]) -> dict[str, Tensor]:
        if not wanted or (at_y is None and at_lse is None):
            return {}
        return backward(call, y, lse, None, torch.zeros_like(y) if at_y is None else at_y, at_lse, wanted)

    primal = needs.intersection(call.gradients)
    found = first_order(dy, dlse, primal)
    of_tangents = first_order(dty, dtlse, frozenset(f"d{name}" for name in tangents if f"dt{name}" in needs))
    found |= {f"dt{gradient[1:]}": x for gradient, x in of_tangents.items()}
    if primal and (dty is not None or dtlse is not None) and y.numel() and call.k.shape[2]:
        tq, tk, tv = map(tangents.get, "qkv")
        given = (torch.zeros_like(y) if dty is None else dty.to(y.dtype), dtlse)
        moving = (torch.zeros_like(call.q) if tq is None and tk is None else tq, tk, tv)
        added = replayed(by_inputs, call, (y, lse, ty, tlse, *given, *moving), None)
        found |= {name: added[name] + found[name] if name in found else added[name] for name in primal}
    return found | {name: torch.zeros_like(_input(call, name)) for name in needs if name not in found}


def _input(call: Call, gradient: str) -> Tensor:
    """What a gradient is by, or is the tangent of."""
    return getattr(call, gradient[-1])


def by_inputs(
    call: Call, y: Tensor, lse: Tensor, ty: Tensor, tlse: Tensor, dty: Tensor, dtlse: Tensor | None, *moving: Tensor | None
) -> dict[str, Tensor]:
    """dq, dk and dv of a loss with gradients dty and dtlse at the tangents; a tangent of q or k is there.

    moving: tangents of q, k and v; behind them `replayed` puts a choice, of which there is none.
    """
    y, ty, dty = (readable(x) for x in (y, ty, dty))
    tq, tk, tv = tangents = tuple(None if t is None else readable(t) for t in moving[:3])
    launch = Launch(call, y, lse, ty, tlse, dty, dtlse, *tangents, choices="second")
    out = {"dq": torch.empty_like(call.q), "dk": torch.empty_like(call.k), "dv": torch.empty_like(call.v)}
    config = launch.once("second", lambda: second_config(call))
    values = Values(*(None if x is None else x.contiguous() for x in (lse, tlse, dtlse)))
    rows = prepass(launch, config, Given(y, ty, dty), values)
    _start(launch, rows, dty, (tq, tk, tv), out)
    convert_dq(launch, rows, rows.bd, out["dq"], turned=True)
    return out


def _start(launch: Launch, rows: Rows, dty: Tensor, moving: Moving, out: dict[str, Tensor]) -> None:
    call, config, block_n = launch.call, rows.config, 2 * WM.value
    tq, tk, tv = moving
    cu_q, cu_k, cu_tiles, n_segments = launch.packing(call.cu_seqlens_k, block_n)
    packing = Packing(cu_q, cu_k, cu_tiles, rows.first_tiles)

    def describe() -> dict[str, Any]:
        programs, integers = numbers(launch, rows, n_segments, block_n)
        by_rows, keys, values = (config.block_m, rows.bd), (WM.value, rows.bd), (WM.value, rows.bdv)
        tiles = [(call.q, by_rows), (tq, by_rows), (dty, (config.block_m, rows.bdv)), (call.k, keys), (call.v, values)]
        tiles += [(tk, keys), (tv, values), (out["dk"], keys), (out["dv"], values)]
        args = [
            *(None if x is None else launch.rows(x, *tile) for x, tile in tiles),
            rows.states,
            None if config.direct else rows.tiles_of_dq(rows.bd, config.block_m),
            rows.accumulator if config.direct else None,
            packing,
            rows.state,
            *integers,
            Units(call.scale, call.scale * LOG2E),
        ]
        variant = Variant(
            D=launch.d,
            DV=launch.dv,
            BD=rows.bd,
            BDV=rows.bdv,
            BM=config.block_m,
            BN=block_n,
            ST=config.stages,
            WARPS=4,
            **launch.flags,
            TQ=tq is not None,
            TK=tk is not None,
            TV=tv is not None,
            DIRECT=config.direct,
            AHEAD=config.ahead,
        )
        options = {"num_warps": 4, "maxnreg": 168, **LATE_ADDRESSES, **OWN_REGISTERS}
        return {"grid": (programs,), "args": args, "constants": {"V": variant}, **options}

    written = out["dk"], out["dv"], rows.state, rows.accumulator
    tensors = (call.q, tq, dty, call.k, call.v, tk, tv, *written, *packing, rows.state)
    launch.start(_second_kernel, tensors, describe)
