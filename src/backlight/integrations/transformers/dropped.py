"""Attention dropout, which no kernel of ours has: such a call runs on torch's own attention, counted, and a warning says so.

Where torch's has no word for what a model asks (soft-capped scores, sinks), the weights are formed here. Either way they are
dropped as "eager" and "sdpa" drop them: masks, biases and geometry keep their meaning, and nothing is left out silently.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.integrations.transformers.refusing import NAME

fallbacks: Counter[str] = Counter()
"""Why calls of eager code ran on torch's own attention instead of our kernels, and how many did."""

REASON = "attention dropout is not 0"


def count() -> None:
    """One more call with dropout; graphs run without us, and are not counted."""
    if torch.compiler.is_compiling():
        return
    fallbacks[REASON] += 1
    instead = "runs on torch's own attention, which forms the weights; set it to 0 in the config for our kernels"
    warnings.warn(f"{NAME} has no kernel with attention dropout: training with it {instead}", stacklevel=4)


@dataclass(frozen=True, slots=True)
class Dropped:
    """Attention whose weights are dropped with probability `dropout`."""

    dropout: float
    scale: float | None
    softcap: float | None
    sink: Tensor | None

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], seen: Tensor | None, bias: Tensor | None, causal: bool) -> Tensor:
        """[B, Hq, Sq, Dv].

        seen: bool, broadcast to [B, Hq, Sq, Sk], or None for all. bias: added to the scores, broadcast alike, or None.
        causal: `seen` and `bias` are None, and rows, as many as keys, see up to themselves.
        """
        q, k, v = qkv
        if self.softcap is not None or self.sink is not None:
            if causal:
                seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
            return self._dense(q, k, v, seen, bias)
        mask = seen if bias is None else _hidden(bias, seen, -torch.inf).to(q.dtype)
        grouped = q.shape[1] != k.shape[1]
        return torch.nn.functional.scaled_dot_product_attention(
            *qkv, attn_mask=mask, dropout_p=self.dropout, is_causal=causal, scale=self.scale, enable_gqa=grouped
        )

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, bias: Tensor | None) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        s = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        least = torch.finfo(torch.float32).min
        if bias is not None:
            above = bias > -torch.inf
            s, seen = s + bias.clamp(min=least), above if seen is None else seen & above
        # a row that sees nothing has weights too, until they are taken away again
        s = _hidden(s, seen, least)
        if self.sink is not None:
            s = torch.cat([s, self.sink.float().reshape(1, -1, 1, 1).expand(*s.shape[:3], 1)], dim=-1)
        p = _hidden(torch.softmax(s, dim=-1)[..., : k.shape[2]], seen, 0.0)
        return torch.nn.functional.dropout(p, self.dropout).to(v.dtype) @ v


def _hidden(x: Tensor, seen: Tensor | None, value: float) -> Tensor:
    return x if seen is None else torch.where(seen, x, value)
