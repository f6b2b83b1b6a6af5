"""The two calls behind all of FlashAttention's functions: batched and packed, with slopes for each batch entry, chunks and
windows that begin or end away from the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import backlight
from backlight.call import trust_borders
from backlight.compat.flash_runs import Runs, borders
from backlight.mask import Mask

Options = dict[str, Any]
Sides = tuple[Tensor, Tensor]
# (places of keys, where the first row sits) -> rows first .. end - 1 that see each; others clip them to rows that there are
Seen = Callable[[Tensor, Tensor | int], Sides]
# beyond every row, with room to add places to it in int32
FAR = 2**30


def of_chunk(chunk: int) -> Seen | None:
    """Rows see the keys of their own chunk; 0 is none."""
    # one of more keys than there are holds them all, and places stay within int32
    chunk = min(chunk, FAR)

    def seen(place: Tensor, offset: Tensor | int) -> Sides:
        first = place // chunk * chunk - offset
        return first, first + chunk

    return seen if chunk else None


def of_band(left: int | None, right: int | None) -> Seen:
    """Row i of a sequence, at key i + offset, sees keys from `left` before to `right` behind that; either may be negative."""
    # beyond every key is as good as open, and places stay within int32
    left, right = (None if side is None or side >= FAR else side for side in (left, right))

    def seen(place: Tensor, offset: Tensor | int) -> Sides:
        row = place - offset
        first = torch.full_like(row, -FAR) if right is None else row - right
        end = torch.full_like(row, FAR) if left is None else row + left + 1
        return first, torch.maximum(first, end)

    return seen


def attend(q: Tensor, k: Tensor, v: Tensor, options: Options, slopes: Tensor | None = None, seen: Seen | None = None) -> Sides:
    """y [B, Sq, Hq, Dv] and lse [B, Hq, Sq] of [B, S, H, D]; slopes [Hq] or [B, Hq]."""
    batch, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    if seen is not None:
        key = torch.arange(sk, dtype=torch.int32, device=q.device)
        options = options | {"mask": _mask(*seen(key, sk - sq))}
    if slopes is not None:
        options = options | backlight.alibi(slopes.flatten(), sq, sk, causal=options["causal"])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if slopes is None or slopes.dim() == 1:
        y, lse = backlight.attention(q, k, v, return_lse=True, **options)
        return y.transpose(1, 2), lse
    y, lse = backlight.attention(*map(_folded, (q, k, v)), return_lse=True, **options)
    return y[0].unflatten(0, (batch, -1)).transpose(1, 2), lse[0].unflatten(0, (batch, -1))


def attend_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Sides,
    used: tuple[Tensor | None, Tensor | None],
    options: Options,
    slopes: Tensor | None = None,
    seen: Seen | None = None,
) -> Sides:
    """`attend_packed` of sequences between borders, of which only the first `used` rows and keys may count."""
    whole = used[0] is None and used[1] is None
    if whole and slopes is None and seen is None:
        return _attend_between(q, k, v, cu_seqlens, options)
    sequences, others = (cu.shape[0] - 1 for cu in cu_seqlens)
    if others != sequences:
        raise ValueError(f"cu_seqlens_k must have as many sequences as cu_seqlens_q, {sequences}, got {others}")
    runs = Runs.of_borders(cu_seqlens[0], q.shape[0], used[0]), Runs.of_borders(cu_seqlens[1], k.shape[0], used[1])
    return attend_packed(q, k, v, runs, options, slopes, seen, cu_seqlens if whole else None)


def attend_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    runs: tuple[Runs, Runs],
    options: Options,
    slopes: Tensor | None = None,
    seen: Seen | None = None,
    cu_seqlens: Sides | None = None,
) -> Sides:
    """y [Tq, Hq, Dv] and lse [Hq, Tq] of [T, H, D], whose rows and keys lie in `runs`; slopes [Hq] or [Z, Hq].

    Rows of nobody give 0 and -inf, and have zero gradients, as keys of nobody have.

    Args:
        cu_seqlens: what says the same as the runs, where it is known.
    """
    if slopes is not None and slopes.dim() == 2:
        return _attend_padded(q, k, v, runs, options, slopes, seen)
    rows, keys = runs
    if seen is not None:
        z, place = keys.places()
        first, end = seen(place, (keys.count - rows.count)[z])
        options = options | {"mask": _mask(first + rows.first[z], end + rows.first[z])}
    if slopes is not None:
        options = options | backlight.alibi(slopes, rows.longest(), keys.longest(), causal=options["causal"])
    return _attend_between(q, k, v, cu_seqlens or borders(rows, keys), options)


def _attend_between(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sides, options: Options) -> Sides:
    """Borders are taken at the caller's word, as FlashAttention takes them: nobody waits for a device to check them."""
    if not torch.compiler.is_compiling():
        for cu, x in zip(cu_seqlens, (q, k), strict=True):
            trust_borders(cu, x.shape[0])
    return backlight.attention_varlen(q, k, v, *cu_seqlens, return_lse=True, **options)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, runs: tuple[Runs, Runs], options: Options, slopes: Tensor, seen: Seen | None
) -> Sides:
    """Each sequence with heads of its own, the last row of each beside its last key; the table by distance is one per head."""
    rows, keys = runs
    sequences, heads = slopes.shape
    sq, sk = rows.longest(), keys.longest()
    (of_q, own_q), (of_k, own_k) = rows.padded(sq), keys.padded(sk)
    q = q[of_q].masked_fill(~own_q[..., None, None], 0)
    k, v = (x[of_k].masked_fill(~own_k[..., None, None], 0) for x in (k, v))
    # rows that see a key, counted as they lie in the padded q
    first, end = torch.zeros_like(of_k), torch.full_like(of_k, sq)
    if seen is not None:
        place = of_k - keys.first[:, None]
        first, end = seen(place, sk - sq - (sk - keys.count)[:, None])
    end = end.masked_fill(~own_k, 0)
    first, end = (x.repeat_interleave(heads, dim=0) for x in (first, end))
    options = options | {"mask": _mask(first, end)} | backlight.alibi(slopes.flatten(), sq, sk, causal=options["causal"])
    y, lse = backlight.attention(*(_folded(x.transpose(1, 2)) for x in (q, k, v)), return_lse=True, **options)
    z, place = rows.places()
    mine, row = place < rows.count[z], place - rows.count[z] + sq
    row = row.clamp(min=0, max=max(sq - 1, 0))
    y = y[0].unflatten(0, (sequences, heads)).transpose(1, 2)[z, row]
    lse = lse[0].unflatten(0, (sequences, heads)).transpose(1, 2)[z, row]
    y, lse = y.masked_fill(~mine[:, None, None], 0), lse.masked_fill(~mine[:, None], -torch.inf)
    return y, lse.transpose(0, 1)


def _folded(x: Tensor) -> Tensor:
    """[B, H, S, D] as one entry with B * H heads: grouped heads stay beside their keys."""
    return x.flatten(0, 1)[None]


def _mask(first: Tensor, end: Tensor) -> Mask:
    """first, end: [Sk], or [Hq, Sk]."""
    return Mask(torch.stack([first, end], dim=-2).to(torch.int32).reshape(1, -1, 2, first.shape[-1]))
