"""A small language model over characters, with plain softmax, Lazy Attention or entmax in the middle.

Lazy Attention adds a learned bias by distance to the scores and replaces softmax by the elastic softmax relu(p + tau / n);
entmax replaces it by alpha-entmax with a learned alpha. The models differ in nothing else: same widths, same rotary embedding,
same starting weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from backlight.nn import Attention, EntmaxAttention, KVCache, LazyAttention

KINDS = ("softmax", "lazy", "entmax")
DISTANCES = 64


def attention_of(kind: str, dim: int, heads: int) -> Attention:
    """All that the models differ in."""
    if kind == "lazy":
        return LazyAttention(dim, heads, distances=DISTANCES)
    return EntmaxAttention(dim, heads) if kind == "entmax" else Attention(dim, heads)


class Block(nn.Module):
    """x + attention, then x + two-layer perceptron, both behind a norm."""

    def __init__(self, dim: int, attention: Attention):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.attention = attention
        self.mlp_norm = nn.RMSNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        x = x + self.attention(self.norm(x), cache=cache)
        return x + self.mlp(self.mlp_norm(x))


class CharacterModel(nn.Module):
    """Tokens [B, S] -> logits [B, S, vocabulary] for the character that follows each."""

    def __init__(self, kind: str, vocabulary: int, dim: int = 64, heads: int = 4, layers: int = 2):
        super().__init__()
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        self.embed = nn.Embedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, attention_of(kind, dim, heads)) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.read = nn.Linear(dim, vocabulary, bias=False)
        # a fresh model guesses blindly: its logits start near zero
        nn.init.normal_(self.read.weight, std=0.1 * dim**-0.5)

    def forward(self, tokens: Tensor, caches: list[KVCache] | None = None) -> Tensor:
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i] if caches else None)
        return self.read(self.norm(x))

    def loss(self, passages: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per character, of passages [B, S + 1]."""
        return functional.cross_entropy(self(passages[:, :-1]).flatten(0, 1), passages[:, 1:].flatten())

    def lazy_layers(self) -> Iterator[LazyAttention]:
        return (layer for layer in self.modules() if isinstance(layer, LazyAttention))

    def entmax_layers(self) -> Iterator[EntmaxAttention]:
        return (layer for layer in self.modules() if isinstance(layer, EntmaxAttention))

    def few_parameters(self) -> list[nn.Parameter]:
        """Those of terms with one value, or a table, for each head."""
        lazy = [parameter for layer in self.lazy_layers() for parameter in (layer.bias, layer.tau)]
        return lazy + [layer.sparsity for layer in self.entmax_layers() if layer.sparsity is not None]

    @torch.no_grad()
    def continue_text(self, tokens: Tensor, count: int, generator: torch.Generator, temperature: float = 0.7) -> Tensor:
        """`count` characters after tokens [S], drawn one by one with a cache."""
        caches = [KVCache(len(tokens) + count) for _ in self.blocks]
        made, step = [], tokens[None]
        for _ in range(count):
            logits = self(step, caches)[0, -1]
            weights = (logits / temperature).softmax(-1).cpu()
            step = torch.multinomial(weights, 1, generator=generator).to(tokens.device)[None]
            made.append(step[0])
        return torch.cat(made)
