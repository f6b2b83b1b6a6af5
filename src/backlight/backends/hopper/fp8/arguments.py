"""Arguments of the kernel for e4m3; the names that device code of the forward looks at are the forward's."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from backlight.backends.hopper.arguments import Sizes
from backlight.backends.hopper.compat import Maybe, arguments
from backlight.backends.hopper.forward.ring import Ring


class Variant(NamedTuple):
    """What is compiled in."""

    D: int
    BN: int
    # consumer warpgroups
    NC: int
    # stages of the rings
    ST: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    # a mask, or a last block that is not full
    MASKED: bool
    PINGPONG: bool
    VARLEN: bool = False
    SOFTCAP: bool = False
    BIAS: bool = False
    SINK: bool = False
    GATE: bool = False
    # row intervals of a key: 0 without such a mask, which has causal and window folded in; places for them
    INTERVALS: int = 0
    PLACES: int = 1
    # what the forward has besides
    QB: int = 1
    KEEP_FIRST_MAX: bool = False
    FULL_FIRST: bool = False


class Packing(NamedTuple):
    """Borders of packed rows and keys, and the first tiles of sequences: of rows, of keys."""

    cu_q_ptr: object
    cu_k_ptr: object
    cu_tiles_ptr: object
    cu_key_tiles_ptr: object


class Scales(NamedTuple):
    """Powers of two of blocks of 128 rows and of 128 keys, those of the columns of v; what lse lacks (eq. 97)."""

    q_ptr: object
    k_ptr: object
    v_ptr: object
    offset_ptr: object


@arguments
class Buffers:
    """Shared memory of a CTA besides the rings, and its mbarriers; tile: published tiles; intervals, entry: as in the forward,
    but that every tile of K has its entry."""

    q: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    gate_full: Maybe
    tile: gl.shared_memory_descriptor
    intervals: Maybe
    entry: Maybe
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor


@arguments
class Quantised(Sizes):
    """What the partitions share: sizes, the kernel's other arguments in their order, shared memory."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    scales: Maybe
    counter_ptr: gl.tensor
    dynamic: gl.tensor
    n_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    key_tiles: gl.tensor
    unit_log2: gl.tensor
    gate_desc: Maybe
    terms: Maybe
    n_bias: Maybe
    bias_origin: Maybe
    packing: Maybe
    n_segments: gl.tensor
    folded_desc: Maybe
    mask: Maybe
    mask_batch: Maybe
    mask_head: Maybe
    most: Maybe
    V: gl.constexpr
    buffers: Buffers
    k: Ring
    v: Ring
