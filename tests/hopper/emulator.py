"""The Hopper kernels' own source, run as plain Python on the CPU.

* One thread per `warp_specialize` partition; shared memory is numpy, poisoned with NaN.
* mbarriers with phases, pending counts and transaction bytes; named barriers count threads.
* TMA with the address arithmetic of the hardware (64-bit wrap-around, bounds per dimension, zero fill, clipped stores).
* wgmma, TMA loads, stores and reductions take effect when they are issued (`early`) or as late as the waits allow (`late`).
  Hardware may do either, so both must give the right result: a difference is a missing wait or a buffer reused too soon.
* A wait that never ends is reported as a deadlock.

Layouts, proxy fences and the memory model are not checked; the compile tests and a GPU do that. 16-bit tensors are fp16.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import emulated_machine as machine
import numpy as np
import torch
from emulated_machine import (
    DTYPES,
    OF_TORCH,
    Barriers,
    Descriptor,
    Ordered,
    Pointer,
    Shared,
    SharedLinearLayout,
    Tensor,
    add_to_global,
    bar_arrive,
    bar_sync,
    flat,
    mbarrier,
    smem_reinterpret,
    store_wait,
    tensor,
    tma_load,
    tma_reduce_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from backlight.backends.hopper import side_kernels
from backlight.backends.intervals import tiles

# --- PTX ---------------------------------------------------------------------------------------------------------------------

_PTX = {
    "abs.f32": np.abs,
    "add.f32": np.add,
    "add.rn.f32": np.add,
    "cvt.rpi.f32.f32": np.ceil,
    "copysign.f32": lambda sign, value: np.copysign(value, sign),
    "div.full.f32": np.divide,
    "ex2.approx.ftz.f32": np.exp2,
    "fma.rn.f32": lambda a, b, c: (np.float64(a) * b + c).astype(np.float32),
    "fma.rn.sat.f32": lambda a, b, c: np.clip(np.float64(a) * b + c, 0, 1).astype(np.float32),
    "max.f32": np.fmax,
    "mul.rn.sat.f32": lambda a, b: np.clip(a * b, 0, 1),
    "max.s16x2": lambda *pairs: np.maximum(*(np.ascontiguousarray(x).view(np.int16) for x in pairs)).view(np.int32),
    "max.s32": np.maximum,
    "mov.b32": lambda x: x.view(np.int32 if x.dtype == np.float32 else np.float32),
    "mov.f32": lambda x: x,
    "mov.u32": lambda x: x,
    "mul.f32": np.multiply,
    "or.pred": np.logical_or,
    "rcp.approx.ftz.f32": np.reciprocal,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "setp.eq.f32": np.equal,
    "setp.gtu.f32": lambda a, b: ~np.less_equal(a, b),
    "setp.le.f32": np.less_equal,
    "setp.neu.f32": np.not_equal,
    "sub.f32": np.subtract,
    "vote.sync.any.pred": lambda p, lanes: np.full_like(p, p.any()),
}


def run_ptx(text: str, inputs: list[np.ndarray], n_outputs: int) -> list[np.ndarray]:
    """Inline assembly on fp32 registers, one array a register; branches are taken by all threads or by none."""
    lines = [line.strip() for line in text.replace("{", "").replace("}", "").replace(":", ":;").split(";")]
    registers: dict[str, Any] = {f"${n_outputs + i}": value for i, value in enumerate(inputs)}

    def value(operand: str) -> Any:
        if operand.startswith("0f"):
            return np.uint32(int(operand[2:], 16)).view(np.float32)
        return int(operand, 0) if operand[0].isdigit() else registers[operand]

    at = 0
    while at < len(lines):
        words = lines[at].replace(",", " ").split()
        at += 1
        if not words or words[0] == ".reg" or words[0].endswith(":"):
            continue
        taken = True
        if words[0].startswith("@"):
            name = words.pop(0)[1:]
            flags = registers[name.removeprefix("!")] != name.startswith("!")
            assert flags.all() == flags.any(), "threads of a warp would part"
            taken = bool(flags.all())
        if words[0] in ("bra", "bra.uni"):
            at = lines.index(words[1] + ":") if taken else at
        else:
            registers[words[1]] = _PTX[words[0]](*(value(word) for word in words[2:]))
    return [registers[f"${i}"] for i in range(n_outputs)]


# --- the language ------------------------------------------------------------------------------------------------------------


def _registers(values: np.ndarray, pack: int, halves: bool) -> np.ndarray:
    """Of `pack` numbers that follow one another: one for each or, where there are `halves`, one for two of 16 bits."""
    if not halves:
        return values.astype(np.float32).reshape(-1, pack).T
    return np.ascontiguousarray(values).reshape(-1, pack).view(np.int32).T


def _float(function: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: tensor(function(*(np.asarray(x, np.float32) for x in args)))


class language:
    """What kernels use of `gl` and of `tl`."""

    float32, float16, bfloat16, int32, int64, int1 = "fp32", "fp16", "bf16", "int32", "int64", "int1"
    int8 = "int8"
    int16 = "int16"
    uint32, float8e4nv = "uint32", "fp8"
    exp2, log2 = staticmethod(_float(np.exp2)), staticmethod(_float(np.log2))
    sqrt = staticmethod(_float(np.sqrt))
    abs = staticmethod(lambda x: tensor(np.abs(x)))
    maximum = staticmethod(lambda a, b: tensor(np.maximum(a, b)))
    minimum = staticmethod(lambda a, b: tensor(np.minimum(a, b)))
    max = staticmethod(lambda x, axis: tensor(np.max(np.asarray(x), axis)))
    min = staticmethod(lambda x, axis: tensor(np.min(np.asarray(x), axis)))
    cast = staticmethod(lambda x, dtype: tensor(np.asarray(x).astype(DTYPES[dtype])))
    expand_dims = staticmethod(lambda x, axis: tensor(np.expand_dims(np.asarray(x), axis)))
    reshape = staticmethod(lambda x, shape: tensor(np.asarray(x).reshape(shape)))
    permute = staticmethod(lambda x, order: tensor(np.asarray(x).transpose(order)))
    split = staticmethod(lambda x: (tensor(np.asarray(x)[..., 0]), tensor(np.asarray(x)[..., 1])))
    join = staticmethod(lambda a, b: tensor(np.stack([np.asarray(a), np.asarray(b)], -1)))
    convert_layout = staticmethod(lambda x, layout, assert_trivial=False: x)
    arange = staticmethod(lambda a, b, layout=None: tensor(np.arange(a, b, dtype=np.int32)))
    cdiv = staticmethod(lambda a, b: -(-a // b))
    cumsum = staticmethod(lambda x, axis: tensor(np.cumsum(np.asarray(x), axis, dtype=x.dtype)))
    div_rn = staticmethod(_float(np.divide))
    static_range = range
    constexpr = staticmethod(lambda x: x)
    to_tensor = staticmethod(tensor)
    program_id = staticmethod(lambda axis: tensor(np.int32(machine.current.local.pid[axis])))
    num_programs = staticmethod(lambda axis: machine.current.local.grid[axis])
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = staticmethod(lambda *a, **k: None)
    SharedLinearLayout = SharedLinearLayout
    BlockedLayout = SwizzledSharedLayout = DistributedLinearLayout = staticmethod(lambda *a, **k: None)

    class NVMMASharedLayout:
        get_default_for = staticmethod(lambda *a, **k: None)

        def __init__(self, **_: Any):
            pass

    @staticmethod
    def sum(x: np.ndarray, axis: int) -> Tensor:
        return tensor(np.sum(np.asarray(x), axis, dtype=np.float32 if x.dtype.kind == "f" else None))

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Tensor:
        values = [np.float32(x) if isinstance(x, float) else np.asarray(x) for x in (a, b)]
        return tensor(np.where(condition, *values))

    @staticmethod
    def zeros(shape: Any, dtype: str, layout: Any = None) -> Tensor:
        return tensor(np.zeros(shape, DTYPES[dtype]))

    @staticmethod
    def full(shape: Any, value: Any, dtype: str, layout: Any = None) -> Tensor:
        return tensor(np.full(shape, value, DTYPES[dtype]))

    @staticmethod
    def allocate_shared_memory(dtype: str, shape: Any, layout: Any) -> Any:
        if isinstance(layout, mbarrier.MBarrierLayout):
            return Barriers(shape[0])
        poison = np.nan if dtype.startswith("fp") else np.iinfo(DTYPES[dtype]).max
        memory = np.full(shape, poison, DTYPES[dtype])
        return Ordered(memory, shape, layout.bases) if isinstance(layout, SharedLinearLayout) else Shared(memory)

    @staticmethod
    def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Tensor:
        offset = np.asarray(pointer.offset)
        if mask is None:
            return tensor(pointer.storage[offset])
        mask, offset = np.broadcast_arrays(np.asarray(mask), offset)
        return tensor(np.where(mask, pointer.storage[np.where(mask, offset, 0)], pointer.storage.dtype.type(other)))

    @staticmethod
    def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
        offset = np.asarray(pointer.offset)
        keep = np.ones(offset.shape, bool) if mask is None else np.broadcast_to(mask, offset.shape)
        assert not keep.any() or (offset[keep].min() >= 0 and offset[keep].max() < pointer.storage.size), "out of bounds"
        pointer.storage[offset[keep]] = np.broadcast_to(np.asarray(value), offset.shape)[keep]

    @staticmethod
    def atomic_add(pointer: Pointer, value: Any, sem: str = "acq_rel") -> Tensor:
        with machine.current.changed:
            before = pointer.storage[pointer.offset].copy()
            pointer.storage[pointer.offset] += value
        return tensor(before)

    @staticmethod
    def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], dtype: str, is_pure: bool, pack: int) -> Tensor:
        x = args[0]
        halves = any(np.asarray(arg).dtype.itemsize == 2 for arg in args)
        inputs = [_registers(np.broadcast_to(np.asarray(arg), x.shape), pack, halves) for arg in args]
        outputs = run_ptx(asm, [register for some in inputs for register in some], pack)
        return tensor(np.stack(outputs, 1).reshape(x.shape).astype(DTYPES[dtype]))

    @staticmethod
    def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any) -> None:
        cta, errors = machine.current, []
        pid, grid = cta.local.pid, cta.local.grid

        def run(function: Callable[..., None], args: tuple[Any, ...], warps: int) -> None:
            try:
                cta.local.pid, cta.local.grid, cta.local.threads = pid, grid, 32 * warps
                with np.errstate(all="ignore"):
                    function(*args)
                assert not cta.queue("stores"), "a TMA store is still reading shared memory when its partition ends"
            except Exception as error:
                errors.append(error)
                with cta.changed:
                    cta.failures.append(repr(error))
                    cta.changed.notify_all()

        warps = (cta.local.warps, *worker_num_warps)
        threads = [
            threading.Thread(target=run, args=(function, args, n), name=function.__name__)
            for (function, args), n in zip(functions_and_args, warps, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert not any(state[0] for state in cta.named.values()), "an arrival at a named barrier was never met"


def acquired(pointer: Pointer) -> Tensor:
    """What a loop reads until it changes."""
    read = language.load(pointer)
    local, seen = machine.current.local, (int(pointer.offset), int(read))
    if getattr(local, "seen", None) != seen:
        local.seen, local.since = seen, time.monotonic()
    elif time.monotonic() > local.since + machine.PATIENCE:
        raise RuntimeError("a counter that a loop waits for never changes")
    return read


# what a launch says to the compiler alone
COMPILER_OPTIONS = ("maxnreg", "num_stages", "enable_fp_fusion", "sched4reg", "ptx_options")

REPLACED = {
    "gl": language,
    "tl": language,
    "mbarrier": mbarrier,
    "tma": types.SimpleNamespace(store_wait=store_wait),
    "tma_load": tma_load,
    "tma_store": tma_store,
    "tma_reduce_add": tma_reduce_add,
    "smem_reinterpret": smem_reinterpret,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": lambda *args: None,
    "peek": language.load,
    "acquired": acquired,
    "arrived": lambda: store_wait(0),
    "per_thread": lambda shape, layout: 32,
    "weights16": lambda weight, dtype: np.maximum(weight, 0).to(dtype),
    "survivors": lambda weight, bar, dtype: (weight > bar).to(dtype),
    "above": lambda x, limit: language.where(x > limit, 1.0, 0.0),
    "rescaled_where_needed": lambda o, factor: o * np.expand_dims(factor, 1),
    "add_quads": add_to_global,
    "bar_sync": bar_sync,
    "end_block": lambda tile: tile,
    "barrier": lambda: None,
    "larger": np.maximum,
    "row_max": lambda s: s.max(1),
    "opaque": lambda number: number,
    "in_fp32": lambda x: x.to("fp32"),
    "rematerialised": lambda tile, count: tile,
    "bar_arrive": bar_arrive,
}


# --- running a kernel --------------------------------------------------------------------------------------------------------


class Emulation:
    """Stands in for a compiled kernel: `emulation[grid](*args, **options)`."""

    def __init__(self, kernel: Any, late: bool, backwards: bool = False):
        self.late, self.backwards, self.scopes = late, backwards, {}
        self.entry = self.plain(kernel)

    def plain(self, value: Any) -> Any:
        """A jitted function, a constant or an argument class as plain Python."""
        if hasattr(value, "field_names"):
            names = value.field_names
            return lambda *values, **named: types.SimpleNamespace(**dict(zip(names, values, strict=False)), **named)
        if type(value).__name__ == "constexpr":
            return value.value
        if hasattr(value, "fn") and hasattr(value.fn, "__code__"):
            function = value.fn
            return types.FunctionType(
                function.__code__, self.scope(function.__module__), function.__name__, function.__defaults__
            )
        return value

    def scope(self, module: str) -> dict[str, Any]:
        if module not in self.scopes:
            scope = self.scopes[module] = {}
            for name, value in vars(sys.modules[module]).items():
                scope[name] = REPLACED[name] if name in REPLACED else self.plain(value)
        return self.scopes[module]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 0, **named: Any) -> None:
            options = {name: value for name, value in named.items() if name not in COMPILER_OPTIONS}
            here = [argument(value) for value in args]
            sizes = (*grid, 1, 1)[:3]
            for z in range(sizes[2]):
                for y in range(sizes[1]):
                    for x in range(sizes[0])[:: -1 if self.backwards else 1]:
                        cta = machine.current = machine.Machine(self.late)
                        cta.local.pid, cta.local.grid, cta.local.warps = (x, y, z), sizes, num_warps
                        with np.errstate(all="ignore"):
                            self.entry(*here, **options)

        return launch


def argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(flat(value), OF_TORCH[value.dtype], value.storage_offset())
    if hasattr(value, "block_shape"):
        return Descriptor(value.base, list(value.shape), list(value.strides), list(value.block_shape))
    if isinstance(value, tuple):
        return type(value)(*map(argument, value)) if hasattr(value, "_fields") else tuple(map(argument, value))
    return value


@contextmanager
def emulated(*modules: Any, late: bool = False, backwards: bool = False) -> Iterator[None]:
    """Inside, every kernel of the modules (a jitted function named `_..._kernel`) and every small one runs in the emulator.

    backwards: CTAs run from the last on.
    """
    before = []
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for module in (*modules, side_kernels, tiles):
            for name, value in list(vars(module).items()):
                if name.startswith("_") and name.endswith("_kernel"):
                    before.append((module, name, value))
                    setattr(module, name, Emulation(value, late, backwards))
        yield
    finally:
        sys.setswitchinterval(switch)
        for module, name, value in before:
            setattr(module, name, value)
