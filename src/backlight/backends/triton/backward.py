"""Backward, split form of eq. 33: rows first (delta), then a kernel that owns rows (dq), one that owns keys (dk, dv), one that
owns distances (dbias), one that owns pairs which others share (dpair_bias). Short rows have one for all; dq and dpair_bias of a
pair bias that many heads share come from one on Hopper GPUs (`members.py`). No sum crosses programs without a fixed order, so
every result repeats bitwise."""

from torch import Tensor

from backlight.backends.triton.dbias import dbias_of
from backlight.backends.triton.delta import RowState, prepare_rows
from backlight.backends.triton.dkdv import dkdv_of
from backlight.backends.triton.dpair import dpair_by_owner, dpair_of_columns, empty_columns, empty_tiles, way_of
from backlight.backends.triton.dq import dq_of
from backlight.backends.triton.fused import fits, fused_of
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.live import sweep
from backlight.backends.triton.members import dq_and_dpair_of, walks
from backlight.call import Call


def backward(
    call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    launch = Launch(call)
    out: dict[str, Tensor] = {}
    way = way_of(call) if "dpair_bias" in needs else ""
    # one kernel for all of a short head knows no low half, and who has it depends on how many heads there are
    in_one = not (call.exact_delta and u is not None) and not call.batch_invariant
    if way in ("", "owner") and {"dq", "dk"} <= needs and in_one and fits(launch):
        out, dpair_bias = fused_of(launch, y, lse, dy, dlse, way == "owner")
        if dpair_bias is not None:
            out["dpair_bias"] = dpair_bias
        return {name: out[name] for name in needs}
    rows = prepare_rows(launch, y, lse, u, dy, dlse, out)
    if call.entmax is not None and (launch.skips or "dentmax" in needs):
        _, dentmax = sweep(launch, lse, dlse, rows.do if "dentmax" in needs else None, wants_slopes=False)
        out |= {} if dentmax is None else {"dentmax": dentmax}
    left = needs
    if way in ("", "owner") and needs & {"dq", "dpair_bias"} and not call.batch_invariant and walks(launch, rows):
        out |= dq_and_dpair_of(launch, rows, way == "owner")
        left, way = needs - {"dq", "dpair_bias"}, ""
    split(launch, rows, left, way, out)
    if way == "owner":
        out["dpair_bias"] = dpair_by_owner(launch, rows)
    if "dbias" in needs:
        out["dbias"] = dbias_of(launch, rows)
    return {name: out[name] for name in needs}


def split(launch: Launch, rows: RowState, needs: frozenset[str], way: str, out: dict[str, Tensor]) -> None:
    """dq, then dk and dv, and dpair_bias where one of their kernels has it."""
    if "dq" in needs or way == "tiles":
        tiles = empty_tiles(launch) if way == "tiles" else None
        out["dq"] = dq_of(launch, rows, tiles)
        if tiles is not None:
            out["dpair_bias"] = tiles
    if needs & {"dk", "dv"} or way == "columns":
        columns = empty_columns(launch) if way == "columns" else None
        out["dk"], out["dv"] = dkdv_of(launch, rows, columns)
        if columns is not None:
            out["dpair_bias"] = dpair_of_columns(launch, columns)
