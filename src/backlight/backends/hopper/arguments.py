"""Arguments that kernels of both directions have in common."""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl


class Packing(NamedTuple):
    """Packed sequences: borders of rows and of keys, the kernel's first tile of each, its first block in padded vectors."""

    cu_q_ptr: Any
    cu_k_ptr: Any
    cu_tiles_ptr: Any
    cu_row_tiles_ptr: Any = None


class Head:
    """Fields of `arguments` classes: a query head of a batch entry or packed sequence: its first row and key, rows, keys."""

    b: gl.tensor
    h: gl.tensor
    kv_head: gl.tensor
    q_start: gl.tensor
    k_start: gl.tensor
    sq: gl.tensor
    sk: gl.tensor


class Sizes:
    """Fields of `arguments` classes: query heads, how many share a key head, rows, keys, limits of the mask (0 where none)."""

    heads: gl.tensor
    group: gl.tensor
    sq: gl.tensor
    sk: gl.tensor
    left: gl.tensor
    right: gl.tensor
