"""Bugs of public kernels, a sixth lot: the answers were written down before the doctor was asked.

Those answers, and what it said, are in docs/doctor.md; what it must say now is here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from strips import OutputAlone, Strips
from wild import CAUSAL, Wild
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
        ("delta-read",),
        ("delta",),
        level="full",
    ),
    "rows of a shared bias stored": Strip(
        "HKUSTDial/flash-sparse-attention#194",
        "the gradient of a bias that all rows share is stored by each of them, so that the last one wins",
        ("pair-bias-not-summed",),
        ("dpair_bias",),
        {"pair_bias": True},
        more={"pair_bias": torch.randn(1, 2, 1, 40, generator=torch.Generator().manual_seed(0))},
    ),
    "columns of the list beyond the keys": Strip(
        "NVIDIA/cudnn-frontend#298",
        "entries of a list of keys are dropped in dk and dv where their place in the list exceeds the number of keys",
        ("part-zero",),
        ("dk",),
    ),
    "no rows, nothing stored": Wild(
        "ROCm/flash-attention#179",
        "dk and dv of a packed sequence that has no rows are not stored",
        ("stale-rows",),
        ("dk",),
        shape=(1, 2, 72, 16),
        more=NO_ROWS,
    ),
    "divided at every tile": Strip(
        "1bit-MONSTER/1bit-MONSTER#495",
        "the sum for o is divided by the running sum of weights after every tile of keys",
        ("divided-per-tile",),
        ("p",),
        {},
        inference=True,
    ),
    "no keys, stored elsewhere": Wild(
        "Dao-AILab/flash-attention#2842",
        "the lse of a packed sequence that has no keys is stored where it would lie were sequences not packed",
        ("stale-rows",),
        ("lse",),
        shape=(1, 2, 72, 16),
        more=NO_KEYS,
        inference=True,
    ),
    "first head alone": Strip(
        "tracel-ai/burn#4484",
        "with a causal mask the first head alone is computed, and o of the others is 0",
        ("part-zero",),
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
        ("kv-other-head",),
        ("s",),
        shape=(1, 6, 40, 16),
        more={"kv_heads": 2},
        inference=True,
    ),
    "statistics by fixed strides": Strip(
        "Dao-AILab/flash-attention#2388",
        "lse of splits is written by strides taken for granted, and read by those that were asked for",
        ("merge-elsewhere",),
        ("p",),
        {},
        inference=True,
    ),
    "maximum of a hidden tile": Strip(
        "Dao-AILab/flash-attention#2174",
        "after a tile that is all hidden the running maximum is 0, and rows of low scores vanish",
        ("hard-inputs",),
        ("lse",),
        {"window": (8, 0)},
        inference=True,
    ),
    "terms of the sink rounded": Strip(
        "jax-ml/jax#40128",
        "terms of dsink are rounded to 16 bits before they are summed",
        ("dsink-rounded",),
        ("dsink",),
        CAUSAL | {"sink": True},
        (1, 2, 72, 16),
        level="full",
        more={"dtype": torch.bfloat16},
        verdict="precision",
    ),
}
