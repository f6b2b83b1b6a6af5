"""Masks by row intervals: for each key one run of rows that see it, or two. `attention(..., mask=documents(ids, causal=True))`.

A mask is one plain tensor of int32, or two, of O(S) numbers: it moves with `.to`, is saved, compiled and mapped over. Which one
you need, and what it is called in FlexAttention: docs/masks.md. In the drawings rows of q go down, keys go to the right.
"""

from backlight.mask.given import from_dense, from_mask_mod, rows
from backlight.mask.mask import Mask
from backlight.mask.sequences import blocks, chunks, documents, evict, global_first, prefix, spans
from backlight.mask.trees import tree

__all__ = [
    "Mask",
    "blocks",
    "chunks",
    "documents",
    "evict",
    "from_dense",
    "from_mask_mod",
    "global_first",
    "prefix",
    "rows",
    "spans",
    "tree",
]
