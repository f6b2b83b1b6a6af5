"""Whole directions again: allocations and launches of a host function, recorded when a layout comes for the second time.

Most calls of a training step are laid out like one before them. Where a host function did nothing but allocate memory and start
kernels, doing so again needs none of its Python: a program holds what was allocated, which kernels were started, and which
tensor stood where. A function that computed anything with torch on the way is left as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from backlight._private.torch import DispatchMode, NoMode, empty_strided_cuda
from backlight._private.triton import heard, stream_of
from backlight.backends.replaying.replay import Replay, tensors_among
from backlight.call import Call, Memory, layout_of, tensors_of
from backlight.config import overridden

aten = torch.ops.aten
ALLOCATORS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.zeros)

_active = threading.local()


# parts of a workspace begin where an allocation of their own could
ALIGNMENT = 512
# without a mode nothing that a host function does is seen
SEES = DispatchMode is not NoMode


class Prepared(Memory[list[tuple[Callable[..., Any], Sequence[Any]]]]):
    MOST = 256


class Program:
    """What a host function did, as memory and launches on it.

    Memory: inputs that kernels use, results, workspaces that hold all else that was allocated. A launch knows its tensors by
    number of memory and offset. The allocator hands out the same addresses again and again, and launches with equal addresses
    have equal arguments, which are kept.

    used:        numbers of inputs.
    allocations: shape, strides, dtype and device of each, results first; `zeroed`: numbers of those that begin as zeros.
    returned:    numbers among inputs and allocations, in order or by name.
    """

    def __init__(
        self,
        used: Sequence[int],
        allocations: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]],
        zeroed: Sequence[int],
        launches: Sequence[tuple[Replay, Sequence[tuple[int, int]]]],
        returned: dict[str, int | None] | Sequence[int | None],
    ):
        self.used, self.allocations, self.zeroed, self.launches, self.returned = used, allocations, zeroed, launches, returned
        self.on_gpu = empty_strided_cuda is not None and all(device.type == "cuda" for *_, device in allocations)
        self.prepared = Prepared()

    def __call__(self, inputs: Sequence[Any]) -> Any:
        if self.on_gpu:
            made = [empty_strided_cuda(shape, stride, dtype) for shape, stride, dtype, _ in self.allocations]
        else:
            empty = torch.empty_strided
            made = [empty(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in self.allocations]
        for number in self.zeroed:
            made[number].zero_()
        if self.launches:
            stream = stream_of(inputs[0].get_device())
            key = (0, stream, *[inputs[number].data_ptr() for number in self.used], *[x.data_ptr() for x in made])
            prepared = self.prepared.get(key)
            if prepared is None or heard():
                prepared = self.prepare(key, stream)
            for launcher, args in prepared:
                launcher(*args)
        tensors = (*inputs, *made)
        if isinstance(self.returned, dict):
            return {name: None if number is None else tensors[number] for name, number in self.returned.items()}
        return tuple([None if number is None else tensors[number] for number in self.returned])

    def again(self, inputs: Sequence[Any]) -> Any:
        """None while a configuration is forced: it would be missed."""
        return None if overridden() else self(inputs)

    def prepare(self, addresses: Sequence[int], stream: int) -> list[tuple[Callable[..., Any], Sequence[Any]]]:
        prepared = [
            replay.prepared([addresses[number] + offset for number, offset in memory], stream)
            for replay, memory in self.launches
        ]
        if not heard():
            self.prepared[tuple(addresses)] = prepared
        return prepared


class Recording(DispatchMode):  # type: ignore[misc]
    """Sees every operation of torch inside, and every launch."""

    def __init__(self, inputs: Sequence[Tensor | None]):
        super().__init__()
        self.inputs = list(inputs)
        self.allocated: list[tuple[Tensor, bool]] = []
        self.launches: list[tuple[Replay, list[Tensor]]] = []
        self.whole = True

    def __enter__(self) -> Any:
        _active.recording = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _active.recording = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        last = self.allocated[-1][0] if self.allocated else None
        if func.overloadpacket in ALLOCATORS:
            self.allocated.append((made, func.overloadpacket is aten.zeros))
        elif func is aten.detach.default and args[0] is last:
            # torch's own wrapping of what it has just allocated
            self.allocated[-1] = made, self.allocated[-1][1]
        else:
            self.whole = False
        return made

    def launched(self, replay: Replay | None, tensors: Sequence[Tensor]) -> None:
        if replay is None:
            self.whole = False
        else:
            self.launches.append((replay, list(tensors)))

    def program(self, results: Any) -> Program | None:
        """None where a tensor comes from elsewhere, or torch has computed something."""
        if not self.whole:
            return None
        found = list(results.values()) if isinstance(results, dict) else list(results)
        taken = {id(x) for _, tensors in self.launches for x in tensors}
        wanted = {id(x) for x in found if x is not None}
        kept = [(x, zeros) for x, zeros in self.allocated if id(x) in wanted]
        numbers: dict[int, int] = {}
        for number, x in enumerate((*self.inputs, *(x for x, _ in kept))):
            numbers.setdefault(id(x), number)
        used = [number for number, x in enumerate(self.inputs) if id(x) in taken and numbers[id(x)] == number]
        # where memory lies among the addresses of a call, which begin with nowhere and the stream
        memory = {id(x): (2 + place, 0) for place, x in enumerate([*(self.inputs[n] for n in used), *(x for x, _ in kept)])}
        allocations = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x, _ in kept]
        zeroed = [number for number, (_, zeros) in enumerate(kept) if zeros]
        for zeros in (False, True):
            parts = [x for x, filled in self.allocated if filled == zeros and x.numel() and id(x) in taken - wanted]
            sizes = [-(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT for x in parts]
            *offsets, size = accumulate(sizes, initial=0)
            memory |= {id(x): (2 + len(used) + len(allocations), at) for x, at in zip(parts, offsets, strict=True)}
            if size:
                zeroed += [len(allocations)] * zeros
                allocations.append(((size,), (1,), torch.uint8, parts[0].device))
        # an empty tensor from elsewhere is as good in the next call, and lies nowhere
        empty = {id(x): (0, 0) for _, tensors in self.launches for x in tensors if not x.numel()}
        memory = empty | memory
        if not (taken <= memory.keys() and wanted <= numbers.keys()):
            return None
        returned = [None if x is None else numbers[id(x)] for x in found]
        return Program(
            used,
            allocations,
            zeroed,
            [(replay, [memory[id(x)] for x in tensors]) for replay, tensors in self.launches],
            dict(zip(results, returned, strict=True)) if isinstance(results, dict) else returned,
        )


def launched(replay: Replay | None, tensors: Sequence[Tensor]) -> None:
    """Tells the recording of this thread, if there is one."""
    recording = getattr(_active, "recording", None)
    if recording is not None:
        recording.launched(replay, tensors)


def start(kernel: Any, grid: tuple[int, ...], args: Sequence[Any], named: dict[str, Any]) -> None:
    """`kernel[grid](*args, **named)`, of which the recording of this thread learns; tensors are among `args` only.

    The compiled kernel is part of what is recorded: arguments may decide what is compiled, as long as the layout of a call
    decides the arguments.
    """
    made = kernel[grid](*args, **named)
    recording = getattr(_active, "recording", None)
    if recording is not None:
        # the interpreter, and stand-ins of tests, have no compiled kernel
        replay = None if made is None else Replay(kernel, made, grid, args, named)
        recording.launched(replay, tensors_among(args))


def check_borders(call: Call) -> None:
    """Wrong cu_seqlens would send kernels out of bounds; a graph under capture was checked when it was warmed up."""
    if call.varlen and not (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):
        call.check_borders()


# what came once; recording takes longer than the function itself, and many lengths never come again
_once: Memory[bool] = Memory()
# None: the host function has to run itself
_programs: Memory[Program | None] = Memory()
_UNKNOWN = object()


def replayed(
    host: Callable[..., Any], call: Call, tensors: Sequence[Tensor | None], choice: Hashable, setting: Hashable = None
) -> Any:
    """`host(call, *tensors, choice)`, from its program where there is one; `setting` is what else decides."""
    check_borders(call)
    if overridden() or not SEES:
        return host(call, *tensors, choice)
    inputs = _inputs(call, tensors)
    key = _key(host, call, tensors, choice, setting, inputs)
    program = _programs.get(key, _UNKNOWN)
    if program is _UNKNOWN:
        if key not in _once:
            _once[key] = True
            return host(call, *tensors, choice)
        with Recording(inputs) as recording:
            results = host(call, *tensors, choice)
        _programs[key] = recording.program(results)
        return results
    return host(call, *tensors, choice) if program is None else program(inputs)  # type: ignore[operator]


def known(
    host: Callable[..., Any], call: Call, tensors: Sequence[Tensor | None], choice: Hashable, setting: Hashable = None
) -> Program | None:
    """The program of `host(call, *tensors, choice)`, for all calls of its layout with as many different q, k and v.

    None where other tensors are one: the program does not know which of them a launch meant.
    """
    inputs = _inputs(call, tensors)
    if overridden() or not _told_apart(inputs):
        return None
    return _programs.get(_key(host, call, tensors, choice, setting, inputs))


def _inputs(call: Call, tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    part = () if call.part is None else (call.part.lse, call.part.n)
    return (*tensors_of(call), *tensors, *part)


def _key(
    host: Callable[..., Any],
    call: Call,
    tensors: Sequence[Tensor | None],
    choice: Hashable,
    setting: Hashable,
    inputs: Sequence[Tensor | None],
) -> tuple[Any, ...]:
    present = [id(x) for x in inputs if x is not None]
    # which of the inputs are one tensor
    same = None if len({*present}) == len(present) else tuple(map(present.index, present))
    return (host, same, call.layout, choice, setting, *[None if x is None else layout_of(x) for x in tensors])


def _told_apart(inputs: Sequence[Tensor | None]) -> bool:
    """Whether each input but q, k and v is a tensor of its own."""
    qkv, others = {id(x) for x in inputs[:3]}, [id(x) for x in inputs[3:] if x is not None]
    return len(others) == len({*others} - qkv)
