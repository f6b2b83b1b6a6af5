"""q, k and v in e4m3 with powers of two as scales (eq. 96, 97): what the forward of Hopper GPUs multiplies twice as fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# rows and keys that share a scale
BLOCK = 128
# below every number that matters, and far above those whose inverse is none
SMALLEST = 448.0 * 2.0**-100
# keys of a group whose places the product with V permutes
GROUP = 16


@dataclass(frozen=True, slots=True)
class Tiles:
    """Packed rows in tiles of BLOCK that begin where sequences do; of tiles there are as many as any borders may need.

    places [T]: where a row goes. sources, counts [tiles], int32: the first row of a tile, and how many it has.
    """

    places: Tensor
    sources: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values in e4m3, to be kept for many queries.

    k [B, Hkv, Sk, D], centred and rotated; v [B, Hkv, D, Sk padded], its keys in the order in which weights lie in registers.
    k_scale [B, Hkv, key blocks], v_scale [B, Hkv, D]: powers of two. mean [B, Hkv, D]: what centring took from k, fp32; zeros
    where it was not centred. tiles: of packed keys, which have the places of whole tiles.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    mean: Tensor
    centred: bool = True
    tiles: Tiles | None = None

    def __repr__(self) -> str:
        return f"Keys(k {tuple(self.k.shape)}, {'' if self.centred else 'not '}centred, {self.k.device})"


@dataclass(frozen=True, slots=True)
class Quantised:
    """Queries in e4m3 beside their keys.

    q [B, Hq, Sq, D], rotated; q_scale [B, Hq, row blocks]: powers of two. offset [B, Hq, Sq]: what centring took from scores of
    a row, fp32. scale: of the scores. dtype: that of y. tiles: of packed rows; offset is that of rows as they were.
    """

    q: Tensor
    q_scale: Tensor
    offset: Tensor
    keys: Keys
    scale: float
    dtype: torch.dtype
    tiles: Tiles | None = None

    def __repr__(self) -> str:
        return f"Quantised(q {tuple(self.q.shape)}, {self.keys})"


@cache
def _signs(d: int) -> tuple[float, ...]:
    generator = torch.Generator().manual_seed(d)
    return tuple((torch.randint(0, 2, (d,), generator=generator) * 2 - 1).tolist())


@cache
def rotation(d: int, device: torch.device) -> Tensor:
    """A signed Hadamard matrix [D, D], fp32: orthogonal, so that scores stay what they are."""
    check_width(d)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < d:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (torch.tensor(_signs(d))[:, None] * matrix / math.sqrt(d)).to(device)


@cache
def turning_signs(d: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The same matrix with entries 1 and -1."""
    return rotation(d, device).sign().to(dtype)


def power_of_two(largest: Tensor) -> Tensor:
    """The smallest power of two by which numbers up to `largest` are divided into the range of e4m3: 448 is 0.875 * 2^9."""
    mantissa, exponent = torch.frexp(largest.clamp(min=SMALLEST))
    return torch.ldexp(torch.ones_like(largest), exponent - 9 + (mantissa > 0.875).to(exponent.dtype))


