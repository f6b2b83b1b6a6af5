"""`attention_jvp` and `attention_second` under `torch.func.vmap`, folded into the heads as `batching` folds the other two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backlight.batching import HEADS, fold, unfold, unfold_gradient
from backlight.spec import LEARNED, TENSOR_NAMES

# a tangent has the axes of what it is the tangent of: y, lse, u, ty, tlse, tu, and gradients at y, lse, ty, tlse
RESULTS = ("y", "lse", "u", "y", "lse", "u")
INCOMING = ("dy", "dlse", "dy", "dlse")


def attention_jvp(run: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    found = run(*_folded((*LEARNED, *RESULTS[:3]), 0, size, in_dims, args))
    return _unfolded(RESULTS, size, found)


def attention_second(run: Callable[..., Any], size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    grads = run(*_folded((*LEARNED, *RESULTS, *INCOMING), 1, size, in_dims, args))
    # tangents come right after the tensors and scalars of the call
    tangents = len(args) - 1 - len((*LEARNED, *RESULTS, *INCOMING))
    places = (*range(len(LEARNED)), *range(tangents, tangents + len(LEARNED)))
    of = zip((*LEARNED, *LEARNED), grads, [args[i] for i in places], [in_dims[i] for i in places], strict=True)
    results = [unfold_gradient(name, x, size, given, axis) for name, x, given, axis in of]
    return tuple(x for x, _ in results), tuple(axis for _, axis in results)


def _folded(names: tuple[str, ...], last: int, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> list[Any]:
    """Arguments of an operator: its tensors, folded, then scalars, then those named, folded, then `last` others."""
    count, first = len(TENSOR_NAMES), len(args) - last - len(names)
    end = first + len(names)
    q, axis = args[0], in_dims[0]
    heads = q.shape[1] if axis is None else q.movedim(axis, 0).shape[2]
    places = (*range(count), *range(first, end))
    tensors = zip((*TENSOR_NAMES, *names), [args[i] for i in places], [in_dims[i] for i in places], strict=True)
    folded = [fold(*entry, size, heads) for entry in tensors]
    return [*folded[:count], *args[count:first], *folded[count:], *args[end:]]


def _unfolded(names: tuple[str, ...], size: int, found: Any) -> tuple[Any, Any]:
    results = [unfold(x, HEADS[name], size) for name, x in zip(names, found, strict=True)]
    return tuple(x for x, _ in results), tuple(axis for _, axis in results)
