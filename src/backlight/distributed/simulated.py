"""`backlight.attention` on whole tensors, computed by ranks that each see their own shard only.

For tests, for the doctor, and to run a sharded problem on one GPU. An autograd graph of each rank would have to wait for the
others inside one backward thread, so forward and backward of all ranks are one node here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from backlight import api
from backlight.arguments import check_borders, check_flag, check_tensor, check_whole
from backlight.binding import bind_batched
from backlight.call import counting_tensors, learned_tensors
from backlight.derivatives import differentiable_once, refuse_tangents
from backlight.distributed import autograd
from backlight.distributed.autograd import Options, Strategy, options_of
from backlight.distributed.context import ContextParallel
from backlight.distributed.layout import assemble
from backlight.distributed.masking import KEYS_OF_ROWS, ROWS_OF_POS
from backlight.distributed.simulation import Simulated, simulate
from backlight.spec import GRADIENTS, LEARNED, SEQUENCE_OF, TERM_NAMES

SEQUENCE = 2


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
    how = (world, layout, strategy, options.get("backend"), counting_tensors(call), rest)
    refuse_tangents(learned_tensors(call))
    y, lse = _SimulatedAttention.apply(how, *learned_tensors(call))
    if call.varlen:
        y, lse = y[0].transpose(0, 1), lse[0]
    return (y, lse) if return_lse else y


class _SimulatedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: tuple[Any, ...], *whole: Tensor | None) -> tuple[Tensor, Tensor]:
        world, layout, strategy, backend, (rows, pos, *borders), options = how

        def forward_of(rank: Simulated) -> tuple[Strategy, Options, list[Tensor | None], Tensor, Tensor]:
            context = ContextParallel(rank, layout, strategy)
            own = [
                context.shard(x, SEQUENCE) if x is not None and name in SEQUENCE_OF else x
                for name, x in zip(LEARNED, whole, strict=True)
            ]
            mask = [
                x if x is None else context.shard(x, dim)
                for x, dim in zip((rows, pos), (KEYS_OF_ROWS, ROWS_OF_POS), strict=True)
            ]
            chosen, call, _ = context.prepare(partial(bind_batched, (*own, *mask, *borders), options, True), backend)
            with torch.no_grad():
                y, lse, kept = chosen.forward(call)
            fixed = options_of(call, sum_learned=True)
            return chosen, fixed, kept, y, lse

        ctx.ranks = simulate(world, forward_of)
        ctx.layout = layout
        ctx.set_materialize_grads(False)
        # what gradients depend on, for `differentiable_once`
        ctx.save_for_backward(*whole)
        return assemble([rank[3] for rank in ctx.ranks], SEQUENCE, layout), assemble([rank[4] for rank in ctx.ranks], 2, layout)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dy: Tensor | None, dlse: Tensor | None) -> tuple[Any, ...]:
        needs = frozenset(name for name, need in zip(GRADIENTS, ctx.needs_input_grad[1:], strict=True) if need)

        def backward_of(rank: Simulated) -> dict[str, Tensor]:
            strategy, options, kept, y, _ = ctx.ranks[rank.rank]
            context = ContextParallel(rank, ctx.layout)
            own_dy = torch.zeros_like(y) if dy is None else context.shard(dy, SEQUENCE)
            own_dlse = None if dlse is None else context.shard(dlse, SEQUENCE)
            # the threads of the forward are gone, and so are their letter boxes
            strategy = type(strategy)(rank, strategy.shards, strategy.backend)  # type: ignore[attr-defined,call-arg]
            with torch.no_grad():
                return autograd.backward(strategy, options, tuple(kept), own_dy, own_dlse, needs)

        found = simulate(len(ctx.ranks), backward_of)
        return None, *(
            _whole(name, [own.get(name) for own in found], ctx.layout) if name in needs else None for name in GRADIENTS
        )


def _whole(name: str, parts: list[Any], layout: str) -> Tensor:
    return assemble(parts, SEQUENCE, layout) if name[1:] in SEQUENCE_OF else parts[0]
