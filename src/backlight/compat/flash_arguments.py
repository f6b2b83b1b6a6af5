"""Arguments of FlashAttention's functions: checked, and as keywords of the public call."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from backlight.arguments import (
    BORDERS,
    FLOATS,
    INTEGERS,
    check_borders,
    check_device,
    check_dtype,
    check_flag,
    check_number,
    check_tensor,
    check_whole,
    shown,
)

# by name, why something that is not None is refused
CUTE = "backlight does not compile programs of CuTe"
REFUSED = {
    "score_mod": CUTE,
    "score_mod_bwd": CUTE,
    "mask_mod": f"{CUTE}; backlight.mask.from_mask_mod takes a function of torch tensors",
    "aux_tensors": CUTE,
    "aux_scalars": CUTE,
    "block_sparse_tensors": "backlight finds the blocks of a mask itself",
    "block_sparse_tensors_bwd": "backlight finds the blocks of a mask itself",
    "gather_kv_indices": "backlight does not gather keys",
    "block_table": "backlight does not read paged keys",
    "page_table": "backlight does not read paged keys",
    "qv": "backlight has no second product in its scores",
    "q_descale": "backlight does not scale fp8 inputs",
    "k_descale": "backlight does not scale fp8 inputs",
    "v_descale": "backlight does not scale fp8 inputs",
}


def refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"{name} must be None, got {shown(value)}: {REFUSED[name]}")


def unbound(name: str, packed: Any, layout: str, parts: int) -> tuple[Tensor, ...]:
    check_tensor(name, packed, layout)
    if packed.shape[-3] != parts:
        raise ValueError(f"{name} must be {layout}, with {parts} third from the end, got shape {tuple(packed.shape)}")
    return packed.unbind(dim=-3)


def check_tensors(q: Any, k: Any, v: Any, layout: str) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, layout)


def check_packed(qkv: tuple[Any, Any, Any], cu_seqlens: tuple[Any, Any], longest: tuple[Any, Any]) -> None:
    check_tensors(*qkv, "[T, H, D]")
    for name, borders in zip(("cu_seqlens_q", "cu_seqlens_k"), cu_seqlens, strict=True):
        check_borders(name, borders, qkv[0].device)
    for name, length in zip(("max_seqlen_q", "max_seqlen_k"), longest, strict=True):
        check_longest(name, length)


def check_flags(causal: Any, deterministic: Any, return_attn_probs: Any) -> None:
    flags = {"causal": causal, "deterministic": deterministic, "return_attn_probs": return_attn_probs}
    for name, flag in flags.items():
        check_flag(name, flag)


def check_longest(name: str, value: Any) -> None:
    """A length: a whole number, or a tensor of one integer, whose value is not read."""
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in INTEGERS:
        return
    check_whole(name, value, least=0)


def check_schedule(num_splits: Any = 0, pack_gqa: Any = None, sm_margin: Any = 0) -> None:
    """How FlashAttention's kernels share out their work. Ours do that themselves: a good value changes nothing."""
    check_whole("num_splits", num_splits, least=0)
    check_whole("sm_margin", sm_margin, least=0)
    if pack_gqa is not None:
        check_flag("pack_gqa", pack_gqa)


def check_per_sequence(name: str, value: Any, sequences: int, q: Tensor) -> None:
    """One whole number for each sequence; the numbers themselves are not read."""
    check_tensor(name, value)
    check_dtype(name, value, BORDERS)
    if tuple(value.shape) != (sequences,):
        raise ValueError(f"{name} must be [{sequences}], one per sequence, got shape {tuple(value.shape)}")
    check_device(name, value, "q", q.device)


def check_slopes(alibi_slopes: Any, q: Tensor, sequences: int) -> None:
    heads = q.shape[-2]
    check_tensor("alibi_slopes", alibi_slopes)
    if tuple(alibi_slopes.shape) not in ((heads,), (sequences, heads)):
        shape = tuple(alibi_slopes.shape)
        raise ValueError(f"alibi_slopes must be [{heads}], one per query head, or [{sequences}, {heads}], got shape {shape}")
    check_dtype("alibi_slopes", alibi_slopes, FLOATS)
    check_device("alibi_slopes", alibi_slopes, "q", q.device)


def options_of(
    dropout_p: Any, softmax_scale: Any, causal: bool, window_size: Any, softcap: Any, deterministic: bool
) -> dict[str, Any]:
    """Keywords of the public call."""
    check_number("dropout_p", dropout_p)
    if dropout_p:
        raise NotImplementedError(f"dropout_p must be 0, got {dropout_p}: backlight has no attention dropout")
    check_number("softmax_scale", softmax_scale, optional=True)
    check_number("softcap", softcap, least=0)
    return {
        "causal": causal,
        "window": _window(window_size),
        "scale": softmax_scale,
        "softcap": softcap or None,
        "deterministic": deterministic or None,
    }


def _window(window_size: Any) -> tuple[int | None, int | None]:
    if isinstance(window_size, Tensor) and not window_size.is_floating_point() and tuple(window_size.shape) == (2,):
        # FlashAttention reads the sides one by one: it takes what has two
        window_size = window_size.tolist()
    if not (isinstance(window_size, (tuple, list)) and len(window_size) == 2):
        raise ValueError(f"window_size must be a pair (left, right), -1 for an open side, got {shown(window_size)}")
    for side, reach in zip(("left", "right"), window_size, strict=True):
        check_whole(f"window_size {side}", reach, least=-1)
    left, right = (None if reach == -1 else reach for reach in window_size)
    return left, right
