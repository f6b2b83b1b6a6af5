"""A bound call without operators, for when nothing but autograd looks at it.

Crossing the dispatcher four times costs more host time than everything else in a small call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from backlight import operators, running
from backlight._private.torch import (
    apply_of,
    dispatch_modes,
    forward_mode,
    function_modes,
    is_batched,
    is_wrapped,
    profiling,
    tracing,
    transforms_active,
)
from backlight.binding import batched, batched_all
from backlight.call import Call, counting_tensors, learned_tensors, manner_of
from backlight.spec import GRADIENTS, SEQUENCE_OF


class _Direct(torch.autograd.Function):
    """On bound calls; the tensors that autograd must see come beside the call, packed where the caller's are."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, backend: str | None, return_lse: bool, *tensors: Tensor | None
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        y, lse, u, peaks = running.forward(call, backend, True)
        if _is_packed(tensors):
            # autograd must not take results for views: it would miss changes in place
            y, lse = _packed(y).detach(), lse[0].detach()
        ctx.save_for_backward(*tensors, *counting_tensors(call), y, lse, u)
        ctx.options = call.spec, manner_of(call), call.trusted, backend, call.shared
        if peaks is not None:
            ctx.mark_non_differentiable(peaks)
            return y, lse, peaks
        # a second output costs the engine more than it costs us to leave it out
        return (y, lse) if return_lse else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None = None, _none: None = None) -> tuple[Any, ...]:
        return _gradients(ctx, dy, dlse)


def _gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    *tensors, y, lse, u = saved
    needs = ctx.needs_input_grad[3:]
    if dy is None:
        if dlse is None:
            return (None,) * (3 + len(GRADIENTS))
        dy = torch.zeros_like(y)
    # with gradients enabled (create_graph=True) autograd looks too: at gradients, which have gradients of their own
    packed, observed = _is_packed(saved), torch.is_grad_enabled() or not unobserved((*saved, dy, dlse))
    if packed:
        tensors = batched_all(tensors)
        y, dy = batched(y), batched(dy)
        lse, dlse = (None if x is None else x[None] for x in (lse, dlse))
    spec, manner, trusted, backend, shared = ctx.options
    call = Call(spec, *tensors, *manner)
    call.trusted, call.shared = trusted, shared
    if observed:
        args = (*operators.pack(call, backend), y, lse, y.new_empty(0) if u is None else u, dy, dlse, list(needs))
        found = operators.run().backward(*args)
        grads = {name: grad for name, grad, need in zip(GRADIENTS, found, needs, strict=True) if need}
    else:
        grads = running.backward(call, backend, y, lse, u, dy, dlse, needs)  # type: ignore[arg-type]
    if packed:
        grads = {name: _packed(grad) if name[1:] in SEQUENCE_OF else grad for name, grad in grads.items()}
    return (None, None, None, *map(grads.get, GRADIENTS))


def _is_packed(tensors: Sequence[Any]) -> bool:
    return tensors[0].dim() == 3


def _packed(x: Tensor) -> Tensor:
    """[1, H, T, D] as [T, H, D]."""
    return x[0].transpose(0, 1)


def unobserved(tensors: Iterable[Tensor | None]) -> bool:
    """Whether nothing but autograd looks at operators on these tensors."""
    if (
        torch.compiler.is_compiling()
        or dispatch_modes()
        or function_modes()
        or transforms_active()
        or tracing()
        or profiling()
        or forward_mode._current_level >= 0
    ):
        return False
    for x in tensors:
        if x is None:
            continue
        # a negative view holds its numbers with the other sign, which kernels would read
        if type(x) not in PLAIN or x.is_meta or x.is_neg() or is_wrapped(x) or is_batched(x):
            return False
    return True


PLAIN = (Tensor, torch.nn.Parameter)
# the checks of `Function.apply` are those of `unobserved`
_apply_direct = apply_of(_Direct)


def attention(
    call: Call, backend: str | None, return_lse: bool, packed: tuple[Tensor | None, ...] = ()
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(y, lse, largest logits of rows) of a bound call, without operators; all but y only where they are wanted.

    packed: the caller's tensors with a gradient, where those of the call are views that autograd has not seen; results are
    packed too.
    """
    tensors = packed or learned_tensors(call)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        found = _apply_direct(call, backend, return_lse, *tensors)
        if call.max_logit:
            return found
        return (*found, None) if return_lse else (found, None, None)
    y, lse, _, peaks = running.forward(call, backend, False)
    return (_packed(y), lse[0], peaks) if packed else (y, lse, peaks)
