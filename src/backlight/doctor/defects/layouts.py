"""k or v that the backward reads with other strides than the forward: another layout, another head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from backlight.call import Call
from backlight.doctor.defects.defect import CAUSAL_TILES, Defect, several_kv_heads
from backlight.doctor.defects.mutants import Mutant, with_call


def as_bshd(x: Tensor) -> Tensor:
    """Contiguous [B, H, S, D] memory taken for [B, S, H, D]."""
    batch, heads, length, width = x.shape
    return x.contiguous().reshape(batch, length, heads, width).transpose(1, 2)


def as_bhsd(x: Tensor) -> Tensor:
    """Contiguous [B, S, H, D] memory taken for [B, H, S, D]."""
    return x.transpose(1, 2).contiguous().reshape(x.shape)


def as_bhds(x: Tensor) -> Tensor:
    """Contiguous [B, H, S, D] memory taken for [B, H, D, S]."""
    return x.contiguous().reshape(*x.shape[:2], x.shape[3], x.shape[2]).mT


def _reading(which: tuple[str, ...], take: Callable[[Tensor], Tensor], words: str) -> Mutant:
    def changed(name: str) -> Callable[[Call], Tensor]:
        return lambda call: take(getattr(call, name))

    return Mutant(sees_backward=with_call(**{name: changed(name) for name in which}), detail=words)


def _layouts(call: Call) -> list[Mutant]:
    found = []
    for which in (("k",), ("v",), ("k", "v")):
        verb = f"{' and '.join(which)} {'are' if len(which) > 1 else 'is'}"
        if several_kv_heads(call):
            found.append(_reading(which, as_bshd, f"{verb} read as [B, S, H, D]"))
            found.append(_reading(which, as_bhsd, f"{verb} stored as [B, S, H, D] and read as [B, H, S, D]"))
        found.append(_reading(which, as_bhds, f"{verb} read as [B, H, D, S]"))
    return found


_layout = partial(Defect, family="heads", demo=CAUSAL_TILES)
DEFECTS = [
    _layout(
        "kv-layout-backward",
        "in the backward {detail}: the forward reads right",
        "the backward has strides of its own for k or v, of another layout, or takes those of q",
        "p (bwd)",
        "o is right and every gradient is wrong by its own size; k or v, solved from the backward's own weights, is elsewhere",
        "Make k and v the same for all heads and positions: the comparison must turn healthy.",
        needs=lambda call: not call.varlen,
        variants=_layouts,
    ),
]


def read_backward(which: tuple[str, ...], take: Callable[[Tensor], Tensor], words: str) -> Defect:
    """The entry with the one reading that was found in the kernel."""
    mutant = _reading(which, take, words)
    return replace(DEFECTS[0], variants=lambda call: [mutant], stage="p (bwd)" if "k" in which else "dp")
