"""Masks of sequences: documents, prefixes, spans, blocks, chunks, eviction, first tokens.

All are made for as many rows as keys, position by position; a q that holds only the last rows takes `Mask.last_rows`. Work is
O(S) on the device of the tensors that are given, and waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.arguments import check_flag, check_whole
from backlight.mask.inputs import Wholes, check_length, keys, one_run, per_entry, per_key, place, same_device, wholes
from backlight.mask.mask import Mask

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
    lengths: instead of ids, [Z] or [B, Z]: documents one after another; what is left of `length` is padding.
    length: S, with lengths; their sum where it is not said, for which a device is waited for.
    causal: of rows and keys of the same positions. With `attention(..., causal=True)` it need not be said.
    """
    check_flag("causal", causal)
    if (ids is None) == (lengths is None):
        raise TypeError("documents needs ids or lengths, one of them")
    if ids is not None:
        if length is not None:
            raise TypeError("length goes with lengths; ids have a length of their own")
        numbers = per_entry("ids", ids, "S", device)
    else:
        numbers = _numbered(per_entry("lengths", lengths, "Z", device), length)
    start, end = _run_of(numbers)
    own = torch.arange(numbers.shape[1], device=numbers.device)
    first = own.expand_as(start) if causal else start
    return one_run(first[:, None], torch.where(numbers < 0, first, end)[:, None])


def _numbered(lengths: Tensor, length: int | None) -> Tensor:
    """Which document each position belongs to, [B, length]; -1 beyond the last."""
    ends = lengths.clamp(min=0).cumsum(dim=1)
    if length is None:
        length = int(ends[:, -1].max()) if ends.numel() else 0
    check_length(length)
    own = torch.arange(length, device=lengths.device).expand(lengths.shape[0], -1).contiguous()
    at = torch.searchsorted(ends, own, right=True)
    return at.masked_fill(at >= lengths.shape[1], -1)


def _run_of(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[start, end) of the run of equal numbers around each position, [B, S] each."""
    size = numbers.shape[1]
    own = torch.arange(size, device=numbers.device)
    changes = numbers[:, 1:] != numbers[:, :-1]
    border = torch.ones_like(numbers[:, :1], dtype=torch.bool)
    begins, ends = torch.cat([border, changes], dim=1), torch.cat([changes, border], dim=1)
    if not size:
        return numbers, numbers
    start = torch.where(begins, own, 0).cummax(dim=1).values
    end = torch.where(ends, own + 1, size).flip(1).cummin(dim=1).values.flip(1)
    return start, end


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
    found = wholes("lengths", lengths, device)
    if found.dim() > 1:
        raise ValueError(f"lengths must be a number or [B], got shape {tuple(found.shape)}")
    own = keys(length, found.device)
    return one_run(torch.where(own < found.reshape(-1, 1, 1), 0, own), torch.full_like(own, length))


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
    start, end = _span_of(begin, stop, length)
    own = torch.arange(length, device=begin.device)
    inside = own < end
    reach = torch.full_like(own, length) if window is None else (own + window + 1).clamp(max=length)
    return one_run(
        torch.where(inside, start, own)[:, None],
        torch.where(inside, torch.maximum(reach, end), reach)[:, None],
    )


def _span_of(begin: Tensor, stop: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """[start, end) of the last span that begins at or before each position, [B, length] each; (0, 0) before the first."""
    last = torch.zeros(begin.shape[0], length + 1, dtype=torch.int64, device=begin.device)
    if not length:
        return last[:, :0], last[:, :0]
    # spans that begin before the sequence begin with it; empty ones are put beyond its end
    begin = begin.clamp(min=0)
    cell = torch.where((stop > begin) & (begin < length), begin, length)
    end_at = last.scatter_reduce(1, cell, stop.clamp(min=0, max=length), "amax")[:, :length]
    own = torch.arange(length, device=begin.device)
    start = torch.where(end_at > 0, own, 0).cummax(dim=1).values
    return start, end_at.gather(1, start)


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
        begin = per_entry("starts", starts, "n", device)
        start, _ = _span_of(begin, torch.full_like(begin, length), length)
        return one_run(start[:, None], torch.full_like(start, length)[:, None])
    check_whole("size", size, least=1)
    own = keys(length, place(device))
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
    own = keys(length, place(device))
    return one_run(own, (own - own % size + size).clamp(max=length))


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
    found = wholes("n", n, device)
    if found.dim() > 1:
        raise ValueError(f"n must be a number or [B], got shape {tuple(found.shape)}")
    own = keys(length, found.device)
    return one_run(own, torch.where(own < found.reshape(-1, 1, 1), length, (own + window + 1).clamp(max=length)))


def _needed(name: str, length: Any) -> int:
    if length is None:
        raise TypeError(f"{name} needs length, the number of keys")
    check_length(length)
    return length
