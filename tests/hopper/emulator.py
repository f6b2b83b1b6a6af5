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
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from backlight.backends.hopper import side_kernels
from backlight.backends.intervals import tiles

PATIENCE = 20.0
DTYPES = {"fp16": np.float16, "fp32": np.float32, "int32": np.int32, "int64": np.int64, "int1": np.bool_, "uint32": np.uint32}
OF_TORCH = {torch.float16: "fp16", torch.float32: "fp32", torch.int32: "int32", torch.int64: "int64"}


class Machine:
    """State of the CTA that is running."""

    def __init__(self, late: bool):
        self.late = late
        self.changed = threading.Condition()
        self.failures: list[str] = []
        self.named: dict[int, list[int]] = {}
        self.local = threading.local()

    def queue(self, name: str) -> list[Any]:
        if not hasattr(self.local, name):
            setattr(self.local, name, [])
        return getattr(self.local, name)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: condition() or bool(self.failures), PATIENCE)
        if not done or self.failures:
            self.failures.append(f"{what} never completes in {threading.current_thread().name}")
            raise RuntimeError(self.failures[0])


_machine = Machine(late=False)


# --- values ------------------------------------------------------------------------------------------------------------------


class Tensor(np.ndarray):
    """A register tensor; scalars are 0-d."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype: str, bitcast: bool = False) -> Tensor:
        values = np.asarray(self)
        return tensor(values.view(DTYPES[dtype]) if bitcast else values.astype(DTYPES[dtype]))


def tensor(value: Any) -> Tensor:
    return np.asarray(value).view(Tensor)


class Pointer:
    """A tensor of addresses into the flat storage of a torch tensor."""

    def __init__(self, storage: np.ndarray, dtype: str, offset: Any = 0):
        self.storage, self.offset = storage, offset
        self.dtype = types.SimpleNamespace(element_ty=dtype)

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.storage, self.dtype.element_ty, self.offset + np.asarray(other, np.int64))

    def __sub__(self, other: Any) -> Pointer:
        return self + -np.asarray(other, np.int64)


class Descriptor:
    """A TMA descriptor: strides in elements, a box of coordinates."""

    def __init__(self, base: torch.Tensor, shape: list[int], strides: list[int], block: list[int]):
        self.storage, self.start = flat(base), base.storage_offset()
        self.shape, self.strides, self.block = shape, strides, block
        self.dtype, self.layout = OF_TORCH[base.dtype], None
        self.itemsize = base.element_size()
        self.block_type = types.SimpleNamespace(nbytes=int(np.prod(block)) * self.itemsize, shape=list(block))

    def box(self, coord: list[Any]) -> tuple[np.ndarray, np.ndarray]:
        """(flat index, inside) of every element of the box; addresses wrap at 64 bits as in the hardware."""
        rank = len(self.block)
        address = np.zeros((1,) * rank, np.uint64)
        inside = np.ones((1,) * rank, bool)
        for axis, (begin, size) in enumerate(zip(coord, self.block, strict=True)):
            at = (int(begin) + np.arange(size, dtype=np.int64)).reshape([-1 if d == axis else 1 for d in range(rank)])
            assert np.abs(at).max() < 1 << 31, "TMA coordinates are 32 bit"
            inside = inside & (at >= 0) & (at < self.shape[axis])
            address = address + at.astype(np.uint64) * np.uint64(self.strides[axis] * self.itemsize % (1 << 64))
        index = self.start + (address // np.uint64(self.itemsize)).astype(np.int64)
        assert index[inside].size == 0 or (index[inside].min() >= 0 and index[inside].max() < self.storage.size), (
            "out of bounds"
        )
        return index, inside

    def read(self, coord: list[Any]) -> np.ndarray:
        index, inside = self.box(coord)
        return np.where(inside, self.storage[np.where(inside, index, 0)], self.storage.dtype.type(0))

    def write(self, coord: list[Any], value: np.ndarray) -> None:
        index, inside = self.box(coord)
        self.storage[index[inside]] = np.broadcast_to(value, index.shape)[inside]

    def add(self, coord: list[Any], value: np.ndarray) -> None:
        index, inside = self.box(coord)
        assert inside.all(), "a reduction that leaves its tensor is an illegal instruction"
        np.add.at(self.storage, index[inside], np.broadcast_to(value, index.shape)[inside])


class Shared:
    """A view of shared memory."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def shape(self) -> list[int]:
        return list(self.array.shape)

    def index(self, i: Any) -> Shared:
        return Shared(self.array[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.array[(slice(None),) * dim + (slice(start, start + length),)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.array.transpose(order))

    def load(self, layout: Any = None) -> Tensor:
        return tensor(self.array.copy())

    def store(self, value: np.ndarray) -> None:
        assert self.array.shape == value.shape, (self.array.shape, value.shape)
        self.array[...] = np.asarray(value)


class Ordered(Shared):
    """Shared memory in the order of a linear layout: bit n of the offset stands for base n of the coordinates."""

    def __init__(self, memory: np.ndarray, shape: tuple[int, ...], bases: list[list[int]]):
        places = np.indices(shape)
        self.offset = np.zeros(shape, np.int64)
        for bit, base in enumerate(bases):
            self.offset |= np.any([(place & step) != 0 for place, step in zip(places, base, strict=True)], 0) * (1 << bit)
        assert np.array_equal(np.sort(self.offset, None), np.arange(memory.size)), "no permutation"
        self.memory = memory.reshape(-1)

    @property
    def array(self) -> np.ndarray:  # type: ignore[override]
        return self.memory[self.offset]

    def store(self, value: np.ndarray) -> None:
        assert self.offset.shape == value.shape, (self.offset.shape, value.shape)
        self.memory[self.offset] = np.asarray(value)


def flat(base: torch.Tensor) -> np.ndarray:
    """The whole storage of a tensor as a numpy array that shares its memory."""
    whole = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
    return whole.numpy()


# --- barriers ----------------------------------------------------------------------------------------------------------------


class Barrier:
    def __init__(self) -> None:
        self.count = self.pending = 0
        self.bytes = self.phase = 0
        self.copies: list[Callable[[], None]] = []

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count
            _machine.changed.notify_all()


class Barriers:
    def __init__(self, n: int):
        self.items = [Barrier() for _ in range(n)]

    def index(self, i: Any) -> Barrier:
        return self.items[int(i)]


class mbarrier:
    class MBarrierLayout:
        pass

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.pending = count

    @staticmethod
    def expect(bar: Barrier, nbytes: int, pred: bool = True) -> None:
        if pred:
            with _machine.changed:
                bar.bytes += nbytes
                bar.pending -= 1
                assert bar.pending >= 0, "more arrivals than the barrier expects"
                bar.settle()

    @staticmethod
    def arrive(bar: Barrier, *, count: int = 1, pred: bool = True) -> None:
        if pred:
            with _machine.changed:
                bar.pending -= count
                assert bar.pending >= 0, "more arrivals than the barrier expects"
                bar.settle()

    @staticmethod
    def wait(bar: Barrier, phase: Any, pred: Any = True, deps: Any = ()) -> None:
        if not pred:
            return

        def done() -> bool:
            while bar.copies:
                bar.copies.pop(0)()
            return (bar.phase & 1) != int(phase)

        _machine.wait_until(done, "an mbarrier wait")


def bar_arrive(number: Any, THREADS: int, wait: bool = False) -> None:
    """Named hardware barrier; a call stands for all threads of its partition."""
    with _machine.changed:
        state = _machine.named.setdefault(int(number), [0, 0])
        state[0] += _machine.local.threads
        generation = state[1]
        assert state[0] <= THREADS, "more threads than the named barrier expects"
        if state[0] == THREADS:
            state[0], state[1] = 0, state[1] + 1
            _machine.changed.notify_all()
            return
    if wait:
        _machine.wait_until(lambda: state[1] != generation, f"named barrier {number}")


def bar_sync(number: Any, THREADS: int) -> None:
    bar_arrive(number, THREADS, wait=True)


# --- asynchronous copies and matmuls -----------------------------------------------------------------------------------------


def tma_load(desc: Descriptor, coord: list[Any], bar: Barrier, dst: Shared, pred: bool = True) -> None:
    coord = [int(c) for c in coord]

    def copy() -> None:
        dst.array[...] = desc.read(coord)
        bar.bytes -= desc.block_type.nbytes
        bar.settle()

    with _machine.changed:
        if _machine.late:
            bar.copies.append(copy)
            _machine.changed.notify_all()
        else:
            copy()


def _leave(action: Callable[[], None]) -> None:
    if _machine.late:
        _machine.queue("stores").append(action)
    else:
        action()


def tma_store(desc: Descriptor, coord: list[Any], src: Shared) -> None:
    coord = [int(c) for c in coord]
    _leave(lambda: desc.write(coord, src.array))


def tma_reduce_add(desc: Descriptor, coord: list[Any], src: Shared) -> None:
    coord = [int(c) for c in coord]

    def add() -> None:
        with _machine.changed:
            desc.add(coord, src.array)

    _leave(add)


def add_to_global(pointers: Pointer, values: Any) -> None:
    offset = np.broadcast_to(np.asarray(pointers.offset), values.shape)
    assert offset.min() >= 0
    assert offset.max() < pointers.storage.size
    with _machine.changed:
        np.add.at(pointers.storage, offset, np.asarray(values))


def store_wait(pendings: int) -> None:
    queue = _machine.queue("stores")
    while len(queue) > pendings:
        queue.pop(0)()


def smem_reinterpret(mem: Shared, dtype: str, shape: Any, layout: Any) -> Shared:
    """The same bytes from the first on, as another type, or fewer of them."""
    shape = tuple(int(size) for size in shape)
    memory = (mem.memory if isinstance(mem, Ordered) else mem.array).view(DTYPES[dtype])
    assert np.shares_memory(memory, mem.memory if isinstance(mem, Ordered) else mem.array)
    memory = memory.reshape(-1)[: np.prod(shape)]
    assert memory.size == np.prod(shape), f"{mem.array.shape} {mem.array.dtype} is not {shape} {dtype}"
    if isinstance(layout, language.SharedLinearLayout):
        return Ordered(memory, shape, layout.bases)
    return Shared(memory.reshape(shape))


class Token:
    """A wgmma in flight."""

    type = types.SimpleNamespace(layout=None)

    def __init__(self, compute: Callable[[], Tensor]):
        self.compute, self.value = compute, None

    def get(self) -> Tensor:
        if self.value is None:
            self.value = self.compute()
        return self.value


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool = False) -> Token:
    left = a.array if isinstance(a, Shared) else np.array(a)
    assert left.shape[1] == b.array.shape[0], (left.shape, b.array.shape)

    def compute() -> Tensor:
        product = np.asarray(left, np.float32) @ np.asarray(b.array, np.float32)
        start = (acc.get() if isinstance(acc, Token) else acc) if use_acc else 0
        return tensor(product + np.asarray(start)).astype(np.float32)

    token = Token(compute)
    if not _machine.late:
        token.get()
    _machine.queue("matmuls").append(token)
    return token


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    queue = _machine.queue("matmuls")
    while len(queue) > num_outstanding:
        queue.pop(0).get()
    out = []
    for dep in deps:
        if isinstance(dep, Token):
            assert dep not in queue, "accumulator read while its wgmma is in flight"
            dep = dep.get()
        out.append(dep)
    return out[0] if len(out) == 1 else tuple(out)


# --- PTX ---------------------------------------------------------------------------------------------------------------------

_PTX = {
    "abs.f32": np.abs,
    "add.f32": np.add,
    "add.rn.f32": np.add,
    "copysign.f32": lambda sign, value: np.copysign(value, sign),
    "div.full.f32": np.divide,
    "ex2.approx.ftz.f32": np.exp2,
    "fma.rn.f32": lambda a, b, c: (np.float64(a) * b + c).astype(np.float32),
    "max.f32": np.fmax,
    "max.s32": np.maximum,
    "mov.b32": lambda x: x.view(np.int32 if x.dtype == np.float32 else np.float32),
    "mov.f32": lambda x: x,
    "mul.f32": np.multiply,
    "or.pred": np.logical_or,
    "rcp.approx.ftz.f32": np.reciprocal,
    "selp.f32": lambda a, b, p: np.where(p, a, b),
    "setp.eq.f32": np.equal,
    "setp.gt.f32": np.greater,
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


def _float(function: Callable[..., Any]) -> Callable[..., Tensor]:
    return lambda *args: tensor(function(*(np.asarray(x, np.float32) for x in args)))


class language:
    """What kernels use of `gl` and of `tl`."""

    float32, float16, bfloat16, int32, int64, int1 = "fp32", "fp16", "bf16", "int32", "int64", "int1"
    uint32 = "uint32"
    exp2, log2 = staticmethod(_float(np.exp2)), staticmethod(_float(np.log2))
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
    program_id = staticmethod(lambda axis: tensor(np.int32(_machine.local.pid[axis])))
    num_programs = staticmethod(lambda axis: _machine.local.grid[axis])
    NVMMADistributedLayout = DotOperandLayout = SliceLayout = staticmethod(lambda *a, **k: None)
    BlockedLayout = SwizzledSharedLayout = DistributedLinearLayout = staticmethod(lambda *a, **k: None)

    class SharedLinearLayout:
        def __init__(self, offset_bases: list[list[int]], **_: Any):
            self.bases = offset_bases

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
        return Ordered(memory, shape, layout.bases) if isinstance(layout, language.SharedLinearLayout) else Shared(memory)

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
        with _machine.changed:
            before = pointer.storage[pointer.offset].copy()
            pointer.storage[pointer.offset] += value
        return tensor(before)

    @staticmethod
    def inline_asm_elementwise(asm: str, constraints: str, args: list[Any], dtype: str, is_pure: bool, pack: int) -> Tensor:
        x = args[0]
        inputs = [np.broadcast_to(np.asarray(arg, np.float32), x.shape).reshape(-1, pack).T for arg in args]
        outputs = run_ptx(asm, [register for some in inputs for register in some], pack)
        return tensor(np.stack(outputs, 1).reshape(x.shape).astype(DTYPES[dtype]))

    @staticmethod
    def warp_specialize(functions_and_args: Any, worker_num_warps: Any, worker_num_regs: Any) -> None:
        machine, pid, grid, errors = _machine, _machine.local.pid, _machine.local.grid, []

        def run(function: Callable[..., None], args: tuple[Any, ...], warps: int) -> None:
            try:
                machine.local.pid, machine.local.grid, machine.local.threads = pid, grid, 32 * warps
                with np.errstate(all="ignore"):
                    function(*args)
                assert not machine.queue("stores"), "a TMA store is still reading shared memory when its partition ends"
            except Exception as error:
                errors.append(error)
                with machine.changed:
                    machine.failures.append(repr(error))
                    machine.changed.notify_all()

        warps = (machine.local.warps, *worker_num_warps)
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
        assert not any(state[0] for state in machine.named.values()), "an arrival at a named barrier was never met"


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
    "per_thread": lambda shape, layout: 32,
    "weights16": lambda weight, dtype: np.maximum(weight, 0).to(dtype),
    "survivors": lambda weight, bar, dtype: (weight > bar).to(dtype),
    "above": lambda x, limit: language.where(x > limit, 1.0, 0.0),
    "add_quads": add_to_global,
    "bar_sync": bar_sync,
    "end_block": lambda tile: tile,
    "barrier": lambda: None,
    "opaque": lambda number: number,
    "widened": lambda x: x.to("fp32"),
    "rematerialised": lambda tile, count: tile,
    "bar_arrive": bar_arrive,
}


# --- running a kernel --------------------------------------------------------------------------------------------------------


class Emulation:
    """Stands in for a compiled kernel: `emulation[grid](*args, **options)`."""

    def __init__(self, kernel: Any, late: bool):
        self.late, self.scopes = late, {}
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
            global _machine
            here = [argument(value) for value in args]
            sizes = (*grid, 1, 1)[:3]
            for z in range(sizes[2]):
                for y in range(sizes[1]):
                    for x in range(sizes[0]):
                        _machine = Machine(self.late)
                        _machine.local.pid, _machine.local.grid, _machine.local.warps = (x, y, z), sizes, num_warps
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
def emulated(*modules: Any, late: bool = False) -> Iterator[None]:
    """Inside, every kernel of the modules (a jitted function named `_..._kernel`) and every small one runs in the emulator."""
    before = []
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        for module in (*modules, side_kernels, tiles):
            for name, value in list(vars(module).items()):
                if name.startswith("_") and name.endswith("_kernel"):
                    before.append((module, name, value))
                    setattr(module, name, Emulation(value, late))
        yield
    finally:
        sys.setswitchinterval(switch)
        for module, name, value in before:
            setattr(module, name, value)
