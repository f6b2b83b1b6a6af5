"""Arguments of a problem, checked before anything is computed.

A message names the argument, what came and what was expected.
"""

from __future__ import annotations

import math
import operator
import os
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from backlight.call import DTYPES, Call, check_packed_pair_sizes, check_pair_sizes
from backlight.problems.axes import AXES, OUTPUT_AXES, Sizes
from backlight.spec import OF_PAIRS, TERMS, AttentionSpec

# one head at a time, the oracle holds about so many Sq x Sk matrices, and the doctor so many copies of the tensors
MATRICES, COPIES = 12, 16
LARGEST_SEED = 2**62
LETTERS = {"batch": "B", "heads": "Hq", "rows": "Sq", "keys": "Sk", "values": "Dv", "distances": "n", "ends": "2 or 4"}
SHAPES = {term.name: f"[{', '.join(LETTERS.get(axis, axis) for axis in term.axes)}]" for term in TERMS}
MASK = ("rows", "pos")
NUMBERS: dict[str, tuple[type, ...]] = {"bias": (int,), "tau": (int, float), "pair_bias": (tuple,), "entmax": (int, float)}


# --- single arguments -------------------------------------------------------------------------------------------------------


def size(name: str, value: Any, least: int = 1) -> int:
    """The value as a count; there is nothing to judge where a tensor is empty."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if found < least:
        empty = ": of an empty tensor there is nothing to judge" if found == 0 else ""
        raise ValueError(f"{name} must be at least {least}, got {found}{empty}")
    return found


def four_sizes(name: str, shape: Any) -> tuple[int, int, int, int]:
    if not isinstance(shape, tuple | list | torch.Size) or len(shape) != 4:
        raise ValueError(f"{name} must be four sizes (B, Hq, Sq, D), got {shape!r}")
    b, h, s, d = (size(f"{letter} of {name}", value) for letter, value in zip(("B", "Hq", "Sq", "D"), shape, strict=True))
    return b, h, s, d


def check_spec(spec: Any) -> None:
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec must be an AttentionSpec, got {type(spec).__name__} {spec!r:.60}")


def check_seed(seed: Any) -> None:
    if size("seed", seed, least=0) > LARGEST_SEED:
        raise ValueError(f"seed must be at most 2 ** 62, got {seed}")


def check_dtype(name: str, dtype: Any) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(str(known)[6:] for known in DTYPES)}, got {dtype}")


def check_heads(hq: int, hkv: int) -> None:
    if hq % hkv:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {hq} and {hkv}")


def check_terms(spec: AttentionSpec, terms: dict[str, Any]) -> None:
    """Learned terms as arguments: of a kind that is understood, and of a spec that has them."""
    for name, value in terms.items():
        if value is None:
            continue
        numbers = NUMBERS.get(name, ())
        if isinstance(value, bool) or not isinstance(value, (Tensor, *numbers)):
            kinds = {
                "bias": " or a number of columns",
                "tau": " or a number",
                "pair_bias": " or words",
                "entmax": " or a number",
            }.get(name, "")
            raise TypeError(f"{name} must be a tensor {SHAPES[name]}{kinds} or None, got {value!r:.60}")
        if not getattr(spec, name):
            raise ValueError(f"{name} was given and would be ignored: the spec says {name}=False")
        if name == "bias" and not isinstance(value, Tensor):
            size("the number of columns of bias", value)
        if name == "tau" and isinstance(value, int | float) and not math.isfinite(value):
            raise ValueError(f"tau must be finite, got {value}")
        if name == "entmax" and isinstance(value, int | float) and not 1.05 <= value <= 2:
            raise ValueError(f"entmax must be from 1.05 to 2, got {value}")


def usable_device(device: Any) -> torch.device:
    """The device, if a tensor can be put there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be a torch device such as cpu or cuda:0, got {device!r}") from None
    if found.type == "meta":
        raise ValueError("device must hold values, got meta")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {found} was asked for, and torch sees no CUDA device")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {found} was asked for, and torch sees {torch.cuda.device_count()} CUDA devices")
    try:
        torch.empty(1, device=found)
    except Exception as error:
        raise ValueError(f"device {found} cannot be used here: {str(error).splitlines()[0]}") from None
    return found


def check_room(sizes: Sizes, device: torch.device) -> None:
    """Refuse what can only end in the system killing the process."""
    if device.type == "cuda":
        room = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    b, hq, hkv, sq, sk, d, dv, columns, _ = astuple(sizes)
    needed = 8 * (MATRICES * sq * sk + COPIES * (b * (hq * sq + hkv * sk) * (d + dv) + hq * columns))
    if needed > room:
        shape = f"B {b}, Hq {hq}, Hkv {hkv}, Sq {sq}, Sk {sk}, D {d}, Dv {dv}" + (f", bias {columns}" if columns else "")
        gib = f"about {needed / 2**30:.3g} GiB, and {device} has {room / 2**30:.3g}"
        raise ValueError(f"the shape {shape} is too large: the float64 oracle needs {gib}")


# --- tensors of the caller's ------------------------------------------------------------------------------------------------


