"""torch's flash operators, answered by our kernels: its arguments and layouts on one side, a bound call on the other.

Where they differ: operators named after SDPA have [B, H, S, D], the others [B, S, H, D] or, packed, [T, H, D]. A row that sees
no key has lse +inf there and -inf here. Both align causal rows to the bottom right; SDPA itself, which aligns to the top left,
sends a causal call here only where rows and keys are as many. Dropout and what kernels refuse raises `TorchsOwn`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import registry, running
from backlight.binding import bind_like_before
from backlight.call import Call
from backlight.slot.counts import Counts
from backlight.spec import GRADIENTS, TERM_NAMES

# backends that are worth it: torch's own kernel is faster than `tiled`
KERNELS: tuple[str, ...] = ("hopper", "triton")
NEEDS = tuple(name in ("dq", "dk", "dv") for name in GRADIENTS)
NO_TERMS = (None,) * len(TERM_NAMES)
INF = float("inf")
# what a bound call keeps its kernels' reasons under
REASON = "reason against the slot"


class TorchsOwn(Exception):
    """The reason why a call is for torch's own kernel."""


class Answers:
    """One method for each operator, its arguments by torch's names and in torch's order."""

    def __init__(self, counts: Counts):
        self.counts = counts

    # --- [B, H, S, D] --------------------------------------------------------------------------------------------------------

    def sdpa(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        _refuse_dropout(dropout_p, return_debug_mask)
        y, lse = self._forward(_bound(query, key, value, None, None, _options(is_causal, scale)))
        return (y, lse, None, None, query.shape[2], key.shape[2], *_placeholders(query))

    def sdpa_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        _refuse_dropout(dropout_p)
        return self._backward(_bound(query, key, value, None, None, _options(is_causal, scale)), out, logsumexp, grad_out)

    # --- [B, S, H, D], or packed [T, H, D] -----------------------------------------------------------------------------------

    def flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        _refuse_dropout(dropout_p, return_debug_mask)
        for name, wanted in others.items():
            if wanted is not None:
                raise TorchsOwn(f"{name} is given")
        call = _bound_rows_first(
            (query, key, value), cum_seq_q, cum_seq_k, _options(is_causal, scale, window_size_left, window_size_right)
        )
        y, lse = self._forward(call)
        return (*((_packed(y), lse[0]) if call.varlen else (y.transpose(1, 2), lse)), *_placeholders(query))

    def flash_in_place(self, out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        y, lse, *_ = self.flash(*args, **kwargs)
        out.copy_(y)
        return lse

    def flash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: Tensor,
        unused: Tensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> tuple[Tensor, ...]:
        _refuse_dropout(dropout_p)
        call = _bound_rows_first(
            (query, key, value), cum_seq_q, cum_seq_k, _options(is_causal, scale, window_size_left, window_size_right)
        )
        if call.varlen:
            grads = self._backward(call, _batched(out), logsumexp[None], _batched(grad_out))
            return tuple(map(_packed, grads))
        grads = self._backward(call, out.transpose(1, 2), logsumexp, grad_out.transpose(1, 2))
        return tuple(grad.transpose(1, 2) for grad in grads)

    # --- bound calls ---------------------------------------------------------------------------------------------------------

    def _forward(self, call: Call) -> tuple[Tensor, Tensor]:
        y, lse, *_ = running.forward(call, None, False)
        self.counts.forward += 1
        return y, lse.masked_fill(lse == -INF, INF) if _may_see_nothing(call) else lse

    def _backward(self, call: Call, y: Tensor, lse: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if _may_see_nothing(call):
            lse = lse.masked_fill(lse == INF, -INF)
        grads = running.backward(call, None, y, lse, None, dy, None, NEEDS)
        self.counts.backward += 1
        return grads["dq"], grads["dk"], grads["dv"]


def _refuse_dropout(dropout_p: float, return_debug_mask: bool = False) -> None:
    if dropout_p:
        raise TorchsOwn("dropout_p is not 0")
    if return_debug_mask:
        raise TorchsOwn("return_debug_mask is True")


def _options(causal: bool, scale: float | None, left: int | None = None, right: int | None = None) -> dict[str, Any]:
    """Keywords of a call; -1 and None are an open side of the window."""
    left, right = (None if side is None or side < 0 else int(side) for side in (left, right))
    # a causal row ends at itself
    window = (left, None if causal else right)
    return {"deterministic": None, "causal": causal, "window": window, "scale": scale, "softcap": None, "bias_origin": 0}


def _bound_rows_first(qkv: tuple[Tensor, ...], cu_q: Tensor | None, cu_k: Tensor | None, options: dict[str, Any]) -> Call:
    """The call of tensors [B, S, H, D] or, with borders, [T, H, D]."""
    if cu_q is None:
        q, k, v = (x.transpose(1, 2) for x in qkv)
    else:
        q, k, v = qkv
    return _bound(q, k, v, cu_q, cu_k, options)


def _bound(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, options: dict[str, Any]) -> Call:
    """The call, which one of our kernels takes."""
    if v.shape[-1] != q.shape[-1]:
        raise TorchsOwn("values have other columns than queries")
    if cu_q is not None and cu_k is not None and cu_q.data_ptr() == cu_k.data_ptr() and cu_q.shape == cu_k.shape:
        cu_k = cu_q
    try:
        # nobody waits for a device to check borders: torch's own kernel does not look at them either
        call = bind_like_before((q, k, v, *NO_TERMS, cu_q, cu_k), options, cu_q is not None, None, trusted=True)
    except (TypeError, ValueError) as error:
        raise TorchsOwn(str(error)) from error
    if call.q.dtype != q.dtype:
        raise TorchsOwn("autocast is on around an operator that it does not know")
    reason = _reason(call)
    if reason:
        raise TorchsOwn(reason)
    return call


def _reason(call: Call) -> str:
    """Why no kernel takes the call; "" where one does."""
    if call.shared is None:
        return _find_reason(call)
    reason = call.shared.get(REASON)
    if reason is None:
        reason = call.shared[REASON] = _find_reason(call)
    return reason


def _find_reason(call: Call) -> str:
    reasons = {name: registry.why_not(registry.get(name), call) for name in KERNELS}
    if not all(reasons.values()):
        return ""
    return "; ".join(f"{name}: {', '.join(why)}" for name, why in reasons.items())


def _may_see_nothing(call: Call) -> bool:
    """Whether a row may see no key."""
    if call.varlen:
        return call.cu_seqlens_q is not call.cu_seqlens_k
    rows, keys = call.q.shape[2], call.k.shape[2]
    ends = call.spec.causal or call.spec.window[1] is not None
    return (ends and rows > keys) or not keys


def _placeholders(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed and offset of a dropout that there is not, and the empty debug mask."""
    return (
        torch.empty(2, dtype=torch.uint64, device=query.device),
        torch.empty((), dtype=torch.uint64, device=query.device),
        query.new_empty(0),
    )


def _batched(x: Tensor) -> Tensor:
    return x.transpose(0, 1)[None]


def _packed(x: Tensor) -> Tensor:
    return x[0].transpose(0, 1)
