"""ALiBi: a bias that falls with the distance, as the table by distance that it is. No tensor of rows x keys is formed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from backlight.arguments import FLOATS, check_dtype, check_flag, check_tensor, check_whole


def alibi(
    slopes: Tensor | int, sq: int, sk: int | None = None, *, causal: bool = False, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Keywords of `attention` that add -slope * |i + Sk - Sq - j| to the score of row i and key j.

        y = backlight.attention(q, k, v, causal=True, **backlight.alibi(slopes, q.shape[2], k.shape[2], causal=True))

    Args:
        slopes: [Hq], one per query head, or the number of heads, for the slopes of the paper. A tensor gets its gradient.
        sq, sk: rows and keys, the most there are where sequences are packed; sk = sq if it is not given.
        causal: the call is causal: distances of keys that no row sees are left out of the table.
        device: of slopes that are made here; those of a tensor stay on its own.

    Returns:
        bias [Hq, Sk or Sq + Sk] in fp32 (fp64 for fp64 slopes), and bias_origin.
    """
    check_whole("sq", sq, least=0)
    check_whole("sk", sk, least=0, optional=True)
    check_flag("causal", causal)
    if isinstance(slopes, int):
        slopes = alibi_slopes(slopes, device)
    check_tensor("slopes", slopes, "[Hq]")
    check_dtype("slopes", slopes, FLOATS)
    # distances i' - j run from 1 - sq to sk - 1
    behind, ahead = max(sq if sk is None else sk, 1), 0 if causal else max(sq, 1)
    # bf16 holds no whole number between 256 and 258, fp16 none between 2048 and 2050
    dtype = torch.float64 if slopes.dtype == torch.float64 else torch.float32
    distance = torch.arange(-ahead, behind, device=slopes.device).abs().to(dtype)
    return {"bias": -slopes.to(dtype)[:, None] * distance, "bias_origin": ahead}


def alibi_slopes(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The slopes of the paper, fp32 [heads]: 2 ** (-8 / n), its square, its cube, ... for n heads, a power of two; for another
    number those of the power of two below it, then every second one of twice that power."""
    check_whole("heads", heads, least=1)
    power = 2 ** math.floor(math.log2(heads))

    def series(n: int) -> list[float]:
        return [2.0 ** (-8 * (i + 1) / n) for i in range(n)]

    return torch.tensor([*series(power), *series(2 * power)[::2][: heads - power]], device=device)
