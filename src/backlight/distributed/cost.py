"""What a sharded call costs per rank, on paper: time, bytes on the wire, memory. The constants of a machine are measured.

Compute follows eq. 42 and the blocks that `Shards` really has; bytes are those of `rule`, which a test compares with what is
sent. A rank of a ring computes step t while the keys of step t + 1 arrive, so a step takes the longer of the two; all-to-all
waits for its messages. A call takes as long as its slowest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backlight.distributed.blocks import Shards
from backlight.distributed.rule import Shape, sent_by_all_to_all, sent_by_ring


@dataclass(frozen=True)
class Machine:
    """One rank and its link.

    forward, backward: FLOP/s of a block's attention, counted by eq. 42.
    bandwidth: bytes/s a rank sends while it receives as much; latency: seconds per message.
    memory: bytes/s of elementwise work (merging parts, adding gradients).
    block: seconds of overhead per block call.
    """

    name: str
    forward: float
    backward: float
    bandwidth: float
    latency: float
    memory: float
    block: float


@dataclass(frozen=True)
class Cost:
    """Of the slowest rank: seconds in all, computing, on the wire, and waiting for the wire; bytes sent; bytes held."""

    seconds: float
    compute: float
    wire: float
    exposed: float
    sent: int
    memory: int


def flops(shape: Shape, pairs: int, backward: bool) -> float:
    """Eq. 42 for `pairs` visible pairs of one head."""
    columns = 3 * shape.d + 2 * shape.dv if backward else shape.d + shape.dv
    return 2.0 * shape.batch * shape.heads * pairs * columns


def cost(
    shape: Shape,
    shards: Shards,
    machine: Machine,
    strategy: str,
    backward: bool = False,
    ranks: Sequence[int] | None = None,
) -> Cost:
    """One call, forward or backward, of the slowest of `ranks`; None = all. One is enough where all do the same."""
    of_rank = {"ring": _ring, "all_to_all": _all_to_all}[strategy]
    found = [of_rank(shape, shards, machine, rank, backward) for rank in ranks or range(shards.world)]
    return max(found, key=lambda one: one.seconds)


def _block_seconds(shape: Shape, shards: Shards, machine: Machine, rank: int, source: int, backward: bool) -> float:
    """Computing what `rank` sees of `source`, parts merged."""
    blocks = shards.blocks(rank, source)
    rate = machine.backward if backward else machine.forward
    seconds = sum(flops(shape, block.pairs, backward) for block in blocks) / rate
    rows = sum(block.q1 - block.q0 for block in blocks) * shape.batch * shape.heads
    keys = sum(block.k1 - block.k0 for block in blocks) * shape.batch * shape.kv_heads
    # fp32: read and write the running sum, read the part
    summed = rows * shape.d + keys * (shape.d + shape.dv) if backward else rows * shape.dv
    return seconds + 12 * summed / machine.memory + machine.block * len(blocks)


def _ring(shape: Shape, shards: Shards, machine: Machine, rank: int, backward: bool) -> Cost:
    world = shards.world
    sources = [(rank - step) % world for step in range(world)]
    compute = [_block_seconds(shape, shards, machine, rank, source, backward) for source in sources]
    wire = [0.0] + [_step_seconds(shape, shards, machine, rank, source, backward) for source in sources[1:]]
    arriving = [*wire[1:], 0.0]
    seconds = sum(max(pair) for pair in zip(compute, arriving, strict=True))
    if backward and world > 1:
        # the gradients of the last keys travel home when all is computed
        seconds += wire[-1]
    sent = sent_by_ring(shape, shards, rank, backward)
    return Cost(seconds, sum(compute), sum(wire), seconds - sum(compute), sent, memory(shape, shards, rank, "ring", backward))


def _step_seconds(shape: Shape, shards: Shards, machine: Machine, rank: int, source: int, backward: bool) -> float:
    """Keys of `source` on their way to `rank`; backward, gradients of another rank's keys travel at the same time."""
    if not shards.sees(rank, source):
        return 0.0
    elements = shards.n_keys(source) * shape.batch * shape.kv_heads * (shape.d + shape.dv)
    width = shape.element + (max(4, shape.element) if backward else 0)
    passes = 1 if backward else (shape.key_sweeps * shape.d + shape.dv) / (shape.d + shape.dv)
    return elements * width * passes / machine.bandwidth + machine.latency


def _all_to_all(shape: Shape, shards: Shards, machine: Machine, rank: int, backward: bool) -> Cost:
    world = shards.world
    whole = Shards(shards.spec, "contiguous", 1, shards.sq, shards.sk, shards.borders, shards.n_bias)
    compute = flops(shape, whole.pairs(0), backward) / world / (machine.backward if backward else machine.forward)
    sent = sent_by_all_to_all(shape, shards, rank, backward)
    # packing and unpacking read and write what is sent and what is kept
    moved = 4 * sent * world / max(1, world - 1) / machine.memory
    wire = sent / machine.bandwidth + 3 * machine.latency * (world > 1)
    held = memory(shape, shards, rank, "all_to_all", backward)
    return Cost(compute + moved + machine.block + wire, compute + moved + machine.block, wire, wire, sent, held)


def memory(shape: Shape, shards: Shards, rank: int, strategy: str, backward: bool = True) -> int:
    """Bytes a rank holds at the peak of a call: what is kept for the backward, and what is in flight or being summed."""
    e, wide = shape.element, max(4, shape.element)
    rows = shards.n_rows(rank) * shape.batch * shape.heads
    keys = shards.n_keys(rank) * shape.batch * shape.kv_heads
    query, key, output = rows * shape.d, keys * (shape.d + shape.dv), rows * shape.dv
    kept = e * (query + key + output * (1 + (shape.tau or shape.entmax) + shape.gate)) + wide * rows
    if strategy == "all_to_all":
        # the shard itself and its trade for heads, then the gradients of both
        return kept + e * (query + key + output) * (2 if backward else 1)
    if shards.world == 1:
        return kept + (wide * (query + key) + e * output if backward else wide * output)
    # two shards of keys in flight; backward also sums of dq, dk, dv and two shards of gradients under way
    flight = 2 * e * key
    return kept + flight + (wide * (query + 3 * key) + e * output if backward else 2 * wide * output)
