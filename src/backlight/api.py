"""The public call: `attention`, `attention_varlen`, `explain`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from backlight import direct, operators, registry
from backlight.arguments import no_flag, shown
from backlight.binding import Tensors, Window, alphas_of, bind, bind_like_before, flattened, mask_tensors, tensors_given
from backlight.call import Call
from backlight.contexts import Context, blocks, innermost
from backlight.spec import LEARNED

if TYPE_CHECKING:
    import backlight.fp8
    import backlight.mask
else:
    # masks are loaded when somebody makes one, or asks for the type of `mask`
    backlight = sys.modules[__package__]

# of the tiles that `explain` counts
TILE = (128, 128)


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
    deterministic: bool | None
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
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor | backlight.fp8.Quantised,
    k: Tensor | backlight.fp8.Keys | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...


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
    deterministic: bool | None = None,
    backend: str | None = None,
    context: Context | None = None,
    precision: Literal["fp8"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
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
        deterministic: bitwise repeatable backward; None follows torch.are_deterministic_algorithms_enabled().
        backend: a backend's name, which never falls back; None chooses (see `explain`).
        context: q, k, v and gate are this rank's shard of a longer sequence (see `backlight.distributed.context_parallel`).
        precision: "fp8" multiplies in e4m3 (docs/fp8.md): on Hopper GPUs by a kernel, elsewhere emulated. q may be what
            `backlight.quantize` returned, k and v then None; or k what `backlight.quantize_keys` returned, v then None.

    Returns:
        y [B, Hq, Sq, Dv] in the dtype of q; with `return_lse` also lse [B, Hq, Sq], fp32 (fp64 for fp64 inputs), natural log.
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
    }
    rows, pos = (None, None) if mask is None else mask_tensors(mask)
    tensors = (q, k, v, bias, sink, tau, gate, pair_bias, alphas, rows, pos, None, None)
    if (fp8 := _fp8(q, k, precision)) is not None:
        return fp8.attend(tensors, options, False, return_lse, backend, innermost(context))
    return _attend(tensors, options, False, return_lse, backend, context, mask)


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
    pair_bias: Tensor | None = None,
    entmax: float | Tensor | None = None,
    mask: backlight.mask.Mask | None = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    context: Context | None = None,
    precision: Literal["fp8"] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` over packed sequences: nothing is visible across their borders.

    Args:
        q, k, v: [Tq, Hq, D], [Tk, Hkv, D], [Tk, Hkv, Dv]: sequences one after another.
        cu_seqlens_q: [Z + 1] int32 or int64: sequence z owns rows cu_seqlens_q[z] .. cu_seqlens_q[z + 1] - 1.
        cu_seqlens_k: the same for keys; None = cu_seqlens_q. Sequences may be empty on either side.
        gate: [Tq, Hq, Dv].
        pair_bias: [Zb, Hq or 1, rows or 1, keys], read by positions inside each sequence, so that rows and keys are at least
            those of the longest. Zb divides the number of sequences Z: each entry serves Z / Zb consecutive ones.
        mask: of one batch entry, its rows counted over all of q. The other keywords are those of `attention`; alignment and
            distances are per sequence. With precision="fp8" q, k and v are tensors.

    Returns:
        y [Tq, Hq, Dv]; with `return_lse` also lse [Hq, Tq].
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
    }
    rows, pos = (None, None) if mask is None else mask_tensors(mask)
    tensors = (q, k, v, bias, sink, tau, gate, pair_bias, alphas, rows, pos, cu_seqlens_q, cu_seqlens_k)
    if (fp8 := _fp8(q, k, precision)) is not None:
        return fp8.attend(tensors, options, True, return_lse, backend, innermost(context))
    return _attend(tensors, options, True, return_lse, backend, context)


def _attend(
    tensors: Tensors,
    options: dict[str, Any],
    packed: bool,
    return_lse: bool,
    backend: str | None,
    context: Context | None,
    mask: backlight.mask.Mask | None = None,
    trusted: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Both public calls: directly where nothing looks at them, through operators or a context elsewhere.

    mask: whose tensors are among these, of a call that is not packed. trusted: see `Call`.
    """
    if return_lse is not True and return_lse is not False:
        raise no_flag("return_lse", return_lse)
    if not packed and isinstance(tensors[0], Tensor) and tensors[0].dim() == 5:
        return _attend_grid(tensors, options, return_lse, backend, context, mask)
    if context is not None or blocks:
        context = innermost(context)
    known = mask is not None and mask.borders is not None and context is None
    if known and _documents().against(mask, tensors, packed, backend) is None:
        return _attend_documents(mask, tensors, options, return_lse, backend)  # type: ignore[arg-type]
    # a context checks it itself, so that the other ranks hear of it
    if backend is not None and context is None:
        check_backend(backend)
    if context is None and direct.unobserved(tensors):
        if packed:
            y, lse = _attend_packed(tensors, options, return_lse, backend, trusted)
        else:
            y, lse = direct.attention(bind_like_before(tensors, options, False, backend, trusted), backend, return_lse)
    else:
        if context is None:
            y, lse = operators.attention(bind(tensors, options, packed, trusted=trusted), backend)
        else:
            y, lse = context.attention(partial(bind, tensors, options, packed, sharded=True), backend)
        if packed:
            y, lse = y[0].transpose(0, 1), lse[0]
    return (y, lse) if return_lse else y  # type: ignore[return-value]


