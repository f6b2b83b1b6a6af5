"""Backward through the tangent and double backward without tau (eq. 56-58), in the split form of `backward.py`: rows first,
then a kernel that owns rows (dq), one that owns keys (dk, dv), one that owns distances (dbias), one that owns pairs which are
shared (dpair_bias).

Gradients at tangents are those of an ordinary backward of the gradients that came in at ty and tlse. Every result repeats
bitwise, and nothing is of the size of the scores. Parity contract: tests/interpreted.
"""

from typing import Any

import torch
from torch import Tensor

from backlight.backends.triton.backward import backward
from backlight.backends.triton.dpair import dpair_of_columns, empty_columns, empty_tiles, way_of
from backlight.backends.triton.launch import Launch
from backlight.backends.triton.second_dbias import second_dbias_of
from backlight.backends.triton.second_dkdv import second_dkdv_of
from backlight.backends.triton.second_dpair import second_dpair_by_owner
from backlight.backends.triton.second_dq import second_dq_of
from backlight.backends.triton.second_rows import prepare_second_rows
from backlight.call import Call


def second(
    call: Call, tangents: dict[str, Tensor], results: tuple[Any, ...], incoming: tuple[Any, ...], needs: frozenset[str]
) -> dict[str, Tensor]:
    """The gradients named in `needs`: dq, dk, ... by the inputs and dtq, dtk, ... by their tangents.

    results: y, lse, u, ty, tlse, tu; incoming: gradients at y, lse, ty and tlse, None is zero.
    """
    y, lse, _, ty, tlse, _ = results
    dy, dlse, dty, dtlse = incoming

    def first_order(at_y: Tensor | None, at_lse: Tensor | None, wanted: frozenset[str]) -> dict[str, Tensor]:
        return backward(call, y, lse, None, torch.zeros_like(y) if at_y is None else at_y, at_lse, wanted) if wanted else {}

    primal = needs.intersection(call.gradients)
    by_tangents = frozenset(f"d{name}" for name in tangents if f"dt{name}" in needs)
    if dty is None and dtlse is None:
        still = {f"dt{gradient[1:]}": torch.zeros_like(tangents[gradient[1:]]) for gradient in by_tangents}
        return first_order(dy, dlse, primal) | still
    found = {f"dt{gradient[1:]}": x for gradient, x in first_order(dty, dtlse, by_tangents).items()}
    return found | _by_inputs(call, tangents, (y, lse, ty, tlse), incoming, primal) if primal else found


def _by_inputs(
    call: Call,
    tangents: dict[str, Tensor],
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    incoming: tuple[Tensor | None, ...],
    needs: frozenset[str],
) -> dict[str, Tensor]:
    launch = Launch(call)
    out: dict[str, Tensor] = {}
    given = prepare_second_rows(launch, tangents, results, incoming, out)
    way = way_of(call) if "dpair_bias" in needs else ""
    if "dq" in needs or way == "tiles":
        tiles = empty_tiles(launch) if way == "tiles" else None
        out["dq"] = second_dq_of(launch, given, tiles)
        out |= {} if tiles is None else {"dpair_bias": tiles}
    if needs & {"dk", "dv"} or way == "columns":
        columns = empty_columns(launch) if way == "columns" else None
        out["dk"], out["dv"] = second_dkdv_of(launch, given, columns)
        out |= {} if columns is None else {"dpair_bias": dpair_of_columns(launch, columns)}
    if way == "owner":
        out["dpair_bias"] = second_dpair_by_owner(launch, given)
    if "dbias" in needs:
        out["dbias"] = second_dbias_of(launch, given)
    return {name: out[name] for name in needs}
