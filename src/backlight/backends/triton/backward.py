"""Backward, split form of eq. 33: rows first (delta), then a kernel that owns rows (dq), one that owns keys (dk, dv), one that
owns distances (dbias). No sum crosses programs without a fixed order, so every result repeats bitwise."""

from torch import Tensor

from backlight.backends.triton.dbias import dbias_of
from backlight.backends.triton.delta import prepare_rows
from backlight.backends.triton.dkdv import dkdv_of
from backlight.backends.triton.dq import dq_of
from backlight.backends.triton.launch import Launch
from backlight.call import Call


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    launch = Launch(call)
    out: dict[str, Tensor] = {}
    rows = prepare_rows(launch, y, lse, u, dy, dlse, out)
    if "dq" in needs:
        out["dq"] = dq_of(launch, rows)
    if needs & {"dk", "dv"}:
        out["dk"], out["dv"] = dkdv_of(launch, rows)
    if "dbias" in needs:
        out["dbias"] = dbias_of(launch, rows)
    return {name: out[name] for name in needs}