def check_qkv(q: Any, k: Any, v: Any) -> None:
    """Canonical q [B,Hq,Sq,D], k [B,Hkv,Sk,D], v [B,Hkv,Sk,Dv] of one dtype on one device, none of them empty."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        _dense(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, H, S, D], got shape {tuple(x.shape)}")
        check_dtype(f"dtype of {name}", x.dtype)
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(f"{name} must be {q.dtype} on {q.device} as q is, got {x.dtype} on {x.device}")
        if not x.numel():
            raise ValueError(f"{name} must not be empty, got shape {tuple(x.shape)}: there is nothing to judge")
    b, _, _, d = q.shape
    if k.shape[0] != b or v.shape[0] != b:
        raise ValueError(f"q, k and v must have one batch size, got {b}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[3] != d:
        raise ValueError(f"k must have the head size of q, got {k.shape[3]} and {d}")
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(f"k and v must have the same heads and length, got {tuple(k.shape)} and {tuple(v.shape)}")
    check_heads(q.shape[1], k.shape[1])


def check_like_output(name: str, x: Any, q: Tensor, v: Tensor) -> None:
    """A tensor [B, Hq, Sq, Dv]: do, gate."""
    _dense(name, x)
    wanted = (*q.shape[:3], v.shape[3])
    if tuple(x.shape) != wanted or not x.is_floating_point():
        raise ValueError(f"{name} must be floating point of shape {wanted}, got {x.dtype} of {tuple(x.shape)}")


def check_term(name: str, x: Any, q: Tensor, v: Tensor) -> None:
    """A learned term against the tensors it belongs to. A table by distance may be of any length but 0."""
    if AXES[name] == OUTPUT_AXES:
        return check_like_output(name, x, q, v)
    _dense(name, x)
    if name in MASK:
        return _check_mask(name, x, q, v)
    if name in OF_PAIRS:
        return _check_pairs(name, x, q, v)
    unknown = [axis for axis in AXES[name] if axis not in ("heads", "distances")]
    if unknown:
        raise NotImplementedError(f"{name} has an axis of {unknown[0]}, and nothing is known here about its length")
    hq = q.shape[1]
    lengths = zip(AXES[name], x.shape, strict=False)
    fits = x.dim() == len(AXES[name]) and all(n == hq if axis == "heads" else n > 0 for axis, n in lengths)
    if not fits or not x.is_floating_point():
        wanted = f"{SHAPES[name]} with Hq = {hq}"
        raise ValueError(f"{name} must be floating point of shape {wanted}, got {x.dtype} of {tuple(x.shape)}")


def _check_pairs(name: str, x: Tensor, q: Tensor, v: Tensor) -> None:
    """Batch, heads and rows may be fewer (`Call.sharing`)."""
    _check_pair_dtype(name, x, q)
    check_pair_sizes(x, (*q.shape[:3], v.shape[2]))


def _check_pair_dtype(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype not in (q.dtype, torch.float32):
        raise ValueError(f"{name} must be {q.dtype} as q is, or torch.float32, got {x.dtype}")


def _check_mask(name: str, x: Tensor, q: Tensor, v: Tensor) -> None:
    """Batch and heads may be 1 for all alike."""
    known = {"batch": (1, q.shape[0]), "heads": (1, q.shape[1]), "ends": (2, 4), "keys": (v.shape[2],), "rows": (q.shape[2],)}
    fits = x.dim() == len(AXES[name]) and all(n in known[axis] for axis, n in zip(AXES[name], x.shape, strict=True))
    if not fits or x.dtype != torch.int32:
        wanted = " x ".join(" or ".join(map(str, dict.fromkeys(known[axis]))) for axis in AXES[name])
        raise ValueError(f"{name} must be int32 of shape {wanted}, got {x.dtype} of {tuple(x.shape)}")


def check_call(call: Call) -> None:
    """Learned terms and borders against the tensors they belong to."""
    for name in SHAPES:
        if getattr(call, name) is not None and not (call.varlen and name in OF_PAIRS):
            check_term(name, getattr(call, name), call.q, call.v)
    if call.varlen and call.pair_bias is not None:
        _check_pair_dtype("pair_bias", call.pair_bias, call.q)
        check_packed_pair_sizes(call.pair_bias, call.problems, call.q.shape[1])
    if call.cu_seqlens_q is not None and call.q.shape[0] != 1:
        raise ValueError(f"packed sequences need a batch of 1, got {call.q.shape[0]}")
    call.segments()


def borders(cu_seqlens: Any) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens as (of queries, of keys); their values are read where the call is made."""
    pair = cu_seqlens if isinstance(cu_seqlens, tuple | list) else (cu_seqlens, cu_seqlens)
    if len(pair) != 2 or (pair[0] is None) != (pair[1] is None):
        raise ValueError(f"cu_seqlens must be a tensor, a pair of tensors or None, got {cu_seqlens!r:.60}")
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k"), pair, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or x.numel() < 2:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"{x!r:.60}"
            raise ValueError(f"{name} must be an int32 or int64 tensor [Z + 1] with Z >= 1, got {got}")
    return pair[0], pair[1]


def _dense(name: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__} {x!r:.60}")
    if x.layout != torch.strided or x.is_meta or x.is_quantized:
        raise ValueError(f"{name} must be a plain dense tensor with values, got {x.layout} {x.dtype} on {x.device}")
