"""Bugs of public kernels, a sixth lot: the answers were written down before the doctor was asked.

Where `names` is empty the catalogue has no name that would be right, and the stage is all that can be expected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from strips import OutputAlone, Strips
from wild import Wild
from wild_packed import borders

# the second sequence has rows and no keys
NO_KEYS = {"cu_seqlens": (borders(0, 20, 30, 72), borders(0, 33, 33, 96)), "sk": 96}
# the second sequence has keys and no rows
NO_ROWS = {"cu_seqlens": (borders(0, 20, 20, 72), borders(0, 33, 44, 96)), "sk": 96}


@dataclass(frozen=True)
class Strip(Wild):
    """A bug of `strips`."""

    kernel: type = Strips


STRIPS: dict[str, Wild] = {
    "offsets of delta wrap": Strip(
        "SHI-Labs/NATTEN#347",
        "offsets into o and dO overflow in the kernel of delta, which reads other rows from some row on",
        ("delta-read", "delta-shifted"),
        ("delta",),
        level="full",
    ),
    "rows of a shared bias stored": Strip(
        "HKUSTDial/flash-sparse-attention#194",
        "the gradient of a bias that all rows share is stored by each of them, so that the last one wins",
        ("pair-bias-rows", "pair-bias-not-summed"),
        ("dpair_bias",),
        {"pair_bias": True},
        more={"pair_bias": torch.randn(1, 2, 1, 40, generator=torch.Generator().manual_seed(0))},
    ),
    "columns of the list beyond the keys": Strip(
        "NVIDIA/cudnn-frontend#298",
        "entries of a list of keys are dropped in dk and dv where their place in the list exceeds the number of keys",
        ("tail-keys-dkdv", "cells-lost-backward"),
        ("dk", "p (bwd)"),
    ),
    "narrowed before the scale": Strip(
        "NVIDIA/cudnn-frontend#1046",
        "ds is rounded to fp16 before the scale, where it can overflow, and after it again",
        ("hard-inputs",),
        ("ds", "dq"),
        shape=(1, 2, 40, 24),
        level="full",
        more={"dtype": torch.float16},
    ),
    "no rows, nothing stored": Wild(
        "ROCm/flash-attention#179",
        "dk and dv of a packed sequence that has no rows are not stored",
        ("stale-rows",),
        ("dk", "dv"),
        shape=(1, 2, 72, 16),
        more=NO_ROWS,
    ),
    "divided at every tile": Strip(
        "1bit-MONSTER/1bit-MONSTER#495",
        "the sum for o is divided by the running sum of weights after every tile of keys",
        (),
        ("p", "o"),
        {},
        level="full",
        inference=True,
    ),
    "no keys, stored elsewhere": Wild(
        "Dao-AILab/flash-attention#2842",
        "the lse of a packed sequence that has no keys is stored where it would lie were sequences not packed",
        ("lse-stored-elsewhere", "stale-rows"),
        ("lse",),
        shape=(1, 2, 72, 16),
        more=NO_KEYS,
        inference=True,
    ),
    "first head alone": Strip(
        "tracel-ai/burn#4484",
        "with a causal mask the first head alone is computed, and o of the others is 0",
        (),
        ("o",),
        shape=(1, 4, 40, 16),
        inference=True,
        kernel=OutputAlone,
    ),
    "left edge of the window unmasked": Strip(
        "ROCm/aiter#5741",
        "tiles before the diagonal are not masked, also those that the window's left edge crosses",
        ("cells-leaked",),
        ("p",),
        {"window": (20, 0)},
        (1, 2, 72, 16),
        level="full",
        inference=True,
    ),
    "tiles of heads cross groups": Strip(
        "FlashML-org/FreeToken#177",
        "query heads are taken in tiles, and each tile has the key/value head of its first",
        (),
        ("s",),
        shape=(1, 6, 40, 16),
        more={"kv_heads": 2},
        inference=True,
    ),
    "statistics by fixed strides": Strip(
        "Dao-AILab/flash-attention#2388",
        "lse of splits is written by strides taken for granted, and read by those that were asked for",
        ("merge-weights",),
        ("p", "lse"),
        {},
        level="full",
        inference=True,
    ),
    "maximum of a hidden tile": Strip(
        "Dao-AILab/flash-attention#2174",
        "after a tile that is all hidden the running maximum is 0, and rows of low scores vanish",
        ("maximum-start", "hard-inputs"),
        ("lse", "o"),
        {"window": (8, 0)},
        level="full",
        inference=True,
    ),
}
