"""Tile sizes of the Triton kernels: the shipped table of a measured card, a heuristic by shared memory elsewhere.

A table holds for its card and for others of the same architecture, where they have as much shared memory. Nothing here looks at
lengths, so that a new length never makes a kernel compile again, but for a pair bias with rows of one tile at most. The dbias
kernel sums diagonals of tiles that are at least as wide as high: its block_m may not exceed its block_n.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch

from backlight.backends.triton.device import KIB, Device, device_of
from backlight.call import Call
from backlight.config import resolve

# rows and keys of one tile together: what padding of the bias table and tests of window edges count on
WIDEST_TILES = 256
# bytes of shared memory that the largest and the middle tiles of the heuristic need (docs/kernels.md lists what they take)
LARGE, MIDDLE = 160 * KIB, 96 * KIB
# what tiles of heads wider than 256 need beyond that
LARGEST = 200 * KIB


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
    # most registers of a thread: more programs run side by side; 0 leaves them to the compiler
    registers: int = 0

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
            **({"maxnreg": self.registers} if self.registers else {}),
        }


def config_of(kernel: str, call: Call) -> KernelConfig:
    return resolve(f"triton.{kernel}", lambda: chosen(kernel, call, device_of(call.q.device)))


def chosen(kernel: str, call: Call, device: Device) -> KernelConfig:
    return shipped(kernel, call, device) or heuristic(kernel, call, device)


def padded(size: int) -> int:
    """Tile dimensions are powers of two, at least 16 for a matmul."""
    return max(16, 1 << (size - 1).bit_length())


def width_of(call: Call) -> int:
    return max(padded(call.q.shape[-1]), padded(call.v.shape[-1]))


def key_kernels(call: Call) -> tuple[str, ...]:
    """Wide heads compute dv and dk in two launches: both accumulators together would leave too few registers for a tile."""
    return ("dkdv",) if width_of(call) <= 128 or call.q.dtype == torch.float32 else ("dv", "dk")


def second_key_kernels(call: Call) -> tuple[str, ...]:
    """`key_kernels` of second derivatives; in fp32 too, two accumulators of wide heads are too many, and beside a pair bias and
    its tangent those of heads wider than 64."""
    widest = 128 if call.pair_bias is None else 64
    return ("second_dkdv",) if width_of(call) <= widest else ("second_dv", "second_dk")


def why_no_second(call: Call) -> tuple[str, ...]:
    """Reasons a card has no room for second derivatives of a call."""
    shared = device_of(call.q.device).shared
    if call.q.dtype != torch.float32 or width_of(call) <= 128 or shared >= LARGE:
        return ()
    return (f"has no second derivative in fp32 of heads wider than 128 with {shared // KIB} KiB of shared memory",)


def why_no_room(call: Call) -> tuple[str, ...]:
    """Reasons a card has no room for heads wider than 256 in fp32."""
    shared = device_of(call.q.device).shared
    if shared >= LARGE:
        return ()
    return (f"fp32 with heads wider than 256 needs {LARGE // KIB} KiB of shared memory, and the card has {shared // KIB}",)


def kernels_of(call: Call) -> tuple[str, ...]:
    """The kernels with a configuration that a call and its backward launch, in order."""
    forward = ("forward",) if call.tau is None else ("lse", "elastic")
    if call.entmax is not None:
        forward = ("entmax", "live")
    return (*forward, "dq", *key_kernels(call), *(() if call.bias is None else ("dbias",)), *pair_kernels(call))


def pair_kernels(call: Call) -> tuple[str, ...]:
    """A pair bias that batch entries or heads share has a kernel for its gradient, unless it is by key (`dpair.way_of`)."""
    b = call.pair_bias
    return () if b is None or b.shape[2] == 1 or call.owns_pairs else ("dpair",)


def variant_of(call: Call) -> str:
    """What decides between tables: the term that costs most, then whether tiles are cut by a mask."""
    if call.tau is not None:
        return "lazy"
    if call.entmax is not None:
        return "entmax"
    if call.pair_bias is not None:
        return "pair"
    if call.bias is not None:
        return "bias"
    if call.spec.softcap is not None:
        return "softcap"
    if call.spec.left is not None:
        return "window"
    return plain_of(call)


def plain_of(call: Call) -> str:
    return "causal" if call.spec.masked or call.spec.rows else "full"


@dataclass(frozen=True, slots=True)
class Shipped:
    """data/tuning/<folder>/triton.json: the card it was measured on, and the best of each kernel/width/variant."""

    folder: str
    device: Device
    best: Mapping[str, KernelConfig]


@cache
def tables() -> tuple[Shipped, ...]:
    found = []
    package = __name__.partition(".")[0]
    for folder in sorted((files(package) / "data" / "tuning").iterdir(), key=lambda folder: folder.name):
        path = folder / "triton.json"
        if path.is_file():
            record = json.loads(path.read_text())
            device = Device(record["device"], record["arch"], record["shared"])
            best = {key: KernelConfig(*value) for key, value in record["best"].items()}
            found.append(Shipped(folder.name, device, best))
    return tuple(found)


@cache
def table_for(device: Device) -> Shipped | None:
    """Its own, else that of a card of its architecture; never one of a card with more shared memory."""
    fitting = [x for x in tables() if x.device.arch == device.arch and x.device.shared <= device.shared]
    return next((x for x in fitting if x.device.name == device.name), fitting[0] if fitting else None)


def table_in_use(device: torch.device) -> str:
    """Where the tile sizes of 16-bit calls on a device come from, in words."""
    found = device_of(device)
    table, room = table_for(found), f"{found.shared // KIB} KiB of shared memory"
    if table is None:
        return f"tiles for {room}, not measured on {found.arch}"
    return f"tiles measured on {table.device.name}, {room}"


def shipped(kernel: str, call: Call, device: Device) -> KernelConfig | None:
    table = None if call.q.dtype == torch.float32 else table_for(device)
    return None if table is None else entry(table.best, kernel, call)


def entry(table: Mapping[str, KernelConfig], kernel: str, call: Call) -> KernelConfig | None:
    """The variant's own entry, else that of plain attention with or without a mask; lse is a forward that keeps no o. A pair
    bias and entmax have none but their own."""
    width, plain = max(64, width_of(call)), plain_of(call)
    if call.pair_bias is not None:
        # its tiles take room beside the others, and where products are short they decide
        return table.get(f"{kernel}/{max(32, width_of(call))}/pair")
    own = table.get(f"{kernel}/{width}/{variant_of(call)}")
    if call.entmax is not None:
        # slopes beside weights take registers that tiles of a softmax do not have
        return own
    return own or table.get(f"{'forward' if kernel == 'lse' else kernel}/{width}/{plain}")


def heuristic(kernel: str, call: Call, device: Device) -> KernelConfig:
    """Tiles that fit into the device's shared memory."""
    width = width_of(call)
    if kernel.startswith("second"):
        return _second(kernel, width, call, device.shared)
    if call.q.dtype == torch.float32:
        return _unrolled(kernel, width, device.arch)
    if width > 256:
        return _widest(kernel, device.shared)
    if call.pair_bias is not None and device.shared >= LARGE and kernel != "dbias":
        return _paired(kernel, width, call.q.shape[2] <= 64)
    return _wide(kernel, device.shared) if width > 128 else _usual(kernel, width, call, device.shared)


