"""All-to-all: for the time of one call, heads are sharded instead of the sequence.

Every rank sends to rank r the heads that are r's, and receives the whole sequence for its own heads; the backend then computes
an ordinary call, and the results go back the same way. Exact to the bit, since no sum is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from backlight import differentiating, registry
from backlight.call import Call, learned_tensors
from backlight.distributed.blocks import Shards
from backlight.distributed.communicator import Communicator
from backlight.distributed.layout import Range, cut, place
from backlight.distributed.ring_tangent import Moved
from backlight.distributed.rows import stored
from backlight.spec import OF_PAIRS, PER_HEAD, SEQUENCE_OF


@dataclass(frozen=True)
class AllToAll:
    """Strategy "all_to_all" for one sharded problem. Kept for the backward: the tensors of this rank's heads."""

    communicator: Communicator
    shards: Shards
    backend: str | None
    keeps_inputs: ClassVar = False

    def forward(self, call: Call) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """(y, lse, what the backward needs) of this rank's rows."""
        own, _ = self._own(call, {})
        y, lse, u, _ = registry.choose(own, self.backend).forward(own, True)
        (y_rows,) = self._to_rows([y], ["rows"], "forward, heads to sequence")
        (lse_rows,) = self._to_rows([lse[..., None]], ["rows"], "forward, lse")
        return stored(y_rows, call.q), lse_rows[..., 0], [*learned_tensors(own), y, lse, u]

    def tangent(self, call: Call, tangents: Mapping[str, Tensor]) -> Moved:
        """y, lse, their tangents and what the backward needs, of this rank's rows."""
        own, along = self._own(call, tangents)
        y, lse, u, ty, tlse, _ = differentiating.choose("tangent", own, self.backend).tangent(own, along, None)
        outputs = self._to_rows([y, ty], ["rows"] * 2, "forward, heads to sequence")
        sums = self._to_rows([lse[..., None], tlse[..., None]], ["rows"] * 2, "forward, lse")
        (y_rows, ty_rows), (lse_rows, tlse_rows) = (stored(x, call.q) for x in outputs), (x[..., 0] for x in sums)
        return Moved(y_rows, lse_rows, ty_rows, tlse_rows, [*learned_tensors(own), y, lse, u])

    def _own(self, call: Call, tangents: Mapping[str, Tensor]) -> tuple[Call, dict[str, Tensor]]:
        """The call of this rank's heads and the whole sequence, and its tangents."""
        cut = [name for name in SEQUENCE_OF if getattr(call, name) is not None]
        moving = [name for name in SEQUENCE_OF if name in tangents]
        sent = [*(getattr(call, name) for name in cut), *(tangents[name] for name in moving)]
        received = self._to_heads(sent, [SEQUENCE_OF[name] for name in (*cut, *moving)], "forward, sequence to heads")
        of_heads = {name: self._own_heads(getattr(call, name)) for name in PER_HEAD}
        of_heads |= {name: self._own_of(getattr(call, name)) for name in (*OF_PAIRS, "rows")}
        changes: dict[str, Any] = dict(zip(cut, received[: len(cut)], strict=True)) | of_heads
        along = dict(zip(moving, received[len(cut) :], strict=True))
        along |= {name: tangents[name][self._heads(len(tangents[name]))] for name in PER_HEAD if name in tangents}
        for name in OF_PAIRS:
            if (pairs := self._own_of(tangents.get(name))) is not None:
                along[name] = pairs
        return replace(call, **changes, _segments=None), along

    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """The gradients in `needs` of this rank's rows and keys; those of other terms for this rank's heads, else 0."""
        call = replace(call, rows=self._own_of(call.rows))
        (dy,) = self._to_heads([dy], ["rows"], "backward, dy to heads")
        if dlse is not None:
            dlse = self._to_heads([dlse[..., None]], ["rows"], "backward, dlse to heads")[0][..., 0]
        found = registry.choose(call, self.backend).backward(call, y, lse, u, dy, dlse, needs)
        names = [f"d{name}" for name in SEQUENCE_OF if f"d{name}" in found]
        sides = [SEQUENCE_OF[name[1:]] for name in names]
        rows = self._to_rows([found[name] for name in names], sides, "backward, heads to sequence")
        out = dict(zip(names, rows, strict=True))
        for name in found.keys() - out.keys():
            out[name] = self._among_all(found[name], 1 if name[1:] in OF_PAIRS else 0, call).to(call.accumulator_dtype)
        return out

    def _among_all(self, own: Tensor, axis: int, call: Call) -> Tensor:
        """A gradient of this rank's heads among zeros for the others; one that all heads share is a summand as it is."""
        if own.shape[axis] < call.q.shape[1]:
            return own
        shape = list(own.shape)
        shape[axis] *= self.shards.world
        total = own.new_zeros(shape)
        total.movedim(axis, 0)[self._heads(shape[axis])] = own.movedim(axis, 0)
        return total

    def _heads(self, heads: int, rank: int | None = None) -> slice:
        rank = self.communicator.rank if rank is None else rank
        own = heads // self.shards.world
        return slice(rank * own, (rank + 1) * own)

    def _own_heads(self, parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else parameter[self._heads(len(parameter))]

    def _own_of(self, term: Tensor | None) -> Tensor | None:
        """This rank's heads of a mask or of a pair bias, which may have one for all."""
        if term is None or term.shape[1] == 1:
            return term
        return term[:, self._heads(term.shape[1])]

    def _ranges(self, side: str, rank: int) -> tuple[Range, ...]:
        return self.shards.rows(rank) if side == "rows" else self.shards.keys(rank)

    def _length(self, side: str, rank: int | None = None) -> int:
        if rank is None:
            return self.shards.sq if side == "rows" else self.shards.sk
        return self.shards.n_rows(rank) if side == "rows" else self.shards.n_keys(rank)

    def _to_heads(self, tensors: Sequence[Tensor], sides: Sequence[str], step: str) -> list[Tensor]:
        """[B, H, own S, D] -> [B, H / world, S, D], the whole sequence in its own order. One message per pair of ranks."""
        world = self.shards.world
        both = list(zip(tensors, sides, strict=True))
        sent = [_flat([x[:, self._heads(x.shape[1], peer)] for x in tensors]) for peer in range(world)]
        shapes = [[self._shape(x, side, x.shape[1] // world, peer) for x, side in both] for peer in range(world)]
        received = [sent[0].new_empty(sum(map(_size, of_peer))) for of_peer in shapes]
        self.communicator.all_to_all(sent, received, step)
        out = [x.new_empty(self._shape(x, side, x.shape[1] // world)) for x, side in both]
        for peer in range(world):
            for whole, side, part in zip(out, sides, _unflat(received[peer], shapes[peer]), strict=True):
                place(whole, 2, self._ranges(side, peer), part)
        return out

    def _to_rows(self, tensors: Sequence[Tensor], sides: Sequence[str], step: str) -> list[Tensor]:
        """[B, H / world, S, D] -> [B, H, own S, D]: the inverse of `_to_heads`."""
        if not tensors:
            return []
        world, rank = self.shards.world, self.communicator.rank
        both = list(zip(tensors, sides, strict=True))
        sent = [_flat([cut(x, 2, self._ranges(side, peer)) for x, side in both]) for peer in range(world)]
        shapes = [self._shape(x, side, x.shape[1], rank) for x, side in both]
        received = [sent[0].new_empty(sum(map(_size, shapes))) for _ in range(world)]
        self.communicator.all_to_all(sent, received, step)
        by_peer = [_unflat(flat, shapes) for flat in received]
        return [torch.cat(heads, dim=1) for heads in zip(*by_peer, strict=True)]

    def _shape(self, x: Tensor, side: str, heads: int, rank: int | None = None) -> tuple[int, ...]:
        """[B, heads, S, D] of a tensor, S of the whole sequence or of a rank's shard."""
        return x.shape[0], heads, self._length(side, rank), x.shape[3]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _unflat(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [part.view(tuple(shape)) for part, shape in zip(flat.split([_size(s) for s in shapes]), shapes, strict=True)]