def tiles_of(cu_seqlens: Tensor, length: int) -> Tiles:
    """Tiles of packed rows; no value is read on the host."""
    cu = cu_seqlens.long()
    most = length // BLOCK + cu.shape[0] - 1
    first = torch.nn.functional.pad((-(-cu.diff() // BLOCK)).cumsum(0), (1, 0))
    row, tile = (torch.arange(n, device=cu.device) for n in (length, most))
    z = torch.searchsorted(cu[1:], row, right=True)
    places = first[z] * BLOCK + row - cu[z]
    z = torch.searchsorted(first[1:], tile, right=True).clamp(max=cu.shape[0] - 2)
    sources = cu[z] + (tile - first[z]) * BLOCK
    counts = (cu[z + 1] - sources).clamp(0, BLOCK)
    return Tiles(places, sources.clamp(max=length).int(), counts.int())


def in_tiles(x: Tensor, tiles: Tiles | None) -> Tensor:
    """Packed rows [1, H, T, D] at their places, zeros between them."""
    if tiles is None:
        return x
    return x.new_zeros(*x.shape[:2], tiles.sources.shape[0] * BLOCK, x.shape[3]).index_copy(2, tiles.places, x)


def out_of_tiles(x: Tensor, tiles: Tiles | None) -> Tensor:
    return x if tiles is None else x.index_select(2, tiles.places)


def by_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3, scales) of rows [B, H, S, D] in blocks."""
    rows = x.shape[2]
    blocks = -(-rows // BLOCK)
    padded = torch.nn.functional.pad(x, (0, 0, 0, blocks * BLOCK - rows)).unflatten(2, (blocks, BLOCK))
    scale = power_of_two(padded.abs().amax((-2, -1)))
    return (padded / scale[..., None, None]).flatten(2, 3)[:, :, :rows].contiguous().to(torch.float8_e4m3fn), scale


def in_register_order(v: Tensor) -> Tensor:
    """Keys (the last dimension) of each sixteen: number 8 i + 2 t + c goes to place 4 t + 2 i + c."""
    shape = v.shape
    return v.unflatten(-1, (-1, 2, 4, 2)).transpose(-3, -2).reshape(shape)


def in_order(v: Tensor) -> Tensor:
    """The way back."""
    shape = v.shape
    return v.unflatten(-1, (-1, 4, 2, 2)).transpose(-3, -2).reshape(shape)


def check_keys(k: Tensor, v: Tensor) -> None:
    if k.shape != v.shape or k.dim() != 4:
        raise ValueError(f"k and v must both be [B, Hkv, Sk, D], got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[2] == 0:
        raise ValueError("k must have a key")
    check_width(k.shape[-1])


def check_width(d: int) -> None:
    if d & (d - 1):
        raise ValueError(f"head dimensions in e4m3 are powers of two, got {d}")


def check_queries(q: Tensor, k: Tensor) -> None:
    if q.dim() != 4 or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} does not go with keys {tuple(k.shape)}: [B, Hq, Sq, D], Hq a multiple of Hkv")


def keys_in_torch(k: Tensor, v: Tensor, centred: bool, tiles: Tiles | None) -> Keys:
    """k and v [B, Hkv, Sk, D] in e4m3, by torch operations."""
    k32, v32 = k.float(), v.float()
    # fp64: the sum is the same in any order
    mean = k.double().mean(2).float() if centred else torch.zeros_like(k32[:, :, 0])
    k8, k_scale = by_blocks(in_tiles((k32 - mean[:, :, None]) @ rotation(k.shape[-1], k.device), tiles))
    v_scale = power_of_two(v32.abs().amax(2))
    turned = in_tiles(v32 / v_scale[:, :, None], tiles).transpose(2, 3)
    padded = torch.nn.functional.pad(turned, (0, -turned.shape[3] % BLOCK))
    return Keys(k8, in_register_order(padded).contiguous().to(torch.float8_e4m3fn), k_scale, v_scale, mean, centred, tiles)


def queries_in_torch(q: Tensor, keys: Keys, scale: float, tiles: Tiles | None) -> Quantised:
    """q [B, Hq, Sq, D] in e4m3, by torch operations."""
    q32 = q.float()
    offset = (q32 * keys.mean.repeat_interleave(q.shape[1] // keys.k.shape[1], 1)[:, :, None]).sum(-1) * scale
    q8, q_scale = by_blocks(in_tiles(q32 @ rotation(q.shape[-1], q.device), tiles))
    return Quantised(q8, q_scale, offset, keys, scale, q.dtype, tiles)


def dequantized(given: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (both rotated, k centred) and v as they were rounded, fp32; exact in bf16 too."""

    def rows(x: Tensor, scale: Tensor, tiles: Tiles | None) -> Tensor:
        return out_of_tiles(x.float() * scale.repeat_interleave(BLOCK, 2)[:, :, : x.shape[2], None], tiles)

    keys = given.keys
    v = out_of_tiles(in_order(keys.v.float())[..., : keys.k.shape[2]].transpose(2, 3), keys.tiles)
    q = rows(given.q, given.q_scale, given.tiles)
    return q, rows(keys.k, keys.k_scale, keys.tiles), v * keys.v_scale[:, :, None]
