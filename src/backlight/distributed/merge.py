"""Putting parts of a softmax together (eq. 14, 43), exact whatever the order: o in the accumulator dtype, lse in fp64.

A running lse would be rounded once per part, and the error of lse is the error of every weight; fp64 costs 8 bytes a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dual:
    """o [B,H,S,Dv] and lse [B,H,S] of some keys, and their tangents."""

    o: Tensor
    lse: Tensor
    to: Tensor
    tlse: Tensor


def merge_(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """(o, lse) of the keys seen so far becomes (o, lse) with the keys of one more part. o [B,H,S,Dv], lse [B,H,S] fp64."""
    total = torch.logaddexp(lse, lse_part.double())
    finite = _finite(total)
    o.mul_(torch.exp(lse - finite).to(o.dtype)[..., None])
    o.addcmul_(o_part.to(o.dtype), torch.exp(lse_part - finite).to(o.dtype)[..., None])
    lse.copy_(total)


def merge_tangent_(whole: Dual, part: Dual) -> None:
    """`merge_` of values and tangents (eq. 54). Both lse and tlse of the whole are fp64; o and to may have no columns."""
    total = torch.logaddexp(whole.lse, part.lse.double())
    finite = _finite(total)
    of_whole, of_part = torch.exp(whole.lse - finite), torch.exp(part.lse - finite)
    # how far the means of the two are from the mean of all
    apart = whole.tlse - part.tlse
    moved_whole, moved_part = of_whole * of_part * apart, of_part * of_whole * -apart
    dtype = whole.o.dtype
    weights = [x.to(dtype)[..., None] for x in (of_whole, of_part, moved_whole, moved_part)]
    whole.to.mul_(weights[0]).addcmul_(whole.o, weights[2])
    whole.to.addcmul_(part.to.to(dtype), weights[1]).addcmul_(part.o.to(dtype), weights[3])
    whole.o.mul_(weights[0]).addcmul_(part.o.to(dtype), weights[1])
    whole.tlse.mul_(of_whole).addcmul_(part.tlse.double(), of_part)
    whole.lse.copy_(total)


def add_sink_tangent(whole: Dual, sink: Tensor, tsink: Tensor | None) -> Dual:
    """With the sink as one more part, without a value, whose tangent is its own."""
    kappa = sink.to(whole.lse.dtype)[None, :, None]
    moved = torch.zeros_like(kappa) if tsink is None else tsink.to(whole.lse.dtype)[None, :, None]
    lse, share = add_sink(whole.lse, sink)
    assert share is not None
    # an infinite sink is all there is, or nothing
    rest = torch.exp(kappa - lse).masked_fill(lse == kappa, 1).masked_fill(lse == -torch.inf, 0)
    tlse = share * whole.tlse + rest * moved
    factor, mean = (x.to(whole.o.dtype)[..., None] for x in (share, share * rest * (whole.tlse - moved)))
    return Dual(whole.o * factor, lse, whole.to * factor + whole.o * mean, tlse)


def merge_lse_(lse: Tensor, lse_part: Tensor) -> None:
    lse.copy_(torch.logaddexp(lse, lse_part.double()))


def add_sink(lse: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """lse with the sink in the denominator and the factor of o, [B,H,S]; the sink is one more part, without a value."""
    if sink is None:
        return lse, None
    total = torch.logaddexp(lse, sink.to(lse.dtype)[None, :, None])
    return total, torch.exp(lse - _finite(total))


def _finite(lse: Tensor) -> Tensor:
    """0 in the place of -inf: weights of rows that see nothing become exp(-inf) = 0 instead of NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
