"""Putting parts of a softmax together (eq. 14, 43), exact whatever the order: o in the accumulator dtype, lse in fp64.

A running lse would be rounded once per part, and the error of lse is the error of every weight; fp64 costs 8 bytes a row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge_(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """(o, lse) of the keys seen so far becomes (o, lse) with the keys of one more part. o [B,H,S,Dv], lse [B,H,S] fp64."""
    total = torch.logaddexp(lse, lse_part.double())
    finite = _finite(total)
    o.mul_(torch.exp(lse - finite).to(o.dtype)[..., None])
    o.addcmul_(o_part.to(o.dtype), torch.exp(lse_part - finite).to(o.dtype)[..., None])
    lse.copy_(total)


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
