"""Bugs that public attention kernels had, each as one line of `tiles`, and what the doctor must say of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tiles import Tiles

CAUSAL: dict[str, Any] = {"causal": True}


@dataclass(frozen=True)
class Wild:
    """A bug: where it was, in words, what must come first (one of `names`), and the call that shows it."""

    where: str
    words: str
    names: tuple[str, ...]
    stages: tuple[str, ...]
    spec: dict[str, Any] = field(default_factory=lambda: CAUSAL)
    shape: tuple[int, int, int, int] = (1, 2, 40, 16)
    level: str = "quick"
    more: dict[str, Any] = field(default_factory=dict)
    # the kernel has no backward
    inference: bool = False
    verdict: str = "defect"
    kernel: type = Tiles


FIRST: dict[str, Wild] = {
    "delta of contiguous rows": Wild(
        "flagos-ai/FlagAttention#1",
        "delta reads o and dO as if they were contiguous",
        ("do-stride",),
        ("dp",),
    ),
    "backward always causal": Wild(
        "triton-lang/triton#5660",
        "the backward masks although the call does not",
        ("mask-added-backward",),
        ("p (bwd)",),
        {},
    ),
    "padded keys not masked": Wild(
        "Dao-AILab/flash-attention#1947",
        "weights of padded keys are not set to 0 in the backward: exp overflows where lse is low",
        ("hard-inputs",),
        ("dq",),
        {},
    ),
    "padded lse not written": Wild(
        "tile-ai/tilelang#2461",
        "lse of padded rows is memory that nobody wrote",
        ("scratch-not-written",),
        ("dk", "dv"),
        {},
    ),
    "heads split by the group": Wild(
        "XunhaoLai/native-sparse-attention-triton#27",
        "dk and dv of a head are stored at another head's place",
        ("write-beyond-end",),
        ("dq", "dk", "dv"),
        shape=(1, 6, 40, 16),
        more={"kv_heads": 2},
    ),
    "v as wide as q": Wild(
        "XunhaoLai/native-sparse-attention-triton#27",
        "dp of the dq kernel leaves out the channels of v beyond the width of q",
        ("dp-split-one",),
        ("dp",),
        more={"dv": 32},
    ),
    "starts at the offset": Wild(
        "openai/gpt-oss#196",
        "the loop over keys begins at the offset of the rows",
        ("cells-lost",),
        ("p",),
        level="full",
        more={"sk": 72},
    ),
    "scratch cleared at tile 0": Wild(
        "vllm-project/tpu-inference#1954",
        "sums are cleared at key tile 0, which a window skips",
        ("scratch-not-written",),
        ("lse", "o"),
        {"window": (8, 0)},
    ),
    "first tile hidden": Wild(
        "vllm-project/vllm#48364",
        "rows whose first tile is hidden subtract -inf from -inf",
        ("maximum-hidden-tile",),
        ("lse", "o"),
        {"window": (8, 0)},
    ),
    "finite mask": Wild(
        "NVIDIA/TensorRT-LLM#17477",
        "hidden scores are a large finite number, so rows that see nothing attend to hidden keys",
        ("empty-rows-mean",),
        ("o",),
        shape=(1, 2, 72, 16),
        more={"sk": 44},
    ),
    "scores times tanh": Wild(
        "Dao-AILab/flash-attention#2402",
        "the soft cap multiplies the scores by tanh",
        ("softcap-function",),
        ("s",),
        {"causal": True, "softcap": 2.0},
    ),
    "bias sign": Wild(
        "meta-pytorch/attention-gym#86",
        "the bias by distance enters with the wrong sign",
        ("bias-sign",),
        ("s",),
        {"causal": True, "bias": True},
    ),
    "end rounded up": Wild(
        "hao-ai-lab/FastVideo#925",
        "the dq kernel counts the keys of a whole last tile",
        ("read-beyond-end",),
        ("dq",),
        {},
        level="full",
    ),
    "ring keeps the first keys": Wild(
        "huggingface/diffusers#14265",
        "every step of the backward's ring reads the keys of the first",
        ("kv-layout-backward",),
        ("p (bwd)",),
        {},
        level="full",
    ),
    "last ring step wins": Wild(
        "feifeibear/long-context-attention#176",
        "each step of a ring overwrites o instead of being merged",
        ("cells-lost",),
        ("p",),
        {},
        level="full",
    ),
    "sink left out of lse": Wild(
        "NVIDIA/cudnn-frontend#421",
        "the dq kernel's weights leave the sink out of the sum, and dsink stays 0",
        ("sink-missing-backward",),
        ("p (bwd)",),
        {"causal": True, "sink": True},
        level="full",
    ),
    "dq with strides of q": Wild(
        "ROCm/flash-attention#122",
        "dq is stored with the strides of q",
        ("input-stride",),
        ("dq",),
        level="full",
    ),
    "dv laid out like k": Wild(
        "pytorch/pytorch#119500",
        "dv has the layout of k and is stored with the strides of v",
        ("input-stride",),
        ("dv",),
        level="full",
    ),
    "forward's list of tiles": Wild(
        "Dao-AILab/flash-attention#2623",
        "dk and dv visit the tiles of the forward's list, not of its transpose",
        ("cells-lost-backward",),
        ("p (bwd)",),
        level="full",
    ),
    "delta after its use": Wild(
        "Dao-AILab/flash-attention#2756",
        "delta is read before it is written",
        ("scratch-not-written",),
        ("dq",),
    ),
    "whole tiles of dk stored": Wild(
        "lucidrains/native-sparse-attention-pytorch#33",
        "dk and dv are stored without a mask for the last tile",
        ("write-beyond-end",),
        ("dq", "dk", "dv"),
    ),
    "halves of dv stored apart": Wild(
        "fla-org/native-sparse-attention#34",
        "half of the columns of dv are stored beyond its end",
        ("write-beyond-end",),
        ("dq", "dv"),
    ),
    "columns stored beyond the row": Wild(
        "Dao-AILab/flash-attention#2698",
        "columns of dk and dv are stored beyond the end of a row",
        ("write-beyond-end",),
        ("dq", "dk", "dv"),
        shape=(1, 2, 40, 24),
    ),
    "columns of dv by the step of dk": Wild(
        "Dao-AILab/flash-attention#2552",
        "columns of dv are stored with the step of dk, so that some are not",
        ("stale-rows",),
        ("dv",),
        {},
        more={"dv": 24},
    ),
    "accumulator cleared to a narrower width": Wild(
        "Dao-AILab/flash-attention#2896",
        "the last columns of the sum of dq are not cleared",
        ("sum-not-cleared",),
        ("dq",),
        shape=(1, 2, 40, 48),
    ),
    "keys bounded by the tile of rows": Wild(
        "hao-ai-lab/FastVideo#879",
        "the size of a tile of rows bounds the keys of the backward",
        ("cells-lost-backward",),
        ("p (bwd)",),
        {},
        level="full",
    ),
    "two rows share one window": Wild(
        "NVIDIA/cudnn-frontend#388",
        "the second of two rows has the mask of the first in the backward",
        ("mask-read-backward",),
        ("p (bwd)",),
        {"window": (8, 0)},
        level="full",
    ),
    "as many columns as threads": Wild(
        "mni-ml/framework#38",
        "only as many columns of o as there are threads are computed",
        ("columns-lost",),
        ("o",),
    ),
}