def _unrolled(kernel: str, width: int, arch: str) -> KernelConfig:
    """fp32."""
    if width > 256:
        return KernelConfig(16, 16, 8, 1)
    if width <= 64:
        return KernelConfig(32, 32, 4, 2)
    if width <= 128:
        # ptxas unrolls further than the registers of four warps reach; Hopper keeps what has run on its cards
        spills = arch.startswith("sm_") and arch != "sm_90" and kernel in ("dq", "dkdv")
        return KernelConfig(32, 32, 8 if spills else 4, 1)
    # products of fp32 are unrolled: with larger tiles or fewer warps they spill, and keep ptxas busy for most of a minute
    tile = {"dkdv": (16, 32), "dbias": (16, 16)}.get(kernel, (32, 16))
    return KernelConfig(*tile, num_warps=8, num_stages=1)


def _paired(kernel: str, width: int, short: bool) -> KernelConfig:
    """16 bits, a pair bias of up to 32 bits beside q, k and v. Measured on an H200: heads up to 32 with a shared bias, 64 with
    one of their own."""
    if width > 128:
        rows, keys = {"forward": (64, 64), "dq": (64, 32), "dpair": (64, 64)}.get(kernel, (32, 64))
        tma = kernel != "dpair"
        return KernelConfig(rows, keys, 8 if kernel in ("dk", "dpair") else 4, 2 if tma else 1, tma)
    if kernel == "fused":
        return KernelConfig(64, 64, 4, 2, tma=True, registers=168)
    if width > 64:
        return KernelConfig(64, 64, 8 if kernel in ("dkdv", "dpair") else 4, 2, tma=True, direct=kernel == "dkdv")
    if kernel == "forward":
        if width > 32:
            return KernelConfig(128, 64, 8, 3, tma=True)
        return KernelConfig(64, 64, 4, 2, tma=True, registers=96) if short else KernelConfig(128, 64, 4, 3, tma=True)
    if kernel == "dkdv":
        if width > 32:
            return KernelConfig(128, 64, 4, 2, tma=True)
        return KernelConfig(64, 64, 4, 2, tma=True, direct=True, registers=128)
    stages = 3 if width <= 32 else 4 if kernel == "dq" else 2
    return KernelConfig(64, 64, 4, stages, tma=True)


def _wide(kernel: str, shared: int) -> KernelConfig:
    """16 bits, heads wider than 128."""
    if kernel in ("forward", "lse"):
        return KernelConfig(64, 64, 4, 2) if shared >= LARGE else KernelConfig(64, 32, 8 if shared >= MIDDLE else 4, 2)
    if kernel in ("elastic", "entmax", "live"):
        return KernelConfig(64, 64 if shared >= LARGE else 32, 8, 2, tma=True)
    return KernelConfig(32, 32 if shared < MIDDLE and kernel in ("dq", "dbias") else 64, 8, 1)


