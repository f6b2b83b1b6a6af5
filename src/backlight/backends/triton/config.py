"""Tile sizes of the Triton kernels: the shipped table of a measured card, a heuristic elsewhere.

Neither looks at lengths, so that a new length never makes a kernel compile again. The dbias kernel sums diagonals of tiles
that are at least as wide as high: its block_m may not exceed its block_n.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from backlight.call import Call
from backlight.config import resolve

# rows and keys of one tile together: what padding of the bias table and tests of window edges count on
WIDEST_TILES = 256


@dataclass(frozen=True, slots=True)
class KernelConfig:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    # main loops read through TMA where card and strides allow it
    tma: bool = False
    # the dk/dv kernel reads lse and delta where it uses them, not ahead through shared memory
    direct: bool = False

    def __post_init__(self) -> None:
        if self.block_m + self.block_n > WIDEST_TILES:
            raise ValueError(f"block_m + block_n must be <= {WIDEST_TILES}, got {self.block_m} + {self.block_n}")

    @property
    def launch(self) -> dict[str, Any]:
        """Keywords of a kernel launch. Fused multiply-adds are asked for by name: Triton's default is about to change."""
        return {
            "BM": self.block_m,
            "BN": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def config_of(kernel: str, call: Call) -> KernelConfig:
    return resolve(f"triton.{kernel}", lambda: shipped(kernel, call) or heuristic(kernel, call))


def padded(size: int) -> int:
    """Tile dimensions are powers of two, at least 16 for a matmul."""
    return max(16, 1 << (size - 1).bit_length())


def width_of(call: Call) -> int:
    return max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))


def key_kernels(call: Call) -> tuple[str, ...]:
    """Wide heads compute dv and dk in two launches: both accumulators together would leave too few registers for a tile."""
    return ("dkdv",) if width_of(call) <= 128 or call.q.dtype == torch.float32 else ("dv", "dk")


def kernels_of(call: Call) -> tuple[str, ...]:
    """The kernels with a configuration that a call and its backward launch, in order."""
    forward = ("forward",) if call.tau is None else ("lse", "elastic")
    return (*forward, "dq", *key_kernels(call), *(() if call.bias is None else ("dbias",)))


def variant_of(call: Call) -> str:
    """What decides between tables: the term that costs most, then whether tiles are cut by a mask."""
    if call.tau is not None:
        return "lazy"
    if call.bias is not None:
        return "bias"
    if call.spec.softcap is not None:
        return "softcap"
    if call.spec.left is not None:
        return "window"
    return "causal" if call.spec.masked else "full"


@cache
def table_of(device: str) -> dict[str, KernelConfig]:
    """best[kernel/width/variant] of data/tuning/<device>/triton.json; empty where no such card was measured."""
    path = files("backlight") / "data" / "tuning" / device / "triton.json"
    if not path.is_file():
        return {}
    return {key: KernelConfig(*value) for key, value in json.loads(path.read_text())["best"].items()}


def shipped(kernel: str, call: Call) -> KernelConfig | None:
    if call.q.device.type != "cuda" or call.q.dtype == torch.float32:
        return None
    return entry(table_of(torch.cuda.get_device_name(call.q.device).replace(" ", "-").lower()), kernel, call)


def entry(table: Mapping[str, KernelConfig], kernel: str, call: Call) -> KernelConfig | None:
    """The variant's own entry, else that of plain attention with or without a mask; lse is a forward that keeps no o."""
    width, plain = max(64, width_of(call)), "causal" if call.spec.masked else "full"
    own = table.get(f"{kernel}/{width}/{variant_of(call)}")
    return own or table.get(f"{'forward' if kernel == 'lse' else kernel}/{width}/{plain}")


def heuristic(kernel: str, call: Call) -> KernelConfig:
    width = width_of(call)
    if call.q.dtype == torch.float32:
        if width <= 128:
            return KernelConfig(32, 32, 4, 2 if width <= 64 else 1)
        # products of fp32 are unrolled: with larger tiles or fewer warps they spill, and keep ptxas busy for most of a minute
        tile = {"dkdv": (16, 32), "dbias": (16, 16)}.get(kernel, (32, 16))
        return KernelConfig(*tile, num_warps=8, num_stages=1)
    if kernel in ("forward", "lse"):
        return KernelConfig(64, 64, 4, 2) if width > 128 else KernelConfig(128, 64, 8, 3)
    if kernel == "elastic":
        return KernelConfig(64, 64, 8 if width > 128 else 4, 2, tma=True)
    if width > 128:
        return KernelConfig(32, 64, 8, 1)
    return KernelConfig(64, 64, 4, 2)
