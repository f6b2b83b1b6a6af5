"""Masks by row intervals of a sharded sequence: each rank is given those of its keys, and needs those of others (eq. 62).

A mask is O(S) whole numbers, so all ranks get all of it before anything else is sent. Intervals count rows of the whole
sequence. Positions of a rank ascend, so those of its rows that lie in an interval are one run again, also where it holds two
pieces of the sequence.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from backlight.call import Call
from backlight.distributed.blocks import Block, Shards
from backlight.distributed.communicator import Communicator
from backlight.distributed.layout import assemble, cut, positions_of
from backlight.intervals import row_counts

STEP = "forward, mask"
KEYS_OF_ROWS, ROWS_OF_POS = 3, 1


def gathered(communicator: Communicator, call: Call, shards: Shards) -> Call:
    """The call with the mask of the whole sequence, from the shards of all ranks."""
    if call.rows is None:
        return call
    held = [shards.n_keys(rank) for rank in range(shards.world)], [shards.n_rows(rank) for rank in range(shards.world)]
    rows = _whole(communicator, call.rows, KEYS_OF_ROWS, held[0], shards.layout)
    pos = None if call.pos is None else _whole(communicator, call.pos, ROWS_OF_POS, held[1], shards.layout)
    return replace(call, rows=rows, pos=pos)


def _whole(communicator: Communicator, shard: Tensor, dim: int, held: list[int], layout: str) -> Tensor:
    """dim is the last one."""
    padded = pad(shard, (0, max(held) - shard.shape[dim])).contiguous()
    shards = [x[..., :length] for x, length in zip(communicator.all_gather(padded, STEP), held, strict=True)]
    return assemble(shards, dim, layout)


def local_rows(call: Call, shards: Shards, rank: int) -> Tensor | None:
    """The intervals of all keys with rows counted as this rank holds them; as they are where they are compared with pos."""
    if call.rows is None or call.pos is not None:
        return call.rows
    held = positions_of(shards.rows(rank), call.rows.device).to(torch.int32)
    return torch.searchsorted(held, call.rows.contiguous()).to(torch.int32)


def of_block(
    rows: Tensor | None, pos: Tensor | None, block: Block, shards: Shards, rank: int, source: int
) -> tuple[Tensor | None, Tensor | None]:
    """(rows, pos) of a block: `rows` of `local_rows`, pos of the whole sequence."""
    if rows is None:
        return None, None
    own = cut(rows, KEYS_OF_ROWS, shards.keys(source))[..., block.k0 : block.k1]
    if pos is None:
        return (own - block.q0).contiguous(), None
    return own.contiguous(), cut(pos, ROWS_OF_POS, shards.rows(rank))[:, block.q0 : block.q1].contiguous()


def counts(call: Call, shards: Shards, rank: int) -> Tensor:
    """Visible keys of this rank's rows over the keys of all ranks: int32 [Sq], under a mask [B|1, Hq|1, Sq]."""
    device = call.q.device
    if call.rows is None:
        return shards.counts(rank, device)
    cu_q, cu_k = (None, None) if shards.borders is None else (torch.tensor(cu, device=device) for cu in shards.borders)
    found = row_counts(call.rows, call.pos, shards.spec, shards.sq, shards.sk, cu_q, cu_k)
    return cut(found, 2, shards.rows(rank)).contiguous()
