"""k and v as the backward reads them: solved from its own weights and ds, and looked for among all rows of the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from backlight.doctor.defects.layouts import as_bhds, as_bshd

# a row is found when it is this much nearer than the typical distance between rows
NEAR = 0.2
AGREE = 0.9


@dataclass(frozen=True)
class Elsewhere:
    """`take` gives the tensor [B, Hkv, S, D] as the backward reads it."""

    text: str
    take: Callable[[Tensor], Tensor]
    cause: str = "its strides are not used in the backward"


def solved(products: Tensor, left: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Rows r_j with products_ij = left_i . r_j, [B, H, Sk, D], and which of them the usable rows i determine."""
    batch, heads, _, sk = products.shape
    width = left.shape[-1]
    found = torch.zeros(batch, heads, sk, width, dtype=torch.float64, device=products.device)
    known = usable.sum(dim=2) >= 2 * width
    for b, h, j in known.nonzero().tolist():
        i = usable[b, h, :, j]
        found[b, h, j] = torch.linalg.lstsq(left[b, h, i].double(), products[b, h, i, j, None]).solution[:, 0]
    return found, known


def elsewhere(name: str, found: Tensor, known: Tensor, tensor: Tensor, group: int) -> Elsewhere | None:
    """Where rows of k or v that the backward used come from; None where they are right or nowhere to be found."""
    own = tensor.double().repeat_interleave(group, dim=1)
    size = float(own.pow(2).sum(-1).mean().sqrt())
    off = (found - own).norm(dim=-1)
    if not bool(known.any()) or float((off <= NEAR * size)[known].double().mean()) >= AGREE:
        return None
    for text, take in _readings(tensor.shape):
        taken = take(tensor).double().repeat_interleave(group, dim=1)
        if float(((found - taken).norm(dim=-1) <= NEAR * size)[known].double().mean()) >= AGREE:
            found_there = Elsewhere(f"{name} is read {text}", take)
            in_a_ring = isinstance(take, partial) and take.func is _first_of
            return replace(found_there, cause="what a ring hands on does not arrive") if in_a_ring else found_there
    return None


def _first_of(x: Tensor, parts: int) -> Tensor:
    """What a ring reads that never hands on: the first of some parts in the place of each."""
    return x[:, :, : x.shape[2] // parts].repeat(1, 1, parts, 1)


def _readings(shape: torch.Size) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    batch, heads, length, _ = shape
    if heads > 1:
        yield "as [B, S, H, D]", as_bshd
        yield "from head 0 for every head", lambda x: x[:, :1].expand_as(x)
        for step in range(1, heads):
            words = "the head before" if step == 1 else "the next head" if step == heads - 1 else f"the head {step} before"
            yield f"from {words}", partial(torch.roll, shifts=step, dims=1)
    yield "as [B, H, D, S]: rows and channels exchanged", as_bhds
    if batch > 1:
        yield "from batch entry 0 for every entry", lambda x: x[:1].expand_as(x)
    for parts in (2, 4, 8):
        if length % parts == 0 and length > parts:
            ordinal = {2: "half", 4: "quarter", 8: "eighth"}[parts]
            yield f"from the first {ordinal} of the keys for every {ordinal}", partial(_first_of, parts=parts)
    for step in sorted({*range(-256, 257)} - {0}, key=abs):
        if abs(step) < length:
            side = "before" if step > 0 else "after"
            words = f"{abs(step)} {'key' if abs(step) == 1 else 'keys'} {side} its own"
            yield f"from the key {words}", partial(torch.roll, shifts=step, dims=2)
