"""FlashAttention 4's functions: its names, argument order, layout and conventions (`flash_attn.cute`).

Both return (out, lse) whether or not return_lse asks for the second. None in `window_size` is an open side, and a side may be
negative: the window then begins or ends away from the row. Rows, keys or both may be packed, or padded with `seqused_q` and
`seqused_k`. What shares out the work of FlashAttention's kernels changes nothing here; programs written in CuTe (score_mod,
mask_mod) and what goes with them, paged and gathered keys and a second product in the scores are refused.
"""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor
from typing_extensions import Unpack

from backlight.arguments import check_borders, check_flag, check_tensor, check_whole, shown
from backlight.compat.flash_arguments import (
    check_longest,
    check_per_sequence,
    check_schedule,
    check_tensors,
    options_of,
    refuse,
)
from backlight.compat.flash_calls import Seen, Sides, attend, attend_packed, attend_varlen, of_band
from backlight.compat.flash_runs import Runs

Window = tuple[int | None, int | None]
OPEN: Window = (None, None)


class Refused(TypedDict, total=False):
    """Anything but None is refused."""

    score_mod: Any
    score_mod_bwd: Any
    mask_mod: Any
    aux_tensors: Any
    aux_scalars: Any
    block_sparse_tensors: Any
    block_sparse_tensors_bwd: Any


class Rest(Refused, total=False):
    """By keyword.

    softcap: 0 is none. deterministic: bitwise repeatable backward. num_splits, pack_gqa: change nothing. return_lse: lse comes
    back either way, and has a gradient.
    """

    softcap: float
    num_splits: int
    pack_gqa: bool | None
    deterministic: bool
    return_lse: bool


class Packed(Rest, total=False):
    """By keyword.

    seqused_q, seqused_k: [Z], rows and keys of each sequence, from its first, that count; causal and windows align by them.
        Rows behind give 0, lse -inf, and gradients there are 0.
    max_seqlen_q, max_seqlen_k, min_seqlen_k, seqlen_k_per_split, scheduler_metadata and disable_scheduler_metadata change
        nothing.
    gather_kv_indices, page_table: refused.
    softmax_scale, causal, window_size, learnable_sink: as in `flash_attn_func`.
    """

    max_seqlen_q: int | None
    max_seqlen_k: int | None
    min_seqlen_k: int | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    gather_kv_indices: None
    page_table: None
    softmax_scale: float | None
    causal: bool
    window_size: Window
    learnable_sink: Tensor | None
    scheduler_metadata: Any
    seqlen_k_per_split: int | None
    disable_scheduler_metadata: bool


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    gather_kv_indices: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = OPEN,
    learnable_sink: Tensor | None = None,
    **rest: Unpack[Rest],
) -> Sides:
    """`flash_attn.cute.flash_attn_func`; everything behind learnable_sink is given by keyword.

    Args:
        q, k, v: [B, Sq, Hq, D], [B, Sk, Hkv, D], [B, Sk, Hkv, Dv].
        window_size: (left, right), both included, None = open, causal closes the right.
        learnable_sink: [Hq], with a gradient.

    Returns:
        out [B, Sq, Hq, Dv], lse [B, Hq, Sq].
    """
    check_tensors(q, k, v, "[B, S, H, D]")
    refuse(qv=qv, gather_kv_indices=gather_kv_indices)
    _check_rest("flash_attn_func", Rest, rest)
    options, seen = _options(softmax_scale, causal, window_size, learnable_sink, rest)
    return attend(q, k, v, options, seen=seen)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    **rest: Unpack[Packed],
) -> Sides:
    """`flash_attn.cute.flash_attn_varlen_func`; everything behind cu_seqlens_k is given by keyword.

    Args:
        q: [Tq, Hq, D] with cu_seqlens_q [Z + 1], or [Z, Sq, Hq, D] without.
        k, v: [Tk, Hkv, D] and [Tk, Hkv, Dv] with cu_seqlens_k [Z + 1], or [Z, Sk, Hkv, D] and [Z, Sk, Hkv, Dv] without.

    Returns:
        out [Tq, Hq, Dv], lse [Hq, Tq]; or, as q lies, [Z, Sq, Hq, Dv] and [Z, Hq, Sq].
    """
    refuse(qv=qv, gather_kv_indices=rest.get("gather_kv_indices"), page_table=rest.get("page_table"))
    sides = (("q", q, cu_seqlens_q), ("k", k, cu_seqlens_k), ("v", v, cu_seqlens_k))
    for name, x, cu in sides:
        check_tensor(name, x, "[B, S, H, D]" if cu is None else "[T, H, D]")
    used = rest.get("seqused_q"), rest.get("seqused_k")
    sequences = _check_sequences(q, k, (cu_seqlens_q, cu_seqlens_k), used)
    _check_rest("flash_attn_varlen_func", Packed, rest)
    scale, causal, window = (rest.get(name, other) for name, other in SHARED.items())
    options, seen = _options(scale, causal, window, rest.get("learnable_sink"), rest)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return attend_varlen(q, k, v, (cu_seqlens_q, cu_seqlens_k), used, options, seen=seen)
    if cu_seqlens_q is None and cu_seqlens_k is None and used == (None, None):
        return attend(q, k, v, options, seen=seen)
    runs = _runs(q, cu_seqlens_q, used[0], sequences), _runs(k, cu_seqlens_k, used[1], sequences)
    y, lse = attend_packed(q.flatten(0, -3), k.flatten(0, -3), v.flatten(0, -3), runs, options, seen=seen)
    if cu_seqlens_q is not None:
        return y, lse
    return y.unflatten(0, q.shape[:2]), lse.unflatten(1, q.shape[:2]).transpose(0, 1)


