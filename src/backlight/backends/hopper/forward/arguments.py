"""Arguments of the forward's kernel: grouped as the host gives them, and as its partitions share them.

Integers stand by themselves: inside a tuple Triton would compile the kernel again for other lengths.
"""

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from backlight.backends.hopper.arguments import Sizes
from backlight.backends.hopper.compat import Maybe, arguments
from backlight.backends.hopper.forward.ring import Ring


class Mask(NamedTuple):
    """A mask by row intervals: the tiles to visit (intervals/kernels.py), and the first key tile of each packed sequence."""

    live_ptr: Any
    counts_ptr: Any
    cu_key_tiles_ptr: Any


class Scale(NamedTuple):
    """Factors from scores to logits, natural and in base 2.

    unit_rest: what the two, rounded to fp32, differ by; it would show in the last bits of lse.
    """

    unit: Any
    unit_log2: Any
    unit_rest: Any


class Terms(NamedTuple):
    """Learned terms and the cap (terms.py). One that is absent is None: neither an argument nor a captured value."""

    table_ptr: Any
    sink_ptr: Any
    tau_ptr: Any
    cap_factor: Any
    cap_log2: Any


class Entmax(NamedTuple):
    """Entmax: e = 1 / (alpha - 1), the factor from scores to z, which blocks of keys live (live_blocks.py), and W of rows for
    the backward. None where there is none."""

    e: Any
    gain: Any
    bounded_ptr: Any
    live_ptr: Any
    unsettled_ptr: Any
    slopes_ptr: Any


class Extras(NamedTuple):
    """What some callers want besides y and lse: the largest logits of rows (peaks.py) with the factor that makes them of raw
    products, the low half of y (eq. 103)."""

    peaks_ptr: Any
    unit: Any
    low_ptr: Any


class Variant(NamedTuple):
    """What is compiled in: a kernel holds no trace of a term that the spec does not have."""

    D: int
    DV: int
    # D and Dv as wide as tiles are
    BD: int
    BDV: int
    BN: int
    # consumer warpgroups
    NC: int
    # stages of the rings of K and V
    ST: int
    # buffers of Q
    QB: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    VARLEN: bool
    # a mask, or a last block that is not full
    MASKED: bool
    # options of ForwardConfig
    EARLY_P: bool
    LATE_RESCALE: bool
    PINGPONG: bool
    KEEP_FIRST_MAX: bool
    # O leaves through the memory of Q
    SHARE_QO: bool
    SOFTCAP: bool
    BIAS: bool
    SINK: bool
    GATE: bool
    TAU: bool
    SAVE_U: bool
    # biased blocks keep the first maximum too
    BIAS_KEEPS_MAX: bool
    # row intervals of a key: 0 without such a mask, which has causal and window folded in
    INTERVALS: int
    # blocks that need no mask come before the others, and the maximum of the first one is kept
    FULL_FIRST: bool = False
    # places for the intervals of key tiles, ST or more
    PLACES: int = 1
    # entmax: its exponent e where that is compiled in, -1 where not, 0 without; sweeps that step to thresholds, at most
    ENTMAX: int = 0
    STEPS: int = 0
    # lse is known: one sweep for the blocks that live and for W
    KNOWN: bool = False
    # how the largest logits are found (peaks.py)
    PEAKS: int = 0
    # columns of the low half of y, 0 where nobody keeps it
    LOW: int = 0
    # it leaves through shared memory, as O does
    LOW_SHARED: bool = False


@arguments
class Buffers:
    """Shared memory of a CTA besides the rings of K and V, and its mbarriers.

    tile: published tiles (tiles.py); overflow: for each warpgroup the first tile that it has to do again (overflow.py).
    intervals: first rows and ends of the keys of each tile of K, one vector after the other; entry: what the list of tiles to
    visit says of it.
    """

    q: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor
    u: Maybe
    low: Maybe
    tile: gl.shared_memory_descriptor
    overflow: Maybe
    intervals: Maybe
    entry: Maybe
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    gate_full: Maybe


@arguments
class Forward(Sizes):
    """What the partitions share: sizes, the kernel's other arguments in their order, shared memory."""

    q_desc: tma.tensor_descriptor
    k_desc: tma.tensor_descriptor
    v_desc: tma.tensor_descriptor
    o_desc: tma.tensor_descriptor
    lse_ptr: gl.tensor
    packing: Maybe
    counter_ptr: gl.tensor
    dynamic: gl.tensor
    n_segments: gl.tensor
    n_tiles: gl.tensor
    row_tiles: gl.tensor
    together: gl.tensor
    scale: Maybe
    gate_desc: Maybe
    u_desc: Maybe
    terms: Maybe
    n_bias: Maybe
    bias_origin: Maybe
    folded_desc: Maybe
    mask: Maybe
    mask_batch: Maybe
    mask_head: Maybe
    key_tiles: Maybe
    most: Maybe
    entmax: Maybe
    extras: Maybe
    low_desc: Maybe
    low_stride_b: Maybe
    low_stride_h: Maybe
    low_stride_s: Maybe
    V: gl.constexpr
    buffers: Buffers
    k: Ring
    v: Ring
