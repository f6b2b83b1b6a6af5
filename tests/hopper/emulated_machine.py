"""The machine of the emulator (emulator.py): memory, mbarriers and named barriers, TMA copies, wgmma."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

PATIENCE = 20.0
# e4m3 is kept as the fp32 numbers that it stands for
DTYPES = {
    "fp8": np.float32,
    "fp16": np.float16,
    "fp32": np.float32,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "int1": np.bool_,
    "uint32": np.uint32,
}
OF_TORCH = {torch.float8_e4m3fn: "fp8", torch.float16: "fp16", torch.float32: "fp32"}
OF_TORCH |= {torch.int8: "int8", torch.int32: "int32", torch.int64: "int64"}


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


current = Machine(late=False)


# --- values ------------------------------------------------------------------------------------------------------------------


class Tensor(np.ndarray):
    """A register tensor; scalars are 0-d."""

    type = types.SimpleNamespace(layout=None)

    def to(self, dtype: str, bitcast: bool = False) -> Tensor:
        values = np.asarray(self)
        if dtype == "fp8":
            rounded = torch.from_numpy(values.astype(np.float32)).clamp(-448, 448).to(torch.float8_e4m3fn)
            return tensor(rounded.float().numpy())
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


class SharedLinearLayout:
    def __init__(self, offset_bases: list[list[int]], **_: Any):
        self.bases = offset_bases


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
    """The whole storage of a tensor as a numpy array that shares its memory; of e4m3 a copy."""
    whole = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
    return (whole.float() if base.dtype == torch.float8_e4m3fn else whole).numpy()


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
            current.changed.notify_all()


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
            with current.changed:
                bar.bytes += nbytes
                bar.pending -= 1
                assert bar.pending >= 0, "more arrivals than the barrier expects"
                bar.settle()

    @staticmethod
    def arrive(bar: Barrier, *, count: int = 1, pred: bool = True) -> None:
        if pred:
            with current.changed:
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

        current.wait_until(done, "an mbarrier wait")


def bar_arrive(number: Any, THREADS: int, wait: bool = False) -> None:
    """Named hardware barrier; a call stands for all threads of its partition."""
    assert 0 <= int(number) < 16, f"named barrier {number}: the hardware has sixteen, and another is an illegal instruction"
    with current.changed:
        state = current.named.setdefault(int(number), [0, 0])
        state[0] += current.local.threads
        generation = state[1]
        assert state[0] <= THREADS, "more threads than the named barrier expects"
        if state[0] == THREADS:
            state[0], state[1] = 0, state[1] + 1
            current.changed.notify_all()
            return
    if wait:
        current.wait_until(lambda: state[1] != generation, f"named barrier {number}")


def bar_sync(number: Any, THREADS: int) -> None:
    bar_arrive(number, THREADS, wait=True)


# --- asynchronous copies and matmuls -----------------------------------------------------------------------------------------


def tma_load(desc: Descriptor, coord: list[Any], bar: Barrier, dst: Shared, pred: bool = True) -> None:
    coord = [int(c) for c in coord]

    def copy() -> None:
        dst.array[...] = desc.read(coord)
        bar.bytes -= desc.block_type.nbytes
        bar.settle()

    with current.changed:
        if current.late:
            bar.copies.append(copy)
            current.changed.notify_all()
        else:
            copy()


def _leave(action: Callable[[], None]) -> None:
    if current.late:
        current.queue("stores").append(action)
    else:
        action()


def tma_store(desc: Descriptor, coord: list[Any], src: Shared) -> None:
    coord = [int(c) for c in coord]
    _leave(lambda: desc.write(coord, src.array))


def tma_reduce_add(desc: Descriptor, coord: list[Any], src: Shared) -> None:
    coord = [int(c) for c in coord]

    def add() -> None:
        with current.changed:
            desc.add(coord, src.array)

    _leave(add)


def add_to_global(pointers: Pointer, values: Any) -> None:
    offset = np.broadcast_to(np.asarray(pointers.offset), values.shape)
    assert offset.min() >= 0
    assert offset.max() < pointers.storage.size
    with current.changed:
        np.add.at(pointers.storage, offset, np.asarray(values))


def store_wait(pendings: int) -> None:
    queue = current.queue("stores")
    while len(queue) > pendings:
        queue.pop(0)()


def smem_reinterpret(mem: Shared, dtype: str, shape: Any, layout: Any) -> Shared:
    """The same bytes from the first on, as another type, or fewer of them."""
    shape = tuple(int(size) for size in shape)
    memory = (mem.memory if isinstance(mem, Ordered) else mem.array).view(DTYPES[dtype])
    assert np.shares_memory(memory, mem.memory if isinstance(mem, Ordered) else mem.array)
    memory = memory.reshape(-1)[: np.prod(shape)]
    assert memory.size == np.prod(shape), f"{mem.array.shape} {mem.array.dtype} is not {shape} {dtype}"
    if isinstance(layout, SharedLinearLayout):
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
    if not current.late:
        token.get()
    current.queue("matmuls").append(token)
    return token


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = ()) -> Any:
    queue = current.queue("matmuls")
    while len(queue) > num_outstanding:
        queue.pop(0).get()
    out = []
    for dep in deps:
        if isinstance(dep, Token):
            assert dep not in queue, "accumulator read while its wgmma is in flight"
            dep = dep.get()
        out.append(dep)
    return out[0] if len(out) == 1 else tuple(out)
