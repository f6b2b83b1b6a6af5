"""Kernels by name: what PyTorch ships, peers if they are installed, and any function of the user's.

Every adapter speaks the project's keywords and refuses, in a sentence, what its kernel cannot do; a feature is never dropped
silently, since a missing feature would be reported as a defect of the kernel.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backlight.doctor.subject import fa3
from backlight.doctor.subject.subject import Subject
from backlight.doctor.subject.trouble import subject_code
from backlight.spec import AttentionSpec

Window = tuple[int | None, int | None]

NAMED = {
    "sdpa": "PyTorch's scaled_dot_product_attention, its own choice of backend",
    "sdpa:math": "the same, composed of plain operations",
    "sdpa:flash": "the same, flash backend (CPU too)",
    "sdpa:efficient": "the same, memory-efficient backend (CUDA)",
    "sdpa:cudnn": "the same, cuDNN backend (CUDA)",
    "flex": "PyTorch's FlexAttention; compiled on CUDA, eager elsewhere",
    "fa2": "the flash_attn package (CUDA)",
    "fa3": "the flash_attn_interface package, or the library BACKLIGHT_FA3 names (Hopper)",
}
# a captured table is pipelined through shared memory, a tile of fp32 a stage: FlexAttention's own choice does not fit
SMALL_TILES: Any = {
    "fwd_BLOCK_M": 64,
    "fwd_BLOCK_N": 64,
    "fwd_num_stages": 1,
    "bwd_BLOCK_M1": 32,
    "bwd_BLOCK_N1": 64,
    "bwd_BLOCK_M2": 64,
    "bwd_BLOCK_N2": 32,
    "bwd_num_stages": 1,
}
SDPA_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}


class UnknownSubject(ValueError):
    """No kernel goes by this name; the message says which names exist."""


def named(name: str) -> Callable[..., Any]:
    """The callable of one of `NAMED`."""
    if name.startswith("sdpa"):
        _, _, backend = name.partition(":")
        if backend and backend not in SDPA_BACKENDS:
            raise UnknownSubject(f"sdpa has no backend {backend!r}; there are {', '.join(SDPA_BACKENDS)}")
        return _renamed(partial(sdpa, backend=backend or None), name)
    peers: dict[str, Callable[..., Any]] = {"flex": flex, "fa2": fa2, "fa3": flash3}
    return peers[name]


def own(name: str, attention: Callable[..., Any], attention_varlen: Callable[..., Any], layout: str) -> Subject:
    """The public call of this package as a subject: `backlight` chooses a backend, any other name forces it."""
    backend = None if name == "backlight" else name
    if layout == "packed":
        return Subject(partial(attention_varlen, return_lse=True, backend=backend), layout="packed", name=name)
    return Subject(partial(attention, return_lse=True, backend=backend), layout="BHSD", name=name)


def user_function(reference: str) -> Callable[..., Any]:
    """`path/to/file.py:fn` or `package.module:fn`; attributes of objects work too (`file.py:Model.forward`)."""
    place, _, attribute = reference.rpartition(":")
    if not place or not attribute:
        raise UnknownSubject(f"{reference!r} names no function: write file.py:function or module:function")
    if place.endswith(".py"):
        module = _module_from_file(Path(place))
    elif not all(part.isidentifier() for part in place.split(".")):
        raise UnknownSubject(f"{place!r} is neither a file that ends in .py nor the name of a module")
    else:
        with subject_code():
            module = importlib.import_module(place)
    found: Any = module
    for part in attribute.split("."):
        with subject_code(module.__file__):
            known = hasattr(found, part)
        if not known:
            raise UnknownSubject(f"{place} has no {attribute!r}; it defines {', '.join(_callables(module)) or 'no functions'}")
        found = getattr(found, part)
    return found


def _module_from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UnknownSubject(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # the file's neighbours are importable, as if it were run as a script; an already imported module keeps its name
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    with subject_code(path):
        spec.loader.exec_module(module)
    return module


def _callables(module: ModuleType) -> list[str]:
    items = vars(module).items()
    return [name for name, item in items if callable(item) and getattr(item, "__module__", None) == module.__name__]


def _renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    function.__name__ = function.__qualname__ = name  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Asked:
    """The features of one call; an adapter lists those its kernel has."""

    causal: bool = False
    window: Window = (None, None)
    scale: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    bias_origin: int = 0
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(causal=self.causal, window=self.window)


def _asked(name: str, features: dict[str, Any], known: tuple[str, ...]) -> Asked:
    unknown = [feature for feature, value in features.items() if feature not in known and value is not None]
    if unknown:
        raise NotImplementedError(f"{name} has no {' and no '.join(unknown)}")
    return Asked(**features)


def dense_bias(bias: Tensor, bias_origin: int, sq: int, sk: int) -> Tensor:
    """[Hq, n] table by distance -> [Hq, Sq, Sk], differentiable; zero outside the table."""
    position = torch.arange(sq, device=bias.device)[:, None] + (sk - sq)
    column = position - torch.arange(sk, device=bias.device)[None, :] + bias_origin
    inside = (column >= 0) & (column < bias.shape[1])
    return bias[:, column.clamp(0, bias.shape[1] - 1)] * inside


# --- adapters ----------------------------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = None, **features: Any) -> Tensor:
    """PyTorch's SDPA. Windows, biases and unequal lengths travel as a dense mask: its causal flag aligns to the top left."""
    asked = _asked("sdpa", features, ("causal", "window", "scale", "bias", "bias_origin"))
    sq, sk = q.shape[2], k.shape[2]
    flag = asked.causal and asked.window == (None, None) and sq == sk and asked.bias is None
    mask = asked.spec.allowed(sq, sk, q.device) if asked.spec.masked and not flag else None
    if asked.bias is not None:
        added = dense_bias(asked.bias, asked.bias_origin, sq, sk).to(q.dtype)
        mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
    with nullcontext() if backend is None else _sdpa_kernel(backend):
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=flag, scale=asked.scale, enable_gqa=q.shape[1] != k.shape[1]
        )


