"""Which strategy a call takes when none is named: the one with fewer bytes on the wire, counted from the geometry."""

from __future__ import annotations

from dataclasses import dataclass

from backlight.distributed.blocks import Shards

# sweeps over the keys with entmax: bounds of thresholds, two to four steps, the last
ENTMAX_SWEEPS = 5


@dataclass(frozen=True)
class Shape:
    """What the bytes of a call depend on, besides its geometry."""

    batch: int
    heads: int
    kv_heads: int
    d: int
    dv: int
    element: int
    gate: bool = False
    tau: bool = False
    entmax: bool = False

    @property
    def key_sweeps(self) -> int:
        """How often a forward sends k: with tau for the lse, then for the output; with entmax about so often."""
        return 2 if self.tau else ENTMAX_SWEEPS if self.entmax else 1


def sent_by_ring(shape: Shape, shards: Shards, rank: int, backward: bool = False) -> int:
    """Bytes a rank sends: its keys to every rank that sees them; backward adds fp32 gradients of the keys it has seen."""
    per_key = shape.batch * shape.kv_heads
    readers = sum(shards.sees(other, rank) for other in range(shards.world) if other != rank)
    keys = readers * shards.n_keys(rank)
    if not backward:
        return keys * per_key * shape.element * (shape.d * shape.key_sweeps + shape.dv)
    seen = sum(shards.n_keys(other) for other in range(shards.world) if other != rank and shards.sees(rank, other))
    # with entmax k comes by once more, for the sums that a gradient by alpha needs
    sums = keys * per_key * shape.element * shape.d if shape.entmax else 0
    return sums + per_key * (shape.d + shape.dv) * (keys * shape.element + seen * max(4, shape.element))


def sent_by_all_to_all(shape: Shape, shards: Shards, rank: int, backward: bool = False) -> int:
    """Bytes a rank sends: all heads but its own of q, k, v and the gate, and its heads of y and lse of all other rows."""
    world, e = shards.world, shape.element
    rows, keys = shards.n_rows(rank), shards.n_keys(rank)
    gate = shape.dv if shape.gate else 0
    # elements per column that leave this rank's shard, and that leave this rank's heads
    rows_out, keys_out = (shape.batch * (h - h // world) * n for h, n in ((shape.heads, rows), (shape.kv_heads, keys)))
    rows_back = shape.batch * shape.heads // world * (shards.sq - rows)
    keys_back = shape.batch * shape.kv_heads // world * (shards.sk - keys)
    if not backward:
        lse = rows_back * max(4, e)
        return e * (rows_out * (shape.d + gate) + keys_out * (shape.d + shape.dv) + rows_back * shape.dv) + lse
    return e * (rows_out * shape.dv + rows_back * (shape.d + gate) + keys_back * (shape.d + shape.dv))


def divides(shape: Shape, world: int) -> bool:
    """All-to-all gives every rank the same number of key heads, with their query heads."""
    return shape.kv_heads % world == 0


def choose(shape: Shape, shards: Shards) -> str:
    """ "all_to_all" if the key heads divide by the world size and it sends fewer bytes, forward and backward, from the busiest
    rank; otherwise "ring", which hides what it sends behind the computation."""
    if not divides(shape, shards.world):
        return "ring"
    ranks = range(shards.world)
    ring = max(sent_by_ring(shape, shards, r) + sent_by_ring(shape, shards, r, True) for r in ranks)
    moved = max(sent_by_all_to_all(shape, shards, r) + sent_by_all_to_all(shape, shards, r, True) for r in ranks)
    return "all_to_all" if moved < ring else "ring"
