"""Launches: the first of its kind through Triton's JIT, later ones again with other tensors.

What Triton does for every launch costs more host time than the driver's own launch: it encodes each TMA descriptor anew, asks
the driver about each pointer and writes records for hooks that nobody has hung up. A tensor map is a pure function of a
descriptor's fields and its address, and addresses come again, because the allocator hands out the same blocks: maps are kept
and given to Triton's compiled launcher directly, with pointers as numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import accumulate, count
from types import CellType, FunctionType
from typing import Any

from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from backlight.call import Memory

_compiled: dict[tuple[Any, ...], Any] = {}


class Maps(Memory[Any]):
    MOST = 1 << 15


# (address, number of a descriptor) -> tensor map
_maps = Maps()
_numbers = count()
STREAM = 3
NO_HOOKS = ENTER, EXIT = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def start(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], **options: Any) -> Any:
    """`kernel[grid](*args, **constants, **options)`, without Triton's search for the compiled kernel from the second time on.

    Constants are the last parameters of the kernel. What else can make Triton compile again is in the key: device, dtypes,
    alignment of pointers, integers that need 64 bits. The kernels specialise on no other value.

    Returns the compiled kernel; None from a stand-in of the tests.
    """
    first = args[0].base if isinstance(args[0], TensorDescriptor) else args[0]
    key = (kernel, first.device, *map(_kind, args), *constants.values())
    made = _compiled.get(key)
    if made is None:
        made = kernel[grid](*args, **constants, **options)
        if made is not None:
            _compiled[key] = made
    else:
        made[(*grid, 1, 1)[:3]](*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
    return made


def _kind(arg: Any) -> Any:
    if type(arg) is int:
        return arg >> 31
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15
    return arg.base.dtype if isinstance(arg, TensorDescriptor) else type(arg)


def descriptor(tensor: Any, known: dict[str, Any]) -> TensorDescriptor:
    """A descriptor without the checks, which cost more than a launch."""
    made = object.__new__(TensorDescriptor)
    made.__dict__.update(known, base=tensor)
    return made


def fields_of(made: TensorDescriptor) -> dict[str, Any]:
    """All that a descriptor says besides its address."""
    return {name: value for name, value in vars(made).items() if name != "base"}


class Address:
    """Memory that a launch is given, as far as Triton looks at a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value

    def data_ptr(self) -> int:
        return self.value


def heard() -> bool:
    """Whether somebody (a profiler) wants to hear of launches, which only Triton's own function tells."""
    runtime = knobs.runtime
    hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(hooks != NO_HOOKS or ENTER.calls or EXIT.calls)


def stream_of(device: int) -> int:
    return driver.active.get_current_stream(device)


class Replay:
    """A launch that was made once: compiled kernel, grid and arguments, with holes where its tensors stood."""

    def __init__(self, kernel: Any, made: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any]):
        # the kernel stays alive: launches are remembered by its id
        self.kernel = kernel
        grid = (*grid, 1, 1)[:3]
        self.run = made[grid]
        self.args = [None if isinstance(arg, (Tensor, TensorDescriptor)) else arg for arg in args]
        self.args += [constants[name] for name in kernel.arg_names[len(args) :]]
        self.holes = [
            (place, fields_of(arg) if isinstance(arg, TensorDescriptor) else None)
            for place, arg in enumerate(args)
            if isinstance(arg, (Tensor, TensorDescriptor))
        ]
        self.direct = Direct.of(made, grid, self.args, self.holes)

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        launcher, args = self.prepared([x.data_ptr() for x in tensors], stream_of(tensors[0].get_device()))
        launcher(*args)

    def prepared(self, addresses: Sequence[int], stream: int) -> tuple[Callable[..., Any], Sequence[Any]]:
        """A function and its arguments that start the kernel on memory at these addresses."""
        if self.direct is None or heard():
            return self.run, self.arguments(addresses)
        return self.direct.launcher, self.direct.prepared(addresses, stream, self.arguments)

    def arguments(self, addresses: Sequence[int]) -> list[Any]:
        """As the kernel's signature has them."""
        args = self.args.copy()
        for (place, known), address in zip(self.holes, addresses, strict=True):
            args[place] = Address(address) if known is None else descriptor(Address(address), known)
        return args


