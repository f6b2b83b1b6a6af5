"""The public call of forward mode: `attention_jvp`, `attention_varlen_jvp`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from backlight import second_operators
from backlight.api import Options, check_backend
from backlight.arguments import ALPHAS, check_device, check_flag, check_tensor, shown
from backlight.binding import Tensors, batched, bind, flattened, tensors_given
from backlight.call import Call
from backlight.contexts import innermost
from backlight.spec import LEARNED, SEQUENCE_OF

PLACE_OF_ENTMAX = LEARNED.index("entmax")


class JvpOptions(Options, total=False):
    """The keywords of `attention`, and a tangent for each of its terms that has a gradient."""

    tbias: Tensor | None
    tsink: Tensor | None
    ttau: Tensor | None
    tgate: Tensor | None
    tpair_bias: Tensor | None
    tentmax: Tensor | None


def attention_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None = None,
    tk: Tensor | None = None,
    tv: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[JvpOptions],
) -> tuple[Any, Any]:
    """(y, ty): attention, and the derivative of its output along tangents, in one sweep and memory linear in the lengths.

    What `torch.func.jvp` of `attention` gives, as a call of its own, which torch.compile takes into its graph. Both results are
    differentiable, in the tangents too; beside a tangent that is detached the backward is the ordinary one.

    Args:
        q, k, v: as in `attention`.
        tq, tk, tv: tangents of q, k and v: shape, dtype and device of theirs; None is zero and costs nothing.
        tbias, tsink, ttau, tgate, tpair_bias, tentmax: tangents of the terms of that name; tentmax of an alpha that is learned.
        return_lse: also return the log-sum-exp and its tangent. The other keywords are those of `attention`.

    Returns:
        (y, ty); with `return_lse` ((y, lse), (ty, tlse)). Rows that see no key have tangents 0 (with a sink: tlse = tsink).
    """
    return _attend((q, k, v), (tq, tk, tv), None, return_lse, dict(options))


def attention_varlen_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tq: Tensor | None,
    tk: Tensor | None,
    tv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: bool = False,
    **options: Unpack[JvpOptions],
) -> tuple[Any, Any]:
    """`attention_jvp` over packed sequences, as `attention_varlen` is `attention` over them; tangents are packed too."""
    return _attend((q, k, v), (tq, tk, tv), (cu_seqlens_q, cu_seqlens_k), return_lse, dict(options))


def _attend(
    inputs: tuple[Tensor, Tensor, Tensor],
    tangents: tuple[Tensor | None, ...],
    borders: tuple[Tensor, Tensor | None] | None,
    return_lse: bool,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    check_flag("return_lse", return_lse)
    backend = options.pop("backend", None)
    check_backend(backend)
    context = innermost(options.pop("context", None))
    tangents = (*tangents, *[options.pop(f"t{name}", None) for name in LEARNED[3:]])
    packed = borders is not None
    cu_seqlens_q, cu_seqlens_k = borders or (None, None)
    tangents = _with_alphas(tangents, options.get("entmax"))
    given = tensors_given(*inputs, cu_seqlens_q, cu_seqlens_k, options)
    grid: tuple[int, ...] = ()
    if not packed and isinstance(given[0], Tensor) and given[0].dim() == 5:
        flat, grid = flattened(given)
        for name, x, t in zip(LEARNED, given[: len(LEARNED)], tangents, strict=True):
            _check(name, x, t)
        pairs = zip(flat[: len(LEARNED)], tangents, strict=True)
        given, tangents = flat, tuple(None if t is None else t.reshape(x.shape) for x, t in pairs)
    bound = partial(_bound, given, tangents, options, packed)
    if context is None:
        (y, lse), (ty, tlse) = second_operators.attention_jvp(*bound(), backend)
    else:
        (y, lse), (ty, tlse) = context.attention_jvp(partial(bound, sharded=True), backend)
    if packed:
        y, ty = (x[0].transpose(0, 1) for x in (y, ty))
        lse, tlse = lse[0], tlse[0]
    if grid:
        y, lse, ty, tlse = (x.unflatten(0, grid) for x in (y, lse, ty, tlse))
    return ((y, lse), (ty, tlse)) if return_lse else (y, ty)


def _bound(
    given: Tensors, tangents: tuple[Tensor | None, ...], options: dict[str, Any], packed: bool, sharded: bool = False
) -> tuple[Call, tuple[Tensor | None, ...]]:
    """The call and its tangents, checked, as [B, H, S, D]."""
    call = bind(given, options, packed, sharded)
    for name, x, t in zip(LEARNED, given[: len(LEARNED)], tangents, strict=True):
        _check(name, x, t)
    laid = [batched(t) if packed and name in SEQUENCE_OF else t for name, t in zip(LEARNED, tangents, strict=True)]
    # autocast has cast the primals
    return call, tuple(None if t is None else t.to(getattr(call, name).dtype) for name, t in zip(LEARNED, laid, strict=True))


def _with_alphas(tangents: tuple[Tensor | None, ...], entmax: Any) -> tuple[Tensor | None, ...]:
    """That of alpha as the call sees it: where alpha is held within its range, it does not move."""
    t = tangents[PLACE_OF_ENTMAX]
    if t is None or entmax is None:
        return tangents
    if not isinstance(entmax, Tensor):
        raise TypeError(f"tentmax must be None where entmax is a number, got a tangent of {shown(entmax)}")
    _check("entmax", entmax, t)
    held = torch.where((entmax < ALPHAS[0]) | (entmax > ALPHAS[1]), 0, t)
    return (*tangents[:PLACE_OF_ENTMAX], held, *tangents[PLACE_OF_ENTMAX + 1 :])


def _check(name: str, primal: Tensor | None, tangent: Any) -> None:
    if tangent is None:
        return
    if primal is None:
        raise TypeError(f"t{name} must be None where {name} is, got a tangent of nothing")
    check_tensor(f"t{name}", tangent)
    if tangent.shape != primal.shape:
        raise ValueError(f"t{name} must have the shape of {name}, {tuple(primal.shape)}, got {tuple(tangent.shape)}")
    if tangent.dtype != primal.dtype:
        raise TypeError(f"t{name} must have the dtype of {name}, {primal.dtype}, got {tangent.dtype}")
    check_device(f"t{name}", tangent, name, primal.device)
