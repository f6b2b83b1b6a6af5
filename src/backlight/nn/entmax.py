"""`EntmaxAttention`: weights that are exactly zero for keys of low score, and heads that learn how sparse to be."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from backlight.arguments import ALPHAS, check_flag, check_number
from backlight.nn.attention import Attention

# a learned alpha stays off the ends of its range, where a sigmoid has no gradient left
MARGIN = 1e-3


class EntmaxAttention(Attention):
    """`Attention` whose weights are alpha-entmax of the scores, with an alpha for each head.

    At alpha = 1 entmax is the softmax, at 2 it is sparsemax; between them low scores get a weight of exactly zero, the more the
    larger alpha is. A learned alpha is lowest + (2 - lowest) * sigmoid(`sparsity`), lowest = 1.05, with a parameter `sparsity`
    [heads] that stays fp32 when the module is cast to fp16 or bf16. One that is not learned is compiled into the kernels, which
    are quicker for it at 1.25, 1.5 and 2.

    Args:
        dim, heads, sizes (kv_heads, head_dim): as in `Attention`, and so is everything that is not named here.
        alpha: where every head starts, or stays.
        learned: alpha is a parameter.
        temperature: scores of a head are multiplied by exp(`sharpness`), a parameter [heads] that starts at 0.
    """

    fp32_parameters = ("sink", "sparsity", "sharpness")

    def __init__(
        self,
        dim: int,
        heads: int,
        *sizes: int | None,
        alpha: float = 1.5,
        learned: bool = True,
        temperature: bool = False,
        **options: Any,
    ):
        check_number("alpha", alpha)
        if not ALPHAS[0] <= alpha <= ALPHAS[1]:
            raise ValueError(f"alpha must be from {ALPHAS[0]} to {ALPHAS[1]:g}, got {alpha}")
        for name, flag in (("learned", learned), ("temperature", temperature)):
            check_flag(name, flag)
        self._initial_alpha = float(alpha)
        super().__init__(dim, heads, *sizes, **options)
        self.spec = self.spec.replace(entmax=True)
        factory = {name: options.get(name) for name in ("device", "dtype")}
        self.sparsity = self._term((self.heads,), **factory) if learned else None
        self.sharpness = self._term((self.heads,), **factory) if temperature else None
        self._reset_terms()

    def reset_parameters(self) -> None:
        """As `Attention.reset_parameters`; alpha at its starting value, scores as they are."""
        super().reset_parameters()
        if hasattr(self, "sparsity"):
            self._reset_terms()

    def _reset_terms(self) -> None:
        low, high = ALPHAS
        share = min(max((self._initial_alpha - low) / (high - low), MARGIN), 1 - MARGIN)
        if self.sparsity is not None:
            nn.init.constant_(self.sparsity, math.log(share / (1 - share)))
        if self.sharpness is not None:
            nn.init.zeros_(self.sharpness)

    @property
    def alpha(self) -> Tensor | float:
        """[heads], or the number that was given."""
        if self.sparsity is None:
            return self._initial_alpha
        low, high = ALPHAS
        return low + (high - low) * torch.sigmoid(self.sparsity)

    def project(self, x: Tensor, **places: Any) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().project(x, **places)
        if self.sharpness is None:
            return q, k, v
        sharpness = self.sharpness.exp().to(q.dtype)
        return q * (sharpness[:, None] if q.dim() == 3 else sharpness[:, None, None]), k, v

    def terms(self) -> dict[str, Any]:
        return super().terms() | {"entmax": self.alpha}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self._initial_alpha}, learned={self.sparsity is not None}"
