"""Bugs of public kernels for packed sequences: asked once before anything was changed for them, when none was named."""

from __future__ import annotations

import torch
from wild import Wild


def borders(*at: int) -> torch.Tensor:
    return torch.tensor(at, dtype=torch.int32)


LENGTHS = {"cu_seqlens": borders(0, 20, 61, 72)}
TWO_LENGTHS = {"cu_seqlens": (borders(0, 20, 61, 72), borders(0, 33, 70, 96)), "sk": 96}

PACKED: dict[str, Wild] = {
    "diagonal of the longest": Wild(
        "ROCm/rocm-libraries#10999",
        "the offset of the causal mask is that of the longest sequences for all that are packed",
        ("varlen-align",),
        ("s",),
        shape=(1, 2, 72, 16),
        more=TWO_LENGTHS,
    ),
    "rows padded to other tiles": Wild(
        "Dao-AILab/flash-attention#2333",
        "kernels of the backward pad packed sequences to tiles of different sizes in lse and delta",
        ("varlen-rows",),
        ("p (bwd)",),
        shape=(1, 2, 72, 16),
        more=LENGTHS,
    ),
    "first boundary alone": Wild(
        "Tencent-Hunyuan/HunyuanVideo#310",
        "only the first boundary between packed sequences is heeded",
        ("varlen-leak",),
        ("s",),
        shape=(1, 2, 72, 16),
        more=LENGTHS,
    ),
}
