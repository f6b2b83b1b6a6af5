"""Ring: rows stay, keys come by. In step t a rank works on the keys of the rank t places before it (eq. 43-46, 94).

The keys of step t + 1 are in flight while step t computes. They come straight from the rank that holds them, so a rank that
sees none of somebody's keys asks for nothing, and all know from the geometry alone who sends what to whom. Partial o, lse, dq,
dk and dv are summed in fp32 (fp64 for fp64 inputs), in the same order every time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from backlight.call import Call, Part, learned_tensors
from backlight.distributed.blocks import Block, Shards
from backlight.distributed.communicator import Communicator, Pending
from backlight.distributed.entmax import prepare_entmax, ring_entmax
from backlight.distributed.local import NARROW, block_backward, block_call, block_forward, block_lse
from backlight.distributed.masking import counts, local_rows, of_block
from backlight.distributed.merge import add_sink, merge_, merge_lse_
from backlight.distributed.ring_tangent import Moved, ring_tangent
from backlight.distributed.rows import finish, gated, prepare, stored

TAGS_PER_STEP = 4


@dataclass(frozen=True)
class Ring:
    """Strategy "ring" for one sharded problem. Kept for the backward: the call's tensors, y, lse and, with tau or entmax, u."""

    communicator: Communicator
    shards: Shards
    backend: str | None
    keeps_inputs: ClassVar = True

    @property
    def rank(self) -> int:
        return self.communicator.rank

    # --- forward -------------------------------------------------------------------------------------------------------------

    def forward(self, call: Call) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """(y, lse, what the backward needs) of this rank's rows."""
        if call.entmax is not None:
            y, lse, u = ring_entmax(self, call)
        elif call.tau is None:
            y, lse, u = *finish(call, *self._softmax(call)), None
        else:
            y, lse, u = self._elastic(call)
        return y, lse, [*learned_tensors(call), y, lse, u]

    def _softmax(self, call: Call) -> tuple[Tensor, Tensor]:
        """(o, lse) over the keys of all ranks, without the sink."""
        o, lse, mask = self.zeros(call), self.no_lse(call), self.masks(call)
        for _, source, (k, v) in self.visits([call.k, call.v], "forward"):
            for block in self.shards.blocks(self.rank, source):
                rows = slice(block.q0, block.q1)
                part = block_call(call, block, k, v, gate=False, part=Part(), mask=mask(block, source))
                merge_(o[:, :, rows], lse[:, :, rows], *block_forward(part, self.backend)[:2])
        return o, lse

    def _elastic(self, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """Eq. 46: the normaliser of the whole row first, from the keys alone; then plain sums of o and u."""
        lse, mask = self.no_lse(call), self.masks(call)
        for _, source, (k,) in self.visits([call.k], "forward, lse"):
            for block in self.shards.blocks(self.rank, source):
                part = block_call(call, block, k, k[..., :NARROW], gate=False, part=Part(), mask=mask(block, source))
                merge_lse_(lse[:, :, block.q0 : block.q1], block_lse(part, self.backend))
        lse = add_sink(lse, call.sink)[0].to(call.accumulator_dtype)
        o, u = self.zeros(call), self.zeros(call)
        whole = Part(lse, counts(call, self.shards, self.rank))
        for _, source, (k, v) in self.visits([call.k, call.v], "forward"):
            for block in self.shards.blocks(self.rank, source):
                part = block_call(call, block, k, v, gate=False, part=whole, mask=mask(block, source))
                o_part, _, u_part = block_forward(part, self.backend, save_u=True)
                assert u_part is not None
                o[:, :, block.q0 : block.q1] += o_part
                u[:, :, block.q0 : block.q1] += u_part
        return gated(call, o), lse, stored(u, call.q)

    def tangent(self, call: Call, tangents: Mapping[str, Tensor]) -> Moved:
        """y, lse, their tangents and what the backward needs, of this rank's rows."""
        return ring_tangent(self, call, tangents)

    # --- backward ------------------------------------------------------------------------------------------------------------

    def backward(
        self, call: Call, y: Tensor, lse: Tensor, u: Tensor | None, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
    ) -> dict[str, Tensor]:
        """The gradients in `needs` (eq. 44); those of bias, sink and tau over this rank's rows, in the accumulator dtype."""
        mask = self.masks(call)
        if call.entmax is None:
            prepared = prepare(call, y, lse, u, dy, dlse, needs)
            whole = Part() if call.tau is None else Part(lse, counts(call, self.shards, self.rank))
        else:
            prepared, whole = prepare_entmax(self, call, y, lse, u, dy, dlse, needs)
        summed = (("dq", call.q), ("dk", call.k), ("dv", call.v), ("dbias", call.bias), ("dentmax", call.entmax))
        sums = {
            # contiguous whatever the strides of the input: dk and dv are sent
            name: prepared.begun.get(name, x.new_zeros(x.shape, dtype=call.accumulator_dtype))
            for name, x in summed
            if name in needs and x is not None
        }
        if not sums:
            return prepared.gradients
        returns = _Returns(self, {name: sums[name] for name in ("dk", "dv") if name in sums})
        for step, source, (k, v) in self.visits([call.k, call.v], "backward"):
            keys_sums = returns.home if step == 0 else returns.blank(k, v)
            for block in self.shards.blocks(self.rank, source):
                rows, keys = slice(block.q0, block.q1), slice(block.k0, block.k1)
                part = block_call(call, block, k, v, gate=True, part=whole, mask=mask(block, source))
                found = block_backward(
                    part, self.backend, lse[:, :, rows], prepared.delta[:, :, rows], dy[:, :, rows], frozenset(sums)
                )
                for name, total in keys_sums.items():
                    total[:, :, keys] += found[name]
                if "dq" in sums:
                    sums["dq"][:, :, rows] += found["dq"]
                for name in {"dbias", "dentmax"} & found.keys():
                    sums[name] += found[name]
            if step > 0:
                returns.send(step, source, keys_sums)
        returns.collect()
        inputs = {"dq": call.q, "dk": call.k, "dv": call.v}
        done = {name: stored(sums[name], x) for name, x in inputs.items() if name in sums}
        return sums | done | prepared.gradients

    def masks(self, call: Call) -> Callable[[Block, int], tuple[Tensor | None, Tensor | None]]:
        """(rows, pos) of a block against the keys of a source."""
        rows = local_rows(call, self.shards, self.rank)
        return lambda block, source: of_block(rows, call.pos, block, self.shards, self.rank, source)

    # --- the ring ------------------------------------------------------------------------------------------------------------

    def visits(self, mine: Sequence[Tensor], what: str) -> Iterator[tuple[int, int, list[Tensor]]]:
        """(step, source, the source's tensors) of every step; tensors without keys where nothing of the source is visible."""
        world = self.shards.world
        own = [x.contiguous() for x in mine]
        coming, pending = self._start(own, 1, what) if world > 1 else ([], None)
        yield 0, self.rank, own
        for step in range(1, world):
            assert pending is not None
            pending.wait()
            present = coming
            if step + 1 < world:
                coming, pending = self._start(own, step + 1, what)
            yield step, (self.rank - step) % world, present

    def _start(self, own: list[Tensor], step: int, what: str) -> tuple[list[Tensor], Pending]:
        world = self.shards.world
        source, reader = (self.rank - step) % world, (self.rank + step) % world
        length = self.shards.n_keys(source) if self.shards.sees(self.rank, source) else 0
        coming = [x.new_empty(*x.shape[:2], length, x.shape[3]) for x in own]
        pending = self.communicator.exchange(
            [(reader, x) for x in own] if self.shards.sees(reader, self.rank) else [],
            [(source, x) for x in coming] if length else [],
            f"{what} {step} of {world - 1}, keys",
            TAGS_PER_STEP * step + (2 if what == "backward" else 1),
        )
        return coming, pending

    def zeros(self, call: Call) -> Tensor:
        return call.q.new_zeros(*call.q.shape[:3], call.v.shape[-1], dtype=call.accumulator_dtype)

    def no_lse(self, call: Call) -> Tensor:
        return call.q.new_full(call.q.shape[:3], -torch.inf, dtype=torch.float64)


class _Returns:
    """dk and dv on their way home: those of one step travel while the next computes."""

    def __init__(self, ring: Ring, home: dict[str, Tensor]):
        self.ring, self.home = ring, home
        self.arriving: dict[str, Tensor] = {}
        self.pending: Pending | None = None

    def blank(self, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        shapes = {"dk": k, "dv": v}
        return {name: total.new_zeros(shapes[name].shape) for name, total in self.home.items()}

    def send(self, step: int, source: int, found: dict[str, Tensor]) -> None:
        """Start sending what was found about the source's keys, and receiving what its counterpart found about ours."""
        self.collect()
        shards, rank = self.ring.shards, self.ring.rank
        reader = (rank + step) % shards.world
        if shards.sees(reader, rank):
            self.arriving = {name: torch.empty_like(total) for name, total in self.home.items()}
        self.pending = self.ring.communicator.exchange(
            [(source, gradient) for gradient in found.values()] if shards.sees(rank, source) else [],
            [(reader, buffer) for buffer in self.arriving.values()],
            f"backward {step} of {shards.world - 1}, gradients of keys",
            TAGS_PER_STEP * step + 3,
        )

    def collect(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        for name, gradient in self.arriving.items():
            self.home[name] += gradient
        self.pending, self.arriving = None, {}
