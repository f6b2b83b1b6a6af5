"""The geometry of masks by row intervals (docs/math.md section 12): dense visibility, the fold, counts, classes of tiles.

`rows` is int32 [B|1, Hq|1, 2w, Sk] with w = 1 or 2: first and end of each key's intervals, first row included, end excluded.
Everything is torch on the tensor's own device and waits for nothing. Interval i of a key stands at 2i (first) and 2i + 1 (end).

Rows are counted as they lie in q, over all of a packed q, and not from the bottom right. Causal, window and borders of packed
sequences are intervals of rows for a fixed key too, so `folded` puts them in; with `pos`, which they are not compared with, it
cannot, and both tests are made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from backlight.spec import AttentionSpec, Segment

if TYPE_CHECKING:
    from backlight.call import Call

# an empty interval among positions, which may be any int32: below every end and above every first
NOWHERE = 2**31 - 1, -(2**31)


def pairs(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(first, end) of every interval, [..., w, Sk] each."""
    return rows[..., 0::2, :], rows[..., 1::2, :]


def shifted(rows: Tensor, first_row: int) -> Tensor:
    """The same intervals with rows counted from another one; what leaves 32 bits becomes the nearest, which means the same."""
    least, most = torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    return (rows.long() - first_row).clamp(least, most).to(torch.int32)


def from_pairs(first: Tensor, end: Tensor) -> Tensor:
    """`rows` of (first, end) [..., w, Sk], int32."""
    return torch.stack([first, end], dim=-2).flatten(-3, -2).to(torch.int32)


# --- dense visibility --------------------------------------------------------------------------------------------------------


def seen(rows: Tensor, positions: Tensor) -> Tensor:
    """Which positions [..., n] lie in an interval of which key of `rows` [..., 2w, Sk]: bool [..., n, Sk]."""
    first, end = pairs(rows)
    at = positions[..., None, :, None]
    return ((first[..., :, None, :] <= at) & (at < end[..., :, None, :])).any(dim=-3)


def of_head(call: Call, segment: Segment, h: int) -> tuple[Tensor, Tensor]:
    """(rows [2w, Sk], positions [Sq]) of one query head of a segment; batch and heads that are 1 stand for all."""
    assert call.rows is not None
    rows, b = call.rows, segment.batch
    own = rows[min(b, rows.shape[0] - 1), min(h, rows.shape[1] - 1), :, segment.k0 : segment.k1]
    if call.pos is None:
        return own, torch.arange(segment.q0, segment.q1, dtype=torch.int32, device=rows.device)
    return own, call.pos[min(b, call.pos.shape[0] - 1), segment.q0 : segment.q1]


def visible(call: Call, segment: Segment, h: int) -> Tensor:
    """Dense visibility of one query head of a segment, bool [Sq, Sk]: the spec's, and that of the mask."""
    allowed = call.spec.allowed(segment.sq, segment.sk, call.q.device)
    return allowed if call.rows is None else allowed & seen(*of_head(call, segment, h))


def visible_heads(call: Call, segment: Segment) -> Tensor:
    """`visible` of all query heads of a segment, bool [Hq or 1, Sq, Sk]: one where they see the same."""
    heads = 1 if call.rows is None else call.rows.shape[1]
    return torch.stack([visible(call, segment, h) for h in range(heads)])


def unhidden_heads(call: Call, segment: Segment) -> Tensor:
    """`visible_heads` without the pairs that a pair bias of -inf hides; bool [Hq or 1, Sq, Sk]."""
    seen = visible_heads(call, segment)
    if call.pair_bias is None:
        return seen
    return seen & (call.pairs_of(call.pair_bias, segment) > -torch.inf)


def visible_whole(call: Call) -> Tensor:
    """Dense visibility of a whole call, bool [B, Hq or 1, Sq, Sk]; of packed sequences a block matrix."""
    heads = 1 if call.rows is None else call.rows.shape[1]
    shape = call.q.shape[0], heads, call.q.shape[2], call.k.shape[2]
    found = torch.zeros(shape, dtype=torch.bool, device=call.q.device)
    for z in call.segments():
        found[z.batch, :, z.q0 : z.q1, z.k0 : z.k1] = visible_heads(call, z)
    return found


# --- the fold (eq. 61, 62) ---------------------------------------------------------------------------------------------------