def _sdpa_kernel(backend: str) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(getattr(SDPBackend, SDPA_BACKENDS[backend]))


def flex(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
    """FlexAttention with masks and packed sequences as a block mask, softcap and bias as a score modification."""
    known = ("causal", "window", "scale", "softcap", "bias", "bias_origin", "cu_seqlens_q", "cu_seqlens_k")
    asked = _asked("flex", features, known)
    cu = asked.cu_seqlens_q
    if cu is not None and asked.cu_seqlens_k is not None and not torch.equal(cu, asked.cu_seqlens_k):
        raise NotImplementedError("flex has packed sequences of equal query and key lengths only")
    sq, sk = q.shape[2], k.shape[2]
    boundaries = None if cu is None else tuple(cu.tolist())
    mask = _block_mask(asked.spec, sq, sk, boundaries, q.device) if asked.spec.masked or boundaries else None
    grouped, small = q.shape[1] != k.shape[1], asked.bias is not None
    attend = _flex_attention(asked.scale, asked.softcap, asked.bias_origin, sk - sq, grouped, q.is_cuda, small)
    return attend(q, k, v, asked.bias, mask)


@cache
def _flex_attention(
    scale: float | None, softcap: float | None, origin: int, shift: int, grouped: bool, compiled: bool, small: bool = False
) -> Callable[..., tuple[Tensor, Tensor]]:
    """One function for each set of plain numbers: a compiled one is found again by the next call."""
    from torch.nn.attention.flex_attention import flex_attention

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, block_mask: Any) -> tuple[Tensor, Tensor]:
        def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if softcap is not None:
                s = softcap * torch.tanh(s / softcap)
            if bias is not None:
                column = i + shift - j + origin
                inside = (column >= 0) & (column < bias.shape[1])
                s = s + torch.where(inside, bias[h, torch.clamp(column, 0, bias.shape[1] - 1)], 0.0)
            return s

        return flex_attention(
            q,
            k,
            v,
            score_mod=None if softcap is None and bias is None else score,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=grouped,
            kernel_options=SMALL_TILES if small and compiled else None,
            return_lse=True,
        )

    return torch.compile(attend, dynamic=False) if compiled else attend


@lru_cache(maxsize=64)
def _block_mask(spec: AttentionSpec, sq: int, sk: int, boundaries: tuple[int, ...] | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    left, right, shift, sequence = spec.left, spec.right, sk - sq, None
    if boundaries is not None:
        lengths = torch.tensor(boundaries, device=device).diff()
        sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=device), lengths)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = i + shift - j
        seen = distance == distance
        if right is not None:
            seen = seen & (distance >= -right)
        if left is not None:
            seen = seen & (distance <= left)
        return seen if sequence is None else seen & (sequence[i] == sequence[j])

    return create_block_mask(visible, None, None, sq, sk, device=device)


def fa2(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> Tensor:
    """FlashAttention 2 of the flash_attn package: [B,S,H,D], a window with -1 for unbounded, softcap 0 for none."""
    asked = _asked("fa2", features, ("causal", "window", "scale", "softcap"))
    if importlib.util.find_spec("flash_attn") is None:
        raise NotImplementedError("fa2 needs the package flash_attn, which is not installed")
    _on_cuda("fa2", q)
    out = importlib.import_module("flash_attn").flash_attn_func(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        softmax_scale=asked.scale,
        causal=asked.causal,
        window_size=tuple(-1 if side is None else side for side in asked.window),
        softcap=asked.softcap or 0.0,
    )
    return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)


def flash3(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
    """FlashAttention 3 through its two operators; transposed views are read in place, packed sequences without their batch."""
    known = ("causal", "window", "scale", "softcap", "cu_seqlens_q", "cu_seqlens_k")
    asked = _asked("fa3", features, known)
    missing = fa3.absent()
    if missing:
        raise NotImplementedError(f"fa3: {missing}")
    _on_cuda("fa3", q)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise NotImplementedError(f"fa3 takes fp16 and bf16 only, and the tensors are {str(q.dtype)[6:]}")
    if q.shape[-1] != v.shape[-1]:
        raise NotImplementedError("fa3's backward needs D = Dv")
    fa3.load()
    packed = asked.cu_seqlens_q is not None
    spec = asked.spec.replace(softcap=asked.softcap)
    scale = q.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    options = fa3.operator_options(spec, scale, asked.cu_seqlens_q, asked.cu_seqlens_k)
    o, lse = fa3.Fa3Function.apply(*(x[0].transpose(0, 1) if packed else x.transpose(1, 2) for x in (q, k, v)), options)
    return (o.transpose(0, 1)[None], lse[None]) if packed else (o.transpose(1, 2), lse)


def _on_cuda(name: str, q: Tensor) -> None:
    if not q.is_cuda:
        raise NotImplementedError(f"{name} needs a CUDA device and the tensors are on {q.device}")
