"""Arguments of the backward's kernels: grouped as the host gives them, and as partitions of the main kernels share them.

Integers stand by themselves: inside a tuple Triton would compile the kernel again for other lengths.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from backlight.backends.hopper.arguments import Sizes
from backlight.backends.hopper.compat import Maybe, arguments
from backlight.backends.hopper.config import rate_of
from backlight.backends.hopper.terms import cap_factor, unit_of
from backlight.call import Call
from backlight.spec import LOG2E

# integers of the main kernels: no value of theirs is compiled in
NUMBERS = [
    *("dynamic", "counter", "n_segments", "n_tiles", "key_tiles", "row_tiles", "together"),
    *("heads", "group", "sq", "sk", "left", "right", "mask_batch", "mask_head", "most", "few", "together_if_few"),
]


class RowState(NamedTuple):
    """Padded vectors of the pre-pass: base-2 lse (with entmax the threshold), delta, tau / n."""

    lse_ptr: Any
    delta_ptr: Any
    share_ptr: Any


class Terms(NamedTuple):
    """Learned terms that tiles meet (terms.py). One that is absent is None: neither an argument nor a captured value."""

    table_ptr: Any
    tau_ptr: Any


class Mask(NamedTuple):
    """A mask by row intervals: them, and the row blocks that see each key tile (intervals/kernels.py)."""

    folded_ptr: Any
    live_ptr: Any
    counts_ptr: Any


class Units(NamedTuple):
    """Factors from ds to dq and dk, from scores to base-2 logits, and under a cap from products to the argument of tanh.

    With entmax the second is the one to z (eq. 80), and e its exponent; else None.
    """

    scale: Any
    scale_log2: Any
    cap: Any
    e: Any = None


def units_of(call: Call) -> Units:
    if call.entmax is not None:
        return Units(call.scale, unit_of(call) * rate_of(call), cap_factor(call), 1 / rate_of(call))
    return Units(call.scale, unit_of(call) * LOG2E, cap_factor(call))


def table_numbers(call: Call) -> tuple[int | None, int | None]:
    """Columns of the bias table, and the one of distance 0."""
    return (None, None) if call.bias is None else (call.bias.shape[1], call.spec.bias_origin)


class Variant(NamedTuple):
    """What is compiled into a main kernel: it holds no trace of a term that the spec does not have."""

    D: int
    DV: int
    # D and Dv as wide as tiles are
    BD: int
    BDV: int
    BM: int
    BN: int
    # stages of the rings of q and do
    ST: int
    # warps of a partition that multiplies
    WARPS: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    VARLEN: bool
    # dq has a kernel of its own
    SPLIT: bool = False
    # heads beyond 128: the warpgroups split columns
    WIDE: bool = False
    # dq leaves by tiles in shared memory
    DQ_TILES: bool = True
    # option of BackwardConfig
    OVERLAP: bool = False
    # dk and dv leave early, through memory that is not that of K and V
    EARLY: bool = False
    BIAS: bool = False
    DBIAS: bool = False
    SOFTCAP: bool = False
    TAU: bool = False
    # no row before the bias table needs a loop
    BAND_FIRST: bool = False
    # slots of the diagonals' accumulator
    SLOTS: int = 1
    # row intervals of a key: 0 without such a mask, which has causal and window folded in
    INTERVALS: int = 0
    # entmax: its exponent e where that is compiled in, -1 where not, 0 without
    ENTMAX: int = 0
    # dq is added in a fixed order (order.py)
    ORDERED: bool = False


@arguments
class Backward(Sizes):
    """What the partitions of a main kernel share: sizes, the kernel's other arguments in their order, shared memory.

    buffers: of either kernel (kernel.py, narrow/kernel.py); Q_EMPTY, DO_EMPTY: the first named barriers of its rings.
    """

    q_desc: tma.tensor_descriptor
    do_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    dk_desc: tma.tensor_descriptor
    dv_desc: tma.tensor_descriptor
    lse_desc: tma.tensor_descriptor
    delta_desc: tma.tensor_descriptor
    acc_desc: Maybe
    acc_ptr: Maybe
    share_desc: Maybe
    diagonals_desc: Maybe
    terms: Maybe
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
    n_bias: Maybe
    origin: Maybe
    mask: Maybe
    mask_batch: Maybe
    mask_head: Maybe
    most: Maybe
    few: Maybe
    together_if_few: Maybe
    order_ptr: Maybe
    V: gl.constexpr
    buffers: Maybe
    Q_EMPTY: gl.constexpr
    DO_EMPTY: gl.constexpr
