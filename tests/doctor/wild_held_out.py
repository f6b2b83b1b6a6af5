"""Bugs of public kernels, a fifth lot: asked once when the fourth had been worked in (`docs/doctor.md` has that score)."""

from __future__ import annotations

from slabs import FIRST_KEYS
from wild import Wild
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
        ("cells-lost",),
        ("p",),
        level="full",
        inference=True,
    ),
    "masked from the next tile on": Slab(
        "triton-lang/triton#8853",
        "tiles of keys twice as long as those of rows are taken for full while they begin before the diagonal",
        ("cells-leaked",),
        ("p",),
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
    "one key more": Slab(
        "sgl-project/sglang#34273",
        "the window holds one key more",
        ("call-window-convention",),
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
