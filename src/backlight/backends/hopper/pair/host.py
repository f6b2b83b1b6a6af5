"""Launches of the kernels of shared pair biases."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from backlight.backends.hopper.backward.prepass import Rows, prepass
from backlight.backends.hopper.config import BackwardConfig
from backlight.backends.hopper.launch import Launch, descriptor, multiprocessors, readable, tile_descriptor, vector_fields
from backlight.backends.hopper.pair.config import WM, groups_of, members_of, pair_config
from backlight.backends.hopper.pair.forward import _pair_forward_kernel
from backlight.backends.hopper.pair.keys import _pair_keys_kernel
from backlight.backends.hopper.pair.members import Bias, Place, Units, Variant
from backlight.backends.hopper.pair.rows import _pair_rows_kernel
from backlight.backends.hopper.pair.sums import BLOCK, _pair_parts_kernel
from backlight.spec import LOG2E

# rows of a block of the pre-pass
ROWS = 128
# registers of a thread before the partitions share them out
REGISTERS = {2: 168, 3: 128, 4: 96}


def bias_of(tensor: Tensor) -> Bias:
    batch, head, row = (0 if tensor.shape[axis] == 1 else tensor.stride(axis) for axis in range(3))
    return Bias(tensor, batch, head, row, tensor.stride(3))


def place_of(tensor: Tensor) -> Place:
    return Place(tensor, *tensor.stride()[:3])


class Walk:
    """What the three launches of a call have in common: tiles of the bias, groups of its members."""

    def __init__(self, launch: Launch):
        self.launch, self.call = launch, launch.call
        assert self.call.pair_bias is not None
        self.bias = self.call.pair_bias
        self.config = pair_config(self.call)
        self.width = max(launch.bd, launch.bdv)
        self.members = members_of(self.call)

    def tiles(self, *tensors: Tensor, rows: int = WM) -> list[Any]:
        return [tile_descriptor(x, rows, self.width, False) for x in tensors]

    def grid(self, length: int) -> tuple[tuple[int, int], int, int]:
        """(grid of programs that own 64 rows or keys, members to a group, groups)."""
        tiles, entries = -(-length // WM), self.bias.shape[0] * self.bias.shape[1]
        each, groups = groups_of(self.members, tiles * entries, multiprocessors(self.call.q.device))
        return (tiles, entries * groups), each, groups

    def numbers(self, each: int, groups: int) -> tuple[int, ...]:
        call, heads = self.call, self.call.q.shape[1]
        bias_heads = self.bias.shape[1]
        own = (self.members, each, groups, bias_heads, call.sharing, heads // bias_heads)
        return *own, heads, call.group, call.q.shape[2], call.k.shape[2], call.spec.left or 0, call.spec.right or 0

    def units(self) -> Units:
        scale = float(self.call.scale)
        return Units(scale, scale * LOG2E, 1 / scale, 1 / (scale * LOG2E))

    def variant(self, groups: int, tiles: int, keys: int, **named: bool) -> Variant:
        spec = self.call.spec
        sizes = (self.launch.d, self.launch.dv, self.width, groups, tiles, keys)
        return Variant(*sizes, spec.left is not None, spec.right is not None, **named)


def options(groups: int) -> dict[str, int]:
    return {"num_warps": 4, "maxnreg": REGISTERS[groups]}


def forward(launch: Launch, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Fills y and lse."""
    call = launch.call
    gate = None if call.gate is None else readable(call.gate)

    def describe() -> dict[str, Any]:
        walk = Walk(launch)
        grid, each, groups = walk.grid(launch.sq)
        keys = walk.config.forward_tile(launch.sk, walk.bias.element_size())
        args = [
            *walk.tiles(call.q),
            *walk.tiles(call.k, call.v, rows=keys),
            bias_of(walk.bias),
            None if gate is None else place_of(gate),
            place_of(y),
            lse,
            *walk.numbers(each, groups),
            walk.units(),
        ]
        warpgroups = walk.config.forward_groups
        constants = {"V": walk.variant(warpgroups, -(-launch.sk // keys), keys)}
        return {"grid": grid, "args": args, "constants": constants, **options(warpgroups)}

    launch.start(_pair_forward_kernel, (call.q, call.k, call.v, call.pair_bias, gate, y, lse), describe)
    return y, lse


def backward(
    launch: Launch, y: Tensor, lse: Tensor, dy: Tensor, dlse: Tensor | None, needs: frozenset[str]
) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    rows = prepass(launch, BackwardConfig(ROWS, WM), y, lse, None, dy, dlse, False, out, needs)
    if needs & {"dq", "dpair_bias"}:
        out |= dq_and_dpair(launch, rows, "dpair_bias" in needs)
    if needs & {"dk", "dv"}:
        out |= dk_and_dv(launch, rows)
    return {name: out[name] for name in needs}


def vectors(rows: Rows) -> tuple[Any, Any]:
    """lse and delta by 64 rows."""
    return tuple(descriptor(x, vector_fields(x.numel(), WM)) for x in (rows.lse2, rows.delta))  # type: ignore[return-value]


def dq_and_dpair(launch: Launch, rows: Rows, want_dpair: bool) -> dict[str, Tensor]:
    call, walk = launch.call, Walk(launch)
    dq = torch.empty_like(call.q)
    grid, each, groups = launch.once("rows", lambda: walk.grid(launch.sq))
    slabs, tiles = walk.config.slabs(launch.sk)
    entries, bias_heads = walk.bias.shape[:2]
    pairs, pitch = launch.sq * launch.sk, rows.tiles * ROWS
    parts = between = rows.delta
    if want_dpair:
        parts = torch.empty(groups, entries, bias_heads, pairs, dtype=torch.float32, device=dq.device)
    if slabs > 1:
        between = torch.empty(*call.q.shape[:2], pitch, walk.width, dtype=torch.float32, device=dq.device)
    for slab in range(slabs):

        def describe(slab: int = slab) -> dict[str, Any]:
            warpgroups, keys = walk.config.rows_groups, walk.config.rows_keys
            args = [
                *walk.tiles(call.q, rows.do, call.k, call.v),
                *vectors(rows),
                bias_of(walk.bias),
                place_of(dq),
                Bias(parts, bias_heads * pairs, pairs, launch.sk, 1),
                between,
                slab * tiles * warpgroups * keys,
                *walk.numbers(each, groups),
                pitch,
                walk.units(),
            ]
            named = {"AHEAD": walk.config.rows_ahead, "DPAIR": want_dpair, "FIRST": slab == 0, "LAST": slab == slabs - 1}
            constants = {"V": walk.variant(warpgroups, tiles, keys, **named)}
            return {"grid": grid, "args": args, "constants": constants, **options(warpgroups)}

        tensors = (call.q, rows.do, call.k, call.v, rows.lse2, rows.delta, walk.bias, dq, parts, between)
        launch.start(_pair_rows_kernel, tensors, describe, f"slab {slab}")
    out = {"dq": dq}
    if want_dpair:
        out["dpair_bias"] = summed(launch, walk, parts)
    return out


def summed(launch: Launch, walk: Walk, parts: Tensor) -> Tensor:
    """dpair_bias [Bb,Hb,Sq,Sk] in the dtype of the bias, of parts [groups,Bb,Hb,pairs]."""
    dpair = torch.empty_like(walk.bias)
    groups, entries, bias_heads, pairs = parts.shape
    args = (parts, bias_of(dpair), groups, pairs, launch.sk, bias_heads)
    launch.start_beside(_pair_parts_kernel, (-(-pairs // BLOCK), entries * bias_heads), args, {"BLOCK": BLOCK}, "dpair")
    return dpair


def dk_and_dv(launch: Launch, rows: Rows) -> dict[str, Tensor]:
    call = launch.call
    dk, dv = torch.empty_like(call.k), torch.empty_like(call.v)

    def describe() -> dict[str, Any]:
        walk = Walk(launch)
        grid, each, groups = walk.grid(launch.sk)
        block = walk.config.keys_rows
        args = [
            *walk.tiles(call.q, rows.do, rows=block),
            *walk.tiles(call.k, call.v),
            *vectors(rows),
            bias_of(walk.bias),
            place_of(dk),
            place_of(dv),
            *walk.numbers(each, groups),
            rows.tiles * ROWS,
            walk.units(),
        ]
        warpgroups = walk.config.keys_groups
        constants = {"V": walk.variant(warpgroups, -(-launch.sq // block) * (block // WM), block)}
        return {"grid": grid, "args": args, "constants": constants, **options(warpgroups)}

    tensors = (call.q, rows.do, call.k, call.v, rows.lse2, rows.delta, call.pair_bias, dk, dv)
    launch.start(_pair_keys_kernel, tensors, describe)
    return {"dk": dk, "dv": dv}
