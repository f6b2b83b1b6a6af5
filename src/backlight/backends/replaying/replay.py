"""Launches again: the same kernel, grid and arguments, with other tensors.

What Triton does for every launch costs more host time than the driver's own launch: it encodes each TMA descriptor anew, asks
the driver about each pointer and writes records for hooks that nobody has hung up. A tensor map is a pure function of a
descriptor's fields and its address, and addresses come again, because the allocator hands out the same blocks: maps are kept
and given to Triton's compiled launcher directly, with pointers as numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from typing import Any

from torch import Tensor

from backlight._private.triton import heard, opened, stream_of
from backlight.call import Memory


class Maps(Memory[Any]):
    MOST = 1 << 15


# (address, number of a descriptor) -> tensor map
_maps = Maps()
_numbers = count()
STREAM = 3


def is_descriptor(arg: Any) -> bool:
    """Triton's and Gluon's: both have a tensor below them."""
    return hasattr(arg, "base") and hasattr(arg, "block_shape")


def unchecked(kind: type, tensor: Any, known: dict[str, Any]) -> Any:
    """A descriptor without the checks, which cost more than a launch."""
    made: Any = object.__new__(kind)
    made.__dict__.update(known, base=tensor)
    return made


def fields_of(made: Any) -> dict[str, Any]:
    """All that a descriptor says besides its address."""
    return {name: value for name, value in vars(made).items() if name != "base"}


def tensors_among(args: Any) -> list[Tensor]:
    """Those of arguments, in order: inside tuples and below descriptors too."""
    found = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif isinstance(arg, tuple):
            found += tensors_among(arg)
        elif is_descriptor(arg):
            found.append(arg.base)
    return found


class Address:
    """Memory that a launch is given, as far as Triton looks at a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: int):
        self.value = value

    def data_ptr(self) -> int:
        return self.value


@dataclass(frozen=True, slots=True)
class Hole:
    """Where a tensor stood, or a descriptor of this kind with these fields, which has a number."""

    kind: type | None = None
    fields: dict[str, Any] | None = None
    number: int | None = None

    def at(self, address: int) -> Any:
        return Address(address) if self.kind is None else unchecked(self.kind, Address(address), self.fields or {})


def with_holes(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return Hole()
    if isinstance(arg, tuple):
        return tuple(map(with_holes, arg))
    return Hole(type(arg), fields_of(arg), next(_numbers)) if is_descriptor(arg) else arg


def holes_of(arg: Any) -> list[Hole]:
    if isinstance(arg, tuple):
        return [hole for x in arg for hole in holes_of(x)]
    return [arg] if isinstance(arg, Hole) else []


def filled(arg: Any, values: Iterator[Any]) -> Any:
    """The argument with the next values in its holes."""
    if isinstance(arg, Hole):
        return next(values)
    return tuple([filled(x, values) for x in arg]) if isinstance(arg, tuple) else arg


class Replay:
    """A launch that was made once: compiled kernel, grid and arguments, with holes where its tensors stood.

    args: as the kernel was given them, by position; constants: those it was given by name. Both together are its parameters.
    """

    def __init__(self, kernel: Any, made: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any]):
        # the kernel stays alive: launches are remembered by its id
        self.kernel, self.made, self.grid = kernel, made, (*grid, 1, 1)[:3]
        self.args = tuple(map(with_holes, args))
        self.constants = tuple([constants[name] for name in kernel.arg_names[len(args) :]])

    # what follows waits for a second call: many layouts come once

    @cached_property
    def run(self) -> Callable[..., Any]:
        return self.made[self.grid]

    @cached_property
    def holes(self) -> list[Hole]:
        return holes_of(self.args)

    @cached_property
    def direct(self) -> Direct | None:
        return Direct.of(self.made, self.grid, self.args, len(self.constants))

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
        values = iter([hole.at(address) for hole, address in zip(self.holes, addresses, strict=True)])
        return [*filled(self.args, values), *self.constants]


