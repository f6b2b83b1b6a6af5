"""The public call: `attention`, `attention_varlen`, `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from backlight import ops, registry
from backlight.arguments import shown
from backlight.binding import (
    Window,
    autocast,
    batched,
    check,
    check_is_tensor,
    check_ranks,
    kind_of,
    make_spec,
    plain,
    recall,
    remember,
)
from backlight.call import Call
from backlight.contexts import Context, blocks, innermost


class Options(TypedDict, total=False):
    """The keywords of `attention` and `attention_varlen`, explained there."""

    causal: bool
    window: Window | None
    scale: float | None
    softcap: float | None
    bias: Tensor | None
    bias_origin: int
    sink: Tensor | None
    tau: Tensor | None
    gate: Tensor | None
    deterministic: bool | None
    backend: str | None
    context: Context | None


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_origin: int = 0,
    sink: Tensor | None = None,
    tau: Tensor | None = None,
    gate: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    context: Context | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention, differentiable in every tensor argument, in memory linear in the lengths.

    Args:
        q: [B, Hq, Sq, D], any strides; fp16, bf16, fp32 or fp64.
        k: [B, Hkv, Sk, D] with Hq a multiple of Hkv; query head h reads key head h // (Hq / Hkv).
        v: [B, Hkv, Sk, Dv].
        causal: hide keys after the row's own position. Rows align to the bottom right: row i sits at key i + Sk - Sq.
        window: (left, right): keys i'-left .. i'+right, both included; None on a side = unbounded.
        scale: factor on q.k, default D ** -0.5.
        softcap: c in c * tanh(score / c).
        bias: [Hq, n] learned bias by distance i' - j; 0 outside the table, which is not a mask.
        bias_origin: table column of distance 0; a two-sided table sets it to the number of negative distances.
        sink: [Hq] learned logit in the denominator.
        tau: [Hq] elastic softmax: weights are relu(p + tau / n), n = visible keys of the row; negative tau prunes.
        gate: [B, Hq, Sq, Dv]; the output is multiplied by sigmoid(gate).
        return_lse: also return the log-sum-exp of each row, differentiable.
        deterministic: bitwise repeatable backward; None follows torch.are_deterministic_algorithms_enabled().
        backend: a backend's name, which never falls back; None chooses (see `explain`).
        context: q, k, v and gate are this rank's shard of a longer sequence (see `backlight.distributed.context_parallel`).

    Returns:
        y [B, Hq, Sq, Dv] in the dtype of q; with `return_lse` also lse [B, Hq, Sq], fp32 (fp64 for fp64 inputs), natural log.
        Rows that see no key give y = 0, lse = -inf (with a sink: lse = sink) and zero gradients.
    """
    options = {
        "deterministic": deterministic,
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "bias_origin": bias_origin,
    }
    if return_lse is not True and return_lse is not False:
        raise _no_flag("return_lse", return_lse)
    tensors = (q, k, v, bias, sink, tau, gate, None, None)
    if context is None and not blocks and ops.unobserved(tensors):
        call = _bind_like_before(tensors, options, backend)
        y, lse = ops.attention_unobserved(call, backend, return_lse)
    else:
        terms = {"bias": bias, "sink": sink, "tau": tau, "gate": gate}
        y, lse = _run(_bind, (q, k, v), options | terms, backend, context)
    return (y, lse) if return_lse else y  # type: ignore[return-value]


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    bias_origin: int = 0,
    sink: Tensor | None = None,
    tau: Tensor | None = None,
    gate: Tensor | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    context: Context | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over packed sequences: nothing is visible across their borders.

    Args:
        q, k, v: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]: sequences one after another.
        cu_seqlens_q: [Z + 1] int32 or int64: sequence z owns rows cu_seqlens_q[z] .. cu_seqlens_q[z + 1] - 1.
        cu_seqlens_k: the same for keys; None = cu_seqlens_q. Sequences may be empty on either side.
        gate: [Tq, Hq, Dv]. The other keywords are those of `attention`; alignment and distances are per sequence.

    Returns:
        y [Tq, Hq, Dv]; with `return_lse` also lse [Hq, Tq].
    """
    options = {
        "deterministic": deterministic,
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "bias_origin": bias_origin,
    }
    if return_lse is not True and return_lse is not False:
        raise _no_flag("return_lse", return_lse)
    tensors = (q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k)
    plain = context is None and not blocks and cu_seqlens_q is not None and ops.unobserved(tensors)
    if plain and not torch.is_autocast_enabled(q.device.type):
        # autograd needs to see neither the views that make a batch of one, nor those that make it packed again
        with torch.no_grad():
            call = _bind_like_before(tensors, options, backend)
        y, lse = ops.attention_unobserved(call, backend, return_lse, packed=(q, k, v, bias, sink, tau, gate))
    else:
        terms = {"bias": bias, "sink": sink, "tau": tau, "gate": gate}
        y, lse = _run(_bind_packed, (q, k, v, cu_seqlens_q, cu_seqlens_k), options | terms, backend, context)
        y, lse = y[0].transpose(0, 1), lse[0]
    return (y, lse) if return_lse else y  # type: ignore[return-value]


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, with which configuration, and why not the others."""

    chosen: str | None
    config: object
    reasons: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        lines = []
        for name, why in self.reasons.items():
            if name == self.chosen:
                lines.append(f"{name}: runs this call with {self.config}")
            elif why:
                lines += [f"{name}: {reason}" for reason in why]
            else:
                lines.append(f"{name}: could run this call; an earlier backend is preferred")
        return "\n".join(lines)


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    backend: str | None = None,
    context: Context | None = None,
    return_lse: bool = False,
    **options: Any,
) -> Explanation:
    """What `attention` (or, with cu_seqlens_q, `attention_varlen`) would do with the same arguments; computes nothing.

    Under a context (`backlight.distributed.context_parallel`): what this rank would do with its blocks; nothing is sent.
    """
    if return_lse is not True and return_lse is not False:
        raise _no_flag("return_lse", return_lse)
    _check_both(cu_seqlens_q, cu_seqlens_k)
    tensors = (q, k, v) if cu_seqlens_q is None else (q, k, v, cu_seqlens_q, cu_seqlens_k)
    bind = _bind if cu_seqlens_q is None else _bind_packed
    context, backend = innermost(context), _known(backend)
    if context is None:
        call = bind(*tensors, **options)
        reasons = registry.refusals(call)
    else:
        call, reasons = context.explain(bind, tensors, options, backend)
    wanted = reasons if backend is None else {backend: reasons[backend]}
    chosen = next((name for name, why in wanted.items() if not why), None)
    return Explanation(chosen, None if chosen is None else registry.get(chosen).config(call), reasons)


