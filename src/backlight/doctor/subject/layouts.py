"""Layouts a kernel may want (BHSD, BSHD, packed) and the ways one tensor can lie in memory.

`Layout.give` turns canonical `[B, H, S, D]` into what the subject reads; `take_*` turns its answers back. The `DO_LAYOUTS` and
`INPUT_LAYOUTS` functions return the same values with other strides: a correct kernel cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from backlight.call import Call

NAMES = ("BHSD", "BSHD", "packed")
# finite, so that 0 * sentinel stays 0 in kernels that load beyond a tile's edge; large, so that reading it shows
SENTINEL = 1e4


class ShapeMismatch(RuntimeError):
    """An output has a shape no reading of this layout explains."""


@dataclass(frozen=True)
class Layout:
    name: str
    batch: int
    heads: tuple[int, int]
    lengths: tuple[int, int]
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    def give(self, x: Tensor) -> Tensor:
        """Canonical [B,H,S,D] -> a fresh contiguous tensor in the subject's layout."""
        if self.name == "BHSD":
            return x.clone(memory_format=torch.contiguous_format)
        x = x.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        return x if self.name == "BSHD" else x.flatten(0, 1)

    def give_lse(self, x: Tensor, like: Tensor) -> Tensor:
        """Canonical [B,H,S] -> the shape in which the subject returned its lse."""
        if self.name == "packed":
            x = x.transpose(0, 1).flatten(1)
        if x.shape != like.shape and x.mT.shape == like.shape:
            x = x.mT
        return x.reshape(like.shape).to(like.dtype)

    def take_rows(self, x: Tensor, name: str = "o") -> Tensor:
        return self._take(x, self.heads[0], self.lengths[0], name)

    def take_keys(self, x: Tensor, name: str = "dk") -> Tensor:
        return self._take(x, self.heads[1], self.lengths[1], name)

    def take_lse(self, x: Tensor) -> Tensor:
        """[B,H,S], [B,S,H], [B,H,S,1], [B*H,S], [H,T] or [T,H] -> [B,H,S]."""
        b, h, s = self.batch, self.heads[0], self.lengths[0]
        x = x.squeeze(-1) if x.dim() == 4 else x
        if x.shape == (b, h, s):
            return x
        if x.shape == (b, s, h):
            return x.transpose(1, 2)
        if self.name == "packed" and x.shape == (h, b * s):
            return x.view(h, b, s).transpose(0, 1)
        if self.name == "packed" and x.shape == (b * s, h):
            return x.view(b, s, h).transpose(1, 2)
        if x.shape == (b * h, s):
            return x.view(b, h, s)
        raise ShapeMismatch(f"lse has shape {tuple(x.shape)}; expected [B,H,S] = {[b, h, s]}")

    def _take(self, x: Tensor, heads: int, length: int, name: str) -> Tensor:
        d = x.shape[-1]
        native = {
            "BHSD": (self.batch, heads, length, d),
            "BSHD": (self.batch, length, heads, d),
            "packed": (self.batch * length, heads, d),
        }[self.name]
        if tuple(x.shape) != native:
            raise ShapeMismatch(f"{name} has shape {tuple(x.shape)}; expected {native} in layout {self.name}")
        if self.name == "BHSD":
            return x
        return x.reshape(self.batch, length, heads, d).transpose(1, 2)


def get(name: str, call: Call) -> Layout:
    b, hq, sq, _ = call.q.shape
    hkv, sk = call.k.shape[1:3]
    cu_q, cu_k = call.cu_seqlens_q, call.cu_seqlens_k
    if name == "packed" and cu_q is None:
        device = call.q.device
        cu_q = torch.arange(b + 1, dtype=torch.int32, device=device) * sq
        cu_k = torch.arange(b + 1, dtype=torch.int32, device=device) * sk
    return Layout(name, b, (hq, hkv), (sq, sk), cu_q, cu_k)


# --- the same values, other strides ----------------------------------------------------------------------------------------


def transposed(x: Tensor) -> Tensor:
    """A transposed view: heads and positions swapped in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def sliced(x: Tensor) -> Tensor:
    """Part of a wider buffer: rows lie further apart than they are long."""
    buffer = x.new_full((*x.shape[:-1], x.shape[-1] + 16), SENTINEL)
    view = buffer[..., 8 : 8 + x.shape[-1]]
    view.copy_(x.detach())
    return view


def offset(x: Tensor) -> Tensor:
    """A contiguous view that starts inside its storage."""
    flat = torch.cat([x.new_full((64,), SENTINEL), x.reshape(-1)])
    return flat[64:].view(x.shape)


def surrounded(value: float) -> Callable[[Tensor], Tensor]:
    """A contiguous view with `value` before and behind it in the same storage, as much as a tile of 256 rows."""

    def layout(x: Tensor) -> Tensor:
        margin = 256 * x.shape[-1]
        outside = x.new_full((margin,), value)
        return torch.cat([outside, x.reshape(-1), outside])[margin : margin + x.numel()].view(x.shape)

    return layout


def fused(x: Tensor) -> Tensor:
    """One third of a fused buffer, as a QKV projection leaves it."""
    filler = torch.full_like(x, SENTINEL)
    return torch.cat([filler, x, filler], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]


def expanded(like: Tensor) -> Tensor:
    """What `out.sum().backward()` delivers: one element, all strides 0, at the head of a buffer full of sentinels."""
    buffer = torch.full((max(like.numel(), 1) + 64,), SENTINEL, dtype=like.dtype, device=like.device)
    buffer[0] = 1
    return buffer.as_strided(like.shape, (0,) * like.dim())


DO_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"transposed": transposed, "sliced": sliced, "offset": offset}
INPUT_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"transposed": transposed, "fused": fused, "offset": offset}