class Direct:
    """Calls of the launcher that Triton compiled, below the function that turns descriptors into tensor maps.

    `record` is that function with all above it, and a list in place of the compiled launcher. The compiled one takes a kernel's
    arguments after its own (Triton 3.6) or as a list, its last (since 3.7); a descriptor stands there as map, shape, strides,
    a tuple as it is.
    """

    def __init__(self, launcher: Callable[..., Any], record: Callable[..., list[Any]], args: tuple[Any, ...], constants: int):
        self.launcher, self.record = launcher, record
        widths = [1 + 2 * len(arg.fields["shape"]) if isinstance(arg, Hole) and arg.fields is not None else 1 for arg in args]
        begins = [0, *accumulate(widths)]
        self.width = begins[-1] + constants
        # arguments with holes, by their places among the launcher's
        self.places = [(begin, arg) for begin, arg in zip(begins, args, strict=False) if holes_of(arg)]
        self.numbers = [hole.number for _, arg in self.places for hole in holes_of(arg)]
        self.own: list[Any] = []
        self.args: list[Any] = []
        self.nested = False

    @classmethod
    def of(cls, made: Any, grid: tuple[int, ...], args: tuple[Any, ...], constants: int) -> Direct | None:
        """None where Triton's launcher is not built as expected (another vendor's is not), or needs scratch memory."""
        run: Any = getattr(made, "run", None)
        metadata = getattr(made, "metadata", None)
        scratch = any(getattr(metadata, f"{kind}_scratch_size", 1) for kind in ("global", "profile"))
        nvidia = getattr(getattr(metadata, "target", None), "backend", None) == "cuda"
        # without them Triton passes a descriptor as a pointer and its fields
        described = any(hole.number is not None for hole in holes_of(args))
        maps = not described or getattr(metadata, "tensordesc_meta", None)
        found = opened(getattr(run, "launch", None))
        if found is None or scratch or not (nvidia and maps) or getattr(run, "gsan_enabled", False):
            return None
        launcher, with_launcher = found

        def record(given: Sequence[Any]) -> list[Any]:
            taken: list[Any] = []
            recorder = copy.copy(run)
            recorder.launch = with_launcher(lambda *to_launcher: taken.extend(to_launcher))
            recorder(*grid, 0, made.function, made.packed_metadata, None, None, None, *given)
            return taken

        return cls(launcher, record, args, constants)

    def prepared(self, addresses: Sequence[int], stream: int, arguments: Callable[..., list[Any]]) -> Sequence[Any]:
        """The launcher's arguments. Where tensor maps are missing, Triton makes them of the kernel's."""
        values = [
            address if number is None else _maps.get((address, number))
            for number, address in zip(self.numbers, addresses, strict=True)
        ]
        if not self.own or None in values:
            values = self._encoded(addresses, arguments(addresses))
        own, given = self.own.copy(), self.args.copy()
        own[STREAM] = stream
        left = iter(values)
        for place, arg in self.places:
            given[place] = filled(arg, left)
        return (*own, given) if self.nested else (*own, *given)

    def _encoded(self, addresses: Sequence[int], args: Sequence[Any]) -> list[Any]:
        """Addresses and tensor maps, made now."""
        taken = self.record(args)
        self.nested = isinstance(taken[-1], (list, tuple)) and len(taken[-1]) == self.width
        own, given = (taken[:-1], list(taken[-1])) if self.nested else (taken[: -self.width], taken[-self.width :])
        values = list(addresses)
        seen = 0
        for place, arg in self.places:
            if isinstance(arg, Hole) and arg.number is not None:
                _maps[addresses[seen], arg.number] = values[seen] = given[place]
            seen += len(holes_of(arg))
            given[place] = None
        # `own` last: it tells another thread that both are there
        self.args, self.own = given, own
        return values
