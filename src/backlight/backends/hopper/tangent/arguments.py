"""Arguments of the tangent's kernel; the names that device code of the forward looks at are the forward's."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from backlight.backends.hopper.arguments import Sizes
from backlight.backends.hopper.compat import Maybe, arguments
from backlight.backends.hopper.forward.ring import Ring


class Variant(NamedTuple):
    """What is compiled in."""

    D: int
    # D and Dv as wide as tiles are
    BD: int
    BDV: int
    BN: int
    # consumer warpgroups
    NC: int
    # stages of the rings
    ST: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    VARLEN: bool
    # a mask, or a last block that is not full
    MASKED: bool
    # options of TangentConfig
    PINGPONG: bool
    AHEAD: bool
    LAZY: bool
    # which tangents there are
    TQ: bool
    TK: bool
    TV: bool
    # y and lse are known
    KNOWN: bool
    # what the forward has besides
    QB: int = 1
    KEEP_FIRST_MAX: bool = False
    INTERVALS: int = 0
    BIAS: bool = False
    SINK: bool = False


@arguments
class Buffers:
    """Shared memory of a CTA besides the rings of K and V, and its mbarriers.

    q, tq: rows of each warpgroup; y and ty leave through them. tk, tv: tiles beside those of the rings, in the same stages.
    tile: published tiles. y_full: y of a warpgroup's rows has come, where it is known.
    """

    q: gl.shared_memory_descriptor
    tq: gl.shared_memory_descriptor
    tk: Maybe
    tv: Maybe
    tile: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    y_full: Maybe


@arguments
class Tangent(Sizes):
    """What the partitions share: sizes, the kernel's other arguments in their order, shared memory."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    tq_desc: Maybe
    tk_desc: Maybe
    tv_desc: Maybe
    y_desc: tma.tensor_descriptor
    ty_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    tlse_ptr: gl.tensor
    packing: Maybe
    counter_ptr: gl.tensor
    dynamic: gl.tensor
    n_segments: gl.tensor
    n_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    scale: Maybe
    terms: Maybe
    V: gl.constexpr
    buffers: Buffers
    k: Ring
    v: Ring
