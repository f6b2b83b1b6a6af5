"""One node of the autograd graph per rank: a strategy forward and backward, gradients of learned terms summed over the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from backlight.call import Call, call_with, counting_tensors, learned_tensors, manner_of
from backlight.derivatives import (
    NO_FORWARD_TWICE,
    NO_SECOND_SHARDED,
    NO_VMAP_SHARDED,
    differentiable_once,
    refuse,
    refuse_tracing,
)
from backlight.distributed.communicator import Communicator
from backlight.distributed.handshake import agree_backward, agree_tangents
from backlight.distributed.ring_tangent import Moved
from backlight.spec import GRADIENTS, LEARNED, SEQUENCE_OF, AttentionSpec

Tensors = tuple[Tensor | None, ...]
# of terms without rows or keys: every rank has a share of them
SHARED = tuple(f"d{name}" for name in LEARNED if name not in SEQUENCE_OF)


class Strategy(Protocol):
    """What `ring.Ring` and `heads.AllToAll` are. `forward` names the tensors to keep, `backward` gets them back in a call.

    keeps_inputs: those are the tensors of the call, y, lse and what follows; else none of them.
    """

    @property
    def communicator(self) -> Communicator: ...

    @property
    def keeps_inputs(self) -> bool: ...

    def forward(self, call: Call) -> tuple[Tensor, Tensor, list[Tensor | None]]: ...

    def tangent(self, call: Call, tangents: Mapping[str, Tensor]) -> Moved: ...

    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Options:
    """What a call has besides its differentiable tensors.

    counting: the tensors without a gradient, masks and borders.
    number: which of its context's calls it is, counted alike on every rank.
    compared: ranks make sure that they are in the same backward before they send anything.
    pair_heads: heads of the pair bias as it was given, 0 without one: of a rank's own it cannot be told whether all share it.
    """

    spec: AttentionSpec
    counting: tuple[Tensor | None, ...]
    manner: tuple[bool, ...]
    sum_learned: bool
    number: int = 0
    compared: bool = True
    pair_heads: int = 0

    def call(self, tensors: tuple[Tensor | None, ...]) -> Call:
        return call_with(self.spec, (*tensors, *self.counting), self.manner)


def options_of(call: Call, sum_learned: bool, **rest: Any) -> Options:
    pair_heads = 0 if call.pair_bias is None else call.pair_bias.shape[1]
    return Options(call.spec, counting_tensors(call), manner_of(call), sum_learned, pair_heads=pair_heads, **rest)


def run(strategy: Strategy, call: Call, sum_learned: bool, number: int = 0, compared: bool = True) -> tuple[Tensor, Tensor]:
    """(y, lse) of this rank's rows, differentiable."""
    options = options_of(call, sum_learned, number=number, compared=compared)
    y, lse, *_ = _ContextAttention.apply(strategy, options, *learned_tensors(call))
    return y, lse


