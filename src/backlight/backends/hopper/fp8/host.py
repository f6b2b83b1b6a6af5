"""The forward of e4m3 tensors on the host: descriptors, tiles, the launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.compat import COMPILER
from backlight.backends.hopper.forward.arguments import Terms
from backlight.backends.hopper.fp8.arguments import Scales, Variant
from backlight.backends.hopper.fp8.kernel import _fp8_kernel
from backlight.backends.hopper.launch import GLUON_DTYPES, multiprocessors, nothing
from backlight.call import Call
from backlight.config import resolve
from backlight.quantising import BLOCK, Quantised
from backlight.spec import LOG2E

NO_TERMS = Terms(None, None, None, None, None)
WIDTHS = (64, 128)
TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Stages of the rings; pingpong: warpgroups take turns with their matmuls."""

    stages: int = 3
    pingpong: bool = True

    def __post_init__(self) -> None:
        if 2 * self.stages + 2 * self.pingpong > 8:
            raise ValueError(f"{self} needs more than the 8 named barriers that are free")


def tiles(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Tiles [rows, width] of the two last dimensions of four."""
    dtype = gl.float8e4nv if tensor.dtype == torch.float8_e4m3fn else GLUON_DTYPES[tensor.dtype]
    block = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def forward(call: Call, given: Quantised) -> tuple[Tensor, Tensor]:
    """(y, lse)."""
    keys, spec = given.keys, call.spec
    batch, heads, sq, d = given.q.shape
    kv_heads, sk = keys.k.shape[1:3]
    device = given.q.device
    y = torch.empty(batch, heads, sq, d, dtype=given.dtype, device=device)
    lse = torch.empty(batch, heads, sq, dtype=torch.float32, device=device)
    config = resolve("hopper.fp8", Fp8Config)
    masked = spec.left is not None or spec.right is not None
    row_tiles, key_tiles = -(-sq // BLOCK), -(-sk // BLOCK)
    n_tiles = row_tiles * batch * heads
    programs = min(n_tiles, multiprocessors(device))
    dynamic = masked and programs < n_tiles
    together = max(n for n in range(1, (TOGETHER if masked else 1) + 1) if batch * heads % n == 0)
    counter = torch.zeros(1, dtype=torch.int32, device=device) if dynamic else nothing(device)
    variant = Variant(
        D=d,
        BN=BLOCK,
        NC=2,
        ST=config.stages,
        HAS_LEFT=spec.left is not None,
        HAS_RIGHT=spec.right is not None,
        MASKED=masked or sk % BLOCK != 0,
        PINGPONG=config.pingpong,
    )
    args: list[Any] = [
        tiles(given.q, 64, d),
        tiles(keys.k, BLOCK, d),
        tiles(keys.v, d, BLOCK),
        tiles(y, 64, d),
        lse,
        Scales(given.q_scale, keys.k_scale, keys.v_scale, given.offset),
        counter,
        int(dynamic),
        n_tiles,
        row_tiles,
        together,
        key_tiles,
        heads,
        heads // kv_heads,
        sq,
        sk,
        spec.left or 0,
        spec.right or 0,
        given.scale * LOG2E,
        NO_TERMS,
        variant,
    ]
    _fp8_kernel[(programs,)](*args, num_warps=4, maxnreg=168, **COMPILER)
    return y, lse
