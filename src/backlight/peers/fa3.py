"""FlashAttention-3's two operators: the installed `flash_attn_interface`, or a library file named by BACKLIGHT_FA3.

The file is `_C.so`, or `_C.so.xz` which is unpacked into the temporary folder once; `libcudart.so.12` is looked for beside it.
Layout is [B,S,H,D], packed [T,H,D]; causal is aligned to the bottom right, as ours.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import lzma
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backlight.peers.features import features_of, on_cuda
from backlight.spec import AttentionSpec

PACKAGE = "flash_attn_interface"
VARIABLE = "BACKLIGHT_FA3"
CUDART = "libcudart.so.12"
KNOWN = ("causal", "window", "scale", "softcap", "cu_seqlens_q", "cu_seqlens_k")


class Fa3Function(torch.autograd.Function):
    """The two operators behind autograd, as the library's own interface does it; lse [B,H,S] or [H,T] has no gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2]
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        return (*torch.ops.flash_attn_3.bwd(do, q, k, v, o, lse, **ctx.options)[:3], None)


def operator_options(
    spec: AttentionSpec, scale: float, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
) -> dict[str, Any]:
    """Keywords that the forward and the backward operator share."""
    options: dict[str, Any] = {
        "softmax_scale": scale,
        "is_causal": spec.causal,
        "window_size_left": -1 if spec.left is None else spec.left,
        "window_size_right": -1 if spec.right is None else spec.right,
        "softcap": spec.softcap or 0.0,
    }
    for side, boundaries in (("q", cu_seqlens_q), ("k", cu_seqlens_k)):
        if boundaries is not None:
            options[f"cu_seqlens_{side}"] = boundaries
            options[f"max_seqlen_{side}"] = int(boundaries.diff().max())
    return options


def attention(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
    """One call with the project's keywords; transposed views are read in place, packed sequences without their batch."""
    asked = features_of("fa3", given, KNOWN)
    missing = absent()
    if missing:
        raise NotImplementedError(f"fa3: {missing}")
    on_cuda("fa3", q)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"fa3 takes fp16 and bf16 only, and the tensors are {str(q.dtype)[6:]}")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError("fa3's backward needs D = Dv")
    load()
    packed, spec = asked.cu_seqlens_q is not None, asked.spec
    options = operator_options(spec, spec.resolve_scale(q.shape[-1]), asked.cu_seqlens_q, asked.cu_seqlens_k)
    o, lse = Fa3Function.apply(*(x[0].transpose(0, 1) if packed else x.transpose(1, 2) for x in (q, k, v)), options)
    return (o.transpose(0, 1)[None], lse[None]) if packed else (o.transpose(1, 2), lse)


# --- the library -------------------------------------------------------------------------------------------------------------


def absent() -> str | None:
    """Why the library cannot be had, or None."""
    if importlib.util.find_spec(PACKAGE) is not None:
        return None
    named = os.environ.get(VARIABLE)
    if not named:
        return f"{PACKAGE} is not installed and {VARIABLE} names no library"
    return None if Path(named).is_file() else f"{VARIABLE} names a file that does not exist"


def source() -> str:
    return PACKAGE if importlib.util.find_spec(PACKAGE) is not None else f"library of {VARIABLE}"


@cache
def load() -> None:
    """Make `torch.ops.flash_attn_3` exist; once a process."""
    if importlib.util.find_spec(PACKAGE) is not None:
        importlib.import_module(PACKAGE)
        return
    named = Path(os.environ[VARIABLE]).resolve()
    beside = next((path for path in (named.with_name(CUDART), named.with_name(CUDART + ".xz")) if path.is_file()), None)
    ctypes.CDLL(CUDART if beside is None else str(unpacked(beside)), mode=ctypes.RTLD_GLOBAL)
    torch.ops.load_library(str(unpacked(named)))


def unpacked(path: Path) -> Path:
    """The file itself, or its decompressed copy in the temporary folder, made once for each content."""
    if path.suffix != ".xz":
        return path
    found = path.stat()
    folder = Path(tempfile.gettempdir()) / f"backlight-fa3-{os.getuid()}-{found.st_size}-{found.st_mtime_ns}"
    target = folder / path.stem
    if not target.is_file():
        folder.mkdir(mode=0o700, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}")
        with lzma.open(path) as packed, partial.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 22)
        partial.replace(target)
    return target
