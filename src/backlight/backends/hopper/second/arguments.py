"""Arguments of the kernel of second derivatives; names that device code of the backward looks at are the backward's."""

from typing import NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from backlight.backends.hopper.arguments import Sizes
from backlight.backends.hopper.compat import Maybe, arguments

# integers of the kernel: no value of theirs is compiled in
NUMBERS = [
    *("dynamic", "counter", "n_segments", "n_tiles", "key_tiles", "row_tiles", "together"),
    *("heads", "group", "sq", "sk", "left", "right"),
]
# what is known of a row block before any tile is visited, one vector behind the other: base-2 lse, mu, eta, delta (eq. 57)
LSE = gl.constexpr(0)
MU = gl.constexpr(1)
ETA = gl.constexpr(2)
DELTA = gl.constexpr(3)
STATES = gl.constexpr(4)


class Variant(NamedTuple):
    """What is compiled in."""

    D: int
    DV: int
    # D and Dv as wide as tiles are
    BD: int
    BDV: int
    BM: int
    # keys of both warpgroups
    BN: int
    # stages of the ring of q, tq and dto
    ST: int
    # warps of a partition that multiplies
    WARPS: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    VARLEN: bool
    # which tangents there are: of q or k at least
    TQ: bool
    TK: bool
    TV: bool
    # options of SecondConfig
    DIRECT: bool
    AHEAD: bool
    # what the backward has besides
    WIDE: bool = False
    BIAS: bool = False
    INTERVALS: int = 0


class Units(NamedTuple):
    """Factors from products to natural and to base-2 scores."""

    scale: float
    scale_log2: float


@arguments
class Buffers:
    """Shared memory of a CTA and its mbarriers.

    k, v, tk, tv: 64 keys of each warpgroup; dk and dv leave through those of k and v. q, tq, dto, state: a ring of row blocks.
    ds, dr: gradients at scores and at their tangents. out: dq on its way to memory.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    tk: Maybe
    tv: Maybe
    q: gl.shared_memory_descriptor
    tq: Maybe
    dto: gl.shared_memory_descriptor
    state: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dr: Maybe
    out: Maybe
    tile: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor
    keys_full: gl.shared_memory_descriptor
    keys_empty: gl.shared_memory_descriptor
    rows_full: gl.shared_memory_descriptor
    out_empty: Maybe


@arguments
class Second(Sizes):
    """What the partitions share: sizes, the kernel's other arguments in their order, shared memory."""

    q_desc: tma.tensor_descriptor
    tq_desc: Maybe
    dto_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    tk_desc: Maybe
    tv_desc: Maybe
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    state_desc: tma.tensor_descriptor
    acc_desc: Maybe
    acc_ptr: Maybe
    packing: Maybe
    counter_ptr: gl.tensor
    dynamic: gl.tensor
    counter: gl.tensor
    n_segments: gl.tensor
    n_tiles: gl.tensor
    key_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    units: Maybe
    V: gl.constexpr
    buffers: Buffers
