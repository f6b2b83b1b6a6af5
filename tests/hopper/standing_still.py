"""A Hopper GPU on which kernels stand still: a launch is written down and leaves its outputs as they were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import backlight
from backlight.backends.replaying import replay


class Machine:
    """Launches in order: kernel, whether Triton's JIT was asked, grid, arguments by name; how many tensor maps were made."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, bool, tuple[int, ...], dict[str, Any]]] = []
        self.encoded = 0

    def took(self, work: Callable[[], Any]) -> list[tuple[Any, ...]]:
        """What kernels were told during the work, without addresses."""
        del self.launches[:]
        work()
        return [(name, grid, by_name(args)) for name, _, grid, args in self.launches]


@dataclass
class Map:
    """A tensor map: the descriptor it was made of, and its address."""

    fields: dict[str, Any]
    address: int


class Compiled:
    """What compiling a kernel gives, down to a launcher that writes down what it gets."""

    function, packed_metadata = 2, (4, 1, 0)
    metadata = SimpleNamespace(
        global_scratch_size=0, profile_scratch_size=0, target=GPUTarget("cuda", 90, 32), tensordesc_meta=["of a descriptor"]
    )

    def __init__(self, name: str, args: dict[str, Any], machine: Machine):
        # a launch that is replayed knows tuples without the names of their fields
        kinds = {key: type(x)._make if hasattr(x, "_fields") else None for key, x in args.items()}
        dtypes = [x.base.dtype for x in args.values() if isinstance(x, TensorDescriptor)]

        def launcher(*args: Any) -> None:
            given, rest = [], iter(args[-1])
            for x in rest:
                given.append(x)
                for _ in range(2 * len(x.fields["shape"]) if isinstance(x, Map) else 0):
                    next(rest)
            named = {key: x if kind is None else kind(x) for (key, kind), x in zip(kinds.items(), given, strict=True)}
            machine.launches.append((name, False, args[:3], named))

        def launch(*args: Any) -> None:
            expanded, known = [], iter(dtypes)
            for x in args[-1]:
                if isinstance(x, TensorDescriptor):
                    machine.encoded += 1
                    fields = {**replay.fields_of(x), "dtype": next(known)}
                    expanded += [Map(fields, x.base.data_ptr()), *x.shape, *x.strides]
                else:
                    expanded.append(x)
            launcher(*args[:-1], expanded)

        self.run = Run()
        self.run.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.run(*grid, 0, self.function, self.packed_metadata, None, None, None, *args)


class Run:
    launch: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        self.launch(*args[:9], args[9:])


class Jitted:
    """A kernel on a machine where nothing moves."""

    def __init__(self, name: str, arg_names: list[str], machine: Machine):
        self.name, self.arg_names, self.machine = name, arg_names, machine

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def start(*args: Any, **named: Any) -> Compiled:
            given = dict(zip(self.arg_names, args, strict=False))
            given |= {key: x for key, x in named.items() if key in self.arg_names}
            self.machine.launches.append((self.name, True, (*grid, 1, 1)[:3], given))
            return Compiled(self.name, {key: given[key] for key in self.arg_names}, self.machine)

        return start


def role(name: str) -> str:
    """Which of its kernels the backward takes is a matter of speed."""
    return "_bwd_kernel" if name.startswith("_bwd_") else name


def by_name(args: dict[str, Any]) -> dict[str, Any]:
    return {key: "address" if key.endswith("_ptr") else described(x) for key, x in args.items()}


def described(value: Any) -> Any:
    if hasattr(value, "_fields"):
        return by_name(value._asdict())
    if isinstance(value, TensorDescriptor):
        return {**replay.fields_of(value), "dtype": value.base.dtype}
    return value.fields if isinstance(value, Map) else value


def address_of(value: Any) -> int:
    value = getattr(value, "base", value)
    return value.data_ptr() if isinstance(value, Tensor) else getattr(value, "address", value)


class Blocks:
    """An allocator like that of a GPU: the same requests in the same order get the same memory."""

    def __init__(self) -> None:
        self.kept: dict[tuple[Any, ...], list[Tensor]] = {}
        self.taken: Counter[tuple[Any, ...]] = Counter()

    def free(self) -> None:
        self.taken.clear()

    def allocate(self, make: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        made = make(*args, **options)
        request = made.shape, made.stride(), made.dtype
        kept = self.kept.setdefault(request, [])
        self.taken[request] += 1
        if self.taken[request] > len(kept):
            kept.append(made)
        return kept[self.taken[request] - 1].detach()


def problem(
    rows: int = 128, heads: int = 4, view: str = "bhsd", dtype: torch.dtype = torch.bfloat16, wanted: str = "qkv"
) -> list[Tensor]:
    """q, k, v, dy."""
    shape = (1, heads, rows, 64)
    if view == "bshd":
        found = [torch.randn(1, rows, heads, 64, dtype=dtype).transpose(1, 2) for _ in range(4)]
    else:
        found = [torch.randn(shape, dtype=dtype) for _ in range(4)]
    if view == "one tensor":
        found[1] = found[2] = found[0]
    if view == "expanded do":
        found[3] = torch.randn(1, dtype=dtype).expand(shape)
    return [*(x.requires_grad_(name in wanted) for name, x in zip("qkv", found, strict=False)), found[3]]


def step(tensors: list[Tensor], lse: bool = False, hooks: bool = False, **options: Any) -> None:
    """hooks: the backward gets what was saved laid out in another way."""
    q, k, v, dy = tensors
    options = {"causal": True, "backend": "hopper", "return_lse": True, **options}
    moved = saved_tensors_hooks(lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x)
    with moved if hooks else nullcontext():
        y, rows = backlight.attention(q, k, v, **options)
    into = [x for x in tensors if x.requires_grad]
    torch.autograd.grad([y, rows] if lse else y, into, [dy, torch.zeros_like(rows)] if lse else dy)