def disjoint(rows: Tensor) -> Tensor:
    """Eq. 61: each key's intervals sorted by first, joined where they overlap or touch, empty ones last (as `NOWHERE`)."""
    first, end = _emptied(*pairs(rows), *NOWHERE)
    if first.shape[-2] == 1:
        return from_pairs(first, end)
    swapped = first[..., 1, :] < first[..., 0, :]
    f0, f1 = (torch.where(swapped, first[..., 1 - at, :], first[..., at, :]) for at in (0, 1))
    e0, e1 = (torch.where(swapped, end[..., 1 - at, :], end[..., at, :]) for at in (0, 1))
    joined = (f1 <= e0) & (f1 < e1)
    e0 = torch.where(joined, torch.maximum(e0, e1), e0)
    f1, e1 = f1.masked_fill(joined, NOWHERE[0]), e1.masked_fill(joined, NOWHERE[1])
    return from_pairs(torch.stack([f0, f1], dim=-2), torch.stack([e0, e1], dim=-2))


def _emptied(first: Tensor, end: Tensor, empty_first: int, empty_end: int) -> tuple[Tensor, Tensor]:
    """All empty intervals written the same way."""
    empty = first >= end
    return first.masked_fill(empty, empty_first), end.masked_fill(empty, empty_end)


def fold_rows(
    rows: Tensor, spec: AttentionSpec, sq: int, sk: int, cu_q: Tensor | None = None, cu_k: Tensor | None = None
) -> Tensor:
    """Eq. 62: disjoint intervals that say all that rows, causal, window and borders say; empty ones are (Sq, 0).

    sq, sk: lengths of q and k, of the packed ones where borders are given.
    """
    first, end = pairs(disjoint(rows))
    keys = torch.arange(sk, device=rows.device)
    q0, q1, k0, k1 = _segment_of_keys(keys, sq, sk, cu_q, cu_k)
    # the row, over all of q, at whose position the key sits
    own = keys - k0 - ((k1 - k0) - (q1 - q0)) + q0
    low, high = torch.zeros_like(keys) + q0, torch.zeros_like(keys) + q1
    if spec.right is not None:
        low = torch.maximum(low, own - spec.right)
    if spec.left is not None:
        high = torch.minimum(high, own + spec.left + 1)
    return from_pairs(*_emptied(torch.maximum(first, low), torch.minimum(end, high), sq, 0))


def _segment_of_keys(
    keys: Tensor, sq: int, sk: int, cu_q: Tensor | None, cu_k: Tensor | None
) -> tuple[int | Tensor, int | Tensor, int | Tensor, int | Tensor]:
    """(q0, q1, k0, k1) of the segment of each key."""
    if cu_q is None or cu_k is None:
        return 0, sq, 0, sk
    at = segment_of(keys, cu_k)
    return cu_q[at].long(), cu_q[at + 1].long(), cu_k[at].long(), cu_k[at + 1].long()


def segment_of(places: Tensor, cu: Tensor) -> Tensor:
    """The number of the packed sequence in which each row or key lies."""
    return (torch.searchsorted(cu.long(), places.long(), right=True) - 1).clamp(0, max(0, cu.shape[0] - 2))


def can_fold(call: Call) -> bool:
    """Whether `folded` says all that hides a key; otherwise causal, window and borders are tested beside it."""
    return call.pos is None or not (call.spec.masked or call.varlen)


def folded(call: Call) -> Tensor:
    """The call's intervals, disjoint (eq. 61): with everything else folded in (eq. 62) where they are compared with rows, by
    themselves, with `NOWHERE` for empty ones, where they are compared with pos. int32 [B|1, Hq|1, 2w, Sk]."""
    assert call.rows is not None
    if call.pos is not None:
        return disjoint(call.rows)
    return fold_rows(call.rows, call.spec, call.q.shape[2], call.k.shape[2], call.cu_seqlens_q, call.cu_seqlens_k)


# --- counts (eq. 63) ---------------------------------------------------------------------------------------------------------


def counts(rows: Tensor, sq: int) -> Tensor:
    """Eq. 63 of folded intervals: how many keys each of the sq rows sees, int32 [..., sq]."""
    first, end = pairs(rows)
    some = (first < end).to(torch.int32).flatten(-2)
    change = torch.zeros(*rows.shape[:-2], sq + 1, dtype=torch.int32, device=rows.device)
    change.scatter_add_(-1, first.flatten(-2).long().clamp(0, sq), some)
    change.scatter_add_(-1, end.flatten(-2).long().clamp(0, sq), -some)
    return change[..., :sq].cumsum(dim=-1, dtype=torch.int32)


def visible_counts(call: Call) -> Tensor:
    """How many keys each row of q sees, int32 [B|1, Hq|1, Sq]; not where `can_fold` says that both tests are made, unless it is
    for the borders of packed sequences."""
    assert call.rows is not None
    lengths = call.q.shape[2], call.k.shape[2]
    return row_counts(call.rows, call.pos, call.spec, *lengths, call.cu_seqlens_q, call.cu_seqlens_k)


