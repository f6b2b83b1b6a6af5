"""The text of the training demo: Lewis Carroll, Alice's Adventures in Wonderland (1865), in the public domain."""

from __future__ import annotations

import bz2
from functools import cached_property
from importlib.resources import files

import torch
from torch import Tensor

# the end of the book is kept from training
HELD_OUT = 1 / 10


class Text:
    """A text as numbers, one per character."""

    def __init__(self, text: str):
        self.text = text
        self.characters = sorted(set(text))

    @classmethod
    def alice(cls) -> Text:
        return cls(bz2.decompress(files("backlight").joinpath("data", "alice.txt.bz2").read_bytes()).decode("ascii"))

    def __len__(self) -> int:
        return len(self.text)

    def encode(self, text: str) -> Tensor:
        """int64 [len(text)]."""
        number = {character: i for i, character in enumerate(self.characters)}
        return torch.tensor([number[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())

    @cached_property
    def tokens(self) -> Tensor:
        return self.encode(self.text)

    @property
    def training(self) -> Tensor:
        return self.tokens[: -int(HELD_OUT * len(self))]

    @property
    def held_out(self) -> Tensor:
        return self.tokens[-int(HELD_OUT * len(self)) :]

    def batch(self, size: int, length: int, generator: torch.Generator) -> Tensor:
        """Random passages of the training part [size, length + 1]: every character but the last is asked for the next."""
        start = torch.randint(len(self.training) - length, (size, 1), generator=generator)
        return self.training[start + torch.arange(length + 1)]

    def evaluation(self, size: int, length: int) -> Tensor:
        """Passages [size, length + 1] spread evenly over the held-out part."""
        start = torch.linspace(0, len(self.held_out) - length - 1, size).long()[:, None]
        return self.held_out[start + torch.arange(length + 1)]
