"""Second derivatives of alpha-entmax in the tiled backend: row sums, the sink's part and alpha's (eq. 111-113).

The mean that centres gradients at scores holds the tangent of w, which nobody saved: it is summed over the tiles first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.backends.tiled.entmax_moving import AtSink, MovingEntmax, Visit
from backlight.backends.tiled.primitives import Workspace, product


@dataclass(frozen=True, slots=True)
class Means:
    """Both row sums of eq. 112, [N, rows, 1]."""

    eta: Tensor
    delta: Tensor


@dataclass(frozen=True, slots=True)
class Values:
    """v and its tangent, [N, Dv, Sk], and the gradient at to, [N, rows, Dv]."""

    v_columns: Tensor
    tv_columns: Tensor | None
    dto: Tensor | None


def means(
    entmax: MovingEntmax,
    visits: Iterable[Visit],
    lse: Tensor,
    mu: Tensor,
    values: Values,
    known: Means,
    at_lse: tuple[Tensor, Tensor],
    workspace: Workspace,
) -> Means:
    """Of the started block; known: dot products with the mean of v by slopes; at_lse: the gradients dlse, dtlse."""
    slopes, moved, found = (torch.zeros_like(lse) for _ in range(3))
    for each in visits:
        part, here = each.part, slice(each.tile.j0, each.tile.j1)
        slopes[:, part] += each.w.sum(dim=-1, keepdim=True)
        tw = None if each.r is None else entmax.bend(each.u, each.r.sub_(mu[:, part]), part).mul_(each.w)
        if tw is not None:
            moved[:, part] += tw.sum(dim=-1, keepdim=True)
        if values.dto is None:
            continue
        dto = values.dto[:, part]
        if tw is not None:
            b = product(dto, values.v_columns[:, :, here], workspace.take("b", *each.u.shape)).sub_(known.eta[:, part])
            found[:, part] += b.mul_(tw).sum(dim=-1, keepdim=True)
        if values.tv_columns is not None:
            c = product(dto, values.tv_columns[:, :, here], workspace.take("b", *each.u.shape))
            found[:, part] += c.mul_(each.w).sum(dim=-1, keepdim=True)
    sink = entmax.sink(lse)
    if sink is not None:
        tw = sink.w * entmax.bend(sink.u, sink.r - mu, slice(None)) if entmax.moves else torch.zeros_like(sink.w)
        slopes, moved, found = slopes + sink.w, moved + tw, found - tw * known.eta
    slopes = slopes.masked_fill(slopes == 0, 1)
    dlse, dtlse = at_lse
    share = dtlse / slopes
    return Means(known.eta - share, known.delta + (found + share * moved - dlse) / slopes)


def at_sink(entmax: MovingEntmax, sink: AtSink, mu: Tensor, rows: Means) -> tuple[Tensor, Tensor]:
    """Gradients at the sink and at its tangent, of each row."""
    dr = -sink.w * rows.eta
    return dr * entmax.bend(sink.u, sink.r - mu, slice(None)) - sink.w * rows.delta, dr


class AlphaTwice:
    """Gradients by alpha and by its tangent of a block's rows, [N, rows, 1], summed in the tile loop (eq. 113)."""

    def __init__(self, entmax: MovingEntmax):
        self.entmax = entmax
        self.by_alpha, self.by_tangent = torch.zeros_like(entmax.e), torch.zeros_like(entmax.e)

    def add_(self, u: Tensor, centred: Tensor, part: slice, ds: Tensor | None, dr: Tensor) -> None:
        phi = self.entmax.by_alpha(u, part)
        self.by_tangent[:, part] += (dr * phi).sum(dim=-1, keepdim=True)
        if ds is not None:
            moved = self.entmax.by_alpha_moved(u, centred, part).mul_(dr)
            self.by_alpha[:, part] += (ds * phi).add_(moved).sum(dim=-1, keepdim=True)
