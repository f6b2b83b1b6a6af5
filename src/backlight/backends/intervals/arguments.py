"""Arguments of the kernels in front of a call with a mask by row intervals, as the host gives them and as kernels pass them on.

The host gives integers one by one: inside a tuple Triton would compile a kernel again for other lengths.
"""

from typing import Any, NamedTuple


class Packing(NamedTuple):
    """Borders of packed sequences, and the first row tile and key tile of each."""

    cu_q: Any
    cu_k: Any
    cu_row_tiles: Any
    cu_key_tiles: Any


class Rows(NamedTuple):
    """The call's `rows` [B|1, H|1, 2 w, Sk] in memory: pointer and strides."""

    ptr: Any
    batch: Any
    head: Any
    end: Any
    key: Any


class Sizes(NamedTuple):
    """Rows and keys of the call, packed sequences, masks of a batch entry, and how far window and causal reach."""

    sq: Any
    sk: Any
    n_segments: Any
    mask_heads: Any
    left: Any
    right: Any


class Variant(NamedTuple):
    """What is compiled in: intervals of a key, what causal and window cut, packed sequences, positions given."""

    W: int
    LEFT: bool
    RIGHT: bool
    VARLEN: bool
    POS: bool


class Positions(NamedTuple):
    """What `_order_kernel` makes."""

    held_ptr: Any
    order_ptr: Any


class Sequence(NamedTuple):
    """The sequence of a tile: its first row, its rows and keys, its first tiles, and the tile's number inside it."""

    q_start: Any
    k_start: Any
    sq: Any
    sk: Any
    row_tile: Any
    key_tile: Any
    tile: Any
