"""`backlight.attention` on whole tensors, computed by ranks that each see their own shard only.

For tests, for the doctor, and to run a sharded problem on one GPU. An autograd graph of each rank would have to wait for the
others inside one backward thread, so forward and backward of all ranks are one node here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from backlight import api
from backlight._private.torch import forward_mode
from backlight.arguments import check_borders, check_flag, check_tensor, check_whole
from backlight.binding import bind_batched
from backlight.call import Call, counting_tensors, learned_tensors
from backlight.derivatives import (
    NO_FORWARD_TWICE,
    NO_SECOND_SHARDED,
    NO_VMAP_SHARDED,
    differentiable_once,
    refuse,
    refuse_tracing,
)
from backlight.distributed import autograd
from backlight.distributed.autograd import Options, Strategy, options_of
from backlight.distributed.context import ContextParallel
from backlight.distributed.layout import assemble
from backlight.distributed.masking import KEYS_OF_ROWS, ROWS_OF_POS
from backlight.distributed.simulation import Simulated, simulate
from backlight.spec import GRADIENTS, LEARNED, SEQUENCE_OF, TERM_NAMES

SEQUENCE = 2
Tensors = tuple[Tensor | None, ...]
# strategy, options, tensors kept for the backward and y of a rank
_Left = tuple[Strategy, Options, list[Tensor | None], Tensor]
_Found = tuple[_Left, tuple[Tensor, ...]]


def simulated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    world: int = 2,
    layout: str = "zigzag",
    strategy: str = "auto",
    return_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`backlight.attention`, or with cu_seqlens `backlight.attention_varlen`, by `world` ranks as threads of this process.

    It shows that a sharded call is right, not how fast it is: the ranks share one device. Other keywords as in `attention`.
    """
    check_whole("world", world, least=1)
    check_flag("return_lse", return_lse)
    given = {"q": q, "k": k, "v": v} | {name: options[name] for name in SEQUENCE_OF if options.get(name) is not None}
    for name, x in given.items():
        check_tensor(name, x, "[B, H, S, D]" if cu_seqlens_q is None else "[T, H, D]")
    for name, borders in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if borders is not None:
            check_borders(name, borders)
    # whatever is wrong with the whole is said once, before it is cut
    call = api.call_of(q, k, v, cu_seqlens_q, cu_seqlens_k, **options)
    rest = {name: option for name, option in options.items() if name not in (*TERM_NAMES, "mask", "backend")}
    how = _How(world, layout, strategy, options.get("backend"), counting_tensors(call), rest)
    y, lse = _SimulatedAttention.apply(how, *learned_tensors(call))
    if call.varlen:
        y, lse = y[0].transpose(0, 1), lse[0]
    return (y, lse) if return_lse else y


@dataclass
class _How:
    """What a simulated call has besides its differentiable tensors; ranks: what its forward leaves to its backward."""

    world: int
    layout: str
    strategy: str
    backend: str | None
    counting: tuple[Tensor | None, ...]
    options: dict[str, Any]
    ranks: list[_Left] = field(default_factory=list)

    def prepare(self, rank: Simulated, whole: Tensors, tangent: bool) -> tuple[ContextParallel, Strategy, Call]:
        """A rank's strategy and its own call."""
        context = ContextParallel(rank, self.layout, self.strategy)
        rows, pos, *borders = self.counting
        mask = [
            x if x is None else context.shard(x, dim) for x, dim in zip((rows, pos), (KEYS_OF_ROWS, ROWS_OF_POS), strict=True)
        ]
        own = (*_own(context, whole), *mask, *borders)
        strategy, call, _ = context.prepare(partial(bind_batched, own, self.options, True), self.backend, tangent)
        return context, strategy, call

    def simulate(self, work: Callable[[Simulated], _Found]) -> tuple[Tensor, ...]:
        """Results of all ranks put together; what they leave is noted."""
        found = simulate(self.world, work)
        self.ranks[:] = [left for left, _ in found]
        return tuple(
            assemble(list(parts), SEQUENCE, self.layout) for parts in zip(*(values for _, values in found), strict=True)
        )


