"""Masks of sequences: documents, prefixes, spans, blocks, chunks, eviction, first tokens.

All are made for as many rows as keys, position by position; a q that holds only the last rows takes `Mask.last_rows`. Work is
O(S) on the device of the tensors that are given, and waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.arguments import check_flag, check_whole, place
from backlight.mask.inputs import Wholes, check_length, keys, of_entries, one_run, per_entry, per_key, same_device
from backlight.mask.mask import Mask, with_borders

Device = torch.device | str | None


def documents(
    ids: Wholes | None = None,
    *,
    lengths: Wholes | None = None,
    length: int | None = None,
    causal: bool = False,
    device: Device = None,
) -> Mask:
    """Rows see the keys of their own document; with `causal`, those up to themselves.

        documents(ids=[0, 0, 1, 1, 1])        documents(lengths=[2, 3], causal=True)
            x x . . .                              x . . . .
            x x . . .                              x x . . .
            . . x x x                              . . x . .
            . . x x x                              . . x x .
            . . x x x                              . . x x x

    ids: [S] or [B, S]: a document is a run of equal numbers; a number that comes back later begins another one. Keys with a
        negative number are padding, which no row sees.
    lengths: instead of ids, [Z] or [B, Z]: documents one after another; what is left of `length` is padding. Such a mask knows
        its borders, and calls run on the kernels of `attention_varlen` where they can (`explain` says so).
    length: S, with lengths; their sum where it is not said, for which the device of a tensor is waited for.
    causal: of rows and keys of the same positions. With `attention(..., causal=True)` it need not be said.
    """
    check_flag("causal", causal)
    if (ids is None) == (lengths is None):
        raise TypeError("documents needs ids or lengths, one of them")
    if ids is not None:
        if length is not None:
            raise TypeError("length goes with lengths; ids have a length of their own")
        numbers = per_entry("ids", ids, "S", device)
        # a sequence may begin with number 1, if its first id is not its last
        number = (numbers != numbers.roll(1, dims=1)).cumsum(dim=1, dtype=torch.int32)
        return _runs(number.contiguous(), numbers >= 0, causal)
    if not (isinstance(lengths, Tensor) or torch.compiler.is_compiling()):
        _check_lengths(per_entry("lengths", lengths, "Z", "cpu"), length)
    totals = None
    if length is None or not (isinstance(lengths, Tensor) or torch.compiler.is_compiling()):
        totals = per_entry("lengths", lengths, "Z", "cpu").long().clamp(min=0).sum(dim=1)
    if length is None:
        assert totals is not None
        length = int(totals.max()) if totals.numel() else 0
    check_length(length)
    each = per_entry("lengths", lengths, "Z", device)
    ends = _ends(each, length, filled=totals is not None and bool((totals >= length).all()))
    number = _numbered(ends[0, :, 1 : 1 + each.shape[1]], length)
    found = _runs(number, number < each.shape[1], causal)
    return with_borders(found.rows, _borders(ends, length), causal) if length else found


def _check_lengths(lengths: Tensor, length: int | None) -> None:
    """Lengths that the host knows; those of a tensor are taken as they fit, because nobody waits for its device."""
    if lengths.numel() == 0:
        return
    if (least := int(lengths.min())) < 0:
        raise ValueError(f"lengths must be at least 0, got {least}")
    if length is not None and (most := int(lengths.long().sum(dim=1).max())) > length:
        raise ValueError(f"lengths must fit into length, {length}, got {most} together")


def _ends(lengths: Tensor, length: int, filled: bool) -> Tensor:
    """Where sequences end that are packed one after another, the first of them at 0, int64 [1, B, Z + 1], plus `length`.

    Where documents may leave padding, [2, B, Z + 3]: two sequences more, first all rows of the padding and no key, then all
    keys of it and no row. The lines are of rows and of keys.
    """
    batch, n = lengths.shape
    sides, more = (1, 1) if filled else (2, 3)
    own = torch.full((sides, batch, n + more), length, dtype=torch.int64, device=lengths.device)
    own[..., 1 : n + 1].copy_(lengths).clamp_(0, length)
    if not filled:
        own[1, :, -2].zero_()
    return own.cumsum(dim=2).clamp_(max=2 * length)


def _borders(ends: Tensor, length: int) -> Tensor:
    """`Mask.borders` of `_ends`, entry after entry; between two of them lies a sequence without rows and keys."""
    batch = ends.shape[1]
    if batch == 1:
        return (ends - length).to(torch.int32).flatten(1)
    first = torch.arange(-length, (batch - 1) * length, length, device=ends.device)
    return (ends + first[:, None]).to(torch.int32).flatten(1)


def _numbered(ends: Tensor, length: int) -> Tensor:
    """Which document each position belongs to, int32 [B, length]; beyond the last, how many there are. ends: plus `length`."""
    own = torch.arange(length, 2 * length, device=ends.device).expand(ends.shape[0], -1).contiguous()
    return torch.searchsorted(ends.contiguous(), own, right=True, out_int32=True)


def _runs(number: Tensor, seen: Tensor, causal: bool) -> Mask:
    """The mask of runs of positions with the same number, which never falls, int32 [B, S]; keys that are not seen are empty.

    So many numbers are smaller: that is where a run begins, and where the next one does.
    """
    after = number + seen
    if causal:
        end = torch.searchsorted(number, after, out_int32=True)
        return one_run(keys(number.shape[1], number.device), end[:, None])
    both = torch.searchsorted(number, torch.cat([number, after], dim=1), out_int32=True)
    return Mask(both.unflatten(1, (2, -1) if number.shape[1] else (2, 0))[:, None])


def prefix(lengths: Wholes, length: int, *, device: Device = None) -> Mask:
    """Prefix-LM: every row sees the prefix, and of the rest what comes before it.

        prefix(2, 5)
            x x . . .
            x x . . .
            x x x . .
            x x x x .
            x x x x x

    lengths: of the prefix, a number or one for each batch entry, [B].
    length:  S. Not with `attention(..., causal=True)`, which would hide the prefix from its own first rows.
    """
    check_length(length)
    ahead, where = of_entries("lengths", lengths, length, device)
    own = keys(length, where)
    return one_run(own * (own >= ahead), torch.full_like(own, length))


def spans(starts: Wholes, ends: Wholes, length: int, *, window: int | None = None, device: Device = None) -> Mask:
    """Spans (images, say) that see all of themselves, inside a causal sequence.

        spans(starts=[1], ends=[4], length=5)
            x . . . .
            x x x x .
            x x x x .
            x x x x .
            x x x x x

    starts, ends: [n] or [B, n]: spans [start, end) that do not overlap; one that ends where it begins, or before, is none.
    length: S.
    window: how far back rows see, as in `window=(window, 0)`, but never less than their own span; None = to the beginning.
    """
    check_length(length)
    check_whole("window", window, least=0, optional=True)
    begin = per_entry("starts", starts, "n", device)
    stop = per_entry("ends", ends, "n", begin.device)
    same_device("ends", stop, "starts", begin)
    if begin.shape != stop.shape:
        raise ValueError(f"ends must have the shape of starts, {tuple(begin.shape)}, got {tuple(stop.shape)}")
    if not length:
        return one_run(begin[:, None, :0], begin[:, None, :0])
    # how far the rows of a span reach, and others to themselves; one that is empty or not in the sequence changes nothing
    reach = torch.arange(1, length + 1, device=begin.device).expand(begin.shape[0], -1)
    reach = reach.scatter_reduce(1, begin.long().clamp(0, length - 1), stop.long().clamp(max=length), "amax")
    reach = reach.cummax(dim=1).values
    start = torch.searchsorted(reach, reach, out_int32=True)[:, None]
    if window is None:
        return one_run(start, torch.full_like(start, length))
    behind = keys(length, begin.device, min(window, length) + 1)
    return one_run(start, torch.maximum(reach.int()[:, None], behind).clamp(max=length))


def blocks(size: int | None = None, length: int | None = None, *, starts: Wholes | None = None, device: Device = None) -> Mask:
    """Blocks, causal between them: rows see their own block whole, and all before it.

        blocks(2, 5)
            x x . . .
            x x . . .
            x x x x .
            x x x x .
            x x x x x

    size:   of the blocks. Or
    starts: where they begin, [n] or [B, n] in any order; the first block begins at 0.
    length: S.
    """
    length = _needed("blocks", length)
    if (size is None) == (starts is None):
        raise TypeError("blocks needs size or starts, one of them")
    if size is None:
        begin = per_entry("starts", starts, "n", device).long().clamp(0, length)
        marks = torch.zeros(begin.shape[0], length + 1, dtype=torch.bool, device=begin.device).scatter_(1, begin, True)
        number = marks[:, :length].cumsum(dim=1, dtype=torch.int32)
        start = torch.searchsorted(number, number, out_int32=True)[:, None]
        return one_run(start, torch.full_like(start, length))
    check_whole("size", size, least=1)
    own, size = keys(length, place(device)), _within(size, length)
    return one_run(own - own % size, torch.full_like(own, length))


def chunks(size: int, length: int, *, device: Device = None) -> Mask:
    """Chunked causal: rows see their own chunk, up to themselves.

    chunks(2, 5)
        x . . . .
        x x . . .
        . . x . .
        . . x x .
        . . . . x
    """
    check_whole("size", size, least=1)
    check_length(length)
    own, size = keys(length, place(device)), _within(size, length)
    return one_run(own, (keys(length, own.device, size) - own % size).clamp(max=length))


def evict(evicted_at: Wholes, *, device: Device = None) -> Mask:
    """Causal, and key j is gone from row evicted_at_j on: a cache that forgets, trained as it will run.

        evict([5, 2, 5, 4, 5])
            x . . . .
            x x . . .
            x . x . .
            x . x x .
            x . x . x

    evicted_at: [S], [B, S] or [B, Hq, S].
    """
    found = per_key("evicted_at", evicted_at, device)
    return one_run(keys(found.shape[2], found.device).expand_as(found), found)


def global_first(n: Wholes, window: int, length: int, *, device: Device = None) -> Mask:
    """The first n keys for every later row, and a causal window: what keeps attention sinks in a streaming cache.

        global_first(1, window=1, length=5)
            x . . . .
            x x . . .
            x x x . .
            x . x x .
            x . . x x

    n: a number, or one for each batch entry, [B].
    window: how far back rows see, as in `window=(window, 0)`.
    length: S.
    """
    check_length(length)
    check_whole("window", window, least=0)
    first, where = of_entries("n", n, length, device)
    own, behind = keys(length, where), keys(length, where, min(window, length) + 1)
    return one_run(own, torch.add(behind, own < first, alpha=length).clamp(max=length))


def _within(size: int, length: int) -> int:
    """One that is longer than the sequence holds all of it, as one of its length does; sums with it stay within int32."""
    return min(size, max(1, length))


def _needed(name: str, length: Any) -> int:
    if length is None:
        raise TypeError(f"{name} needs length, the number of keys")
    check_length(length)
    return length
