"""Plain PyTorch as a contender: the memory that dense scores take is part of what is measured."""

from __future__ import annotations

import torch

from backlight.bench.contender import TERM_WORDS, Contender, by_autograd, cannot, leaves_of
from backlight.bench.room import dense_refusal
from backlight.bench.workload import Tensors, Workload
from backlight.peers import eager

# scores, weights, their casts and their gradients are alive together
COPIES = 8
ABLE = ("packed sequences", "a window", "softcap", *TERM_WORDS.values())


class Eager:
    name = "eager"

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        return cannot("plain PyTorch", workload, ABLE) or dense_refusal(workload, device, COPIES)

    def build(self, tensors: Tensors) -> Contender:
        return by_autograd(
            self.name,
            leaves_of(tensors),
            tensors.dy,
            eager.attention(tensors.call),
            detail="dense, matmuls in the dtype of the inputs, softmax in fp32",
        )


ADAPTERS = (Eager(),)
