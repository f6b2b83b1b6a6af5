"""Which kernels a backward runs: pre-pass, one of two main kernels, one of two ways to dq, one of two to dbias."""

from __future__ import annotations

import torch
from torch import Tensor

from backlight.backends.hopper.backward.alive import look
from backlight.backends.hopper.backward.dbias import Diagonals
from backlight.backends.hopper.backward.dbias_ordered import ordered_dbias
from backlight.backends.hopper.backward.dq_convert import convert_dq
from backlight.backends.hopper.backward.dq_rows import split_dq
from backlight.backends.hopper.backward.launch import main_dk_dv, narrow_dk_dv
from backlight.backends.hopper.backward.order import can_be_ordered
from backlight.backends.hopper.backward.prepass import prepass
from backlight.backends.hopper.config import backward_config
from backlight.backends.hopper.launch import Launch
from backlight.call import Call


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients of a call that `why_not` accepts."""
    launch = Launch(call, y, lse, u, dy, dlse, choices=needs)
    dq, dk, dv = torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)
    out = {"dq": dq, "dk": dk, "dv": dv}
    if launch.sq == 0 or launch.sk == 0 or launch.batch == 0:
        return {name: _without_pairs(call, name, lse, dlse) for name in needs}
    config = launch.once("backward", lambda: backward_config(call))
    ordered = call.deterministic and config.ordered and can_be_ordered(call, config.wide)
    split = config.split or (call.deterministic and not ordered) or "dq" not in needs
    if call.entmax is not None:
        launch.alive = look(launch, lse)
    rows = prepass(launch, config, y, lse, u, dy, dlse, not split, out, needs)
    # diagonals are added in the order in which CTAs come, and need the fragments of 128 keys
    fused = "dbias" in needs and not (call.deterministic or config.wide)
    diagonals = Diagonals.of(launch) if fused else None
    if config.narrow and not split and not ordered:
        narrow_dk_dv(launch, rows, dk, dv)
    elif needs & {"dk", "dv"} or fused or not split:
        main_dk_dv(launch, rows, dk, dv, diagonals, split, ordered and not split)
    if "dq" in needs:
        split_dq(launch, rows, dq) if split else convert_dq(launch, rows, launch.bd, dq)
    if "dbias" in needs:
        out["dbias"] = ordered_dbias(launch, rows) if diagonals is None else diagonals.dbias()
    return {name: out[name] for name in needs}


def _without_pairs(call: Call, name: str, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """A gradient where no row meets a key: 0, except that a sink alone is the whole lse (math.md section 2)."""
    given = getattr(call, name[1:])
    if name == "dsink" and dlse is not None:
        return dlse.float().sum(dim=(0, 2)).masked_fill(given == -torch.inf, 0).to(given.dtype)
    return torch.zeros_like(given)
