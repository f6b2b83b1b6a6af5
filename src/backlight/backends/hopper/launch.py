"""Host side that all kernels of a call share: TMA descriptors, packing of sequences, geometry, grids, launches.

A call that is laid out like one before it (`Call.layout`) decides nothing again: `Launch.once` and `Launch.start` remember.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper import side_kernels
from backlight.backends.hopper.compiled import start
from backlight.backends.hopper.config import padded
from backlight.backends.hopper.terms import TABLE_PAD, unit_of
from backlight.backends.replaying.preparing import Preparing
from backlight.backends.replaying.program import launched
from backlight.backends.replaying.replay import Replay, fields_of, tensors_among, unchecked
from backlight.call import Call, Memory, layout_of
from backlight.config import overridden

Value = TypeVar("Value")

GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
# extents of the two leading dimensions of a ragged descriptor, and of its rows
MANY = 0x7FFF0000
RAGGED_END = 1 << 30
WRAP = 1 << 34


@lru_cache(maxsize=1024)
def usable_strides(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...] | None:
    """Strides for a descriptor of a 16-bit tensor, or None when TMA cannot read it in place.

    Strides of dimensions of size 1 are never used and may be anything; elsewhere they are positive multiples of 16 bytes.
    """
    if stride[-1] != 1 and shape[-1] > 1:
        return None
    strides = [8 if size == 1 else step for size, step in zip(shape[:-1], stride[:-1], strict=True)]
    if any(step % 8 or step <= 0 for step in strides):
        return None
    return (*strides, 1)


def tma_reads(tensor: Tensor) -> bool:
    """Whether TMA can read a 16-bit tensor [B,H,S,D] in place."""
    return tensor.data_ptr() % 16 == 0 and usable_strides(tensor.shape, tensor.stride()) is not None


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where TMA cannot read it in place."""
    # contiguous memory may begin anywhere, and `contiguous` gives it back
    return tensor if tma_reads(tensor) else tensor.clone(memory_format=torch.contiguous_format)


@cache
def swizzled(block: tuple[int, ...], dtype: torch.dtype) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])


@cache
def linear(rank: int) -> Any:
    """fp32 tiles in the order of the register fragments that wrote them."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def descriptor(tensor: Tensor, known: dict[str, Any]) -> TensorDescriptor:
    """A descriptor of known fields."""
    return unchecked(TensorDescriptor, tensor, known)


def tile_descriptor(tensor: Tensor, rows: int, width: int, ragged: bool) -> TensorDescriptor:
    """Tiles [rows, width] of a tensor [B,H,S,D]; beyond its own rows and columns a tile reads zeros and writes nothing."""
    assert tensor.data_ptr() % 16 == 0
    return descriptor(tensor, tile_fields(tensor.shape, tensor.stride(), tensor.dtype, rows, width, ragged))


@lru_cache(maxsize=4096)
def tile_fields(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, rows: int, width: int, ragged: bool
) -> dict[str, Any]:
    """What a descriptor says about a tensor besides its address.

    Ragged (packed sequences, B = 1): the row bound moves with the coordinates. Address = 2^30 (2^34 - r) + (start + n) r +
    (2^30 - n + row) r, r the row stride: the first product is -2^30 r in 64 bits, so the row start + row remains, while the
    bound on the last coordinate cuts at row = n. The same trick as in `triton.tools.ragged_tma`.
    """
    strides = usable_strides(shape, stride)
    assert strides is not None
    block: tuple[int, ...] = (1, 1, rows, width)
    if ragged:
        _, heads, _, columns = shape
        _, head_stride, row_stride, _ = strides
        block = (1, *block)
        shape = (MANY, MANY, heads, RAGGED_END, columns)
        strides = (WRAP - row_stride, row_stride, head_stride, row_stride, 1)
    return fields(shape, strides, block, swizzled(block, dtype))


def fields(shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], layout: Any) -> dict[str, Any]:
    """The fields of a valid descriptor: built once by Triton, which checks them, and kept without the tensor."""
    made = TensorDescriptor(_Anything(layout.element_bitwidth), list(shape), list(strides), list(block), layout)
    return fields_of(made)


class _Anything:
    """Stands for a tensor while a descriptor's fields are checked."""

    def __init__(self, bits: int):
        self.dtype = torch.float32 if bits == 32 else torch.float16

    def data_ptr(self) -> int:
        return 0


@lru_cache(maxsize=1024)
def vector_fields(length: int, block: int) -> dict[str, Any]:
    return fields((length,), (1,), (block,), linear(1))


@lru_cache(maxsize=1024)
def matrix_fields(rows: int, width: int, block: int) -> dict[str, Any]:
    return fields((rows, width), (width, 1), (block, width), linear(2))


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


_known: Memory[dict[Hashable, Any]] = Memory()


def knowledge(layout: tuple[Any, ...]) -> dict[Hashable, Any]:
    """What calls of this layout remember; nothing while a configuration is forced."""
    if overridden():
        return {}
    remembered = _known.get(layout)
    if remembered is None:
        remembered = _known[layout] = {}
    return remembered


