"""FlashAttention's functions as dense PyTorch, one sequence at a time: what the drop-ins are held against."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    chunk: int = 0,
    window: tuple[int | None, int | None] = (None, None),
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [Sq, Hq, Dv] and lse [Hq, Sq] of q [Sq, Hq, D], k and v [Sk, Hkv, D].

    window_size: -1 is an open side. window: the same with None for an open side, and sides that may be negative.
    """
    (sq, hq, d), (sk, hkv, _) = q.shape, k.shape
    k, v = (x.repeat_interleave(hq // hkv, dim=1) for x in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (d**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    at = torch.arange(sq)[:, None] + sk - sq
    j = torch.arange(sk)[None]
    if slopes is not None:
        s = s - slopes[:, None, None] * (at - j).abs()
    seen = torch.ones(sq, sk, dtype=torch.bool)
    left, right = window_size
    if causal:
        seen &= j <= at
    if left >= 0:
        seen &= j >= at - left
    if right >= 0:
        seen &= j <= at + right
    if window[0] is not None:
        seen &= j >= at - window[0]
    if window[1] is not None:
        seen &= j <= at + window[1]
    if chunk:
        seen &= torch.div(at, chunk, rounding_mode="floor") == j // chunk
    lse = s.masked_fill(~seen, -torch.inf).logsumexp(-1) if sk else s.new_full((hq, sq), -torch.inf)
    some = seen.any(dim=1)
    if sink is not None:
        lse, some = torch.logaddexp(lse, sink[:, None].expand(hq, sq)), torch.ones_like(some)
    p = torch.where(seen, (s - torch.where(some, lse, 0.0)[..., None]).masked_fill(~seen, -torch.inf).exp(), 0.0)
    return torch.einsum("hij,jhd->ihd", p, v), lse


def pieces(x: Tensor, lengths: Iterable[int], used: Iterable[int]) -> list[Tensor]:
    """The first `used` rows of each of the packed sequences."""
    return [part[:n] for part, n in zip(x.split(list(lengths)), used, strict=True)]


def same(got: Iterable[Tensor], want: Iterable[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
