"""Long context in three steps: documents packed without padding, masks that are more than borders, and one sequence over ranks.

A notebook as a script: each `# %%` is a cell. Ranks are threads here, so that it runs anywhere; under torchrun, with a model
and a training loop, it is examples/train_long_context.py.

    python examples/long_context.py                     seconds on a CPU
"""

# %% A batch as it often comes: documents of very different lengths
import torch
from torch import Tensor

import backlight
from backlight import mask
from backlight.distributed import simulated_attention

torch.manual_seed(0)
LENGTHS = [700, 40, 210, 90, 260]
HEADS, KV_HEADS, DIM = 4, 2, 32
TOTAL, LONGEST = sum(LENGTHS), max(LENGTHS)
padded = len(LENGTHS) * LONGEST
print(f"{len(LENGTHS)} documents, {TOTAL} tokens; padded to the longest {padded}, of which {1 - TOTAL / padded:.0%} is padding")

# [1, H, T, D]: all documents one after another
q, do = (torch.randn(1, HEADS, TOTAL, DIM) for _ in range(2))
k, v = (torch.randn(1, KV_HEADS, TOTAL, DIM) for _ in range(2))


def gradients(attention) -> tuple[Tensor, ...]:
    """y, dq, dk, dv"""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    y = attention(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, do))


def furthest(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


# %% 1. Packed: borders instead of padding. Nothing is seen across a border, and no tensor of S x S exists in either direction
cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = backlight.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens, causal=True)
    return y.transpose(0, 1)[None]


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = zip(*(x.split(LENGTHS, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat([backlight.attention(*part, causal=True) for part in parts], dim=2)


truth = gradients(one_by_one)
print(f"\npacked and each document alone: furthest apart {furthest(gradients(packed), truth):.1e}, gradients included")
torch.testing.assert_close(gradients(packed), truth)

# %% 2. The same as a mask, and what borders cannot say: sinks for streaming, documents with a prompt that sees all of itself
documents = mask.documents(lengths=LENGTHS)
torch.testing.assert_close(gradients(lambda *x: backlight.attention(*x, causal=True, mask=documents)), truth)
starts = cu_seqlens[:-1]
masks = {
    "causal alone": {"causal": True},
    "documents": {"causal": True, "mask": documents},
    "window of 128": {"causal": True, "window": (127, 0)},
    "first 4 tokens and a window": {"mask": mask.global_first(4, 127, TOTAL)},
    "first 32 of each see each other": {"mask": mask.spans(starts, starts + 32, TOTAL)},
}
print("\nshare of 64 x 64 tiles that a kernel has to visit")
for name, options in masks.items():
    empty = backlight.statistics(q, k, v, tile=(64, 64), **options).empty_tiles.mean().item()
    size = options["mask"].rows.numel() if "mask" in options else 0
    print(f"  {name:32} {1 - empty:5.1%}   mask of {size:5d} numbers, dense it would have {TOTAL * TOTAL}")

# %% 3. One sequence over ranks: each holds a part of the rows and keys, and attention still sees all of them
bias = torch.randn(HEADS, 64)
whole = gradients(lambda *x: backlight.attention(*x, causal=True, bias=bias))
print("\none sequence of", TOTAL, "tokens, causal, with a bias by distance, over ranks")
for world, layout, strategy in (
    (2, "zigzag", "ring"),
    (4, "zigzag", "ring"),
    (4, "contiguous", "ring"),
    (2, "zigzag", "all_to_all"),
):
    how = {"world": world, "layout": layout, "strategy": strategy}
    cut = gradients(lambda *x, how=how: simulated_attention(*x, causal=True, bias=bias, **how))
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-4)
    print(f"  {world} ranks, {layout:10} {strategy:10} furthest from one process {furthest(cut, whole):.1e}")

# %% Packed sequences over ranks: the borders stay those of the whole
cut = simulated_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), cu_seqlens, world=4, causal=True)
torch.testing.assert_close(cut.transpose(0, 1)[None], truth[0], rtol=1e-4, atol=1e-4)
print("  the packed documents over 4 ranks: the same")
