"""Triton's interpreter multiplies the bit patterns of bf16 operands in `tl.dot`: with it, bf16 says nothing about a kernel."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from backlight.doctor.subject.trouble import of_the_user
from backlight.problems.axes import tensors_of
from backlight.problems.problem import Problem, recast

if TYPE_CHECKING:
    import triton.language as tl

SIDE = 16


def misread_bf16(dtype: torch.dtype) -> bool:
    """Whether kernels of the user's run in an interpreter that cannot be trusted with this dtype."""
    asked = dtype == torch.bfloat16 and os.environ.get("TRITON_INTERPRET", "0") == "1"
    return asked and find_spec("triton") is not None and any(map(_uses_triton, [*sys.modules.values()])) and not dot_is_right()


def _uses_triton(module: ModuleType) -> bool:
    """A module of the user's, not one of an installed package, that has imported triton."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not of_the_user(path):
        return False
    return any(isinstance(x, ModuleType) and x.__name__.split(".")[0] == "triton" for x in [*vars(module).values()])


@cache
def dot_is_right() -> bool:
    """One product of two bf16 tiles in this Triton: the identity times a matrix."""
    import triton

    x = torch.linspace(-2, 2, SIDE * SIDE).reshape(SIDE, SIDE).bfloat16()
    out = torch.zeros(SIDE, SIDE)
    kernel: Any = triton.jit(_product)
    kernel[(1,)](torch.eye(SIDE, dtype=torch.bfloat16), x, out, SIDE)
    return torch.equal(out, x.float())


def _product(a_ptr: Any, b_ptr: Any, out_ptr: Any, side: tl.constexpr) -> None:
    import triton.language as tl

    rows = tl.arange(0, side)
    cells = rows[:, None] * side + rows[None, :]
    tl.store(out_ptr + cells, tl.dot(tl.load(a_ptr + cells), tl.load(b_ptr + cells)))


def wider(problem: Problem) -> Problem:
    """The same numbers in fp16 where it can hold them, else in fp32."""
    largest = max(float(x.abs().max()) for x in (*tensors_of(problem.call).values(), problem.dy) if x.numel())
    dtype = torch.float16 if largest < torch.finfo(torch.float16).max / 2 else torch.float32
    return problem.replace(call=recast(problem.call, dtype), dy=problem.dy.to(dtype))