def _run(
    bind: Callable[..., Call], tensors: tuple[Any, ...], options: dict[str, Any], backend: str | None, context: Context | None
) -> tuple[Tensor, Tensor]:
    context = innermost(context)
    if context is not None:
        return context.attention(bind, tensors, options, backend)
    return ops.attention(bind(*tensors, **options), _known(backend))


def _bind(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    deterministic: bool | None = None,
    gate: Tensor | None = None,
    **options: Any,
) -> Call:
    check_ranks({"q": q, "k": k, "v": v}, 4, "[B, H, S, D]")
    spec = make_spec(gate=gate, **options)
    deterministic = plain(deterministic)
    if not (deterministic is None or isinstance(deterministic, bool)):
        raise TypeError(f"deterministic must be a bool or None, got {deterministic!r}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v, gate = autocast(q, k, v, gate)
    bias, sink, tau = options.get("bias"), options.get("sink"), options.get("tau")
    return check(Call(spec, q, k, v, bias, sink, tau, gate, cu_seqlens_q, cu_seqlens_k, deterministic))


def _bind_like_before(tensors: tuple[Any, ...], options: dict[str, Any], backend: str | None) -> Call:
    """`_bind` or `_bind_packed`, with the checks left out where a call of the same kind has passed them."""
    window = options["window"]
    kind = kind_of(tensors, (*options.values(), *(window if isinstance(window, tuple) else ()), backend))
    call = recall(kind, tensors)
    if call is None:
        _known(backend)
        q, k, v, bias, sink, tau, gate, cu_q, cu_k = tensors
        options = options | {"bias": bias, "sink": sink, "tau": tau, "gate": gate}
        call = _bind(q, k, v, **options) if cu_q is None else _bind_packed(q, k, v, cu_q, cu_k, **options)
        remember(kind, tensors, call)
    return call


def _bind_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    gate: Tensor | None = None,
    **options: Any,
) -> Call:
    """Packed [T, H, D] as the batched case B = 1, in place."""
    check_is_tensor("cu_seqlens_q", cu_seqlens_q)
    check_ranks({"q": q, "k": k, "v": v} if gate is None else {"q": q, "k": k, "v": v, "gate": gate}, 3, "[T, H, D]")
    q, k, v, gate = (batched(x) for x in (q, k, v, gate))  # type: ignore[assignment]
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    check_is_tensor("cu_seqlens_k", cu_seqlens_k)
    # kernels read borders one after another; shared ones stay one tensor
    shared = cu_seqlens_k is cu_seqlens_q
    cu_seqlens_q = cu_seqlens_q.contiguous()
    cu_seqlens_k = cu_seqlens_q if shared else cu_seqlens_k.contiguous()
    return _bind(q, k, v, cu_seqlens_q, cu_seqlens_k, gate=gate, **options)


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    *,
    backend: str | None = None,
    **options: Any,
) -> Call:
    """The call that `attention` or, with cu_seqlens_q, `attention_varlen` makes of these arguments, checked."""
    _known(backend)
    _check_both(cu_seqlens_q, cu_seqlens_k)
    if innermost(None) is not None:
        raise ValueError("this call is one rank's shard of a longer sequence (context_parallel); leave the block first")
    return _bind(q, k, v, **options) if cu_seqlens_q is None else _bind_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)


def _no_flag(name: str, value: Any) -> TypeError:
    # numpy's own is called bool as well
    return TypeError(f"{name} must be a bool, got {type(value).__module__}.{type(value).__name__}")


def _check_both(cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> None:
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise TypeError("cu_seqlens_q must be given with cu_seqlens_k, got None")


def _known(backend: str | None) -> str | None:
    if backend is not None and not (isinstance(backend, str) and backend in registry.names()):
        raise ValueError(f"backend must be one of {', '.join(registry.names())} or None, got {shown(backend)}")
    return backend
