"""q, k and v in e4m3 with powers of two as scales (eq. 96, 97): what the forward of Hopper GPUs multiplies twice as fast."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# rows and keys that share a scale
BLOCK = 128
LARGEST = 448.0
# keys of a group whose places the product with V permutes
GROUP = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys and values in e4m3, to be kept for many queries.

    k [B, Hkv, Sk, D], centred and rotated; v [B, Hkv, D, Sk padded], its keys in the order in which weights lie in registers.
    k_scale [B, Hkv, key blocks], v_scale [B, Hkv, D]: powers of two. mean [B, Hkv, D]: what centring took from k, fp32.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor
    v_scale: Tensor
    mean: Tensor


@dataclass(frozen=True, slots=True)
class Quantised:
    """Queries in e4m3 beside their keys.

    q [B, Hq, Sq, D], rotated; q_scale [B, Hq, row blocks]: powers of two. offset [B, Hq, Sq]: what centring took from scores of
    a row, fp32. scale: of the scores. dtype: that of y.
    """

    q: Tensor
    q_scale: Tensor
    offset: Tensor
    keys: Keys
    scale: float
    dtype: torch.dtype


@cache
def _signs(d: int) -> tuple[float, ...]:
    generator = torch.Generator().manual_seed(d)
    return tuple((torch.randint(0, 2, (d,), generator=generator) * 2 - 1).tolist())


@cache
def rotation(d: int, device: torch.device) -> Tensor:
    """A signed Hadamard matrix [D, D], fp32: orthogonal, so that scores stay what they are."""
    if d & (d - 1):
        raise ValueError(f"head dimensions in e4m3 are powers of two, got {d}")
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < d:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (torch.tensor(_signs(d))[:, None] * matrix / math.sqrt(d)).to(device)


def power_of_two(largest: Tensor) -> Tensor:
    """The smallest power of two by which numbers up to `largest` are divided into the range of e4m3."""
    exponent = torch.frexp((largest / LARGEST).clamp(min=2.0**-100))
    exact = exponent.mantissa == 0.5
    return torch.ldexp(torch.ones_like(largest), exponent.exponent - exact.to(exponent.exponent.dtype))


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


def quantize_keys(k: Tensor, v: Tensor) -> Keys:
    """k and v [B, Hkv, Sk, D] in e4m3."""
    if k.shape != v.shape or k.dim() != 4:
        raise ValueError(f"k and v must both be [B, Hkv, Sk, D], got {tuple(k.shape)} and {tuple(v.shape)}")
    if k.shape[2] == 0:
        raise ValueError("k must have a key")
    k32, v32 = k.float(), v.float()
    mean = k32.mean(2)
    k8, k_scale = by_blocks((k32 - mean[:, :, None]) @ rotation(k.shape[-1], k.device))
    v_scale = power_of_two(v32.abs().amax(2))
    padded = torch.nn.functional.pad((v32 / v_scale[:, :, None]).transpose(2, 3), (0, -v.shape[2] % BLOCK))
    return Keys(k8, in_register_order(padded).contiguous().to(torch.float8_e4m3fn), k_scale, v_scale, mean)


def quantize_queries(q: Tensor, keys: Keys, scale: float | None = None) -> Quantised:
    """q [B, Hq, Sq, D] in e4m3, for keys that are."""
    batch, heads, _, d = q.shape
    kv_heads = keys.k.shape[1]
    if (batch, d) != (keys.k.shape[0], keys.k.shape[3]) or heads % kv_heads:
        raise ValueError(
            f"q {tuple(q.shape)} does not go with keys {tuple(keys.k.shape)}: [B, Hq, Sq, D], Hq a multiple of Hkv"
        )
    scale = d**-0.5 if scale is None else scale
    q32 = q.float()
    offset = (q32 * keys.mean.repeat_interleave(heads // kv_heads, 1)[:, :, None]).sum(-1) * scale
    q8, q_scale = by_blocks(q32 @ rotation(d, q.device))
    return Quantised(q8, q_scale, offset, keys, scale, q.dtype)


def quantize(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Quantised:
    """q, k and v [B, H, S, D] in e4m3."""
    return quantize_queries(q, quantize_keys(k, v), scale)


def dequantized(given: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (both rotated, k centred) and v as they were rounded, fp32; exact in bf16 too."""

    def rows(x: Tensor, scale: Tensor) -> Tensor:
        return x.float() * scale.repeat_interleave(BLOCK, 2)[:, :, : x.shape[2], None]

    keys = given.keys
    v = in_order(keys.v.float())[..., : keys.k.shape[2]].transpose(2, 3) * keys.v_scale[:, :, None]
    return rows(given.q, given.q_scale), rows(keys.k, keys.k_scale), v