def _fp8(q: Any, k: Any, precision: Any) -> Any:
    """The way in of calls in e4m3, loaded where one is asked for."""
    if precision is None and isinstance(q, Tensor) and isinstance(k, Tensor):
        return None
    from backlight.fp8 import entry

    return entry if entry.asked_for(q, k, precision) else None


def _documents() -> Any:
    """Loaded when somebody has such a mask."""
    from backlight import documents

    return documents


def _attend_documents(
    mask: backlight.mask.Mask, tensors: Tensors, options: dict[str, Any], return_lse: bool, backend: str | None
) -> Tensor | tuple[Tensor, Tensor]:
    """A call with documents of known lengths, as packed sequences."""
    documents, batch = _documents(), tensors[0].shape[0]
    tensors, options, packed = documents.as_packed(mask, tensors, options)
    found = _attend(tensors, options, packed, return_lse, backend, None, trusted=True)
    if return_lse:
        y, lse = found
        return documents.as_batched(y, batch, packed), documents.as_batched(lse, batch, packed)
    return documents.as_batched(found, batch, packed)


def _attend_grid(
    tensors: Tensors,
    options: dict[str, Any],
    return_lse: bool,
    backend: str | None,
    context: Context | None,
    mask: backlight.mask.Mask | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Tensors of five axes, [B, N, H, S, D]."""
    tensors, grid = flattened(tensors)
    found = _attend(tensors, options, False, return_lse, backend, context, mask)
    if return_lse:
        y, lse = found
        return y.unflatten(0, grid), lse.unflatten(0, grid)
    return found.unflatten(0, grid)  # type: ignore[union-attr]


def _attend_packed(
    tensors: Tensors, options: dict[str, Any], return_lse: bool, backend: str | None, trusted: bool
) -> tuple[Tensor, Tensor | None]:
    """Packed tensors where nothing looks at the call."""
    q = tensors[0]
    if q is not None and torch.is_autocast_enabled(q.device.type):
        y, lse = direct.attention(bind(tensors, options, True, trusted=trusted), backend, True)
        return y[0].transpose(0, 1), lse[0]  # type: ignore[index]
    # autograd needs to see neither the views that make a batch of one, nor those that make it packed again
    with torch.no_grad():
        call = bind_like_before(tensors, options, True, backend, trusted)
    return direct.attention(call, backend, return_lse, packed=tensors[: len(LEARNED)])


@dataclass(frozen=True)
class Explanation:
    """Which backend would run a call, with which configuration, and why not the others.

    tiles: with a mask, the shares of tiles of `TILE` rows and keys that are empty (left out), full (not masked) and partial.
    documents: with a mask of documents that knows their lengths, whether the call runs packed, and why.
    """

    chosen: str | None
    config: object
    reasons: dict[str, tuple[str, ...]]
    tiles: tuple[float, float, float] | None = None
    documents: str | None = None

    def __str__(self) -> str:
        lines = []
        for name, why in self.reasons.items():
            if name == self.chosen:
                lines.append(f"{name}: runs this call with {self.config}")
            elif why:
                lines += [f"{name}: {reason}" for reason in why]
            else:
                lines.append(f"{name}: could run this call; an earlier backend is preferred")
        if self.tiles is not None:
            empty, full, partial = (f"{share:.0%}" for share in self.tiles)
            lines.append(f"mask: of tiles of {TILE[0]} x {TILE[1]}, {empty} are empty, {full} full and {partial} partial")
        if self.documents is not None:
            lines.append(f"mask: {self.documents}")
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
    """What `attention` (or, with cu_seqlens_q, `attention_varlen`) would do with the same arguments; computes nothing, but
    reads a mask, if there is one.

    Under a context (`backlight.distributed.context_parallel`): what this rank would do with its blocks; nothing is sent.
    """
    if return_lse is not True and return_lse is not False:
        raise no_flag("return_lse", return_lse)
    check_backend(backend)
    bound = _binding(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    context, tiles, said = innermost(context), None, None
    if context is None:
        call = bound()
        if call.rows is not None and not call.rows.is_meta:
            from backlight import intervals

            tiles = intervals.tile_shares(call, TILE)
        call, said = _as_documents(options.get("mask"), bound, backend, call)
        reasons = registry.refusals(call)
    else:
        call, reasons = context.explain(partial(bound, sharded=True), backend)
    wanted = reasons if backend is None else {backend: reasons[backend]}
    chosen = next((name for name, why in wanted.items() if not why), None)
    return Explanation(chosen, None if chosen is None else registry.get(chosen).config(call), reasons, tiles, said)


def _as_documents(
    mask: backlight.mask.Mask | None, bound: partial[Call], backend: str | None, call: Call
) -> tuple[Call, str | None]:
    """The call that runs, and a sentence about it where the mask knows the lengths of documents."""
    if mask is None or mask.borders is None:
        return call, None
    documents = _documents()
    tensors, options, packed = bound.args
    reason = documents.against(mask, tensors, packed, backend)
    if reason is not None:
        return call, f"documents of known lengths run by their intervals, not packed, because {reason}"
    tensors, options, packed = documents.as_packed(mask, tensors, {"causal": False} | options)
    found = bind(tensors, options, packed, trusted=True)
    return found, "documents of known lengths run packed, as attention_varlen does: tiles begin at their borders"


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
    bound = _binding(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    if innermost(None) is not None:
        raise ValueError("this call is one rank's shard of a longer sequence (context_parallel); leave the block first")
    return bound()


def _binding(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, options: dict[str, Any]) -> partial[Call]:
    """Makes the call of these arguments; terms stand among the options."""
    if cu_seqlens_q is None and cu_seqlens_k is not None:
        raise TypeError("cu_seqlens_q must be given with cu_seqlens_k, got None")
    options = dict(options)
    tensors = tensors_given(q, k, v, cu_seqlens_q, cu_seqlens_k, options)
    if cu_seqlens_q is None and isinstance(q, Tensor) and q.dim() == 5:
        tensors, _ = flattened(tensors)
    return partial(bind, tensors, options, cu_seqlens_q is not None)


def check_backend(backend: str | None) -> None:
    if backend is not None and not (isinstance(backend, str) and backend in registry.names()):
        raise ValueError(f"backend must be one of {', '.join(registry.names())} or None, got {shown(backend)}")
