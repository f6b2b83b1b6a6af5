"""AdaSplash's call, on top of `backlight.attention`: entmax attention."""

from __future__ import annotations

from torch import Tensor

import backlight
from backlight.arguments import check_alpha, check_flag, check_tensor, shown
from backlight.compat.lazy import attend_padded


def adasplash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alpha: float | Tensor = 1.5,
    is_causal: bool = True,
    varlen: Tensor | None = None,
    niter: int | None = None,
) -> Tensor:
    """alpha-entmax attention with scores q.k / sqrt(D).

    Args:
        q, k, v: [B, H, S, D]; grouped heads may be given as [B, Hkv, S, D] keys and values.
        alpha: a number from 1.05 to 2 (1: softmax), or [H], which is learned.
        is_causal: hide keys after the row's own position.
        varlen: [B] integer lengths of right-padded sequences. Padding is not read: rows behind a length are 0 and have zero
            gradients.
        niter: None or a number, not used: thresholds are found to the precision of the result.

    Returns:
        [B, H, S, Dv].
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, "[B, H, S, D]")
    check_flag("is_causal", is_causal)
    if niter is not None and (isinstance(niter, bool) or not isinstance(niter, int)):
        raise TypeError(f"niter must be an int or None, got {shown(niter)}")
    if isinstance(alpha, Tensor):
        check_tensor("alpha", alpha, "[H]")
    else:
        check_alpha("alpha", alpha)
    if varlen is None:
        return backlight.attention(q, k, v, causal=is_causal, entmax=alpha)
    return attend_padded(q, k, v, varlen, causal=is_causal, entmax=alpha)
