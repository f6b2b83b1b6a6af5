"""The call as torch.func wants it: one autograd function for each operator, made of public names only.

Operators see one level of nested transforms (grad of vmap of jvp); autograd functions with `setup_context` and `vmap` are taken
through all of them by torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight import batching, rules, second_batching


class Attention(torch.autograd.Function):
    """Of tensors, scalars and save_u: y, lse, u, largest logits of rows."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.backlight.attention(*args)

    setup_context = staticmethod(rules.keep_forward)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None, *_none: None) -> tuple[Any, ...]:
        return rules.gradients(ctx, dy, dlse, RUN)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return rules.pushed(ctx, tangents, RUN)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return batching.attention(Attention.apply, info.batch_size, in_dims, args)


class AttentionBackward(torch.autograd.Function):
    """Of tensors, scalars, y, lse, u, dy, dlse and needs: the gradients."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.backlight.attention_backward(*args)

    setup_context = staticmethod(rules.keep_backward)

    @staticmethod
    def backward(ctx: Any, *hats: Any) -> tuple[Any, ...]:
        return rules.twice(ctx, hats, RUN)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return rules.pushed_backward(ctx, tangents, RUN)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return batching.attention_backward(AttentionBackward.apply, info.batch_size, in_dims, args)


class AttentionJvp(torch.autograd.Function):
    """Of tensors, scalars, tangents and y, lse, u or None: y, lse, u (empty where they were given), ty, tlse, tu."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.backlight.attention_jvp(*args)

    setup_context = staticmethod(rules.keep_jvp)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        return rules.through_tangent(ctx, grads, RUN)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return rules.pushed_jvp(ctx, tangents, RUN)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return second_batching.attention_jvp(AttentionJvp.apply, info.batch_size, in_dims, args)


class AttentionSecond(torch.autograd.Function):
    """Of tensors, scalars, tangents, results, gradients at them and needs: gradients by the tensors and by the tangents."""

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return torch.ops.backlight.attention_second(*args)

    setup_context = staticmethod(rules.keep_second)

    @staticmethod
    def backward(ctx: Any, *hats: Any) -> tuple[Any, ...]:
        return rules.third(ctx, hats, RUN)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        return rules.pushed_second(ctx, tangents, RUN)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        return second_batching.attention_second(AttentionSecond.apply, info.batch_size, in_dims, args)


RUN = rules.Run(AttentionBackward.apply, AttentionJvp.apply, AttentionSecond.apply)


def attention(*args: Any) -> tuple[Tensor, ...]:
    """(y, lse, u, largest logits of rows) of tensors and scalars, under any transforms."""
    return Attention.apply(*args, True)


def attention_jvp(*args: Any) -> tuple[Tensor, ...]:
    """y, lse, u, ty, tlse, tu of tensors, scalars and tangents, under any transforms."""
    return AttentionJvp.apply(*args, None, None, None)
