"""The operators under `torch.func.vmap`: the new axis is folded into the heads.

Heads are the one axis that every tensor of a call has, learned terms included, so one call does the work of all: entry v's head
h becomes head v * H + h, and grouped heads keep their groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from backlight.spec import LEARNED, OF_PAIRS, TENSOR_NAMES, TENSORS

# the axis of heads in each tensor of the two operators
HEADS = {each.name: place for each in TENSORS for place, axis in enumerate(each.axes) if axis in ("heads", "kv_heads")}
HEADS |= dict.fromkeys(("y", "u", "lse", "dy", "dlse"), 1)
BORDERS = ("cu_seqlens_q", "cu_seqlens_k")
# those that may have one head for all of them
SHARED_HEADS = tuple(each.name for each in TENSORS if each.name in HEADS and (each.of_pairs or not each.learned))
SAVED = ("y", "lse", "u", "dy", "dlse")


def fold(name: str, x: Tensor | None, axis: int | None, size: int, heads_of_q: int) -> Tensor | None:
    """A tensor with `size` times its heads: batched along `axis`, or the same for every entry (None)."""
    if x is None or (axis is None and _is_placeholder(x)):
        return x
    heads = HEADS.get(name)
    if heads is None:
        if axis is not None:
            advice = ": pack the sequences of all entries instead" if name in BORDERS else ", which has no axis of heads"
            raise NotImplementedError(f"torch.func.vmap over {name} is not supported{advice}")
        return x
    if name in SHARED_HEADS:
        if axis is None and x.shape[heads] == 1 and name not in OF_PAIRS:
            return x
        if axis is not None:
            x, axis = x.movedim(axis, heads), heads
            x = x.expand(*x.shape[: heads + 1], heads_of_q, *x.shape[heads + 2 :])
        else:
            # each entry has a gradient of its own
            x = x.expand(*x.shape[:heads], heads_of_q, *x.shape[heads + 1 :])
    if axis is None:
        x = x.unsqueeze(heads).expand(*x.shape[:heads], size, *x.shape[heads:])
    else:
        x = x.movedim(axis, heads)
    return x.flatten(heads, heads + 1)


def _heads_of(q: Tensor, axis: int | None) -> int:
    """Query heads of one entry."""
    return q.shape[1] if axis is None else q.movedim(axis, 0).shape[2]


def unfold(x: Tensor, heads: int, size: int) -> tuple[Tensor, int | None]:
    """The result with its axis of entries, and where that is; empty placeholders have none."""
    return (x, None) if _is_placeholder(x) else (x.unflatten(heads, (size, -1)), heads)


def _is_placeholder(x: Tensor) -> bool:
    """What stands where nothing was computed; a result without rows is none."""
    return x.dim() == 1 and not x.numel()


def unfold_gradient(name: str, x: Tensor, size: int, of: Tensor | None, of_axis: int | None) -> tuple[Tensor, int | None]:
    """The gradient of tensor `of`, batched along `of_axis`, which may have one head for all of them."""
    x, axis = unfold(x, HEADS[name], size)
    if of is None or axis is None or name not in OF_PAIRS:
        return x, axis
    shared = (of if of_axis is None else of.movedim(of_axis, 0)[0]).shape[HEADS[name]] == 1
    return (x.sum(dim=axis + 1, keepdim=True) if shared else x), axis


def attention(run: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """`size` forwards in one: results and where their new axes are; `run` takes the folded arguments."""
    count = len(TENSOR_NAMES)
    heads = _heads_of(args[0], in_dims[0])
    folded = [fold(*entry, size, heads) for entry in zip(TENSOR_NAMES, args[:count], in_dims[:count], strict=True)]
    found = [unfold(x, 1, size) for x in run(*folded, *args[count:])]
    return tuple(x for x, _ in found), tuple(axis for _, axis in found)


def attention_backward(run: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    count = len(TENSOR_NAMES)
    first = len(args) - 1 - len(SAVED)
    heads = _heads_of(args[0], in_dims[0])
    folded = [fold(*entry, size, heads) for entry in zip(TENSOR_NAMES, args[:count], in_dims[:count], strict=True)]
    saved = [fold(*entry, size, heads) for entry in zip(SAVED, args[first:-1], in_dims[first:-1], strict=True)]
    grads = run(*folded, *args[count:first], *saved, args[-1])
    given = zip(LEARNED, grads, args, in_dims, strict=False)
    found = [unfold_gradient(name, x, size, of, axis) for name, x, of, axis in given]
    return tuple(x for x, _ in found), tuple(axis for _, axis in found)
