"""The launch of the kernel that walks over the members of a pair bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backlight.backends.hopper.compat import COMPILER
from backlight.backends.hopper.config import padded
from backlight.backends.hopper.launch import descriptor, multiprocessors, tile_descriptor, vector_fields
from backlight.backends.hopper.pair.config import WM, groups_of, members_of, pair_config
from backlight.backends.hopper.pair.members import Bias, Place, Units, Variant
from backlight.backends.hopper.pair.rows import _pair_rows_kernel
from backlight.backends.hopper.pair.sums import BLOCK, _pair_parts_kernel
from backlight.call import Call
from backlight.spec import LOG2E

# registers of a thread before the partitions share them out
REGISTERS = {2: 168, 3: 128}


def bias_of(tensor: Tensor) -> Bias:
    batch, head, row = (0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in range(3))
    return Bias(tensor, batch, head, row, tensor.stride(3), tensor.shape[3])


def place_of(tensor: Tensor) -> Place:
    return Place(tensor, *tensor.stride()[:3])


class Walk:
    """A call whose rows are known: do, and by rows padded to `pitch` -lse in base 2 and delta.

    start(kernel, grid, args, named) launches.
    """

    def __init__(self, start: Callable[..., None], call: Call, do: Tensor, minus_lse2: Tensor, delta: Tensor):
        assert call.pair_bias is not None
        self.start, self.call, self.do, self.minus_lse2, self.delta = start, call, do, minus_lse2, delta
        self.bias, self.config, self.members = call.pair_bias, pair_config(), members_of(call)
        self.pitch = minus_lse2.shape[-1]
        self.width = max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))
        self.entries, self.bias_heads, self.sq, self.sk = self.bias.shape

    def grid(self, length: int) -> tuple[tuple[int, int], int, int]:
        """(grid of programs that own 64 rows or keys, members to a group, groups)."""
        tiles, entries = -(-length // WM), self.entries * self.bias_heads
        each, groups = groups_of(self.members, tiles * entries, multiprocessors(self.bias.device))
        return (tiles, entries * groups), each, groups

    def tiles(self) -> list[Any]:
        """q, do, k and v, and vectors of rows, by 64; the bias."""
        tensors = (self.call.q, self.do, self.call.k, self.call.v)
        vectors = (descriptor(x, vector_fields(x.numel(), WM)) for x in (self.minus_lse2, self.delta))
        return [*(tile_descriptor(x, WM, self.width, False) for x in tensors), *vectors, bias_of(self.bias)]

    def numbers(self, each: int, groups: int) -> list[Any]:
        call, heads, scale = self.call, self.call.q.shape[1], float(self.call.scale)
        own = (self.members, each, groups, self.bias_heads, call.sharing, heads // self.bias_heads)
        sizes = (heads, call.group, self.sq, self.sk, call.spec.left or 0, call.spec.right or 0, self.pitch)
        return [*own, *sizes, Units(scale, scale * LOG2E, 1 / scale, 1 / (scale * LOG2E))]

    def named(self, warpgroups: int, tiles: int, block: int, **flags: bool) -> dict[str, Any]:
        call = self.call
        sizes = (call.q.shape[-1], call.v.shape[-1], self.width, warpgroups, tiles, block)
        variant = Variant(*sizes, call.spec.left is not None, call.spec.right is not None, **flags)
        return {"V": variant, "num_warps": 4, "maxnreg": REGISTERS[warpgroups], **COMPILER}

    def dq_and_dpair(self, want_dpair: bool) -> tuple[Tensor, Tensor | None]:
        """dq, and dpair_bias where it is wanted."""
        call, config = self.call, self.config
        dq = torch.empty_like(call.q)
        grid, each, groups = self.grid(self.sq)
        slabs, tiles = config.slabs(self.sk, self.bias.element_size())
        pairs, between, parts = self.sq * self.sk, self.delta, self.delta
        if want_dpair:
            parts = torch.empty(groups, self.entries, self.bias_heads, pairs, dtype=torch.float32, device=dq.device)
        if slabs > 1:
            between = torch.empty(*dq.shape[:2], self.pitch, self.width, dtype=torch.float32, device=dq.device)
        width = tiles * config.consumers * config.keys
        for slab in range(slabs):
            args = [
                *self.tiles(),
                place_of(dq),
                Bias(parts, self.bias_heads * pairs, pairs, self.sk, 1, self.sk),
                between,
                slab * width,
                *self.numbers(each, groups),
            ]
            flags = {"DPAIR": want_dpair, "FIRST": slab == 0, "LAST": slab == slabs - 1}
            self.start(_pair_rows_kernel, grid, args, self.named(config.consumers, tiles, config.keys, **flags))
        return dq, self.summed(parts) if want_dpair else None

    def summed(self, parts: Tensor) -> Tensor:
        """dpair_bias in the dtype of the bias, of parts [groups,Bb,Hb,pairs]."""
        dpair = torch.empty_like(self.bias)
        groups, pairs = parts.shape[0], parts.shape[3]
        args = [parts, bias_of(dpair), groups, pairs, self.sk, self.bias_heads]
        grid = (-(-pairs // BLOCK), self.entries * self.bias_heads)
        self.start(_pair_parts_kernel, grid, args, {"BLOCK": BLOCK, "num_warps": 4, **COMPILER})
        return dpair
