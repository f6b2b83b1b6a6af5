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
class Quantised:
    """Attention's inputs in e4m3.

    q [B, Hq, Sq, D] and k [B, Hkv, Sk, D], rotated, k centred; v [B, Hkv, D, Sk padded], its keys in the order in which
    weights lie in registers. q_scale [B, Hq, row blocks], k_scale [B, Hkv, key blocks], v_scale [B, Hkv, D]: powers of two.
    offset [B, Hq, Sq]: what centring took from the scores of a row, fp32. mean [B, Hkv, D]: the mean of k. dtype: that of y.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor
    offset: Tensor
    mean: Tensor
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


def quantize(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Quantised:
    """q, k and v [B, H, S, D] in e4m3."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    turn = rotation(q.shape[-1], q.device)
    q32, k32, v32 = (x.float() for x in (q, k, v))
    mean = k32.mean(2)
    group = q.shape[1] // k.shape[1]
    offset = (q32 * mean.repeat_interleave(group, 1)[:, :, None]).sum(-1) * scale
    q8, q_scale = by_blocks(q32 @ turn)
    k8, k_scale = by_blocks((k32 - mean[:, :, None]) @ turn)
    v_scale = power_of_two(v32.abs().amax(2))
    turned = (v32 / v_scale[:, :, None]).transpose(2, 3)
    padded = torch.nn.functional.pad(turned, (0, -v.shape[2] % BLOCK))
    v8 = in_register_order(padded).contiguous().to(torch.float8_e4m3fn)
    return Quantised(q8, k8, v8, q_scale, k_scale, v_scale, offset, mean, q.dtype)


def dequantized(given: Quantised) -> tuple[Tensor, Tensor, Tensor]:
    """q, k (both rotated, k centred) and v as they were rounded; exact in 16 bits with 8 bits of exponent."""

    def rows(x: Tensor, scale: Tensor) -> Tensor:
        return x.float() * scale.repeat_interleave(BLOCK, 2)[:, :, : x.shape[2], None]

    v = in_order(given.v.float())[..., : given.k.shape[2]].transpose(2, 3) * given.v_scale[:, :, None]
    return rows(given.q, given.q_scale), rows(given.k, given.k_scale), v
