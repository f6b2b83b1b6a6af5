"""Whole directions again: allocations and launches of a host function, recorded once for each layout.

Most calls of a training step are laid out like one before them. Where a host function did nothing but allocate memory and start
kernels, doing so again needs none of its Python: a program holds what was allocated, which kernels were started, and which
tensor stood where. A function that computed anything with torch on the way is left as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from backlight.backends.hopper.replay import Replay
from backlight.call import Call, Memory, layout_of
from backlight.config import overridden

aten = torch.ops.aten
ALLOCATORS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.zeros)

_active = threading.local()


class Program:
    """What a host function did, with numbers for tensors: inputs first, then constants, then allocations."""

    def __init__(
        self,
        constants: Sequence[Tensor],
        allocations: Sequence[tuple[Tensor, bool]],
        launches: Sequence[tuple[Replay, Sequence[int]]],
        results: dict[str, int | None] | Sequence[int | None],
    ):
        self.constants, self.launches, self.results = constants, launches, results
        self.allocations = [(x.shape, x.stride(), x.dtype, x.device, zeros) for x, zeros in allocations]

    def __call__(self, inputs: Sequence[Tensor | None]) -> Any:
        tensors: list[Any] = [*inputs, *self.constants]
        for shape, stride, dtype, device, zeros in self.allocations:
            made = torch.empty_strided(shape, stride, dtype=dtype, device=device)
            tensors.append(made.zero_() if zeros else made)
        for replay, numbers in self.launches:
            replay([tensors[number] for number in numbers])
        if isinstance(self.results, dict):
            return {name: None if number is None else tensors[number] for name, number in self.results.items()}
        return tuple([None if number is None else tensors[number] for number in self.results])


class Recording(TorchDispatchMode):
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
        used = [x for _, tensors in self.launches for x in tensors]
        found = list(results.values()) if isinstance(results, dict) else list(results)
        wanted = {id(x) for x in (*used, *found) if x is not None}
        made = [(x, zeros) for x, zeros in self.allocated if id(x) in wanted]
        known = {id(x) for x in (*self.inputs, *(x for x, _ in made))}
        # an empty tensor from elsewhere is as good in the next call
        constants = [x for x in {id(x): x for x in used}.values() if id(x) not in known and not x.numel()]
        numbers: dict[int, int] = {}
        for number, x in enumerate((*self.inputs, *constants, *(x for x, _ in made))):
            numbers.setdefault(id(x), number)
        if not self.whole or not wanted <= numbers.keys():
            return None
        outputs = [None if x is None else numbers[id(x)] for x in found]
        return Program(
            constants,
            made,
            [(replay, [numbers[id(x)] for x in tensors]) for replay, tensors in self.launches],
            dict(zip(results, outputs, strict=True)) if isinstance(results, dict) else outputs,
        )


def launched(replay: Replay | None, tensors: Sequence[Tensor]) -> None:
    """Tells the recording of this thread, if there is one."""
    recording = getattr(_active, "recording", None)
    if recording is not None:
        recording.launched(replay, tensors)


# None: the host function has to run itself
_programs: Memory[Program | None] = Memory()
_UNKNOWN = object()


def replayed(host: Callable[..., Any], call: Call, tensors: Sequence[Tensor | None], choice: Hashable) -> Any:
    """`host(call, *tensors, choice)`, from its program where there is one."""
    if call.varlen or overridden():
        # borders between sequences are values, and are checked
        return host(call, *tensors, choice)
    q, k, v = call.q, call.k, call.v
    same = (k is q, v is q, v is k)
    key = (host, same, call.layout, choice, *[None if x is None else layout_of(x) for x in tensors])
    program = _programs.get(key, _UNKNOWN)
    inputs = (q, k, v, call.bias, call.sink, call.tau, call.gate, *tensors)
    if program is _UNKNOWN:
        with Recording(inputs) as recording:
            results = host(call, *tensors, choice)
        if _told_apart(inputs):
            _programs[key] = recording.program(results)
        return results
    return host(call, *tensors, choice) if program is None else program(inputs)  # type: ignore[operator]


def _told_apart(inputs: Sequence[Tensor | None]) -> bool:
    """Whether each input but q, k and v is a tensor of its own: else it would not be known which of two a launch meant."""
    qkv, others = {id(x) for x in inputs[:3]}, [id(x) for x in inputs[3:] if x is not None]
    return len(others) == len({*others} - qkv)
