"""The call as torch.func wants it: one autograd function for each direction, made of public names only.

Operators see one level of nested transforms (grad of vmap of jvp); autograd functions with `setup_context` and `vmap` are taken
through all of them by torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import batching
from backlight.derivatives import refuse_second, refuse_tangent
from backlight.spec import LEARNED, TENSOR_NAMES

N_TENSORS, N_SCALARS, N_GRADIENTS = len(TENSOR_NAMES), 9, len(LEARNED)
TAU = TENSOR_NAMES.index("tau")


def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """What the backward needs: inputs are tensors, scalars, save_u."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    y, lse, u = output
    # as many as the direct path saves: checkpoints may recompute by one what ran by the other
    ctx.save_for_backward(*inputs[:N_TENSORS], y, lse, None if inputs[TAU] is None else u)
    ctx.scalars, ctx.saves_u = inputs[N_TENSORS : N_TENSORS + N_SCALARS], inputs[-1]


class Attention(torch.autograd.Function):
    """Of tensors, scalars and save_u: y, lse, u."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.backlight.attention(*args)

    setup_context = staticmethod(keep)
    jvp = staticmethod(refuse_tangent)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None, _du: None) -> tuple[Any, ...]:
        return gradients(ctx, dy, dlse, AttentionBackward.apply)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return batching.attention(Attention.apply, info.batch_size, in_dims, args)


class AttentionBackward(torch.autograd.Function):
    """Of tensors, scalars, y, lse, u, dy, dlse and needs: the gradients, which cannot be differentiated."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.backlight.attention_backward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    backward = staticmethod(refuse_second)
    jvp = staticmethod(refuse_tangent)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return batching.attention_backward(AttentionBackward.apply, info.batch_size, in_dims, args)


def gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None, run: Any) -> tuple[Any, ...]:
    """Gradients of all arguments of a forward that was kept; `run` is the operator of the backward, or stands for it."""
    none = (None,) * (N_TENSORS + N_SCALARS + 1)
    if dy is None and dlse is None:
        return none
    *tensors, y, lse, u = ctx.saved_tensors
    needs = ctx.needs_input_grad[:N_GRADIENTS]
    if tensors[TAU] is None:
        # a tensor without the axes of transforms
        u = torch.empty(0, dtype=y.dtype, device=y.device)
    elif not ctx.saves_u:
        u = torch.ops.backlight.attention(*tensors, *ctx.scalars, True)[2]
    found = run(*tensors, *ctx.scalars, y, lse, u, torch.zeros_like(y) if dy is None else dy, dlse, list(needs))
    used = [grad if need else None for grad, need in zip(found, needs, strict=True)]
    return (*used, *none[N_GRADIENTS:])


def attention(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(y, lse, u) of tensors and scalars, under any transforms."""
    return Attention.apply(*args, True)
