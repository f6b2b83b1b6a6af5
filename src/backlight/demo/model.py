"""One layer of Lazy Attention on a task that only distance can solve.

Lazy Attention adds a learned bias by distance to the scores and replaces softmax by the elastic softmax relu(p + tau / n).
The task: at every position, name the tokens that stood `LAGS` steps back. Tokens are random and the model has no position
embedding, so the bias table is the only way to know distance: each lag needs a head whose bias peaks there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import backlight

VOCABULARY = 16
LAGS = (1, 4, 9, 15)
TABLE = 24


class LazyCopier(nn.Module):
    """Tokens [B,S] -> logits [B,S,len(LAGS),VOCABULARY]."""

    def __init__(self, heads: int = 4, head_dim: int = 16):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        width = heads * head_dim
        self.embed = nn.Embedding(VOCABULARY, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.read = nn.Linear(width, len(LAGS) * VOCABULARY)
        self.bias = nn.Parameter(0.02 * torch.randn(heads, TABLE))
        self.tau = nn.Parameter(torch.full((heads,), -0.3))

    def project(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [B,H,S,D] as views of one projection."""
        batch, length = tokens.shape
        qkv = self.qkv(self.embed(tokens)).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return q, k, v

    def forward(self, tokens: Tensor) -> Tensor:
        q, k, v = self.project(tokens)
        y = backlight.attention(q, k, v, causal=True, bias=self.bias, tau=self.tau)
        return self.read(y.transpose(1, 2).flatten(2)).unflatten(-1, (len(LAGS), VOCABULARY))


def batch_of(size: int, length: int, generator: torch.Generator) -> Tensor:
    """Random tokens [size, length]."""
    return torch.randint(VOCABULARY, (size, length), generator=generator)


def targets_of(tokens: Tensor) -> Tensor:
    """The token each lag back [B, S - max lag, len(LAGS)], for the rows where every lag exists."""
    first = max(LAGS)
    return torch.stack([tokens[:, first - lag : tokens.shape[1] - lag] for lag in LAGS], dim=-1)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross-entropy over rows and lags; log(VOCABULARY) is blind guessing."""
    return functional.cross_entropy(logits[:, max(LAGS) :].flatten(0, 2), targets_of(tokens).flatten())