class Launch(Preparing):
    """A call with what its kernels need to know.

    `others`: further tensors whose layout decides something (y, dy, dlse); `choices`: what else does.
    """

    small = side_kernels

    def __init__(self, call: Call, *others: Tensor | None, choices: Hashable = None):
        super().__init__(call)
        self.known = knowledge((call.layout, choices, *[None if x is None else layout_of(x) for x in others]))
        self.batch, self.heads, self.sq, self.d = call.q.shape
        self.kv_heads, self.sk, self.dv = call.k.shape[1], call.k.shape[2], call.v.shape[3]
        self.bd, self.bdv = padded(self.d), padded(self.dv)
        # with entmax, in the backward: which tiles live (`backward.alive`)
        self.alive: Any = None

    def once(self, name: Hashable, decide: Callable[[], Value]) -> Value:
        """`decide()`, remembered for every call of the same layout: it may look at no value of a tensor."""
        if name not in self.known:
            self.known[name] = decide()
        return self.known[name]

    def start(
        self, kernel: Any, tensors: Sequence[Tensor | None], describe: Callable[[], dict[str, Any]], which: str = ""
    ) -> None:
        """One launch. `describe()` gives the arguments of `start` below the kernel, whenever the layout is a new one.

        `tensors` are those among the arguments, in order; None for one that is not there. A kernel that a call launches more
        than once says `which`.
        """
        present = [x for x in tensors if x is not None]
        replay = self.known.get((id(kernel), which))
        if replay is None:
            replay = self._first(kernel, present, describe)
            self.known[id(kernel), which] = replay
        else:
            replay(present)
        launched(replay, present)

    def start_small(self, kernel: Any, programs: int, args: Sequence[Any], which: str) -> None:
        self.start_beside(kernel, (programs,), args, {"BLOCK": side_kernels.BLOCK}, which)

    def start_beside(
        self, kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], which: str
    ) -> None:
        """One launch of a kernel beside the large ones."""

        def describe() -> dict[str, Any]:
            return {"grid": grid, "args": args, "constants": constants, "num_warps": 4}

        self.start(kernel, tensors_among(args), describe, which)

    def _first(self, kernel: Any, present: Sequence[Tensor], describe: Callable[[], dict[str, Any]]) -> Replay | None:
        arguments = describe()
        among = tensors_among(arguments["args"])
        assert len(among) == len(present)
        assert all(map(operator.is_, among, present))
        made = start(kernel, **arguments)
        if made is None:
            return None
        grid, args, constants = (arguments[name] for name in ("grid", "args", "constants"))
        return Replay(kernel, made, grid, args, constants)

    def rows(self, tensor: Tensor, block: int, width: int) -> TensorDescriptor:
        return tile_descriptor(tensor, block, width, self.call.varlen)

    def counter(self, wanted: bool) -> Tensor:
        """A zero on the device, from which programs draw their tiles."""
        device = self.call.q.device
        return torch.zeros(1, dtype=torch.int32, device=device) if wanted else nothing(device)

    @property
    def geometry(self) -> tuple[int, int, int, int, int, int]:
        """heads, group, sq, sk, left, right."""
        spec = self.call.spec
        return self.heads, self.call.group, self.sq, self.sk, spec.left or 0, spec.right or 0

    @property
    def widths(self) -> dict[str, Any]:
        """Head dimensions, and as wide as tiles are."""
        return {"D": self.d, "DV": self.dv, "BD": self.bd, "BDV": self.bdv}

    @property
    def flags(self) -> dict[str, bool]:
        """What of the mask is compiled in; row intervals have causal and window folded in."""
        spec, apart = self.call.spec, self.call.rows is None
        return {
            "HAS_LEFT": apart and spec.left is not None,
            "HAS_RIGHT": apart and spec.right is not None,
            "VARLEN": self.call.varlen,
        }

    def row_tiles(self, block: int) -> int:
        return self.tiles(self.sq, self.call.cu_seqlens_q, block)

    def key_tiles(self, block: int) -> int:
        return self.tiles(self.sk, self.call.cu_seqlens_k, block)

    @cached_property
    def tau(self) -> Tensor | None:
        return None if self.call.tau is None else self.call.tau.contiguous()

    @cached_property
    def sink(self) -> Tensor | None:
        return None if self.call.sink is None else self.call.sink.contiguous()

    @cached_property
    def table(self) -> Tensor | None:
        """The bias in units of scores, zeros around it: [Hq, n + 2 * TABLE_PAD] fp32."""
        bias, pad, block = self.call.bias, TABLE_PAD.value, side_kernels.BLOCK
        if bias is None:
            return None
        heads, n = bias.shape
        table = torch.empty(heads, n + 2 * pad, dtype=torch.float32, device=bias.device)

        def describe() -> dict[str, Any]:
            args = [bias, table, n, *bias.stride(), unit_of(self.call)]
            grid = (-(-table.shape[1] // block), heads)
            return {"grid": grid, "args": args, "constants": {"PAD": pad, "BLOCK": block}, "num_warps": 4}

        self.start(side_kernels._table_kernel, (bias, table), describe)
        return table


@lru_cache(maxsize=16)
def nothing(device: torch.device) -> Tensor:
    """Stands for a counter that no kernel reads."""
    return torch.empty(0, dtype=torch.int32, device=device)
