"""FlashAttention-3: the installed `flash_attn_interface`, or a library file named by the environment variable BACKLIGHT_FA3.

The file is `_C.so`, or `_C.so.xz` which is unpacked into the temporary folder once; `libcudart.so.12` is looked for beside it.
Layout is [B,S,H,D], packed [T,H,D]. `fa3` runs through autograd; `fa3-bare` calls the two operators alone.
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

from backlight.bench.contender import AUTOGRAD, BARE, Contender, by_autograd, cannot, gated, leaves_of
from backlight.bench.workload import Tensors, Workload
from backlight.call import Call

VARIABLE = "BACKLIGHT_FA3"
CUDART = "libcudart.so.12"
ABLE = ("packed sequences", "a window", "softcap")


class Fa3:
    def __init__(self, name: str, path: str):
        self.name, self.path = name, path

    def refuse(self, workload: Workload, device: torch.device) -> str | None:
        case = workload.case
        if device.type != "cuda":
            return "FlashAttention-3 needs a CUDA device"
        if torch.cuda.get_device_capability(device)[0] != 9:
            return "FlashAttention-3 needs a Hopper GPU (sm_90)"
        if workload.dtype not in (torch.float16, torch.bfloat16):
            return "FlashAttention-3 takes fp16 and bf16 only"
        if workload.dv != case.d or case.d > 256:
            return "FlashAttention-3's backward needs Dv = D <= 256"
        return cannot("FlashAttention-3", workload, (*ABLE, *(("a gate",) if self.path == AUTOGRAD else ()))) or absent()

    def build(self, tensors: Tensors) -> Contender:
        load()
        call = tensors.call
        leaves, options = leaves_of(tensors, _own_layout), operator_options(call)
        shared: dict[str, Any] = {"canonical": _canonical, "path": self.path, "detail": source()}
        dy = _own_layout(tensors.dy).contiguous()
        if call.varlen:
            leaves = {name: x.detach()[0].requires_grad_() for name, x in leaves.items()}
            dy, shared["canonical"] = dy[0], lambda x: _canonical(x[None])
        if self.path == BARE:
            return _bare(self.name, leaves, dy, options, shared)

        def attend(q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None) -> Tensor:
            return gated(_Fa3Function.apply(q, k, v, options), gate)

        return by_autograd(self.name, leaves, dy, attend, **shared)


def _bare(name: str, leaves: dict[str, Tensor], dy: Tensor, options: dict[str, Any], shared: dict[str, Any]) -> Contender:
    q, k, v = (leaves[x].detach() for x in ("q", "k", "v"))

    def attend() -> tuple[Tensor, Tensor]:
        o, lse = torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2]
        return o, lse

    def gradients(o: Tensor, lse: Tensor, retain: bool) -> tuple[Tensor, ...]:
        return tuple(torch.ops.flash_attn_3.bwd(dy, q, k, v, o, lse, **options)[:3])

    return Contender(name, {"q": q, "k": k, "v": v}, dy, attend, gradients, **shared)


class _Fa3Function(torch.autograd.Function):
    """The two operators behind autograd, as the library's own interface does it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        o, lse = torch.ops.flash_attn_3.fwd(q, k, v, **options)[:2]
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = options
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        return (*torch.ops.flash_attn_3.bwd(do, q, k, v, o, lse, **ctx.options)[:3], None)


def operator_options(call: Call) -> dict[str, Any]:
    """Keywords that the forward and the backward operator share; causal is aligned to the bottom right, as ours."""
    spec = call.spec
    options: dict[str, Any] = {
        "softmax_scale": call.scale,
        "is_causal": spec.causal,
        "window_size_left": -1 if spec.left is None else spec.left,
        "window_size_right": -1 if spec.right is None else spec.right,
        "softcap": spec.softcap or 0.0,
    }
    if call.varlen:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = call.cu_seqlens_q, call.cu_seqlens_k
        options["max_seqlen_q"] = max(z.sq for z in call.segments())
        options["max_seqlen_k"] = max(z.sk for z in call.segments())
    return options


def _own_layout(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _canonical(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


# --- the library ---------------------------------------------------------------------------------------------------------


def absent() -> str | None:
    """Why the library cannot be had, or None."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        return None
    named = os.environ.get(VARIABLE)
    if not named:
        return f"flash_attn_interface is not installed and {VARIABLE} names no library"
    return None if Path(named).is_file() else f"{VARIABLE} names a file that does not exist"


def source() -> str:
    return "flash_attn_interface" if importlib.util.find_spec("flash_attn_interface") is not None else f"library of {VARIABLE}"


@cache
def load() -> None:
    """Make `torch.ops.flash_attn_3` exist; once a process."""
    if importlib.util.find_spec("flash_attn_interface") is not None:
        importlib.import_module("flash_attn_interface")
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


ADAPTERS = (Fa3("fa3", AUTOGRAD), Fa3("fa3-bare", BARE))
