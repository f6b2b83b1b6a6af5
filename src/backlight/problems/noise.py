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
from backlight.reference.trace import Stage


def _stages(**stages: Callable[..., Tensor]) -> dict[str, Stage]:
    return {name: Stage.of(compute, name) for name, compute in stages.items()}


def _weight(gate: Tensor | None) -> Tensor | float:
    return 1.0 if gate is None else torch.sigmoid(gate)


def _delta_squares(do: Tensor, o: Tensor) -> Tensor:
    """A rounded o enters delta once per column."""
    return (do**2 * o**2).sum(dim=-1)


def _dbias_squares(ds, bias, column):
    if bias is None:
        return ds.new_zeros(0)
    inside = (column >= 0) & (column < bias.numel())
    return ds.new_zeros(bias.numel()).index_add(0, column[inside], ds[inside] ** 2)


def _dpair_bias_squares(ds, pair_bias):
    return STAGES["dpair_bias"].compute(ds**2, pair_bias)


def wobble(ratio: float, q: Tensor, k: Tensor, scale: float, lse: Tensor) -> Tensor:
    """By how many eps a weight may move, given the numbers behind its logit and its lse; `ratio` = accumulator eps / eps."""
    behind = scale * (q**2 @ (k**2).mT).sqrt() + lse.masked_fill(torch.isinf(lse), 0).abs()[:, None]
    return 1 + ratio * behind


def _squares(ratio: float) -> dict[str, Stage]:
    """Stages whose values are sums of squared summands; `ratio` = accumulator eps / eps.

    `ds` carries the size of its two summands; the row-coherent error of delta reaches dq as a vector, hence delta * (p k).
    """

    def ds(p, m, dp, delta, q, k, scale, lse):
        return p * wobble(ratio, q, k, scale, lse) * ((m * dp).abs() + delta.abs()[:, None])

    def weights(a, p, q, k, scale, lse):
        return a**2 + (p * (wobble(ratio, q, k, scale, lse) - 1)) ** 2

    def y(a, p, q, k, scale, lse, v, gate):
        return (weights(a, p, q, k, scale, lse) @ v**2) * _weight(gate) ** 2

    def dv(a, p, q, k, scale, lse, do):
        return weights(a, p, q, k, scale, lse).mT @ do**2

    def dgate(a, p, q, k, scale, lse, v, dy, gate):
        return (weights(a, p, q, k, scale, lse) @ v**2) * (dy * _weight(gate) * (1 - _weight(gate))) ** 2

    def dq(dx, k, scale, p, do, o):
        return scale**2 * (dx**2 @ k**2 + _delta_squares(do, o)[:, None] * (p @ k) ** 2)

    def dk(dx, q, scale, p, do, o):
        return scale**2 * ((dx**2 + p**2 * _delta_squares(do, o)[:, None]).mT @ q**2)

    def dsink(p_sink, delta, do, o, lse):
        sized = 1 + ratio * lse.masked_fill(torch.isinf(lse), 0).abs()
        return (p_sink**2 * (_delta_squares(do, o) + (delta * sized) ** 2)).sum()

    return STAGES | _stages(
        y=y,
        dgate=dgate,
        dv=dv,
        ds=ds,
        dbias=_dbias_squares,
        dsink=dsink,
        dpair_bias=_dpair_bias_squares,
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
    return {name: value.sqrt() for name, value in sums.items()} | {"lse": behind * ratio}
