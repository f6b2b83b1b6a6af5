"""The forward of e4m3 tensors on the host: descriptors, tiles, the launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.compat import COMPILER
from backlight.backends.hopper.config import intervals_of, is_masked
from backlight.backends.hopper.forward.arguments import Mask, Terms
from backlight.backends.hopper.fp8.arguments import Packing, Scales, Variant
from backlight.backends.hopper.fp8.kernel import _fp8_kernel
from backlight.backends.hopper.launch import GLUON_DTYPES, Launch, descriptor, multiprocessors, readable, vector_fields
from backlight.backends.intervals.tiles import Tiling, live_tiles
from backlight.call import Call
from backlight.config import resolve
from backlight.quantising import BLOCK, Quantised
from backlight.spec import LN2, LOG2E

TOGETHER = 8


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """Stages of the rings; pingpong: warpgroups take turns with their matmuls."""

    stages: int = 3
    pingpong: bool = True

    def __post_init__(self) -> None:
        if 2 * self.stages + 2 * self.pingpong > 8:
            raise ValueError(f"{self} needs more than the 8 named barriers that are free")


def config_of(d: int, masked: bool = False) -> Fp8Config:
    """O of 256 columns leaves through 64 KB, as much as a stage of both rings takes."""
    return resolve("hopper.fp8", lambda: Fp8Config(3 if d <= 128 else 2, pingpong=d > 64 or masked))


def tiles(tensor: Tensor, rows: int, width: int) -> TensorDescriptor:
    """Tiles [rows, width] of the two last dimensions of four."""
    dtype = gl.float8e4nv if tensor.dtype == torch.float8_e4m3fn else GLUON_DTYPES[tensor.dtype]
    block = [1, 1, rows, width]
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def variant_of(call: Call, given: Quantised, config: Fp8Config) -> Variant:
    spec, sk, intervals = call.spec, given.keys.k.shape[2], intervals_of(call)
    # row intervals have causal and window folded in
    left, right = (limit is not None and intervals == 0 for limit in (spec.left, spec.right))
    return Variant(
        D=given.q.shape[-1],
        BN=BLOCK,
        NC=2,
        ST=config.stages,
        HAS_LEFT=left,
        HAS_RIGHT=right,
        MASKED=left or right or intervals > 0 or call.varlen or sk % BLOCK != 0,
        PINGPONG=config.pingpong,
        VARLEN=call.varlen,
        SOFTCAP=spec.softcap is not None,
        BIAS=spec.bias,
        SINK=spec.sink,
        GATE=spec.gate,
        INTERVALS=intervals,
        PLACES=config.stages,
    )


def masking(launch: Launch, tiling: Tiling) -> tuple[Any, ...]:
    """The key blocks that row tiles visit under a mask by row intervals, and those intervals: arguments of the kernel."""
    if launch.call.rows is None:
        return (None,) * 5
    visited = live_tiles(launch.start_beside, launch.call, tiling, of_rows=True)
    folded = descriptor(visited.folded, vector_fields(visited.folded.numel(), BLOCK))
    mask = Mask(visited.live, visited.counts, visited.first_key_tiles)
    return folded, mask, visited.batch_step, visited.head_step, visited.most


def forward(call: Call, given: Quantised) -> tuple[Tensor, Tensor]:
    """(y, lse); of q, k and v of the call nothing but shapes is read."""
    keys, spec = given.keys, call.spec
    batch, heads, sq, d = call.q.shape
    device = given.q.device
    y = torch.empty(batch, heads, sq, d, dtype=given.dtype, device=device)
    lse = torch.empty(batch, heads, sq, dtype=torch.float32, device=device)
    # the bias is added to logits in base 2
    launch = Launch(replace(call, spec=spec.replace(scale=LN2, softcap=None)))
    packing = Packing(*(None,) * 4)
    row_tiles, key_tiles = given.q_scale.shape[2], keys.k_scale.shape[2]
    tiling = Tiling(BLOCK, BLOCK, row_tiles, key_tiles)
    if call.cu_seqlens_k is not None:
        cu_q, cu_k, row_tiles_before, _ = launch.packing(call.cu_seqlens_q, BLOCK)
        before = row_tiles_before, launch.first_tiles(call.cu_seqlens_k, BLOCK)
        packing = Packing(cu_q, cu_k, *before)
        tiling = Tiling(BLOCK, BLOCK, row_tiles, key_tiles, cu_q, cu_k, *before)
    n_tiles = row_tiles * batch * heads
    if n_tiles == 0:
        return y, lse
    programs = min(n_tiles, multiprocessors(device))
    uneven = is_masked(call) or call.varlen
    dynamic = uneven and programs < n_tiles
    gate = None if call.gate is None else readable(call.gate)
    args: list[Any] = [
        tiles(given.q, 64, d),
        tiles(keys.k, BLOCK, d),
        tiles(keys.v, d, BLOCK),
        launch.rows(y, 64, d),
        lse,
        Scales(given.q_scale, keys.k_scale, keys.v_scale, given.offset),
        launch.counter(dynamic),
        int(dynamic),
        n_tiles,
        row_tiles,
        max(n for n in range(1, (TOGETHER if uneven else 1) + 1) if batch * heads % n == 0),
        key_tiles,
        *(heads, call.group, sq, call.k.shape[2], spec.left or 0, spec.right or 0),
        LOG2E * given.scale if spec.softcap is None else given.scale / spec.softcap,
        None if gate is None else launch.rows(gate, 64, d),
        Terms(launch.table, launch.sink, None, *((None, None) if spec.softcap is None else (None, spec.softcap * LOG2E))),
        *((None, None) if call.bias is None else (call.bias.shape[1], spec.bias_origin)),
        packing,
        0 if call.cu_seqlens_q is None else call.cu_seqlens_q.shape[0] - 1,
        *masking(launch, tiling),
        variant_of(call, given, config_of(d, uneven)),
    ]
    _fp8_kernel[(programs,)](*args, num_warps=4, maxnreg=168, **COMPILER)
    return y, lse