# --- arguments ---------------------------------------------------------------------------------------------------------------

SHARED = {"softmax_scale": None, "causal": False, "window_size": OPEN}
LONGEST = ("max_seqlen_q", "max_seqlen_k", "min_seqlen_k")


def _check_rest(function: str, known: Any, rest: Any) -> None:
    """What is given by keyword, but for tensors and what `_options` reads."""
    for name in rest:
        if name not in known.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    refuse(**{name: rest.get(name) for name in Refused.__annotations__})
    check_schedule(rest.get("num_splits", 1), rest.get("pack_gqa"))
    check_flag("return_lse", rest.get("return_lse", False))
    for name in LONGEST:
        if rest.get(name) is not None:
            check_longest(name, rest[name])


def _options(scale: Any, causal: Any, window: Any, sink: Tensor | None, rest: Any) -> tuple[dict[str, Any], Seen | None]:
    """Keywords of the public call, and the rows that see a key where windows cannot say it."""
    check_flag("causal", causal)
    deterministic = rest.get("deterministic", False)
    check_flag("deterministic", deterministic)
    options = options_of(0.0, scale, causal, (-1, -1), rest.get("softcap", 0.0), deterministic)
    left, right = _sides(window)
    options["sink"] = sink
    if causal:
        right = 0
    if (left or 0) >= 0 and (right or 0) >= 0:
        return options | {"window": (left, None if causal else right)}, None
    return options | {"causal": False, "window": (None, None)}, of_band(left, right)


def _sides(window: Any) -> Window:
    if not (isinstance(window, (tuple, list)) and len(window) == 2):
        raise ValueError(f"window_size must be a pair (left, right), None for an open side, got {shown(window)}")
    for side, reach in zip(("left", "right"), window, strict=True):
        check_whole(f"window_size {side}", reach, least=-(2**30), optional=True)
    return window[0], window[1]


def _check_sequences(q: Tensor, k: Tensor, borders: tuple[Any, Any], used: tuple[Any, Any]) -> int:
    """How many sequences there are, on both sides."""
    counts = []
    for side, x, cu in zip("qk", (q, k), borders, strict=True):
        if cu is not None:
            check_borders(f"cu_seqlens_{side}", cu, q.device)
        counts.append(x.shape[0] if cu is None else cu.shape[0] - 1)
    if counts[0] != counts[1]:
        raise ValueError(f"k must have as many sequences as q, {counts[0]}, got {counts[1]}")
    for side, count in zip("qk", used, strict=True):
        if count is not None:
            check_per_sequence(f"seqused_{side}", count, counts[0], q)
    return counts[0]


def _runs(x: Tensor, cu_seqlens: Tensor | None, used: Tensor | None, sequences: int) -> Runs:
    if cu_seqlens is not None:
        return Runs.of_borders(cu_seqlens.long(), x.shape[0], used)
    return Runs.of_batch(sequences, x.shape[1], x.device, end=None if used is None else used.long())
