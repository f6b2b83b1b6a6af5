"""Bugs of public kernels, a fifth lot: asked once after the fourth had been worked in, and nothing was changed for them."""

from __future__ import annotations

import torch
from slabs import FIRST_KEYS
from wild import CAUSAL, Wild
from wild_packed import LENGTHS, TWO_LENGTHS
from wild_slabs import Slab

from backlight import mask

HELD_OUT: dict[str, Wild] = {
    "bias in base e": Slab(
        "meta-pytorch/segment-anything-fast#71",
        "the bias is added to logits of base 2 as it is",
        ("pair-bias-scaled",),
        ("s",),
        {"pair_bias": True},
        inference=True,
    ),
    "bound of the first row": Slab(
        "ROCm/rocMLIR#2165",
        "the bound of the keys is that of the first row of a tile, where it must be of the last",
        ("bound-forward", "cells-lost"),
        ("p", "s"),
        level="full",
        inference=True,
    ),
    "masked from the next tile on": Slab(
        "triton-lang/triton#8853",
        "tiles of keys twice as long as those of rows are taken for full while they begin before the diagonal",
        ("diagonal-unmasked", "cells-leaked"),
        ("p", "s"),
        level="full",
        inference=True,
    ),
    "first keys see no mask": Slab(
        "gittensor-ai-lab/sparkinfer#611",
        "the first keys, which all later rows see, are seen by earlier ones too",
        ("cells-leaked",),
        ("p",),
        {"rows": True},
        level="full",
        more={"mask": mask.global_first(FIRST_KEYS, 12, 40)},
        inference=True,
    ),
    "terms of dsink in 16 bits": Slab(
        "jax-ml/jax#40128",
        "the terms of the sink's gradient are rounded to 16 bits before they are summed",
        (),
        ("dsink",),
        CAUSAL | {"sink": True},
        (1, 2, 72, 32),
        level="full",
        more={"dtype": torch.bfloat16},
        verdict="precision",
    ),
    "one key more": Slab(
        "sgl-project/sglang#34273",
        "the window holds one key more",
        ("window+1", "window-forward+1", "call-window-convention"),
        ("s",),
        {"window": (8, 0)},
        inference=True,
    ),
    "scale of the fallback": Slab(
        "mlc-ai/mlc-llm#3426",
        "the scale is left out",
        ("call-scale",),
        ("s",),
        {},
        inference=True,
    ),
    "rows of all sequences counted": Wild(
        "pie-project/pie#84",
        "the diagonal of a packed sequence is moved by the number of rows of all of them",
        ("varlen-align",),
        ("s",),
        shape=(1, 2, 72, 16),
        more=TWO_LENGTHS,
        inference=True,
    ),
    "causal forgotten": Wild(
        "huggingface/candle#3606",
        "packed sequences are not causal",
        ("call-causal-lost",),
        ("s",),
        shape=(1, 2, 72, 16),
        more=LENGTHS,
        inference=True,
    ),
    "dq of each at the first": Wild(
        "ROCm/TransformerEngine#657",
        "dq of every packed sequence is stored where the first one lies",
        ("stale-rows",),
        ("dq",),
        shape=(1, 2, 72, 16),
        more=LENGTHS,
    ),
}
