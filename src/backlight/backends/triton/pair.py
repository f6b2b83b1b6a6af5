"""Device code of the pair bias (eq. 67): one tile of it, read in place in either orientation."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Pair(NamedTuple):
    """A pair bias or its gradient [Bb,Hb,Rb,Sk] in memory: pointer and strides, 0 along axes it does not have. sharing: batch
    entries, or packed sequences, to one of its entries; rows: Rb; keys: Sk, of which the kernel knows whether whole vectors end
    there."""

    ptr: Any
    batch: Any
    head: Any
    row: Any
    key: Any
    sharing: Any
    rows: Any
    keys: Any


@triton.jit
def pair_place(b, h, i0, j0, segment, V: tl.constexpr):
    """Where a tile stands in the pair bias: packed sequences are its batch. i0: row of the sequence."""
    entry = b
    if V.VARLEN:
        entry = segment.number
    return entry, h, i0, j0


@triton.jit
def block_place(block, j0, V: tl.constexpr):
    """`pair_place` of a block of rows."""
    return pair_place(block.b, block.h, block.row - block.segment.q_start, j0, block.segment, V)


@triton.jit
def pair_tile(
    pair, descriptor, place, sq, V: tl.constexpr, TMA: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    TURNED: tl.constexpr, BEFORE: tl.constexpr = False,
):  # fmt: skip
    """fp32 [BM, BN], TURNED [BN, BM]; zero beyond the ends. By key: [1, BN] or [BN, 1]. place: batch entry or packed sequence,
    head, first row and key, which BEFORE lets lie before all of them. sq: rows of it."""
    b, h, i0, j0 = place
    start = pair_start(pair, b, h, i0, j0)
    rows = tl.arange(0, BM)
    keys = tl.arange(0, BN)
    sq = tl.minimum(sq, pair.rows)
    exists = j0 + keys < pair.keys
    if BEFORE:
        exists = exists & (j0 + keys >= 0)
    if V.PAIR == 1:
        value = tl.load(start + keys * pair.key, mask=exists, other=0.0)
        tile = value[:, None] if TURNED else value[None, :]
    elif TMA:
        # beyond the tensor's own heads a descriptor reads zeros
        own_head = tl.where(pair.head == 0, 0, h)
        tile = descriptor.load([b // pair.sharing, own_head, i0, j0]).reshape([BM, BN])
        if TURNED:
            tile = tl.trans(tile)
    elif TURNED:
        inside = exists[:, None] & (i0 + rows < sq)[None, :]
        tile = tl.load(start + (keys[:, None] * pair.key + rows[None, :] * pair.row), mask=inside, other=0.0)
    else:
        inside = (i0 + rows < sq)[:, None] & exists[None, :]
        tile = tl.load(start + (rows[:, None] * pair.row + keys[None, :] * pair.key), mask=inside, other=0.0)
    return tile.to(tl.float32)


@triton.jit
def store_pair(pair, place, sq, value, BM: tl.constexpr, BN: tl.constexpr):
    """A tile [BM, BN] of the gradient."""
    b, h, i0, j0 = place
    rows = tl.arange(0, BM)
    keys = tl.arange(0, BN)
    sq = tl.minimum(sq, pair.rows)
    inside = (i0 + rows < sq)[:, None] & (j0 + keys < pair.keys)[None, :]
    pointers = pair_start(pair, b, h, i0, j0) + (rows[:, None] * pair.row + keys[None, :] * pair.key)
    tl.store(pointers, value.to(pair.ptr.dtype.element_ty), mask=inside)


@triton.jit
def pair_start(pair, b, h, i0, j0):
    """Pointer to the entry of a row and a key; 64-bit, as the rows of q."""
    return (
        pair.ptr
        + tl.cast(b // pair.sharing, tl.int64) * pair.batch
        + tl.cast(h, tl.int64) * pair.head
        + tl.cast(i0, tl.int64) * pair.row
        + tl.cast(j0, tl.int64) * pair.key
    )