class Direct:
    """Calls of the launcher that Triton compiled, below the function that turns descriptors into tensor maps.

    `record` is that function with all above it, and a list in place of the compiled launcher. The compiled one takes a kernel's
    arguments after its own (Triton 3.6) or as a list, its last (since 3.7); a descriptor stands there as map, shape, strides.
    """

    def __init__(
        self,
        launcher: Callable[..., Any],
        record: Callable[..., list[Any]],
        args: Sequence[Any],
        holes: Sequence[tuple[int, dict[str, Any] | None]],
    ):
        self.launcher, self.record = launcher, record
        widths = [1] * len(args)
        for place, known in holes:
            widths[place] = 1 if known is None else 1 + 2 * len(known["shape"])
        begins = [0, *accumulate(widths)]
        self.width = begins[-1]
        # for each tensor its place among the launcher's arguments, and the number of its descriptor
        self.places = [(begins[place], None if known is None else next(_numbers)) for place, known in holes]
        self.own: list[Any] = []
        self.args: list[Any] = []
        self.nested = False

    @classmethod
    def of(cls, made: Any, grid: tuple[int, ...], args: Sequence[Any], holes: Sequence[Any]) -> Direct | None:
        """None where Triton's launcher is not built as expected, or needs scratch memory."""
        run: Any = getattr(made, "run", None)
        metadata = getattr(made, "metadata", None)
        scratch = any(getattr(metadata, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
        found = _opened(getattr(run, "launch", None))
        if found is None or scratch or getattr(run, "gsan_enabled", False):
            return None
        launcher, with_launcher = found

        def record(given: Sequence[Any]) -> list[Any]:
            taken: list[Any] = []
            recorder = copy.copy(run)
            recorder.launch = with_launcher(lambda *to_launcher: taken.extend(to_launcher))
            recorder(*grid, 0, made.function, made.packed_metadata, None, None, None, *given)
            return taken

        return cls(launcher, record, args, holes)

    def prepared(self, addresses: Sequence[int], stream: int, arguments: Callable[..., list[Any]]) -> Sequence[Any]:
        """The launcher's arguments. Where tensor maps are missing, Triton makes them of the kernel's."""
        values = [
            address if number is None else _maps.get((address, number))
            for (_, number), address in zip(self.places, addresses, strict=True)
        ]
        if not self.own or None in values:
            values = self._encoded(addresses, arguments(addresses))
        own, given = self.own.copy(), self.args.copy()
        own[STREAM] = stream
        for (place, _), value in zip(self.places, values, strict=True):
            given[place] = value
        return (*own, given) if self.nested else (*own, *given)

    def _encoded(self, addresses: Sequence[int], args: Sequence[Any]) -> list[Any]:
        """Addresses and tensor maps, made now."""
        taken = self.record(args)
        self.nested = isinstance(taken[-1], (list, tuple)) and len(taken[-1]) == self.width
        own, given = (taken[:-1], list(taken[-1])) if self.nested else (taken[: -self.width], taken[-self.width :])
        values: list[Any] = []
        for (place, number), address in zip(self.places, addresses, strict=True):
            if number is None:
                assert given[place].data_ptr() == address
                values.append(address)
            else:
                values.append(given[place])
                _maps[address, number] = given[place]
            given[place] = None
        # `own` last: it tells another thread that both are there
        self.args, self.own = given, own
        return values


def _opened(wrapped: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The compiled launcher inside Triton's function around it, and what puts another in its place.

    A kernel without descriptors has no such function: the compiled launcher stands there itself.
    """
    if not isinstance(wrapped, FunctionType):
        return (wrapped, lambda launcher: launcher) if callable(wrapped) else None
    names = wrapped.__code__.co_freevars
    if wrapped.__closure__ is None or "launcher" not in names:
        return None
    cells = dict(zip(names, wrapped.__closure__, strict=True))

    def with_launcher(launcher: Callable[..., Any]) -> Callable[..., Any]:
        closure = tuple((cells | {"launcher": CellType(launcher)}).values())
        return FunctionType(wrapped.__code__, wrapped.__globals__, wrapped.__name__, wrapped.__defaults__, closure)

    return cells["launcher"].cell_contents, with_launcher
