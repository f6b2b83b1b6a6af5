"""The pre-pass of the forward in e4m3 on the host (e4m3.py): what it writes, its launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backlight.backends.triton import interpreting
from backlight.backends.triton.e4m3 import (
    Codes,
    Columns,
    Sizes,
    Sources,
    Variant,
    _columns_kernel,
    _mean_kernel,
    _quantise_kernel,
    _turn_back_kernel,
)
from backlight.backends.triton.launch import rows_of
from backlight.quantising import BLOCK, Keys, Quantised, Tiles, turning_signs

DTYPES = (torch.float16, torch.bfloat16)
WIDTHS = (64, 128, 256)
# programs that add up columns, about four for each multiprocessor
PROGRAMS, STEP = 528, 16


def takes(*tensors: Tensor) -> bool:
    """Whether kernels quantise these."""
    first = tensors[0]
    fits = first.dtype in DTYPES and first.shape[-1] in WIDTHS and all(x.dtype == first.dtype for x in tensors)
    return fits and (first.is_cuda or interpreting())


def readable(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@dataclass(frozen=True, slots=True)
class Prepass:
    """Queries, keys or both, of these sizes. rounded: not codes but the numbers that they stand for, in rows as they were."""

    sizes: Sizes
    d: int
    rounded: bool
    scale: float = 1.0
    q_tiles: Tiles | None = None
    k_tiles: Tiles | None = None

    @property
    def packed(self) -> bool:
        return self.q_tiles is not None or self.k_tiles is not None

    def start(self, q: Tensor, k: Tensor, v: Tensor, codes: Codes, columns: Columns) -> None:
        sizes = self.sizes
        kv_heads = sizes.heads // sizes.group
        programs = sizes.batch * (sizes.heads * sizes.q_tiles + 2 * kv_heads * sizes.k_tiles)
        variant = Variant(self.d, self.packed, self.rounded, interpreting())
        given: list[Any] = []
        for tiles in (self.q_tiles, self.k_tiles):
            given += [columns.mean_ptr] * 2 if tiles is None else [tiles.sources, tiles.counts]
        rows = (rows_of(readable(x)) for x in (q, k, v))
        if programs:
            _quantise_kernel[(programs,)](
                *rows, codes, columns, Sources(*given), sizes, self.scale, V=variant, num_warps=8, num_stages=1
            )


def blocks(length: int, tiles: Tiles | None) -> int:
    return -(-length // BLOCK) if tiles is None else tiles.sources.shape[0]


def columns_of(k: Tensor, v: Tensor, centred: bool) -> Columns:
    """What all tiles of a head have in common: the mean of k, the scales of v."""
    batch, heads, keys, d = k.shape
    chunks = max(1, min(PROGRAMS // max(1, batch * heads), -(-keys // BLOCK)))
    length = -(-keys // (chunks * STEP)) * STEP
    sums = torch.empty(batch * heads, chunks, d, dtype=torch.float64, device=k.device)
    largest = torch.empty(batch * heads, chunks, d, dtype=torch.float32, device=k.device)
    mean, turned, v_scale = (torch.empty(batch, heads, d, dtype=torch.float32, device=k.device) for _ in range(3))
    columns = Columns(turning_signs(d, k.device, k.dtype), sums, largest, mean, turned, v_scale)
    if batch * heads:
        of_k, of_v = rows_of(readable(k)), rows_of(readable(v))
        _columns_kernel[(chunks, batch * heads)](of_k, of_v, columns, heads, keys, length, D=d, num_warps=4)
        _mean_kernel[(batch * heads,)](columns, keys, chunks, D=d, CENTRED=centred, num_warps=4)
    return columns


def empty_codes(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float8_e4m3fn, device=like.device)


def keys_of(k: Tensor, v: Tensor, centred: bool, tiles: Tiles | None) -> Keys:
    """As `quantising.keys_in_torch`."""
    batch, heads, keys, d = k.shape
    n = blocks(keys, tiles)
    columns = columns_of(k, v, centred)
    k8 = empty_codes((batch, heads, keys if tiles is None else n * BLOCK, d), k)
    v8 = empty_codes((batch, heads, d, n * BLOCK), k)
    k_scale = torch.empty(batch, heads, n, dtype=torch.float32, device=k.device)
    codes = Codes(k8, k8, v8, k_scale, k_scale, columns.mean_ptr)
    prepass = Prepass(Sizes(batch, heads, 1, 0, keys, 0, n), d, rounded=False, k_tiles=tiles)
    prepass.start(k, k, v, codes, columns)
    return Keys(k8, v8, k_scale, columns.v_scale_ptr, columns.mean_ptr, centred, tiles)


def queries_of(q: Tensor, keys: Keys, scale: float, tiles: Tiles | None) -> Quantised:
    """As `quantising.queries_in_torch`."""
    batch, heads, rows, d = q.shape
    n = blocks(rows, tiles)
    q8 = empty_codes((batch, heads, rows if tiles is None else n * BLOCK, d), q)
    q_scale = torch.empty(batch, heads, n, dtype=torch.float32, device=q.device)
    offset = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    unused = keys.mean
    columns = Columns(turning_signs(d, q.device, q.dtype), unused, unused, keys.mean, unused, unused)
    codes = Codes(q8, q8, q8, q_scale, q_scale, offset)
    sizes = Sizes(batch, heads, heads // keys.k.shape[1], rows, 0, n, 0)
    Prepass(sizes, d, rounded=False, scale=scale, q_tiles=tiles).start(q, q, q, codes, columns)
    return Quantised(q8, q_scale, offset, keys, scale, q.dtype, tiles)


def quantised(
    q: Tensor, k: Tensor, v: Tensor, scale: float, centred: bool, tiles: tuple[Tiles | None, Tiles | None]
) -> Quantised:
    """Both at once."""
    batch, heads, rows, d = q.shape
    kv_heads, keys = k.shape[1:3]
    q_tiles, k_tiles = tiles
    nq, nk = blocks(rows, q_tiles), blocks(keys, k_tiles)
    columns = columns_of(k, v, centred)
    packed = q_tiles is not None
    q8 = empty_codes((batch, heads, nq * BLOCK if packed else rows, d), q)
    k8 = empty_codes((batch, kv_heads, nk * BLOCK if packed else keys, d), q)
    v8 = empty_codes((batch, kv_heads, d, nk * BLOCK), q)
    shapes = (batch, heads, nq), (batch, kv_heads, nk), (batch, heads, rows)
    q_scale, k_scale, offset = (torch.empty(shape, dtype=torch.float32, device=q.device) for shape in shapes)
    sizes = Sizes(batch, heads, heads // kv_heads, rows, keys, nq, nk)
    prepass = Prepass(sizes, d, False, scale, q_tiles, k_tiles)
    prepass.start(q, k, v, Codes(q8, k8, v8, q_scale, k_scale, offset), columns)
    found = Keys(k8, v8, k_scale, columns.v_scale_ptr, columns.mean_ptr, centred, k_tiles)
    return Quantised(q8, q_scale, offset, found, scale, q.dtype, q_tiles)


def rounded(
    q: Tensor, k: Tensor, v: Tensor, scale: float, centred: bool, tiles: tuple[Tiles | None, Tiles | None]
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """(q, k, v as e4m3 rounds them, in their own dtype and rows; offset; mean): `quantised`, then `dequantized`."""
    batch, heads, rows, d = q.shape
    kv_heads, keys = k.shape[1:3]
    q_tiles, k_tiles = tiles
    columns = columns_of(k, v, centred)
    q8, k8, v8 = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    offset = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
    sizes = Sizes(batch, heads, heads // kv_heads, rows, keys, blocks(rows, q_tiles), blocks(keys, k_tiles))
    codes = Codes(q8, k8, v8, columns.mean_ptr, columns.mean_ptr, offset)
    prepass = Prepass(sizes, d, True, scale, q_tiles, k_tiles)
    prepass.start(q, k, v, codes, columns)
    return (q8, k8, v8), offset, columns.mean_ptr


def turned_back(x: Tensor) -> Tensor:
    """Gradients of turned rows [B, H, S, D] as those of rows."""
    batch, heads, rows, d = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        signs, grid = turning_signs(d, x.device, x.dtype), (-(-rows // BLOCK), batch * heads)
        _turn_back_kernel[grid](rows_of(readable(x)), rows_of(out), signs, heads, rows, D=d, num_warps=8)
    return out


__all__ = ["keys_of", "quantised", "queries_of", "rounded", "takes", "turned_back"]
