"""The public calls: `attention`, `attention_varlen`; `explain` is in `explaining`."""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from backlight import direct, operators, registry
from backlight.arguments import shown
from backlight.binding import Tensors, Window, alphas_of, bind, bind_like_before, flattened, mask_tensors, tensors_given
from backlight.call import Call, Found, wanted
from backlight.contexts import Context, blocks, innermost
from backlight.spec import LEARNED

if TYPE_CHECKING:
    import backlight.fp8
    import backlight.mask
else:
    # masks are loaded when somebody makes one, or asks for the type of `mask`
    backlight = sys.modules[__package__]

# "batch": a sequence gives the same bits whatever else is in the call, too
Deterministic = bool | Literal["batch"] | None


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
    pair_bias: Tensor | None
    entmax: float | Tensor | None
    mask: backlight.mask.Mask | None
    deterministic: Deterministic
    exact_delta: bool | None
    backend: str | None
    context: Context | None
    precision: Literal["fp8"] | None


@overload
def attention(
    q: Tensor | backlight.fp8.Quantised,
    k: Tensor | backlight.fp8.Keys | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor | backlight.fp8.Quantised,
    k: Tensor | backlight.fp8.Keys | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor | backlight.fp8.Quantised,
    k: Tensor | backlight.fp8.Keys | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor | backlight.fp8.Quantised,
    k: Tensor | backlight.fp8.Keys | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...


def attention(
    q: Tensor | backlight.fp8.Quantised,
    k: Tensor | backlight.fp8.Keys | None = None,
    v: Tensor | None = None,
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
    pair_bias: Tensor | None = None,
    entmax: float | Tensor | None = None,
    mask: backlight.mask.Mask | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: Deterministic = None,
    exact_delta: bool | None = None,
    backend: str | None = None,
    context: Context | None = None,
    precision: Literal["fp8"] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """Softmax attention, differentiable in every tensor argument, in memory linear in the lengths.

    q, k, v, gate and the output may have five axes, [B, N, H, S, D]: the call is that of a batch of B * N. A pair_bias of five,
    [B, 1 or N, H, S, S], then serves all N entries of its b without a copy.

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
        pair_bias: [Bb, Hq or 1, Sq or 1, Sk] added to scores before they are masked; in the dtype of q or fp32, any strides. Bb
            divides B: each entry serves B / Bb consecutive ones of the batch. -inf hides a pair. Not together with tau.
        entmax: alpha of the alpha-entmax that takes the place of the softmax: a number from 1.05 to 2 (1: softmax), or [Hq],
            learned, held within that range. Weights of low scores are exactly zero. Not together with tau.
        mask: which rows see a key, by intervals of rows (`backlight.mask`), on top of causal and window.
        return_lse: also return the log-sum-exp of each row, differentiable.
        return_max_logit: also return the largest logit of each query head, for QK-clip; it has no gradient. Not together with
            entmax.
        deterministic: bitwise repeatable backward; None follows torch.are_deterministic_algorithms_enabled(). "batch": also the
            same bits for a sequence whatever else is in the call (docs/sums.md).
        exact_delta: keep what rounding took from y, too, so that the delta of the backward is as exact as if y were in fp32; as
            many bytes again as y has, between forward and backward. None: no. Not together with tau or entmax.
        backend: a backend's name, which never falls back; None chooses (see `explain`).
        context: q, k, v and gate are this rank's shard of a longer sequence (see `backlight.distributed.context_parallel`).
        precision: "fp8" multiplies in e4m3 (docs/fp8.md); q may be what `quantize` returned, or k what `quantize_keys` did.

    Returns:
        y [B, Hq, Sq, Dv] in the dtype of q; with `return_lse` also lse [B, Hq, Sq], fp32 (fp64 for fp64 inputs), natural log;
        with `return_max_logit` also [Hq], fp32: the largest scale * q.k over batch, rows and the keys they see, before softcap
        and biases, -inf where nothing is seen. In this order.
        Rows that see no key give y = 0, lse = -inf (with a sink: lse = sink) and zero gradients.
    """
    alphas, alpha = (None, None) if entmax is None else alphas_of(entmax, q)
    options = {
        "deterministic": deterministic,
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "bias_origin": bias_origin,
        "alpha": alpha,
        "exact_delta": exact_delta,
        "max_logit": return_max_logit,
    }
    rows, pos = (None, None) if mask is None else mask_tensors(mask)
    tensors = (q, k, v, bias, sink, tau, gate, pair_bias, alphas, rows, pos, None, None)
    if (precision is not None or not isinstance(q, Tensor) or not isinstance(k, Tensor)) and (fp8 := _fp8(q, k, precision)):
        return fp8.attend(tensors, options, False, return_lse, backend, innermost(context))
    found = _attend(tensors, options, False, return_lse, backend, context, mask)
    return wanted(found, return_lse, return_max_logit) if return_lse or return_max_logit else found[0]


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[False] = False,
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
    return_max_logit: Literal[False] = False,
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    *,
    return_lse: Literal[True],
    return_max_logit: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor, Tensor]: ...


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
    pair_bias: Tensor | None = None,
    entmax: float | Tensor | None = None,
    mask: backlight.mask.Mask | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
    deterministic: Deterministic = None,
    exact_delta: bool | None = None,
    backend: str | None = None,
    context: Context | None = None,
    precision: Literal["fp8"] | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`attention` over packed sequences: nothing is visible across their borders.

    Args:
        q, k, v: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]: sequences one after another.
        cu_seqlens_q: [Z + 1] int32 or int64: sequence z owns rows cu_seqlens_q[z] .. cu_seqlens_q[z + 1] - 1.
        cu_seqlens_k: the same for keys; None = cu_seqlens_q. Sequences may be empty on either side.
        gate: [Tq, Hq, Dv].
        pair_bias: [Zb, Hq or 1, rows or 1, keys], read by positions inside each sequence, so that rows and keys are at least
            those of the longest. Zb divides the number of sequences Z: each entry serves Z / Zb consecutive ones.
        mask: of one batch entry, its rows counted over all of q. The other keywords are those of `attention`; alignment and
            distances are per sequence.

    Returns:
        y [Tq, Hq, Dv]; with `return_lse` also lse [Hq, Tq]; with `return_max_logit` also [Hq], over all sequences.
    """
    alphas, alpha = (None, None) if entmax is None else alphas_of(entmax, q)
    options = {
        "deterministic": deterministic,
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "bias_origin": bias_origin,
        "alpha": alpha,
        "exact_delta": exact_delta,
        "max_logit": return_max_logit,
    }
    rows, pos = (None, None) if mask is None else mask_tensors(mask)
    tensors = (q, k, v, bias, sink, tau, gate, pair_bias, alphas, rows, pos, cu_seqlens_q, cu_seqlens_k)
    if (precision is not None or not isinstance(q, Tensor) or not isinstance(k, Tensor)) and (fp8 := _fp8(q, k, precision)):
        return fp8.attend(tensors, options, True, return_lse, backend, innermost(context))
    found = _attend(tensors, options, True, return_lse, backend, context)
    return wanted(found, return_lse, return_max_logit) if return_lse or return_max_logit else found[0]


def _fp8(q: Any, k: Any, precision: Any) -> Any:
    """The way in of calls in e4m3, loaded where one is asked for."""
    from backlight.fp8 import entry

    return entry if entry.asked_for(q, k, precision) else None


def _attend(
    tensors: Tensors,
    options: dict[str, Any],
    packed: bool,
    return_lse: bool,
    backend: str | None,
    context: Context | None,
    mask: backlight.mask.Mask | None = None,
    trusted: bool = False,
) -> Found:
    """Both public calls: directly where nothing looks at them, through operators or a context elsewhere.

    mask: whose tensors are among these, of a call that is not packed. trusted: see `Call`.
    """
    if type(return_lse) is not bool or type(options["max_logit"]) is not bool:
        check_flags(return_lse, options["max_logit"])
    if not packed and isinstance(tensors[0], Tensor) and tensors[0].dim() == 5:
        return _attend_grid(tensors, options, return_lse, backend, context, mask)
    if context is not None or blocks:
        context = innermost(context)
    known = mask is not None and mask.borders is not None and context is None
    if known and _documents().against(mask, tensors, packed, backend, options["deterministic"] == "batch") is None:
        return _attend_documents(mask, tensors, options, return_lse, backend)  # type: ignore[arg-type]
    # a context checks it itself, so that the other ranks hear of it
    if backend is not None and context is None:
        check_backend(backend)
    lse: Tensor | None
    peaks: Tensor | None = None
    if context is None and direct.unobserved(tensors):
        if packed:
            y, lse, peaks = _attend_packed(tensors, options, return_lse, backend, trusted)
        else:
            y, lse, peaks = direct.attention(bind_like_before(tensors, options, False, backend, trusted), backend, return_lse)
    else:
        if context is None:
            y, lse, peaks = operators.attention(bind(tensors, options, packed, trusted=trusted), backend)
        else:
            y, lse = context.attention(partial(bind, tensors, options, packed, sharded=True), backend)
        if packed:
            y, lse = y[0].transpose(0, 1), lse[0]
    return y, lse, _of_heads(peaks) if options["max_logit"] else None


def _of_heads(peaks: Tensor | None) -> Tensor:
    """The largest logit of each head, of those of rows [B, Hq, Sq]: -inf where there are none."""
    assert peaks is not None
    return peaks.amax((0, 2)) if peaks.shape[0] and peaks.shape[2] else peaks.new_full(peaks.shape[1:2], -math.inf)


def _documents() -> Any:
    """Loaded when somebody has such a mask."""
    from backlight import documents

    return documents


def _attend_documents(
    mask: backlight.mask.Mask, tensors: Tensors, options: dict[str, Any], return_lse: bool, backend: str | None
) -> Found:
    """A call with documents of known lengths, as packed sequences."""
    documents, (batch, heads, *_) = _documents(), tensors[0].shape
    tensors, options, packed = documents.as_packed(mask, tensors, options)
    y, lse, max_logit = _attend(tensors, options, packed, return_lse, backend, None, trusted=True)
    if lse is not None:
        lse = documents.as_batched(lse, batch, packed)
    if max_logit is not None:
        # batch entries may have become heads
        max_logit = max_logit.unflatten(0, (-1, heads)).amax(0)
    return documents.as_batched(y, batch, packed), lse, max_logit


def _attend_grid(
    tensors: Tensors,
    options: dict[str, Any],
    return_lse: bool,
    backend: str | None,
    context: Context | None,
    mask: backlight.mask.Mask | None,
) -> Found:
    """Tensors of five axes, [B, N, H, S, D]."""
    tensors, grid = flattened(tensors)
    y, lse, max_logit = _attend(tensors, options, False, return_lse, backend, context, mask)
    return y.unflatten(0, grid), None if lse is None else lse.unflatten(0, grid), max_logit


def _attend_packed(tensors: Tensors, options: dict[str, Any], return_lse: bool, backend: str | None, trusted: bool) -> Found:
    """Packed tensors where nothing looks at the call; the largest logits are those of rows."""
    q = tensors[0]
    if q is not None and torch.is_autocast_enabled(q.device.type):
        y, lse, peaks = direct.attention(bind(tensors, options, True, trusted=trusted), backend, True)
        return y[0].transpose(0, 1), lse[0], peaks  # type: ignore[index]
    # autograd needs to see neither the views that make a batch of one, nor those that make it packed again
    with torch.no_grad():
        call = bind_like_before(tensors, options, True, backend, trusted)
    return direct.attention(call, backend, return_lse, packed=tensors[: len(LEARNED)])


def call_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    backend: str | None = None,
    **options: Any,
) -> Call:
    """The call that `attention` or, with cu_seqlens_q, `attention_varlen` makes of these arguments, checked."""
    check_backend(backend)
    bound = binding_of(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    if innermost(None) is not None:
        raise ValueError("this call is one rank's shard of a longer sequence (context_parallel); leave the block first")
    return bound()


def binding_of(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: dict[str, Any]) -> partial[Call]:
    """Makes the call of these arguments; terms stand among the options."""
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise TypeError("cu_seqlens_q must be given with cu_seqlens_k, got None")
    options = dict(options)
    tensors = tensors_given(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    if cu_seqlens_q is None and isinstance(q, Tensor) and q.dim() == 5:
        tensors, _ = flattened(tensors)
    return partial(bind, tensors, options, cu_seqlens_q is not None)


def check_flags(return_lse: Any, return_max_logit: Any) -> None:
    for name, value in (("return_lse", return_lse), ("return_max_logit", return_max_logit)):
        if value is not True and value is not False:
            kind = type(value)
            # NumPy's bool is called bool too: the module tells them apart
            where = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            raise TypeError(f"{name} must be a bool, got {where}{kind.__name__}")


def check_backend(backend: str | None) -> None:
    if backend is not None and not (isinstance(backend, str) and backend in registry.names()):
        raise ValueError(f"backend must be one of {', '.join(registry.names())} or None, got {shown(backend)}")
