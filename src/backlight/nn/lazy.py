"""`LazyAttention`: a learned bias by distance and the elastic softmax, both per head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from backlight.arguments import check_flag, check_number, check_whole
from backlight.nn.attention import Attention

LARGEST = torch.finfo(torch.float32).max


class LazyAttention(Attention):
    """`Attention` whose scores carry a learned bias by distance and whose weights are relu(p + tau / n).

    `bias` [heads, distances] is added to the score of keys 0, 1, 2, ... steps back; keys further back get none and stay
    visible. `tau` [heads] is divided by n, the number of keys the row can see, and added to every softmax weight. **Negative
    tau prunes**: keys with p <= -tau / n, that is at most |tau| times the uniform weight, drop out, and the row spends less
    than its full mass. Positive tau adds uniform attention; 0 is plain softmax. Both stay fp32 when the module is cast to fp16
    or bf16.

    tau starts at -0.5: a fresh head keeps more than half of its keys and no row is dead. At -1, a common choice, near-uniform
    weights sit on the kink of the relu, and the first row of a causal layer (one key, p = 1) is dead with zero gradient.

    Args:
        dim, heads, sizes (kv_heads, head_dim): as in `Attention`, and so is everything that is not named here.
        distances: columns of the bias table.
        tau: its starting value for every head.
        two_sided: for layers that are not causal: the table also covers keys ahead, up to distances - 1 of them.
    """

    fp32_parameters = ("sink", "bias", "tau")

    def __init__(
        self,
        dim: int,
        heads: int,
        *sizes: int | None,
        distances: int = 512,
        tau: float = -0.5,
        two_sided: bool = False,
        **options: Any,
    ):
        check_whole("distances", distances, least=1)
        check_number("tau", tau)
        if not abs(tau) <= LARGEST:
            raise ValueError(f"tau must be a number that fp32 holds, got {tau}")
        check_flag("two_sided", two_sided)
        self._initial_tau = float(tau)
        super().__init__(dim, heads, *sizes, **options)
        columns = 2 * distances - 1 if two_sided else distances
        self.spec = self.spec.replace(bias=True, bias_origin=columns - distances, tau=True)
        factory = {name: options.get(name) for name in ("device", "dtype")}
        self.bias = self._term((self.heads, columns), **factory)
        self.tau = self._term((self.heads,), **factory)
        self._reset_terms()

    def reset_parameters(self) -> None:
        """As `Attention.reset_parameters`; bias 0, tau at its starting value."""
        super().reset_parameters()
        if hasattr(self, "tau"):
            self._reset_terms()

    def _reset_terms(self) -> None:
        nn.init.zeros_(self.bias)
        nn.init.constant_(self.tau, self._initial_tau)

    def terms(self) -> dict[str, Tensor]:
        return super().terms() | {"bias": self.bias, "tau": self.tau}

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, distances={self.bias.shape[1] - self.spec.bias_origin}"