def _own(context: ContextParallel, whole: Tensors) -> list[Tensor | None]:
    """A rank's part of tensors that have a gradient, or of their tangents."""
    return [
        context.shard(x, SEQUENCE) if x is not None and name in SEQUENCE_OF else x
        for name, x in zip(LEARNED, whole, strict=True)
    ]


class _SimulatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(how: _How, *whole: Tensor | None) -> tuple[Tensor, ...]:
        whole = _primals(whole)

        def forward_of(rank: Simulated) -> _Found:
            _, strategy, call = how.prepare(rank, whole, tangent=False)
            with torch.no_grad():
                y, lse, kept = strategy.forward(call)
            return (strategy, options_of(call, sum_learned=True), kept, y), (y, lse)

        return how.simulate(forward_of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs[0], inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        return None, *_gradients(ctx, dy, dlse)

    @staticmethod
    def jvp(ctx: Any, _how: None, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        _, _, ty, tlse = _SimulatedTangent.apply(replace(ctx.how, ranks=[]), *ctx.saved_tensors, *tangents)
        return ty, tlse

    vmap = staticmethod(refuse(NO_VMAP_SHARDED))


class _SimulatedTangent(torch.autograd.Function):
    @staticmethod
    def forward(how: _How, *both: Tensor | None) -> tuple[Tensor, ...]:
        refuse_tracing()
        both = _primals(both)
        whole, tangents = both[: len(LEARNED)], both[len(LEARNED) :]

        def tangent_of(rank: Simulated) -> _Found:
            context, strategy, call = how.prepare(rank, whole, tangent=True)
            with torch.no_grad():
                y, lse, ty, tlse, kept = autograd.tangent(strategy, call, tuple(_own(context, tangents)))
            return (strategy, options_of(call, sum_learned=True), kept, y), (y, lse, ty, tlse)

        return how.simulate(tangent_of)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs[0], inputs[1 : 1 + len(LEARNED)])

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None, dty: Tensor | None, dtlse: Tensor | None) -> tuple[Any, ...]:
        if dty is not None or dtlse is not None:
            raise NotImplementedError(NO_SECOND_SHARDED)
        return None, *_gradients(ctx, dy, dlse), *(None for _ in LEARNED)

    jvp = staticmethod(refuse(NO_FORWARD_TWICE))
    vmap = staticmethod(refuse(NO_VMAP_SHARDED))


def _primals(tensors: Tensors) -> Tensors:
    """Without dual numbers, which threads would take for part of what they compute."""
    if forward_mode._current_level < 0:
        return tensors
    return tuple(None if x is None else forward_ad.unpack_dual(x).primal for x in tensors)


def _keep(ctx: Any, how: _How, whole: Tensors) -> None:
    ctx.how = how
    ctx.set_materialize_grads(False)
    # what gradients depend on, for `differentiable_once`
    ctx.save_for_backward(*whole)


def _gradients(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> Iterator[Tensor | None]:
    how = ctx.how
    needs = frozenset(name for name, need in zip(GRADIENTS, ctx.needs_input_grad[1:], strict=False) if need)

    def backward_of(rank: Simulated) -> dict[str, Tensor]:
        strategy, options, kept, y = how.ranks[rank.rank]
        context = ContextParallel(rank, how.layout)
        own_dy = torch.zeros_like(y) if dy is None else context.shard(dy, SEQUENCE)
        own_dlse = None if dlse is None else context.shard(dlse, SEQUENCE)
        # the threads of the forward are gone, and so are their letter boxes
        strategy = type(strategy)(rank, strategy.shards, strategy.backend)  # type: ignore[attr-defined,call-arg]
        with torch.no_grad():
            return autograd.backward(strategy, options, tuple(kept), own_dy, own_dlse, needs)

    found = simulate(how.world, backward_of)
    return (_whole(name, [own.get(name) for own in found], how.layout) if name in needs else None for name in GRADIENTS)


def _whole(name: str, parts: list[Any], layout: str) -> Tensor:
    return assemble(parts, SEQUENCE, layout) if name[1:] in SEQUENCE_OF else parts[0]
