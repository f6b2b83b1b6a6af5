"""Bugs of public kernels, a fourth lot: the answers were written down, and committed, before the doctor was asked.

Those answers, and what it said, are in docs/doctor.md; what it must say now is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from slabs import OwnSlopes, Slabs
from wild import CAUSAL, Wild

from backlight import alibi, mask


@dataclass(frozen=True)
class Slab(Wild):
    """A bug of `slabs`."""

    kernel: type = Slabs


SLABS: dict[str, Slab] = {
    "sink of a row": Slab(
        "modular/modular#6591",
        "the sink is read by the row, where it must be by the head",
        ("sink-other-head",),
        ("lse",),
        CAUSAL | {"sink": True},
        (1, 3, 40, 16),
        inference=True,
    ),
    "keys transposed twice": Slab(
        "huggingface/diffusers#14338",
        "the backward transposes k and v once more",
        ("kv-layout-backward",),
        ("p (bwd)",),
        {},
        level="full",
    ),
    "o and lse of a step": Slab(
        "tenstorrent/tt-metal#53216",
        "each step of the backward's ring has the o and lse of its own keys, not those of all",
        ("part-softmax-backward",),
        ("p (bwd)",),
        {},
    ),
    "padding of the mask is zero": Slab(
        "tenstorrent/tt-metal#54833",
        "the mask is padded with zeros, so that keys beyond the end are seen",
        ("tail-padding",),
        ("lse",),
        {},
        inference=True,
    ),
    "columns of the bias skipped": Slab(
        "tenstorrent/tt-metal#38004",
        "from tile to tile of keys the bias moves on by too many columns",
        ("pair-bias-columns",),
        ("s",),
        {"pair_bias": True},
        inference=True,
    ),
    "mean of a part of the keys": Slab(
        "ROCm/aiter#3334",
        "each split subtracts the mean of its own keys, and its lse, which weighs it, lacks what that took off",
        ("merge-weights",),
        ("p",),
        {},
        inference=True,
    ),
    "merge of two that saw nothing": Slab(
        "flashinfer-ai/flashinfer#4051",
        "parts that saw no key are merged by exp(-inf - -inf)",
        ("empty-rows-nan",),
        ("p",),
        shape=(1, 2, 72, 16),
        more={"sk": 44},
        inference=True,
    ),
    "tiles of a causal mask": Slab(
        "vllm-project/vllm#30974",
        "tiles of keys are visited as a causal mask needs them, and the prefix that all rows see lies beyond",
        ("cells-lost",),
        ("p",),
        {"rows": True},
        level="full",
        more={"mask": mask.prefix(25, 40)},
        inference=True,
    ),
    "slopes of any number of heads": Slab(
        "ml-explore/mlx#343",
        "ALiBi's slopes for three heads follow the rule for powers of two",
        ("bias-slopes",),
        ("s",),
        CAUSAL | {"bias": True},
        (1, 3, 40, 16),
        more={"bias": alibi(3, 40, causal=True)["bias"]},
        kernel=OwnSlopes,
    ),
    "as wide as the tutorial": Slab(
        "triton-lang/triton#621",
        "heads of 32 are read, and stored, as if they were as wide as a tile",
        ("stale-rows",),
        ("o",),
        shape=(1, 2, 40, 32),
    ),
    "exp of a difference": Slab(
        "jzhang38/EasyContext#14",
        "the lse of a ring is updated by log(1 + exp(difference)), which overflows",
        ("merge-difference",),
        ("lse",),
        {},
        level="full",
    ),
    "sink added without a maximum": Slab(
        "NVIDIA/cudnn-frontend#676",
        "the backward adds the sink to lse as log(exp(lse) + exp(sink)), which overflows",
        ("hard-inputs",),
        ("dq",),
        CAUSAL | {"sink": True},
        level="full",
    ),
    "bias of all stored by each": Slab(
        "facebookresearch/xformers#649",
        "the gradient of a bias that batch and heads share is stored by each of them, not summed",
        ("pair-bias-not-summed",),
        ("dpair_bias",),
        {"pair_bias": True},
        (2, 2, 40, 16),
        more={"pair_bias": torch.randn(1, 1, 40, 40, generator=torch.Generator().manual_seed(0))},
    ),
    "window without its right side": Slab(
        "jax-ml/jax#39576",
        "of a window the left side alone is passed on, and rows see their whole future",
        ("call-causal-lost",),
        ("s",),
        {"window": (8, 0)},
    ),
    "keys scaled in 16 bits": Slab(
        "hao-ai-lab/FastVideo#1730",
        "the backward multiplies the scale into keys of 16 bits, and rounds them again",
        ("operand-prescaled",),
        ("s",),
        {},
        level="full",
        more={"dtype": torch.bfloat16, "recipe": "outliers"},
        verdict="precision",
    ),
    "half a tile has the mask of the other": Slab(
        "tracel-ai/cubecl#1027",
        "both halves of a tile of keys are masked as the first is",
        ("cells-leaked",),
        ("p",),
        level="full",
        inference=True,
    ),
}