def _widest(kernel: str, shared: int) -> KernelConfig:
    """16 bits, heads wider than 256: a tile of 64 x 512 takes 64 KiB, its accumulator 128 registers of each of 256 threads."""
    if shared < LARGE:
        return KernelConfig(16, 16, 4, 1)
    if kernel == "forward":
        return KernelConfig(64, 32, 8, 2 if shared >= LARGEST else 1)
    if kernel in ("dbias", "dpair") or shared < LARGEST:
        return KernelConfig(32, 32, 8, 1)
    return KernelConfig(64, 32, 8, 1) if kernel == "dq" else KernelConfig(32, 64, 8, 1)


def _usual(kernel: str, width: int, call: Call, shared: int) -> KernelConfig:
    """16 bits, heads up to 128. tau, softcap and columns beyond a head keep a tile more in registers: smaller tiles, or more
    warps."""
    if kernel in ("forward", "lse"):
        return KernelConfig(128, 64, 8, 3 if width <= 64 or shared >= LARGE else 2)
    if kernel in ("elastic", "entmax", "live"):
        return KernelConfig(64, 64, 4, 2, tma=True)
    heads = call.q.shape[-1], call.v.shape[-1]
    heavy = call.spec.keeps_u or call.spec.softcap is not None or any(padded(d) != d for d in heads)
    if heavy and kernel == "dkdv" and (width <= 64 or shared < MIDDLE):
        return KernelConfig(32, 64, 4, 2) if shared >= MIDDLE else KernelConfig(32, 64, 8, 1)
    if shared >= MIDDLE:
        return KernelConfig(64, 64, 8 if heavy and (width > 64 or kernel == "dbias") else 4, 2)
    return KernelConfig(64, 64, 8, 1) if kernel == "dbias" and width > 64 else KernelConfig(64, 64, 4, 2)


def _second_plain(kernel: str, narrow: bool, causal: bool) -> KernelConfig:
    """Measured on an H200."""
    if kernel == "second_dq_of_both":
        # the gradients at o and at its tangent side by side: wide tiles of both exceed shared memory
        return KernelConfig(64, 64 if narrow else 32, 4, 2, tma=True)
    if kernel == "second_dq":
        return KernelConfig(64, 64, 4, 2, tma=True) if narrow else KernelConfig(128, 64, 8, 2, tma=True)
    if narrow:
        return KernelConfig(64, 64, 4, 2, tma=True, direct=True)
    return KernelConfig(32, 64, 4, 2, tma=True, direct=True) if causal else KernelConfig(32, 128, 8, 2, tma=True)


def _second_paired(kernel: str, width: int, crowded: bool) -> KernelConfig:
    """Tiles of a pair bias and of its tangent beside the others, crowded by a softcap or a bias by distance: those that spill
    little or nothing on a Hopper card. Nobody has timed them."""
    if kernel == "second_dpair":
        return KernelConfig(64, 64, 8, 2) if width <= 64 else KernelConfig(64, 32, 8, 1)
    if width <= 32 and not crowded:
        return KernelConfig(64, 64, 4, 2, tma=True)
    if kernel.startswith("second_dq"):
        return KernelConfig(128, 32, 8, 2, tma=True) if width <= 64 else KernelConfig(64, 32, 4, 2, tma=True)
    return KernelConfig(32, 64, 4, 2, tma=True)


def _second(kernel: str, width: int, call: Call, shared: int) -> KernelConfig:
    """Second derivatives keep four tiles of scores in registers, a softcap two more, and twice the tensors in shared memory."""
    if call.q.dtype == torch.float32:
        # products of fp32 are unrolled: larger tiles spill thousands of bytes even of narrow heads
        return KernelConfig(16, 16, 8, 1)
    if width > 128:
        # descriptors take the place of addresses, for which a pair bias leaves no registers
        rows, tma = 16 if kernel == "second_dpair" else 32, call.pair_bias is not None
        return KernelConfig(rows, 32, 8, 1, tma) if shared >= LARGE else KernelConfig(16, 16, 4, 1)
    narrow = width <= 64
    if kernel == "second_dbias":
        return KernelConfig(64, 64, 8, 1) if narrow and shared >= MIDDLE else KernelConfig(32, 64, 8, 1)
    if shared < LARGE:
        # the kernel of dpair_bias streams eight tensors, the others four
        return KernelConfig(32, 32, 4, 2 if shared >= MIDDLE and kernel != "second_dpair" else 1)
    if call.pair_bias is not None:
        return _second_paired(kernel, width, call.bias is not None or call.spec.softcap is not None)
    if call.spec.softcap is None and call.bias is None:
        return _second_plain(kernel, narrow, plain_of(call) == "causal")
    step = 64 if narrow and call.spec.softcap is None else 32
    if kernel.startswith("second_dq"):
        return KernelConfig(128, step, 8, 2, tma=True)
    return KernelConfig(step, 128, 8, 2, tma=True, direct=True)
