"""The noise floor: what rounding every summand once would do to a value, taken before the summands cancel.

A yardstick is one random draw of rounding errors. Where few numbers are behind a value (the last keys of a causal problem, a
sink's gradient) the ratio of two such draws says nothing, so each value also gets an expectation: `eps` times the root sum of
squares of its summands. The same floor covers fp32 and fp64 kernels, which differ in the order of their sums; there a weight
also moves by the accumulator's eps times the size of its logit and of lse.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from backlight.call import Call
from backlight.reference import GRADIENTS, STAGES, Oracle
from backlight.reference.entmax import exponent, slope, slopes
from backlight.reference.trace import Stage


def slope_of(p: Tensor, entmax: Tensor | None) -> Tensor:
    """What ds has before the difference."""
    return p if entmax is None else slope(p, entmax)


def _stages(**stages: Callable[..., Tensor]) -> dict[str, Stage]:
    return {name: Stage.of(compute, name) for name, compute in stages.items()}


def _weight(gate: Tensor | None) -> Tensor | float:
    return 1.0 if gate is None else torch.sigmoid(gate)


def _delta_squares(do: Tensor, o: Tensor, u: Tensor, entmax: Tensor | None) -> Tensor:
    """A rounded o, with entmax a rounded u, enters delta once per column."""
    return (do**2 * (o if entmax is None else u) ** 2).sum(dim=-1)


def _dentmax_squares(p, p_sink, dp, dlse, entmax, moved):
    """Both summands of each key: their difference is small beside them; moved: by how many eps a weight may."""
    if entmax is None:
        return dp.new_zeros(())
    e = exponent(entmax)
    w, total = slopes(p, p_sink, entmax)
    eta = (e - torch.xlogy(p, p).sum(dim=-1) - torch.xlogy(p_sink, p_sink)) / total
    of_keys = ((p * e - torch.xlogy(p, p)) ** 2 + (w * eta[:, None]) ** 2) * (moved * dp) ** 2
    of_lse = 0 if dlse is None else (dlse * (e + eta.abs())) ** 2
    return e**2 * (of_keys.sum(dim=-1) + of_lse).sum()


def _dbias_squares(ds, bias, column):
    if bias is None:
        return ds.new_zeros(0)
    inside = (column >= 0) & (column < bias.numel())
    return ds.new_zeros(bias.numel()).index_add(0, column[inside], ds[inside] ** 2)


def _dpair_bias_squares(ds, pair_bias):
    return STAGES["dpair_bias"].compute(ds**2, pair_bias)


def wobble(ratio: float, q: Tensor, k: Tensor, scale: float, lse: Tensor, entmax: Tensor | None = None) -> Tensor:
    """By how many eps a weight may move, given the numbers behind its logit and its lse; `ratio` = accumulator eps / eps."""
    behind = scale * (q**2 @ (k**2).mT).sqrt() + lse.masked_fill(torch.isinf(lse), 0).abs()[:, None]
    if entmax is not None:
        # of a number near 1, raised to e
        behind = behind + exponent(entmax)
    return 1 + ratio * behind


def _squares(ratio: float) -> dict[str, Stage]:
    """Stages whose values are sums of squared summands; `ratio` = accumulator eps / eps.

    `ds` carries the size of its two summands; the row-coherent error of delta reaches dq as a vector, hence delta * (p k).
    """

    def ds(p, m, dp, delta, q, k, scale, lse, entmax):
        return slope_of(p, entmax) * wobble(ratio, q, k, scale, lse, entmax) * ((m * dp).abs() + delta.abs()[:, None])

    def weights(a, p, q, k, scale, lse, entmax):
        return a**2 + (slope_of(p, entmax) * (wobble(ratio, q, k, scale, lse, entmax) - 1)) ** 2

    def y(a, p, q, k, scale, lse, v, gate, entmax):
        return (weights(a, p, q, k, scale, lse, entmax) @ v**2) * _weight(gate) ** 2

    def dv(a, p, q, k, scale, lse, do, entmax):
        return weights(a, p, q, k, scale, lse, entmax).mT @ do**2

    def dgate(a, p, q, k, scale, lse, v, dy, gate, entmax):
        return (weights(a, p, q, k, scale, lse, entmax) @ v**2) * (dy * _weight(gate) * (1 - _weight(gate))) ** 2

    def dq(dx, k, scale, p, do, o, u, entmax):
        return scale**2 * (dx**2 @ k**2 + _delta_squares(do, o, u, entmax)[:, None] * (slope_of(p, entmax) @ k) ** 2)

    def dk(dx, q, scale, p, do, o, u, entmax):
        return scale**2 * ((dx**2 + slope_of(p, entmax) ** 2 * _delta_squares(do, o, u, entmax)[:, None]).mT @ q**2)

    def dsink(p_sink, delta, do, o, lse, u, entmax):
        sized = 1 + ratio * lse.masked_fill(torch.isinf(lse), 0).abs()
        return (slope_of(p_sink, entmax) ** 2 * (_delta_squares(do, o, u, entmax) + (delta * sized) ** 2)).sum()

    def dentmax(p, p_sink, dp, dlse, entmax, q, k, scale, lse):
        return _dentmax_squares(p, p_sink, dp, dlse, entmax, wobble(ratio, q, k, scale, lse, entmax))

    return STAGES | _stages(
        y=y,
        dgate=dgate,
        dv=dv,
        ds=ds,
        dbias=_dbias_squares,
        dsink=dsink,
        dpair_bias=_dpair_bias_squares,
        dentmax=dentmax,
        dtau=lambda m, do, v, n: ((m @ v**2 * do**2).sum(-1) / n.clamp(min=1).squeeze(-1) ** 2).sum(),
        dq=dq,
        dk=dk,
    )


def noise(call: Call, dy: Tensor | None, dlse: Tensor | None, lse: Tensor) -> dict[str, Tensor]:
    """Per value, the root sum of squares of its summands: multiply by eps. For lse: the size of the numbers behind it."""
    names = ("y",) if dy is None and dlse is None else ("y", *GRADIENTS)
    eps = torch.finfo(call.q.dtype).eps
    ratio = torch.finfo(call.accumulator_dtype).eps / eps
    sums = Oracle(stages=_squares(ratio))(call, dy, dlse, keep=names)
    behind = lse.abs() + torch.tensor(call.k.shape[2] + 2.0, dtype=lse.dtype).log()
    if call.entmax is not None:
        # a threshold is told from a sum of e-th powers, and lse is e times it
        behind = behind + exponent(call.entmax.to(lse))[None, :, None]
    return {name: value.sqrt() for name, value in sums.items()} | {"lse": behind * ratio}