def row_counts(
    rows: Tensor, pos: Tensor | None, spec: AttentionSpec, sq: int, sk: int, cu_q: Tensor | None, cu_k: Tensor | None
) -> Tensor:
    """`visible_counts` of the tensors of a call."""
    if pos is None:
        return counts(fold_rows(rows, spec, sq, sk, cu_q, cu_k), sq)
    assert not spec.masked, "with pos, causal or a window the visible keys of a row are not counted"
    return _counts_at(disjoint(rows), pos, sq, sk, cu_q, cu_k)


def _counts_at(rows: Tensor, pos: Tensor, sq: int, sk: int, cu_q: Tensor | None, cu_k: Tensor | None) -> Tensor:
    """Eq. 63 read at positions: keys whose interval has begun, less those whose interval has ended.

    In a packed call keys of earlier sequences have begun and ended, and those of later ones have not.
    """
    first, end = pairs(rows)
    # an empty interval begins where it ends
    first = torch.where(first < end, first, end).long()
    after, at = end.long(), pos.long()[:, None].expand(-1, rows.shape[1], -1)
    if cu_q is not None and cu_k is not None:
        own, keys = (torch.arange(length, device=rows.device) for length in (sq, sk))
        of_key, of_row = segment_of(keys, cu_k) << 33, segment_of(own, cu_q) << 33
        first, after, at = first + of_key, after + of_key, at + of_row
    batch = max(rows.shape[0], pos.shape[0])
    first, after, at = (x.expand(batch, *x.shape[1:]).flatten(2).contiguous() for x in (first, after, at))
    begun, ended = (torch.searchsorted(x.sort(dim=-1).values, at, right=True) for x in (first, after))
    return (begun - ended).to(torch.int32)


# --- tiles (eq. 64) ----------------------------------------------------------------------------------------------------------


def extremes(rows: Tensor, size: int) -> Tensor:
    """(f_min, f_max, e_min, e_max) of each interval over tiles of `size` keys: int32 [..., w, 4, tiles].

    rows: disjoint or folded. Keys past the last one count as empty.
    """
    missing = -rows.shape[-1] % size
    first, end = (
        torch.nn.functional.pad(x, (0, missing), value=empty).unflatten(-1, (-1, size))
        for x, empty in zip(pairs(rows), NOWHERE, strict=True)
    )
    return torch.stack([first.amin(-1), first.amax(-1), end.amin(-1), end.amax(-1)], dim=-2)


def tile_shares(call: Call, tile: tuple[int, int]) -> tuple[float, float, float]:
    """Shares of tiles (rows, keys) that eq. 64 calls empty, full and partial, over all heads of a call; of the mask alone where
    `can_fold` says no. Tiles start at the first row and key of a sequence. Waits for the device.
    """
    rows, at = folded(call), call.pos
    found = torch.zeros(3, dtype=torch.float64)
    for z in call.segments() if call.varlen else call.segments()[:1]:
        if not (z.sq and z.sk):
            continue
        own = rows[..., z.k0 : z.k1]
        # the last tile is no less full for the keys that it lacks
        padded = torch.cat([own, own[..., -1:].expand(*own.shape[:-1], -z.sk % tile[1])], dim=-1)
        positions = torch.arange(z.q0, z.q1, device=rows.device)[None] if at is None else at[:, z.q0 : z.q1]
        grouped = torch.cat([positions, positions[:, -1:].expand(-1, -z.sq % tile[0])], dim=1).unflatten(1, (-1, tile[0]))
        low, high = grouped.amin(dim=-1), grouped.amax(dim=-1) + 1
        extreme = extremes(padded, tile[1])[:, :, None]
        empty, full = classes(extreme, low[:, None, :, None, None], high[:, None, :, None, None])
        shares = torch.stack([empty.double().mean(), full.double().mean()]).cpu()
        found += torch.cat([shares, 1 - shares.sum(0, keepdim=True)]) * -(-z.sq // tile[0]) * -(-z.sk // tile[1])
    empty_share, full_share, partial_share = (found / found.sum().clamp(min=1)).tolist()
    return empty_share, full_share, partial_share


def classes(extreme: Tensor, i0: Tensor | int, i1: Tensor | int) -> tuple[Tensor, Tensor]:
    """(empty, full) of tiles by eq. 64 for rows i0 <= i < i1, or positions from the smallest to the largest plus one.

    extreme: [..., w, 4, tiles]; i0 and i1 broadcast with [..., w, tiles]. What is neither is partial. Of two intervals, a
    tile is empty where both are, and full where one is.
    """
    f_min, f_max, e_min, e_max = extreme.unbind(dim=-2)
    empty = (f_min >= i1) | (e_max <= i0)
    full = (f_max <= i0) & (e_min >= i1)
    return empty.all(dim=-2), full.any(dim=-2)
