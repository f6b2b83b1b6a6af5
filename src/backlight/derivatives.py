"""What gradients of ours cannot do, said in one sentence instead of returning zeros.

Kernels give first derivatives in reverse mode. Whoever asks for more (a Hessian, a gradient penalty, a tangent) must hear it:
autograd takes a derivative that nobody has written for zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch

NO_SECOND = (
    "backlight.attention has no second derivative: its gradients cannot be differentiated again, as a Hessian, "
    "a Hessian-vector product, a gradient penalty and torch.autograd.functional.jvp need"
)
NO_TANGENT = "backlight.attention has no forward-mode derivative (jvp, jacfwd, linearize); use reverse mode (vjp, grad, jacrev)"


def refuse_second(ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError(NO_SECOND)


def refuse_tangent(ctx: Any, *_: Any) -> NoReturn:
    raise NotImplementedError(NO_TANGENT)


class _Once(torch.autograd.Function):
    """A backward as a node of its own: its results depend on all that it was given, in a way that cannot be followed."""

    @staticmethod
    def forward(ctx: Any, backward: Callable[..., Any], outer: Any, count: int, *tensors: Any) -> Any:
        return backward(outer, *tensors[:count])

    backward = staticmethod(refuse_second)
    jvp = staticmethod(refuse_tangent)


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of an autograd function whose results raise when they are differentiated.

    torch's `once_differentiable` sees the incoming gradients alone: where those need no gradient, it passes results off as
    constants, although they depend on what was saved.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        return _Once.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return once
