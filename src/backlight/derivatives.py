"""What derivatives of ours cannot do, said in one sentence instead of returning zeros.

A call has a tangent, gradients, and derivatives of both. A third derivative has no kernel, nor has a second one of a sharded
call. Whoever asks for it must hear it: autograd takes a derivative that nobody has written for zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

NO_THIRD = (
    "backlight.attention has no third derivative: derivatives of its tangent and its gradients cannot be differentiated again"
)
NO_FORWARD_TWICE = (
    "backlight.attention has no forward-mode derivative of a forward-mode derivative (jvp of jvp, jacfwd of jacfwd); "
    "use reverse mode for one of the two (hessian, jacfwd of jacrev)"
)
NO_TANGENT_IN_GRAPH = (
    "backlight.attention has no forward-mode derivative by dual numbers in a compiled graph; use torch.func.jvp or "
    "backlight.attention_jvp inside it"
)
NO_SECOND_SHARDED = (
    "backlight.attention has no second derivative under context parallel: gradients and tangents of a sharded call cannot be "
    "differentiated again, as a Hessian, a Hessian-vector product and a gradient penalty need"
)
NO_GRAPH_SHARDED = (
    "backlight.attention has no forward-mode derivative by linearize under context parallel: what ranks send one another is no "
    "part of a graph; use torch.func.jvp or backlight.attention_jvp"
)
NO_VMAP_SHARDED = (
    "backlight.attention has no torch.func.vmap under context parallel, nor what is made of it (jacfwd, jacrev, hessian); make "
    "a batch of what vmap goes over"
)


def refuse(sentence: str) -> Callable[..., NoReturn]:
    """In place of a derivative of an autograd function."""

    def refused(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(sentence)

    return refused


def refuse_tracing() -> None:
    """Before the tangent of a sharded call: a graph would hold what this rank received as a constant."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        raise NotImplementedError(NO_GRAPH_SHARDED)


class Guard(torch.autograd.Function):
    """Its argument, and a sentence for whoever differentiates by it.

    A node of its own: autograd does not tell a node which of its derivatives are asked for, and calls none that is not.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    backward = staticmethod(refuse(NO_THIRD))
    jvp = staticmethod(refuse(NO_THIRD))


class _Outer:
    """The context of a node, with these tensors for those it saved: under transforms they come without their wrappers."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Any, ...]):
        self._ctx, self.saved_tensors = ctx, saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _Once(torch.autograd.Function):
    """A backward as a node of its own: its results depend on all that it was given, in a way that cannot be followed."""

    @staticmethod
    def forward(backward: Callable[..., Any], outer: Any, count: int, *tensors: Any) -> Any:
        return backward(_Outer(outer, tensors[count:]), *tensors[:count])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = staticmethod(refuse(NO_SECOND_SHARDED))
    jvp = staticmethod(refuse(NO_SECOND_SHARDED))


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward of a sharded call whose results raise when they are differentiated.

    torch's `once_differentiable` sees the incoming gradients alone: where those need no gradient, it passes results off as
    constants, although they depend on what was saved.
    """

    @wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        return _Once.apply(backward, ctx, len(grads), *grads, *ctx.saved_tensors)

    return once
