"""One sequence among others: what a batch-invariant call gives it must not depend on them (eq. 79)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import backlight

Run = Callable[[Sequence[Tensor], int], tuple[Tensor, ...]]


def drawn(seed: int, rows: int, heads: tuple[int, int], width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """q, k, v, dy of a sequence, [S, H, D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, heads[0], width), (rows, heads[1], width), (rows, heads[1], width), (rows, heads[0], width)]
    return tuple(torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes)


def packed_results(sequences: list[tuple[Tensor, ...]], which: int, **options: object) -> dict[str, Tensor]:
    """Of sequence number `which` of a pack."""
    q, k, v, dy = (torch.cat(parts) for parts in zip(*sequences, strict=True))
    lengths = [len(each[0]) for each in sequences]
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=q.device)
    given = [x.requires_grad_() for x in (q, k, v)]
    y, lse = backlight.attention_varlen(*given, cu, deterministic="batch", return_lse=True, **options)
    grads = torch.autograd.grad(y, given, dy)
    own = slice(sum(lengths[:which]), sum(lengths[: which + 1]))
    found = dict(zip(("y", "dq", "dk", "dv"), (x[own].detach().clone() for x in (y, *grads)), strict=True))
    return found | {"lse": lse[:, own].detach().clone()}


def batched_results(sequences: list[tuple[Tensor, ...]], which: int, **options: object) -> dict[str, Tensor]:
    """Of entry number `which` of a batch of sequences of one length."""
    q, k, v, dy = (torch.stack(parts).transpose(1, 2) for parts in zip(*sequences, strict=True))
    given = [x.requires_grad_() for x in (q, k, v)]
    y, lse = backlight.attention(*given, deterministic="batch", return_lse=True, **options)
    grads = torch.autograd.grad(y, given, dy)
    return dict(zip(("y", "lse", "dq", "dk", "dv"), (x[which].detach().clone() for x in (y, lse, *grads)), strict=True))


def differing(
    rows: int,
    width: int,
    draws: int,
    dtype: torch.dtype,
    device: str = "cpu",
    packed: bool = True,
    longest: int = 700,
    **options: object,
) -> list[str]:
    """Which results of a sequence of `rows` differ between draws of the rest of the batch, with and without a rest."""
    heads = (4, 2)
    own = drawn(0, rows, heads, width, dtype, device)
    results = packed_results if packed else batched_results
    alone = results([own], 0, **options)
    found = []
    generator = torch.Generator().manual_seed(1)
    for draw in range(draws):
        count, which = (int(torch.randint(1, 6, (1,), generator=generator)) for _ in range(2))
        lengths = torch.randint(0, longest, (count,), generator=generator).tolist() if packed else [rows] * count
        others = [drawn(100 * draw + n + 1, length, heads, width, dtype, device) for n, length in enumerate(lengths)]
        place = which % (count + 1)
        beside = results([*others[:place], own, *others[place:]], place, **options)
        found += [f"{name} of draw {draw}" for name, x in alone.items() if not torch.equal(x, beside[name])]
    return found
