"""One block of a sharded problem, computed by whichever backend can: the only place that calls one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from backlight import differentiating, registry
from backlight.call import Call, Part, manner_of
from backlight.distributed.blocks import Block
from backlight.distributed.merge import Dual
from backlight.spec import packed_segments

# what blocks are cut for; a term that is not here needs all keys of a row in one place
RING_TAKES = frozenset({"causal", "window", "softcap", "bias", "sink", "tau", "gate", "entmax", "rows", "pos", "packed"})
# v of a forward that is run for its lse alone: as narrow as every backend takes it
NARROW = 8


def check_backend(call: Call, name: str | None, whole: bool, tangent: bool = False) -> None:
    """Raises `Unsupported` before anything is sent.

    tangent: that of the call is asked for, too.
    whole: heads are traded, so that the call is run as it is. Else in blocks, which differ from it in lengths and windows, and
    in the sink, which is added once per row.
    """
    choose = partial(differentiating.choose, "tangent") if tangent else registry.choose
    if whole:
        choose(call, name)
        return
    unknown = [feature for feature in call.features if feature not in RING_TAKES]
    if unknown:
        raise NotImplementedError(f"strategy must be all_to_all for a call with {unknown[0]}, which ring does not take")
    choose(typical_block(call), name)


def typical_block(call: Call) -> Call:
    """A call that a backend takes if it takes the blocks of this one."""
    elastic = call.tau is not None
    needs_lse = elastic or call.entmax is not None
    lse = call.q.new_empty(call.q.shape[:3], dtype=call.accumulator_dtype, device="meta") if needs_lse else None
    spec = call.spec.replace(sink=elastic and call.spec.sink)
    return replace(call, spec=spec, sink=call.sink if spec.sink else None, part=Part(lse, lse if elastic else None))


def block_call(
    call: Call,
    block: Block,
    k: Tensor,
    v: Tensor,
    *,
    gate: bool,
    part: Part,
    mask: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Call:
    """The block as a call of its own. Sink and gate act once per row, on the whole: they come along only where stated.

    gate: the backward of a block needs it to turn dy into do. The sink comes along with tau, where it tells that a single
    visible key does not have all the weight.
    mask: rows and pos of the block.
    """
    rows = slice(block.q0, block.q1)
    elastic = part.n is not None
    if part.lse is not None:
        lse, tlse, eta = (None if x is None else x[:, :, rows].contiguous() for x in (part.lse, part.tlse, part.eta))
        part = Part(lse, None if part.n is None else part.n[..., rows], tlse, eta)
    gated = gate and call.gate is not None
    spec = block.spec.replace(tau=elastic, sink=elastic and call.sink is not None, gate=gated)
    cu_q, cu_k = (None, None) if block.borders is None else (_on(call.q.device, values) for values in block.borders)
    return Call(
        spec,
        call.q[:, :, rows],
        k[:, :, block.k0 : block.k1],
        v[:, :, block.k0 : block.k1],
        call.bias if spec.bias else None,
        call.sink if spec.sink else None,
        call.tau if spec.tau else None,
        call.gate[:, :, rows] if gated and call.gate is not None else None,
        # a ring takes no pair bias
        None,
        call.entmax,
        *mask,
        cu_q,
        cu_k,
        *manner_of(call),
        part,
        None if block.borders is None else packed_segments(*block.borders),
    )


def block_forward(call: Call, name: str | None, save_u: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    """(o, lse, u) of a block."""
    o, lse, u, _ = registry.choose(call, name).forward(call, save_u)
    return o, lse, u


def block_lse(call: Call, name: str | None) -> Tensor:
    """lse of a block whose v is not at hand: the first columns of k stand in for it."""
    return block_forward(call, name)[1]


def block_sums(call: Call, name: str | None) -> Tensor:
    """[4,B,Hq,Sq]: F, W, W2 and the sum of p ln p of a block with entmax at the lse of its part."""
    return registry.choose(call, name).entmax_sums(call)  # type: ignore[attr-defined]


def block_tangent(call: Call, name: str | None, tangents: Mapping[str, Tensor]) -> tuple[Dual, Tensor | None]:
    """o, lse and their tangents, and u, of a block; of an elastic part they are summands (`Part`)."""
    met = {each: t for each, t in tangents.items() if getattr(call, each) is not None}
    o, lse, u, to, tlse, _ = differentiating.choose("tangent", call, name).tangent(call, met, None)
    return Dual(o, lse, to, tlse), u


def block_backward(
    call: Call, name: str | None, lse: Tensor, delta: Tensor, dy: Tensor, needs: frozenset[str]
) -> dict[str, Tensor]:
    """dq, dk, dv, dbias and dentmax of a block, of those in `needs`, from the lse and delta (eq. 20, less dlse) of whole rows.

    A backend forms delta as y . dy - dlse: with y = 0 and dlse = -delta it is the one given (eq. 44).
    """
    if not call.spec.bias:
        needs -= {"dbias"}
    y = dy.new_zeros(1).expand(dy.shape)
    u = y if call.spec.keeps_u else None
    return registry.choose(call, name).backward(call, y, lse.contiguous(), u, dy, -delta, needs)


@lru_cache(maxsize=512)
def _on(device: torch.device, cu_seqlens: tuple[int, ...]) -> Tensor:
    return torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
