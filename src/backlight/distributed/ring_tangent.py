"""Tangents of a ring: they travel with the keys, and parts are put together as dual numbers (eq. 54).

With tau the normaliser of the whole row and its tangent come first, from the keys alone; then every block gives summands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from backlight.call import Call, Part, learned_tensors
from backlight.distributed.keys import Keys
from backlight.distributed.local import NARROW, block_call, block_tangent
from backlight.distributed.masking import counts
from backlight.distributed.merge import Dual, add_sink_tangent, merge_tangent_
from backlight.distributed.rows import gated, gated_tangent, stored


class Moved(NamedTuple):
    """Of this rank's rows; kept: what the backward of y and lse needs."""

    y: Tensor
    lse: Tensor
    ty: Tensor
    tlse: Tensor
    kept: list[Tensor | None]


def ring_tangent(ring: Keys, call: Call, tangents: Mapping[str, Tensor]) -> Moved:
    dual, u = (_softmax(ring, call, tangents), None) if call.tau is None else _elastic(ring, call, tangents)
    lse, tlse = (x.to(call.accumulator_dtype) for x in (dual.lse, dual.tlse))
    y, ty = gated(call, dual.o), gated_tangent(call, tangents, dual)
    return Moved(y, lse, ty, tlse, [*learned_tensors(call), y, lse, None if u is None else stored(u, call.q)])


def _softmax(ring: Keys, call: Call, tangents: Mapping[str, Tensor]) -> Dual:
    """Over the keys of all ranks, sink included."""
    whole = Dual(ring.zeros(call), ring.no_lse(call), ring.zeros(call), torch.zeros_like(ring.no_lse(call)))
    for part, rows, along in _blocks(ring, call, tangents, Part(), "forward, tangents"):
        merge_tangent_(_rows_of(whole, rows), block_tangent(part, ring.backend, along)[0])
    return whole if call.sink is None else add_sink_tangent(whole, call.sink, tangents.get("sink"))


def _elastic(ring: Keys, call: Call, tangents: Mapping[str, Tensor]) -> tuple[Dual, Tensor]:
    """(the dual number of whole rows, u): eq. 50 with lse and tlse known is a plain sum over keys."""
    lse, tlse = _normaliser(ring, call, tangents)
    o, to, u = ring.zeros(call), ring.zeros(call), ring.zeros(call)
    dtype = call.accumulator_dtype
    known = Part(lse.to(dtype), counts(call, ring.shards, ring.rank), tlse.to(dtype))
    for part, rows, along in _blocks(ring, call, tangents, known, "forward, tangents"):
        found, of_u = block_tangent(part, ring.backend, along)
        assert of_u is not None
        for total, summand in ((o, found.o), (to, found.to), (u, of_u)):
            total[:, :, rows] += summand
    return Dual(o, lse, to, tlse), u


def _normaliser(ring: Keys, call: Call, tangents: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(lse, tlse) of whole rows from the keys alone, whose first columns stand in for v."""
    lse = ring.no_lse(call)
    nothing = call.q.new_zeros(*call.q.shape[:3], call.k[..., :NARROW].shape[-1], dtype=call.accumulator_dtype)
    whole = Dual(nothing, lse, torch.zeros_like(nothing), torch.zeros_like(lse))
    along = {name: t for name, t in tangents.items() if name in ("q", "k", "bias")}
    for part, rows, met in _blocks(ring, call, along, Part(), "forward, lse and tangents", keys_alone=True):
        merge_tangent_(_rows_of(whole, rows), block_tangent(part, ring.backend, met)[0])
    if call.sink is not None:
        whole = add_sink_tangent(whole, call.sink, tangents.get("sink"))
    return whole.lse, whole.tlse


def _rows_of(whole: Dual, rows: slice) -> Dual:
    return Dual(*(getattr(whole, name)[:, :, rows] for name in ("o", "lse", "to", "tlse")))


def _blocks(
    ring: Keys, call: Call, tangents: Mapping[str, Tensor], part: Part, what: str, keys_alone: bool = False
) -> Iterator[tuple[Call, slice, dict[str, Tensor]]]:
    """(a block, its rows, its tangents) of all ranks' keys, as they come by with theirs."""
    mask = ring.masks(call)
    moving = [name for name in ("k", "v") if name in tangents]
    sent = [call.k] if keys_alone else [call.k, call.v]
    for _, source, (k, *rest) in ring.visits([*sent, *(tangents[name] for name in moving)], what):
        v = k[..., :NARROW] if keys_alone else rest[0]
        coming = dict(zip(moving, rest[len(sent) - 1 :], strict=True))
        for block in ring.shards.blocks(ring.rank, source):
            rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
            along = {name: t[:, :, keys] for name, t in coming.items()}
            along |= {name: tangents[name] for name in ("bias", "tau") if name in tangents}
            if "q" in tangents:
                along["q"] = tangents["q"][:, :, rows]
            yield block_call(call, block, k, v, gate=False, part=part, mask=mask(block, source)), rows, along
