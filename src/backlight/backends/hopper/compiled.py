"""Compiled kernels, found without Triton's search for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from backlight.backends.hopper.compat import COMPILER
from backlight.backends.hopper.ptx import override

_compiled: dict[tuple[Any, ...], Any] = {}


def start(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: dict[str, Any], lean_ptx: bool = False, **options: Any
) -> Any:
    """`kernel[grid](*args, **constants, **options)`, without Triton's search for the compiled kernel from the second time on.

    Constants are the last parameters of the kernel. What else can make Triton compile again is in the key: device, dtypes,
    alignment of pointers, tiles of descriptors, integers that need 64 bits. The kernels specialise on no other value, except
    for integers inside a tuple: there Triton does not ask whether it should.

    `lean_ptx`: what Triton writes is rewritten before ptxas reads it (`ptx.py`).

    Returns the compiled kernel; None from a stand-in of the tests.
    """
    first = args[0].base if isinstance(args[0], TensorDescriptor) else args[0]
    key = (kernel, first.device, *map(_kind, args), *constants.values())
    made = _compiled.get(key)
    if made is None:
        named = {**constants, **COMPILER, **options}
        made = kernel[grid](*args, **named, **override(kernel, grid, args, named, lean_ptx))
        if made is not None:
            _compiled[key] = made
    else:
        made[(*grid, 1, 1)[:3]](*args, *(constants[name] for name in kernel.arg_names[len(args) :]))
    return made


def _kind(arg: Any) -> Any:
    if type(arg) is int:
        return arg >> 31
    if isinstance(arg, tuple):
        return type(arg), *(_specialised(x) if type(x) is int else _kind(x) for x in arg)
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() & 15
    if isinstance(arg, TensorDescriptor):
        return arg.base.dtype, *arg.block_shape, arg.layout
    return type(arg)


def _specialised(number: int) -> tuple[int, bool, bool]:
    """What Triton looks at in an integer that it may specialise on."""
    return number >> 31, number == 1, number % 16 == 0