def run_tangent(
    strategy: Strategy, call: Call, tangents: Tensors, sum_learned: bool, number: int = 0, compared: bool = True
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """((y, lse), (ty, tlse)) of this rank's rows; the first two are differentiable."""
    options = options_of(call, sum_learned, number=number, compared=compared)
    y, lse, ty, tlse, *_ = _ContextTangent.apply(strategy, options, *learned_tensors(call), *tangents)
    return (y, lse), (ty, tlse)


def tangent(strategy: Strategy, call: Call, tangents: Tensors) -> Moved:
    """Of this rank's rows; an input that has a tangent elsewhere has one here, zero where none is given."""
    given = agree_tangents(strategy.communicator, [t is not None for t in tangents])
    along = {
        name: torch.zeros_like(x) if t is None else t
        for name, x, t, somewhere in zip(LEARNED, learned_tensors(call), tangents, given, strict=True)
        if somewhere and x is not None
    }
    return strategy.tangent(call, along)


def backward(
    strategy: Strategy,
    options: Options,
    kept: tuple[Tensor | None, ...],
    dy: Tensor,
    dlse: Tensor | None,
    needs: frozenset[str],
) -> dict[str, Tensor]:
    """All gradients of this rank, learned terms summed over the mesh where asked for."""
    *tensors, y, lse, u = kept
    assert y is not None
    assert lse is not None
    if options.compared and agree_backward(strategy.communicator, options.number, dlse is not None) and dlse is None:
        # rows of another rank have a gradient for lse, and all-to-all sends them to this rank
        dlse = torch.zeros(dy.shape[:-1], dtype=lse.dtype, device=lse.device)
    found = strategy.backward(options.call(tuple(tensors)), y, lse, u, dy, dlse, needs)
    if "dpair_bias" in found and found["dpair_bias"].shape[1] != options.pair_heads:
        found["dpair_bias"] = found["dpair_bias"].sum(dim=1, keepdim=True)
    learned = [name for name in SHARED if name in needs]
    if learned and options.sum_learned and strategy.communicator.world > 1:
        flat = torch.cat([found[name].reshape(-1) for name in learned])
        strategy.communicator.all_reduce(flat, "backward, gradients of learned terms")
        sizes = [found[name].numel() for name in learned]
        found |= {name: part.view_as(found[name]) for name, part in zip(learned, flat.split(sizes), strict=True)}
    return found


class _ContextAttention(torch.autograd.Function):
    """Of a strategy, options and tensors: y, lse, and what else is kept for the backward, without a derivative."""

    @staticmethod
    def forward(strategy: Strategy, options: Options, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        y, lse, kept = strategy.forward(options.call(tensors))
        return y, lse, *_beside(strategy, kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        y, lse, *rest = output
        _keep(ctx, inputs[:2], inputs[2:], y, lse, rest)
        ctx.save_for_forward(*inputs[2:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Any, ...]:
        return None, None, *_gradients(ctx, dy, dlse)

    @staticmethod
    def jvp(ctx: Any, _strategy: None, _options: None, *tangents: Tensor | None) -> tuple[Any, ...]:
        _, _, ty, tlse, *rest = _ContextTangent.apply(ctx.strategy, ctx.options, *ctx.saved_tensors, *tangents)
        return ty, tlse, *(None for _ in rest)

    vmap = staticmethod(refuse(NO_VMAP_SHARDED))


class _ContextTangent(torch.autograd.Function):
    """Of a strategy, options, tensors and tangents: y, lse, ty, tlse, and what else the backward of the first two needs."""

    @staticmethod
    def forward(strategy: Strategy, options: Options, *both: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_tracing()
        y, lse, ty, tlse, kept = tangent(strategy, options.call(both[: len(LEARNED)]), both[len(LEARNED) :])
        return y, lse, ty, tlse, *_beside(strategy, kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        y, lse, _, _, *rest = output
        _keep(ctx, inputs[:2], inputs[2 : 2 + len(LEARNED)], y, lse, rest)

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, dy: Tensor | None, dlse: Tensor | None, dty: Tensor | None, dtlse: Tensor | None, *_: None
    ) -> tuple[Any, ...]:
        if dty is not None or dtlse is not None:
            raise NotImplementedError(NO_SECOND_SHARDED)
        return None, None, *_gradients(ctx, dy, dlse), *(None for _ in LEARNED)

    jvp = staticmethod(refuse(NO_FORWARD_TWICE))
    vmap = staticmethod(refuse(NO_VMAP_SHARDED))


def _beside(strategy: Strategy, kept: list[Tensor | None]) -> list[Tensor | None]:
    """What is kept besides tensors of the call, y and lse."""
    return kept[len(LEARNED) + 2 :] if strategy.keeps_inputs else kept


def _keep(ctx: Any, how: tuple[Any, ...], tensors: Tensors, y: Tensor, lse: Tensor, rest: list[Tensor | None]) -> None:
    ctx.set_materialize_grads(False)
    ctx.strategy, ctx.options = how
    ctx.save_for_backward(*((*tensors, y, lse, *rest) if ctx.strategy.keeps_inputs else rest))
    ctx.mark_non_differentiable(*(x for x in rest if x is not None))
    # shapes, dtypes and strides of the inputs; all-to-all does not keep the tensors themselves
    ctx.inputs = [None if x is None else _layout(x) for x in tensors]
    ctx.y = _layout(y)


def _gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> list[Tensor | None]:
    kept = ctx.saved_tensors
    if dy is None:
        # others may wait for what this rank knows about their keys
        dy = torch.zeros_like(ctx.y, device=kept[0].device)
    needs = frozenset(name for name, need in zip(GRADIENTS, ctx.needs_input_grad[2:], strict=False) if need)
    found = backward(ctx.strategy, ctx.options, kept, dy, dlse, needs)
    return [
        _like(found[name], like) if name in needs and like is not None else None
        for name, like in zip(GRADIENTS, ctx.inputs, strict=True)
    ]


def _layout(x: Tensor) -> Tensor:
    """Shape, dtype and strides of a tensor; `empty_like` would wrap them where a transform wraps the tensor."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _like(gradient: Tensor, like: Tensor) -> Tensor:
    """In the dtype and strides of the input."""
    if gradient.dtype == like.dtype and gradient.stride() == like.stride():
        return gradient
    return torch.empty_like(like, device=gradient.device).copy_(gradient)
